//! Types of stored weights. Reading is exact; bfloat16 is written rounded to nearest even.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use safetensors::Dtype as Stored;

/// Values that are widened at once.
const RUN: usize = 512;

/// A type of stored weights that is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// float32.
    F32,
    /// bfloat16.
    Bf16,
    /// float16.
    F16,
}

impl Dtype {
    pub(crate) fn of(stored: Stored) -> Option<Self> {
        match stored {
            Stored::F32 => Some(Self::F32),
            Stored::BF16 => Some(Self::Bf16),
            Stored::F16 => Some(Self::F16),
            _ => None,
        }
    }

    pub(crate) fn stored(self) -> Stored {
        match self {
            Self::F32 => Stored::F32,
            Self::Bf16 => Stored::BF16,
            Self::F16 => Stored::F16,
        }
    }

    /// Bytes of a value.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Its name in a `config.json`.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
        }
    }
}

/// The values of little-endian `bytes`, which hold as many as `out`.
pub(crate) fn widen(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    debug_assert_eq!(bytes.len(), out.len() * dtype.bytes());
    match dtype {
        Dtype::F32 => crate::hash::read_values(bytes, out),
        Dtype::Bf16 => {
            for (value, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
            }
        }
        Dtype::F16 => {
            let mut run = [f16::ZERO; RUN];
            for (out, bytes) in out.chunks_mut(RUN).zip(bytes.chunks(RUN * 2)) {
                for (value, bytes) in run.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *value = f16::from_le_bytes(*bytes);
                }
                run[..out.len()].convert_to_f32_slice(out);
            }
        }
    }
}

/// The bits of `value` in bfloat16, rounded to nearest, ties to even; what is beyond the
/// largest finite value by half a unit becomes infinite, NaN stays NaN.
pub fn bf16_bits(value: f32) -> u16 {
    bf16::from_f32(value).to_bits()
}

/// Puts the little-endian bytes of `values` in `out`; narrower types are rounded to nearest,
/// ties to even. `Err` is the first value that would become infinite.
pub(crate) fn narrow(dtype: Dtype, values: &[f32], out: &mut Vec<u8>) -> Result<(), usize> {
    out.clear();
    if dtype == Dtype::F32 {
        crate::hash::push_bytes(values, out);
        return Ok(());
    }
    out.resize(values.len() * 2, 0);
    let (infinite, round): (u16, fn(f32) -> u16) = match dtype {
        Dtype::F16 => (f16::INFINITY.to_bits(), |value| f16::from_f32(value).to_bits()),
        _ => (bf16::INFINITY.to_bits(), bf16_bits),
    };
    for (at, (bytes, value)) in out.as_chunks_mut::<2>().0.iter_mut().zip(values).enumerate() {
        let bits = round(*value);
        if bits & 0x7fff == infinite {
            return Err(at);
        }
        *bytes = bits.to_le_bytes();
    }
    Ok(())
}

/// Where the first value is that is NaN or infinite.
pub(crate) fn first_not_finite(values: &[f32]) -> Option<usize> {
    // Without an early exit, so that it runs with whole vectors.
    let largest = values.iter().fold(0, |largest: u32, value| largest.max(value.to_bits() & 0x7fff_ffff));
    if largest < 0x7f80_0000 { None } else { values.iter().position(|value| !value.is_finite()) }
}
