//! `f32` slices seen as bytes. Messages carry little-endian numbers.

#[cfg(target_endian = "big")]
compile_error!("messages carry little-endian numbers; this host is big-endian");

/// The bytes of `data`.
pub(crate) fn bytes(data: &[f32]) -> &[u8] {
    // SAFETY: every byte of an f32 is initialised, u8 has no alignment, the length in
    // bytes is that of the slice, and the borrow keeps the memory alive and unchanged.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), size_of_val(data)) }
}

/// The bytes of `data`, to be overwritten; any bytes are a valid `f32`.
pub(crate) fn bytes_mut(data: &mut [f32]) -> &mut [u8] {
    // SAFETY: as in `bytes`; every bit pattern is a valid f32 and the borrow is exclusive.
    unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), size_of_val(data)) }
}

/// `data` as numbers, where it lies if that is aligned, else copied to `spare`. Its length
/// must be a multiple of 4.
pub(crate) fn numbers<'a>(data: &'a [u8], spare: &'a mut Vec<f32>) -> &'a [f32] {
    assert!(data.len().is_multiple_of(size_of::<f32>()), "{} bytes are not numbers", data.len());
    // SAFETY: every bit pattern is a valid f32; `align_to` keeps to whole, aligned numbers.
    let (before, aligned, _) = unsafe { data.align_to::<f32>() };
    if before.is_empty() {
        return aligned;
    }
    spare.resize(data.len() / size_of::<f32>(), 0.0);
    bytes_mut(spare).copy_from_slice(data);
    spare
}

/// Flips bit number `bit`, modulo the size.
pub(crate) fn flip(bytes: &mut [u8], bit: u64) {
    let bit = bit % (bytes.len() as u64 * 8);
    bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_at_any_alignment() {
        let want: Vec<f32> = (0..9).map(|i| i as f32 / 3.0).collect();
        let mut room = vec![0.0f32; 12];
        for shift in 0..8 {
            let place = &mut bytes_mut(&mut room)[shift..shift + 36];
            place.copy_from_slice(bytes(&want));
            assert_eq!(numbers(place, &mut Vec::new()), want);
        }
        assert!(numbers(&[], &mut Vec::new()).is_empty());
    }
}
