//! The operations that a rank's state needs of the GPU that runs the layers: memory, copies to and from the host, codes
//! of collectives, the gradient norm and the optimizer step.
//!
//! The modules `device` and `none` have the same interface. Without the feature `cuda`, `none` replaces `device`. No
//! value of its type `Gpu` can exist, so callers compile without a feature check.

#[cfg(feature = "cuda")]
#[path = "device.rs"]
mod of_program;
#[cfg(not(feature = "cuda"))]
#[path = "none.rs"]
mod of_program;

pub(crate) use of_program::{
    Arriving, Gpu, add_codes, add_to_host, communicated, copy, dequantized, download, leaving, packed, quantize,
    storage_of, to_send, unpacked, values_of,
};
pub use of_program::{gpu_copy, gpu_room};

use std::ops::Range;

use crate::error::ZeroError;

/// A range of values, and the offset of its codes in bytes.
pub(crate) type CodedRange = (Range<usize>, usize);

/// Returns the error for values that should be on a GPU.
pub(crate) fn elsewhere() -> ZeroError {
    ZeroError::internal("state that should be on a GPU is on the host")
}
