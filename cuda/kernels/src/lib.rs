//! CUDA kernels for operations that have no backward in candle, or that take too much memory traffic there. The crate
//! contains the sources of the kernels and their launches.
//!
//! The crate itself needs neither a device nor a toolkit. A function such as [`norm::forward`] returns a [`Launch`]: an
//! entry point, its arguments, and the numbers of blocks and threads. A caller with a stream launches it. The tests run
//! it on the host, in an emulator (`cuda/emulator/`). The feature `cuda` compiles the sources in `cu/` with nvcc and
//! provides `Kernels`, which launches them.
//!
//! All kernels are deterministic: they use no atomics, and the order of every sum depends only on the shape.
//! Elementwise operations (activations, rotary embedding, dropout, optimizer steps, rounding), block quantization,
//! embedding gradients and the gradient norm are bit-identical to those of the CPU.

#![deny(unsafe_code)]

pub mod activation;
pub mod attention;
pub mod block_codes;
pub mod cross_entropy;
#[cfg(feature = "cuda")]
mod device;
pub mod dropout;
pub mod embedding;
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
