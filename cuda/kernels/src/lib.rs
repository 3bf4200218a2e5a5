//! CUDA kernels of what candle has no backward for, or wastes memory traffic on: their sources, and how each is launched.
//!
//! Nothing here needs a device or a toolkit. A function such as [`norm::forward`] gives a [`Launch`]: an entry, its arguments, how
//! many blocks of how many threads. Who has a stream launches it; the tests launch it on a host, by the emulator behind feature
//! `emulated`. Feature `cuda` compiles the sources of `cu/` with nvcc, and gives `Kernels`, which launches them.
//!
//! All kernels are deterministic: no atomics, every sum in an order that depends on the shape alone. What the CPU computes element by
//! element (activations, rotary embedding, dropout, AdamW, rounding), the gradient of an embedding and the sums of squares of a gradient
//! norm have the CPU's bits.

#![deny(unsafe_code)]

pub mod activation;
pub mod attention;
pub mod cross_entropy;
#[cfg(feature = "cuda")]
mod device;
pub mod dropout;
pub mod embedding;
#[cfg(feature = "emulated")]
pub mod emulated;
pub mod gradient_norm;
pub mod indices;
pub mod launch;
pub mod norm;
pub mod optimizer;
pub mod rotary;
pub mod rows;

#[cfg(feature = "cuda")]
pub use device::Kernels;
pub use launch::{Address, Dtype, Launch, Source};
