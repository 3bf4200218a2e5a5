//! Models and losses, compared with plain candle, PyTorch and transformers.

pub(super) mod dropout;
pub(super) mod families;
pub(super) mod family_layouts;
pub(super) mod gradients;
pub(super) mod ignored_targets;
pub(super) mod module_buffers;
pub(super) mod named;
pub(super) mod packing;
pub(super) mod plain_candle;
pub(super) mod recomputation;
pub(super) mod tiles;
pub(super) mod torch;
pub(super) mod transformers;
pub(super) mod z_loss;
