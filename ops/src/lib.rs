//! Differentiable fused operations for candle, with their kernels for processors and NVIDIA's GPUs.
//!
//! candle's own fused kernels (`softmax_last_dim`, `layer_norm`, `rms_norm`, `sdpa`, `rope`) have no backward and cut
//! the gradient without a word, and its differentiable forms are chains of elementwise passes. The operations here are
//! candle custom operations with a backward of their own, and keep three promises:
//!
//! - **A row's result depends on that row alone**, so a batch that is cut into micro-batches gives the rows of the
//!   whole, bit for bit.
//! - **The bits do not depend on the number of threads or on the instruction set.** Rows are split over threads, sums
//!   over rows go through blocks of a fixed size in a fixed order, and one generic kernel is compiled for each
//!   instruction set. One exception: products of two bf16 operands take numbers below 2⁻¹²⁶ for zero on processors that
//!   multiply bf16 in pairs, and not on others.
//! - **A parameter's gradient goes straight to [`sink`]** where one is installed, in f32; a frozen parameter
//!   costs nothing.
//!
//! Operations inside of a [`graph::fused_block`] are one node of candle's graph: gradients are handed from one to the next
//! and not added to zeros. Operations on tensors without values ([`meta`]) compute nothing and count memory.
//!
//! Storage may be f32, bf16 or f16. The latter two are widened to f32 on the way in and rounded once on the way out. Inputs may be
//! views; only the view is copied, and only when it is not contiguous.
//!
//! With the feature `cuda` the operations run on NVIDIA's GPUs as well (`gpu/`), in memory that [`device`](crate) manages. There the last two
//! promises hold in part: elementwise operations have the processor's bits, sums have an order of their own, which is the same in every run.
//!
//! The crate knows neither layers nor models: `zero-model` is made of it.

#![allow(unsafe_code)]

mod activation;
mod attention;
mod cross_entropy;
#[cfg(feature = "cuda")]
pub mod device;
mod dropout;
mod embedding;
mod flag;
mod forward_only;
#[cfg(feature = "cuda")]
mod gpu;
pub mod graph;
pub mod init;
mod kernel;
mod linear;
pub mod measure;
pub mod meta;
mod norm;
mod parallel;
mod pass;
mod product;
pub mod random;
mod residual;
mod rotary;
pub mod sink;
mod tiled_mlp;

pub use activation::{Activation, UnknownActivation, gelu, gelu_erf, relu, silu, swiglu};
pub use attention::span::AttentionSpan;
pub use attention::{
    causal_attention, causal_attention_packed, causal_attention_packed_within, causal_attention_within,
};
pub use cross_entropy::cross_entropy;
pub use dropout::{Dropout, dropout};
pub use embedding::Embedding;
pub use forward_only::{asks_forward_only, forward_only};
pub use graph::backward::backward_from;
pub use kernel::Isa;
pub use linear::cross_entropy::linear_cross_entropy;
pub use linear::{Conv1D, Linear, Projection};
pub use norm::{LayerNorm, RmsNorm};
pub use parallel::{convert, in_parallel, set_threads, threads};
pub use pass::Pass;
pub use rotary::{RopeScaling, Rotary};
pub use tiled_mlp::{TILE_UNIT, TiledMlp};

/// Bytes that a thread keeps from its first product on: the calling one, and of several threads each of the others. No more of
/// them is in memory than was needed.
#[must_use]
pub fn room_of_a_thread() -> u64 {
    product::ROOM as u64
}
