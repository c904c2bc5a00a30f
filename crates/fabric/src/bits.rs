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
