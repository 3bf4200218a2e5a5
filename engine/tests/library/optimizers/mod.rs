//! Optimizers, learning rates, precision and the averages that training keeps.

pub(super) mod adafactor;
pub(super) mod averages;
pub(super) mod bf16_state;
pub(super) mod clipping;
pub(super) mod custom;
pub(super) mod eight_bit;
pub(super) mod group_optimizers;
pub(super) mod groups;
pub(super) mod lamb;
pub(super) mod loss_scale;
pub(super) mod lr_lambda;
pub(super) mod muon;
pub(super) mod mup;
pub(super) mod mup_base;
pub(super) mod noise;
pub(super) mod whole_parameters;
