//! Differentiable fused operations for candle, with kernels for CPUs and NVIDIA GPUs.
//!
//! candle's own fused kernels (`softmax_last_dim`, `layer_norm`, `rms_norm`, `sdpa`, `rope`) have no backward and
//! silently cut the gradient. candle's differentiable forms of these operations are chains of elementwise passes. The
//! operations of this crate are candle custom operations with their own backward. They make three promises:
//!
//! - **A row's result depends on that row alone.** A batch that is cut into micro-batches yields rows that are
//!   bit-identical to those of the whole batch.
//! - **Results are bit-identical for any number of threads and any instruction set.** Threads split rows, sums over
//!   rows go through blocks of a fixed size in a fixed order, and one generic kernel is compiled for each instruction
//!   set. Products of two bf16 operands are the exception. Processors that multiply bf16 in pairs treat numbers below
//!   2⁻¹²⁶ as zero. Processors with AMX do so too, and add 32 terms at a time.
//! - **A parameter's gradient goes straight to the [`sink`]**, if one is installed, in f32. A frozen parameter costs
//!   nothing.
//!
//! Operations inside a [`graph::fused_block`] form a single node of candle's graph: each passes its gradient directly
//! to the next instead of adding it to zeros. Operations on meta tensors ([`meta`]) compute nothing and only count
//! memory.
//!
//! Storage may be f32, bf16 or f16. bf16 and f16 are widened to f32 on the way in and rounded once on the way out.
//! Inputs may be views. A view that is not contiguous is copied, without the rest of its storage.
//!
//! With the feature `cuda`, most operations also run on NVIDIA GPUs (`gpu/`), in memory that [`device`](crate) manages.
//! On a GPU, the results of elementwise operations and embeddings are bit-identical to those of the CPU. Most sums are
//! added in a different order, which is the same in every run.
//!
//! Several ranks can share sequences, each with a slice of the positions ([`SequenceGroup`]). They can also split the
//! parameters of layers ([`whole_sequences`]).
//!
//! The crate contains no models; `zero-model` builds models from these operations.

#![allow(unsafe_code)]

mod activation;
mod attention;
mod columns;
mod convolution;
mod cross_entropy;
mod decode;
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
mod orthogonal;
mod parallel;
mod pass;
mod preference;
mod product;
mod quantized;
pub mod random;
mod residual;
mod rotary;
mod scaled;
mod sequence;
pub mod sink;
mod tensor;
mod tiled_mlp;

pub use activation::{activate, gated, geglu, gelu, gelu_erf, relu, silu, swiglu};
pub use attention::span::AttentionSpan;
pub use attention::{
    causal_attention, causal_attention_packed, causal_attention_packed_with_dropout, causal_attention_packed_within,
    causal_attention_with_dropout, causal_attention_within,
};
pub use columns::columns;
pub use convolution::{conv1d, max_pool2d};
pub use cross_entropy::{count_targets, cross_entropy, cross_entropy_with_z_loss};
pub use decode::{Cache, decode, positions};
pub use dropout::{Dropout, dropout, dropout_of_columns};
pub use embedding::Embedding;
pub use forward_only::{asks_forward_only, forward_only};
pub use graph::backward::backward_from;
pub use graph::operand::IGNORE_INDEX;
pub use kernel::Isa;
pub use linear::cross_entropy::{linear_cross_entropy, linear_cross_entropy_with_z_loss};
pub use linear::dora::weight_norms;
pub use linear::log_probs::linear_log_probs;
pub use linear::lora::{LinearMap, LoraOptions, MAGNITUDES, asks_adapter, with_lora};
pub use linear::module_names::names;
pub use linear::{Conv1D, Linear, Projection};
pub use norm::{BatchNorm, LayerNorm, RmsNorm};
pub use orthogonal::{orthogonalize, orthogonalize_bytes};
pub use parallel::{convert, in_parallel, set_threads, threads};
pub use pass::Pass;
pub use preference::{PreferenceLoss, preference_loss};
pub use quantized::{
    Quantization, QuantizationOptions, QuantizedFormat, asks_inputs_first, asks_quantized, quantized_bytes,
    quantized_storage, with_quantization,
};
pub use rotary::Rotary;
pub use scaled::scaled;
pub use sequence::{ByGpu, SequenceGroup, Sharing, own_slice, sum_of_slices, whole_length};
pub use tensor::{
    Cut, RowParallel, Run, VocabParallel, asks_cut, cutting, get_cut, own_heads, whole_rows, whole_sequences, with_cuts,
};
pub use tiled_mlp::{TILE_UNIT, TiledMlp};
pub use zero_model_options::{Activation, FourBit, LoraInit, RopeScaling};

/// Returns the size in bytes of the buffers that the calling thread and each worker allocate for their first product
/// and then keep. Only the part that was used is resident.
#[must_use]
pub fn room_of_a_thread() -> u64 {
    product::ROOM as u64
}
