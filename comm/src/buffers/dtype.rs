//! The element types of buffers.

use std::fmt;

/// The element type of a [`Buffer`](crate::Buffer).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Dtype {
    /// 32-bit float.
    F32 = 1,
    /// Brain float.
    Bf16 = 2,
    /// IEEE half float.
    F16 = 3,
    /// 64-bit signed integer.
    I64 = 4,
    /// Byte.
    U8 = 5,
}

impl Dtype {
    /// Every element type, for tests and tables.
    pub const ALL: [Dtype; 5] = [Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::I64, Dtype::U8];

    /// Returns the size of one element in bytes.
    pub fn size(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
            Dtype::I64 => 8,
            Dtype::U8 => 1,
        }
    }

    /// Returns the name used in messages: `f32`, `bf16`, `f16`, `i64`, `u8`.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "f16",
            Dtype::I64 => "i64",
            Dtype::U8 => "u8",
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Dtype> {
        Dtype::ALL.into_iter().find(|dtype| *dtype as u8 == code)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
