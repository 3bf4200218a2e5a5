//! How this processor multiplies two bf16 operands.

use super::{amx, pairs};
use std::sync::LazyLock;

/// The ways, slowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bf16Units {
    /// As f32.
    Widened,
    /// See [`pairs`].
    Pairs,
    /// See [`amx`].
    Squares,
}

impl Bf16Units {
    /// The fastest of those that are here. By what the processor is, not by a measurement: ranks on like machines must come to
    /// the same answer.
    pub(crate) fn best() -> Self {
        static BEST: LazyLock<Bf16Units> = LazyLock::new(|| match () {
            () if amx::available() => Bf16Units::Squares,
            () if pairs::pay() => Bf16Units::Pairs,
            () => Bf16Units::Widened,
        });
        *BEST
    }

    /// Those that are here.
    #[cfg(test)]
    pub(super) fn available() -> Vec<Self> {
        let here = [(Self::Widened, true), (Self::Pairs, pairs::available()), (Self::Squares, amx::available())];
        here.into_iter().filter(|(_, here)| *here).map(|(units, _)| units).collect()
    }

    /// Rows of a full tile.
    pub(super) fn rows(self) -> usize {
        match self {
            Self::Widened | Self::Pairs => super::ROWS,
            Self::Squares => amx::ROWS,
        }
    }
}
