//! Weights that are loaded, frozen, quantized, adapted or exported.

pub(super) mod adapter;
pub(super) mod export;
pub(super) mod frozen;
pub(super) mod initial_weights;
pub(super) mod peft;
pub(super) mod pretrained;
pub(super) mod quantized;
