//! Values of the configuration that are resolved before its sections are read.

/// Values of some sections that defaults in other sections depend on.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Facts {
    pub(crate) ranks: usize,
    /// Shard groups per pipeline stage.
    pub(crate) replicates: usize,
    /// Number of ranks of a shard group, if `mesh.data_parallel_shard_degree` is `auto`.
    pub(crate) shards: Option<usize>,
    pub(crate) batch: Batch,
    /// The optimizer's learning rate.
    pub(crate) lr: f64,
    /// `None` if the configuration gives the length of the run in epochs.
    pub(crate) max_steps: Option<usize>,
    /// Whether the configuration names a cost table.
    pub(crate) is_measured: bool,
    /// Width of the model, if it has one.
    pub(crate) width: Option<usize>,
    /// Maximum sequence length of the model, if it has one.
    pub(crate) longest: Option<usize>,
}

/// The three resolved batch sizes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Batch {
    pub(crate) train: usize,
    pub(crate) micro: usize,
    pub(crate) accumulation: usize,
}
