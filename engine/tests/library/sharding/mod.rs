//! Sharding, offloading, and the division of batches among ranks.

pub(super) mod bytes;
pub(super) mod hpz;
pub(super) mod hsdp;
pub(super) mod local_steps;
pub(super) mod offload;
pub(super) mod on_disk;
pub(super) mod quantized_collectives;
pub(super) mod rampup;
pub(super) mod replicas;
pub(super) mod uneven_micro_batches;
