//! NVIDIA's libraries, found at run time: devices, streams, events, what they time, memory, products with an epilogue.
//!
//! With the feature `cuda` this crate defines the symbols of the driver, of NCCL and of cuBLAS and its like, so that candle and the
//! bindings of `cudarc` link on every machine, and the program starts on every machine: a library is opened at the first call of one of
//! its functions. What needs a library that is not there gives that library's error code; ask `Library::available` first for words.
//!
//! Without the feature nothing of NVIDIA's is compiled, and [`inventory`] says so.

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
pub mod product;
#[cfg(feature = "cuda")]
mod stream;
#[cfg(feature = "cuda")]
mod trampolines;

pub use inventory::{Found, Inventory, inventory};
pub use timeline::{Span, Subject, Track, Transfer};

/// The most bytes of a GPU that a product with an epilogue takes while it runs: what NVIDIA recommends for Hopper.
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
