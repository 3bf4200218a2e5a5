//! What a run writes while it trains, on layouts of all kinds.

mod loss_scale;
mod monitors;
mod nvml;
mod offload;
mod pipeline;
mod profiles;
