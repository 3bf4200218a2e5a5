//! Differentiable fused operations.
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
//! - **A parameter's gradient goes straight to [`crate::sink`]** where one is installed, in f32; a frozen parameter
//!   costs nothing.
//!
//! The blocks of the zoo are regions (`region.rs`): one node of candle's graph each, inside of which gradients are handed on
//! and not added to zeros.
//!
//! Storage may be f32, bf16 or f16. The latter two are widened to f32 on the way in and rounded once on the way out. Inputs may be
//! views; only the view is copied, and only when it is not contiguous.
//!
//! With the feature `cuda` the operations run on NVIDIA's GPUs as well (`device/`). There the last two promises hold in part: elementwise operations have the
//! processor's bits, sums have an order of their own, which is the same in every run.

#![allow(unsafe_code)]

mod activation;
mod addend;
mod affine;
pub(crate) mod apply;
mod attention;
mod attention_heads;
mod cross_entropy;
#[cfg(feature = "cuda")]
pub(crate) mod device;
mod dropout;
mod embedding;
mod footprint;
mod gradient;
pub(crate) mod hollow;
pub(crate) mod kernel;
mod linear;
mod linear_cross_entropy;
mod linear_gelu;
mod many_inputs;
pub mod measure;
mod norm;
mod operand;
mod output;
pub(crate) mod parallel;
mod product;
mod reach;
pub(crate) mod region;
mod residual;
mod rotary;
mod team;
mod tiled_mlp;

/// What a thread that multiplies keeps.
pub(crate) fn room_of_products() -> u64 {
    product::ROOM as u64
}

pub use activation::{Activation, UnknownActivation, gelu, gelu_erf, relu, silu, swiglu};
pub use attention::{
    causal_attention, causal_attention_packed, causal_attention_packed_within, causal_attention_within,
};
pub use cross_entropy::cross_entropy;
pub use dropout::{Dropout, dropout};
pub use embedding::Embedding;
pub use kernel::Isa;
pub use linear::{Conv1D, Linear, Projection};
pub use linear_cross_entropy::linear_cross_entropy;
pub use norm::{LayerNorm, RmsNorm};
pub use parallel::{convert, in_parallel, set_threads, threads};
pub use reach::Reach;
pub use rotary::{RopeScaling, Rotary};
pub use tiled_mlp::{TILE_UNIT, TiledMlp};
