//! Numbers as the bytes they are.

/// The bytes of `data`, in the order of this machine.
pub fn bytes(data: &[f32]) -> &[u8] {
    // SAFETY: any bytes may be read as u8, which needs no alignment; the length is that of the same memory.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), size_of_val(data)) }
}
