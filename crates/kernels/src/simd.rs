//! Instruction paths and their dispatch.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Which instruction path; bits are equal on all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Simd {
    /// Portable code (with the fused multiply-add instruction where the CPU has it).
    Scalar,
    /// 256-bit vectors with fused multiply-add.
    Avx2,
    /// 512-bit vectors.
    Avx512,
}

/// Why an instruction path cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SimdError {
    /// The name is not known.
    #[error("unknown instruction path `{0}`: use scalar, avx2 or avx512")]
    Unknown(String),
    /// The CPU lacks the instructions.
    #[error("this CPU has no {requested}: use {best} or below (all give the same bits)")]
    Unsupported {
        /// What was asked for.
        requested: Simd,
        /// The best path of this CPU.
        best: Simd,
    },
}

impl Simd {
    /// The best path of this CPU.
    pub fn detect() -> Self {
        [Simd::Avx512, Simd::Avx2].into_iter().find(|s| s.is_supported()).unwrap_or(Simd::Scalar)
    }

    /// Every path of this CPU, slowest first.
    pub fn available() -> impl Iterator<Item = Self> {
        [Simd::Scalar, Simd::Avx2, Simd::Avx512].into_iter().filter(|s| s.is_supported())
    }

    /// Whether this CPU has the path.
    pub fn is_supported(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        match self {
            Simd::Scalar => true,
            Simd::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            Simd::Avx512 => {
                Simd::Avx2.is_supported()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        matches!(self, Simd::Scalar)
    }

    /// The path itself, or why this CPU cannot take it.
    pub fn checked(self) -> Result<Self, SimdError> {
        if self.is_supported() {
            Ok(self)
        } else {
            Err(SimdError::Unsupported { requested: self, best: Self::detect() })
        }
    }
}

impl fmt::Display for Simd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Simd::Scalar => "scalar",
            Simd::Avx2 => "avx2",
            Simd::Avx512 => "avx512",
        })
    }
}

impl FromStr for Simd {
    type Err = SimdError;

    /// Parses `scalar`, `avx2` or `avx512`; an error when the CPU lacks it.
    fn from_str(s: &str) -> Result<Self, SimdError> {
        match s {
            "scalar" => Simd::Scalar.checked(),
            "avx2" => Simd::Avx2.checked(),
            "avx512" => Simd::Avx512.checked(),
            _ => Err(SimdError::Unknown(s.to_owned())),
        }
    }
}

/// Proof that the CPU has a path: made by [`Level::new`] alone, so that dispatch on it is sound.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Level(Path);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// No assumption on the CPU.
    Plain,
    /// Scalar code where `mul_add` is one instruction.
    #[cfg(target_arch = "x86_64")]
    Fma,
    Avx2,
    Avx512,
}

impl Level {
    pub(crate) fn new(simd: Simd) -> Result<Self, SimdError> {
        Ok(Level(match simd.checked()? {
            Simd::Avx512 => Path::Avx512,
            Simd::Avx2 => Path::Avx2,
            #[cfg(target_arch = "x86_64")]
            Simd::Scalar if is_x86_feature_detected!("fma") => Path::Fma,
            Simd::Scalar => Path::Plain,
        }))
    }

    pub(crate) fn path(self) -> Path {
        self.0
    }

    #[cfg(target_arch = "x86_64")]
    pub(crate) fn has_avx2(self) -> bool {
        matches!(self.0, Path::Avx2 | Path::Avx512)
    }
}

/// Compiles one body for every path and picks by [`Level`]: `fn name(level, args..)`.
///
/// The body is written once, hence every path has the same operations; the compiler may only vectorise it.
macro_rules! by_level {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name(level: $crate::simd::Level, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                use $crate::simd::Path;
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn avx512($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }
                #[target_feature(enable = "fma")]
                fn fma($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }
                match level.path() {
                    // SAFETY: a `Level` exists only for a path that the CPU has.
                    Path::Avx512 => unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    Path::Avx2 => unsafe { avx2($($arg),*) },
                    // SAFETY: as above.
                    Path::Fma => unsafe { fma($($arg),*) },
                    Path::Plain => body($($arg),*),
                }
            }
            #[cfg(not(target_arch = "x86_64"))]
            {
                let _ = level;
                body($($arg),*)
            }
        }
    };
}
pub(crate) use by_level;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for simd in Simd::available() {
            assert_eq!(simd.to_string().parse(), Ok(simd));
        }
        assert_eq!("sse".parse::<Simd>(), Err(SimdError::Unknown("sse".into())));
        assert!(Simd::detect().is_supported());
    }
}
