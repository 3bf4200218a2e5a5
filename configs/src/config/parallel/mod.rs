//! How ranks share the work: data-parallel replicates, pipeline stages, sequence groups and tensor groups.

pub(super) mod local_steps;
pub(super) mod mesh;
pub(super) mod pipeline;
pub(crate) mod sequence_parallel;
pub(super) mod tensor_parallel;
