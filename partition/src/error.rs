//! Errors of executing a program's instructions.

use zero_comm::CommError;
use zero_optim::LengthError;
use zero_tier::DiskError;

/// Why an instruction failed.
#[derive(Debug, thiserror::Error)]
pub enum ZeroError {
    /// Communication failed: a lost rank, a deadline, ranks that disagree.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The disk with offloaded state or parameters failed.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// candle refused an operation.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
    /// Slices that must have equal lengths differ in length.
    #[error("internal error: {0}")]
    Length(#[from] LengthError),
    /// A parameter received no gradient in a backward.
    #[error(
        "parameter `{parameter}` received no gradient in the backward pass of layer `{layer}`: an operation without a \
         backward pass blocks it, or the layer does not use the parameter"
    )]
    NoGradient {
        /// Full name of the parameter.
        parameter: String,
        /// The layer whose backward ran.
        layer: String,
    },
    /// Replicated values differ between ranks, because of a faulty processor or memory.
    #[error(
        "{what} must be the same on all {of} ranks, but {}\n  help: a processor or memory is faulty; replace that machine and \
         continue from a checkpoint with --resume auto", who(.ranks, *.of)
    )]
    Differs {
        /// World ranks whose value differs from the majority.
        ranks: Vec<usize>,
        /// Number of ranks compared.
        of: usize,
        /// Name of the value that differs.
        what: String,
    },
    /// The program does not match the state. A pass has a bug that the validator did not detect.
    #[error("internal error: {0}")]
    Internal(String),
}

impl ZeroError {
    pub(crate) fn internal(what: impl Into<String>) -> Self {
        Self::Internal(what.into())
    }
}

/// The error for a range that this rank does not hold.
pub(crate) fn missing() -> ZeroError {
    ZeroError::internal("this rank does not hold the requested range")
}

fn who(ranks: &[usize], of: usize) -> String {
    let list = ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    match ranks {
        [one] => format!("rank {one} differs"),
        _ if ranks.len() == of => format!("ranks {list} differ, and no majority shows which of them are wrong"),
        _ => format!("ranks {list} differ"),
    }
}
