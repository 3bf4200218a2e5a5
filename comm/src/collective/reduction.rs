//! How a reduction combines the values of the ranks.

use crate::buffers::dtype::Dtype;

/// How the values of several ranks are combined into one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Sum over the fixed tree of ranks.
    Sum,
    /// Largest value; NaN if any is NaN.
    Max,
}

/// How contributions are combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reduction {
    /// How two values are combined.
    pub op: ReduceOp,
    /// The type of the values.
    pub dtype: Dtype,
}
