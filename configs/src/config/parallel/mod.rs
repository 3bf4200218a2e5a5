//! How ranks share the work: data-parallel replicates, pipeline stages, sequence groups and tensor groups.

pub(super) mod local_steps;
pub(super) mod mesh;
pub(super) mod partition_method;
pub(super) mod pipeline;
pub(super) mod tensor_parallel;
