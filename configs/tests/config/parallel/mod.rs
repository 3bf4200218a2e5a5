//! Keys that divide work among ranks: valid combinations, and messages for invalid ones.

pub(super) mod local_steps;
pub(super) mod mesh;
pub(super) mod pipeline;
pub(super) mod quantized_collectives;
pub(super) mod secondary_shards;
pub(super) mod sequence_parallel;
pub(super) mod tensor_parallel;
