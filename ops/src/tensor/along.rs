//! The dimension along which slices of sequences are joined.

/// The dimension along which the slices of all ranks are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Along {
    Batch,
    Positions,
}
