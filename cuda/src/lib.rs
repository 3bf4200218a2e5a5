//! Access to NVIDIA's libraries, found at run time: devices, streams, events, timelines, memory, and matrix products
//! with an epilogue.
//!
//! With the feature `cuda` this crate defines the symbols of the driver, NCCL, cuBLAS and related libraries, so that
//! candle and the bindings of `cudarc` link, and the program starts, on every machine. A library is opened at the first
//! call of one of its functions. A call into a missing library returns an error code of that library. To get the reason
//! as text, call `Library::available` first.
//!
//! Without the feature, no CUDA code is compiled, and [`inventory`] returns an error with this reason.

mod inventory;
mod timeline;

#[cfg(feature = "cuda")]
mod device;
#[cfg(feature = "cuda")]
mod error;
#[cfg(feature = "cuda")]
mod libraries;
#[cfg(feature = "cuda")]
mod memory;
#[cfg(feature = "cuda")]
mod module;
#[cfg(feature = "cuda")]
mod pool;
#[cfg(feature = "cuda")]
pub mod product;
#[cfg(feature = "cuda")]
mod stream;
#[cfg(feature = "cuda")]
mod trampolines;

pub use inventory::{Found, Inventory, inventory};
pub use timeline::{Span, Subject, Track, Transfer};

/// The largest workspace, in bytes of GPU memory, of a matrix product with an epilogue; NVIDIA recommends this size for
/// Hopper.
pub const MOST_WORKSPACE: u64 = 32 << 20;

#[cfg(feature = "cuda")]
pub use device::Device;
#[cfg(feature = "cuda")]
pub use error::{CudaError, check};
#[cfg(feature = "cuda")]
pub use libraries::Library;
#[cfg(feature = "cuda")]
pub use memory::{Allocation, Pinned};
#[cfg(feature = "cuda")]
pub use module::{Footprint, Function, Module};
#[cfg(feature = "cuda")]
pub use stream::{Event, Stream};
#[cfg(feature = "cuda")]
pub use timeline::{Begun, Recorder};
