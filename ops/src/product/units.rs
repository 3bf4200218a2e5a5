//! The units with which this processor multiplies two bf16 operands.

use super::super::kernel::Isa;
use super::{amx, pairs};

/// The ways to multiply, slowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bf16Units {
    /// Widened to f32.
    Widened,
    /// See [`pairs`].
    Pairs,
    /// See [`amx`].
    Squares,
}

impl Bf16Units {
    /// Returns the fastest way on the instruction set in use. The choice depends on the processor and not on a
    /// measurement, because ranks on identical machines must choose the same way.
    pub(crate) fn best() -> Self {
        if Isa::current().has_amx() {
            Bf16Units::Squares
        } else if pairs::pay() {
            Bf16Units::Pairs
        } else {
            Bf16Units::Widened
        }
    }

    /// Returns the ways that this processor supports.
    #[cfg(test)]
    pub(super) fn available() -> Vec<Self> {
        let here = [
            (Self::Widened, true),
            (Self::Pairs, super::tile::multiplies_pairs()),
            (Self::Squares, Isa::current().has_amx()),
        ];
        here.into_iter().filter(|(_, here)| *here).map(|(units, _)| units).collect()
    }

    /// Rows of a full tile.
    pub(super) fn rows(self) -> usize {
        match self {
            Self::Widened | Self::Pairs => super::tile::rows(Isa::current()),
            Self::Squares => amx::ROWS,
        }
    }
}
