//! The GPU that runs the layers, as far as a rank's state needs it: memory, copies to and from the host, the gradient
//! norm and the optimizer step.
//!
//! Two modules have one interface. `device` calls CUDA. `none` takes its place in a program without the feature `cuda`:
//! its `Gpu` has no value, so the code that calls it needs no feature.

#[cfg(feature = "cuda")]
#[path = "device.rs"]
mod of_program;
#[cfg(not(feature = "cuda"))]
#[path = "none.rs"]
mod of_program;

pub(crate) use of_program::{
    Arriving, Gpu, add_to_host, copy, download, packed, storage_of, to_send, travelled, unpacked,
};
pub use of_program::{gpu_copy, gpu_room};

use crate::error::ZeroError;

/// Returns the error for values that should be on a GPU.
pub(crate) fn elsewhere() -> ZeroError {
    ZeroError::internal("state that should be on a GPU is on the host")
}
