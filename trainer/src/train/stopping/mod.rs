//! Decides from losses, gradients and evaluations whether a run stops, and which checkpoint is the best.

pub(super) mod best;
pub(super) mod divergence;
pub(super) mod early_stop;
pub(super) mod noise_scale;
pub(super) mod objective;
