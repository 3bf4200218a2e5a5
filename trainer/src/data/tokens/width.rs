//! The number of bytes per stored token.

use serde::{Deserialize, Serialize};

use crate::data::options::TokenDtype;

/// The width of a stored token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Width {
    U8,
    U16,
    U32,
    /// Used only in token files.
    I64,
}

impl From<TokenDtype> for Width {
    fn from(dtype: TokenDtype) -> Self {
        match dtype {
            TokenDtype::U16 => Width::U16,
            TokenDtype::U32 => Width::U32,
            TokenDtype::I64 => Width::I64,
        }
    }
}

impl Width {
    /// Returns the smallest width for tokens below `vocabulary`.
    pub(crate) fn for_vocabulary(vocabulary: usize) -> Self {
        match vocabulary {
            0..=0x100 => Width::U8,
            0x101..=0x1_0000 => Width::U16,
            _ => Width::U32,
        }
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            Width::U8 => 1,
            Width::U16 => 2,
            Width::U32 => 4,
            Width::I64 => 8,
        }
    }

    /// Appends tokens as little-endian bytes. The tokens must fit the width.
    pub(crate) fn encode(self, tokens: &[u32], out: &mut Vec<u8>) {
        match self {
            Width::U8 => out.extend(tokens.iter().map(|&token| token as u8)),
            Width::U16 => out.extend(tokens.iter().flat_map(|&token| (token as u16).to_le_bytes())),
            Width::U32 => out.extend(tokens.iter().flat_map(|&token| token.to_le_bytes())),
            Width::I64 => out.extend(tokens.iter().flat_map(|&token| i64::from(token).to_le_bytes())),
        }
    }

    /// Decodes little-endian bytes and appends the tokens. A number that does not fit in u32 becomes `u32::MAX`, which
    /// is never a valid token.
    pub(crate) fn decode(self, bytes: &[u8], out: &mut Vec<u32>) {
        match self {
            Width::U8 => out.extend(bytes.iter().map(|&token| u32::from(token))),
            Width::U16 => out.extend(bytes.as_chunks().0.iter().map(|&token| u32::from(u16::from_le_bytes(token)))),
            Width::U32 => out.extend(bytes.as_chunks().0.iter().map(|&token| u32::from_le_bytes(token))),
            Width::I64 => {
                let token = |&token| u32::try_from(i64::from_le_bytes(token)).unwrap_or(u32::MAX);
                out.extend(bytes.as_chunks().0.iter().map(token));
            }
        }
    }
}
