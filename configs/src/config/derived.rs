//! Values that follow from several sections of the configuration.

use crate::config::{
    AdamParams, BatchSizes, Config, Dtype, Gpt2, Llama, Mesh, Model, Optimizer, ParameterGroup, RotateMethod,
    SgdParams, Training,
};
use crate::path::item_path;

impl Config {
    /// Data-parallel degree: how many ranks of a pipeline stage train on different samples. Ranks that share a sequence
    /// count as one rank, and so do the ranks of a tensor group.
    pub fn data_parallel_size(&self) -> usize {
        self.ranks_of_stage() / self.context_size()
    }

    /// Number of tensor-parallel ranks.
    pub fn tensor_size(&self) -> usize {
        self.tensor_parallel.autotp_size.max(1)
    }

    /// Number of ranks of a pipeline stage over which gradients are summed. The ranks of a tensor group count as one
    /// rank.
    pub fn ranks_of_stage(&self) -> usize {
        // The field is public, so a program may have set it to 0.
        self.world_size / self.pipeline.stages.max(1) / self.tensor_size()
    }

    /// Number of ranks over which ZeRO shards: `ranks_of_stage` divided by the number of shard groups.
    pub fn shard_group_size(&self) -> usize {
        self.ranks_of_stage() / self.mesh.data_parallel_replicate_degree.max(1)
    }

    /// Number of ranks per host, as set by [`Typed::on_hosts`](crate::Typed::on_hosts); without that call, all ranks.
    pub fn ranks_per_host(&self) -> usize {
        self.typed.ranks_per_host.unwrap_or(self.world_size)
    }

    /// Whether the layout depends on [`Config::ranks_per_host`], which must then be the same on all hosts.
    pub fn depends_on_hosts(&self) -> bool {
        self.zero.zero_quantized_gradients || self.mesh_is_auto()
    }

    /// Whether a key of `mesh` is `auto`.
    pub(crate) fn mesh_is_auto(&self) -> bool {
        [Mesh::data_parallel_replicate_degree, Mesh::data_parallel_shard_degree]
            .iter()
            .any(|path| self.typed.fields.is_auto(path))
    }

    /// Number of ranks that together hold secondary shards of all parameters (hpZ). `None` without secondary shards,
    /// and also if these ranks are the whole shard group: secondary shards would then only repeat the primary ones.
    pub fn secondary_group_size(&self) -> Option<usize> {
        let size = self.zero.zero_hpz_partition_size;
        (size > 1 && size != self.shard_group_size()).then_some(size)
    }

    /// Number of consecutive ranks with fast links between them: [`Config::secondary_group_size`] if set. Otherwise,
    /// with `zero_quantized_gradients`, the number of ranks of a shard group on one host. `None` if that would be one
    /// rank or the whole shard group.
    pub fn near_group_size(&self) -> Option<usize> {
        let of_host = || match self.zero.zero_quantized_gradients {
            true => common_divisor(self.shard_group_size(), (self.ranks_per_host() / self.tensor_size()).max(1)),
            false => 1,
        };
        self.secondary_group_size()
            .or_else(|| Some(of_host()).filter(|&near| near > 1 && near < self.shard_group_size()))
    }

    /// The optimizers of the run: first the section `optimizer`, then those of `training.param_groups`, each with the
    /// index of its group.
    pub fn optimizers(&self) -> Vec<(Option<usize>, &Optimizer)> {
        let groups = self.training.param_groups.iter().flatten().enumerate();
        let of_groups = groups.filter_map(|(index, group)| Some((Some(index), group.optimizer.as_ref()?)));
        std::iter::once((None, &self.optimizer)).chain(of_groups).collect()
    }

    /// The first optimizer that updates whole parameters (in f32, in host memory): the path of its `type`, and its
    /// name.
    pub fn of_whole_parameters(&self) -> Option<(String, &'static str)> {
        self.optimizers()
            .into_iter()
            .find_map(|(group, optimizer)| Some((in_group(group, Optimizer::TYPE), optimizer.of_whole_parameters()?)))
    }

    /// The path of a key that selects 8-bit optimizer states, for all or some of the parameters.
    pub fn eight_bit_states(&self) -> Option<String> {
        let of_optimizer = self.optimizers().into_iter().find(|(_, optimizer)| optimizer.has_eight_bits());
        let group = || self.training.param_groups.iter().flatten().position(|group| group.optim_bits == Some(8));
        match of_optimizer {
            Some((group, _)) => Some(in_group(group, AdamParams::optim_bits)),
            None => group().map(|group| item_path(Training::param_groups, group, ParameterGroup::optim_bits)),
        }
    }

    /// Data type in which gradients are accumulated over micro-batches and kept until the update.
    /// `bf16_master_weights_and_grads` selects bf16, except with `training.reproducible`.
    pub fn gradient_dtype(&self) -> Dtype {
        let is_narrow = self.bf16.bf16_master_weights_and_grads && !self.training.reproducible;
        self.data_types.grad_accum_dtype.unwrap_or(if is_narrow { Dtype::Bf16 } else { Dtype::F32 })
    }

    /// Data type of parameters and activations.
    pub fn working_dtype(&self) -> Dtype {
        match (self.bf16.enabled, self.fp16.enabled) {
            (true, _) => Dtype::Bf16,
            (false, true) => Dtype::F16,
            (false, false) => Dtype::F32,
        }
    }

    /// Returns the number of samples of each step.
    #[must_use]
    pub fn batch_sizes(&self) -> BatchSizes {
        BatchSizes { full: self.train_batch_size, rampup: self.training.rampup_batch_size }
    }

    /// Returns the base model of µP: `model` with the widths of `mup.base`. `None` without that section.
    #[must_use]
    pub fn base_model(&self) -> Option<Model> {
        let base = self.mup.as_ref()?.base.as_ref()?;
        // The check has reported every error.
        base.base_of(self.model.as_ref()?).ok()
    }

    /// Returns the configuration of a run that only evaluates. Its optimizer has no states, unless evaluations need
    /// them.
    #[must_use]
    pub fn for_evaluation(mut self) -> Self {
        let is_needed = |optimizer: &Optimizer| matches!(optimizer, Optimizer::ScheduleFree(_) | Optimizer::Custom(_));
        if self.mup.is_none() && !self.optimizers().into_iter().any(|(_, optimizer)| is_needed(optimizer)) {
            self.optimizer = Optimizer::Sgd(SgdParams {
                lr: 1e-3,
                momentum: 0.0,
                dampening: 0.0,
                nesterov: false,
                weight_decay: 0.0,
            });
            self.training.param_groups = None;
        }
        self
    }

    /// Number of ranks that share each sequence.
    pub fn context_size(&self) -> usize {
        (self.sequence_parallel_size * self.mesh.context_parallel_degree).max(1)
    }

    /// The key that sets how many ranks share each sequence.
    pub fn context_key(&self) -> &'static str {
        if self.mesh.context_parallel_degree > 1 { Mesh::context_parallel_degree } else { Self::sequence_parallel_size }
    }

    /// Whether context-parallel ranks pass keys and values from rank to rank.
    pub fn uses_ring_attention(&self) -> bool {
        self.mesh.context_parallel_degree > 1 && self.mesh.context_parallel_rotate_method == RotateMethod::AllToAll
    }

    /// Number of parts of equal length into which ranks split each sequence.
    pub fn slices_of_a_sequence(&self) -> usize {
        self.tensor_size() * self.chunks_of_a_sequence()
    }

    /// The number of attention heads of a tensor-parallel rank, and the key of the model's number of heads; `None` if
    /// the configuration has no model with attention.
    pub fn heads_of_a_rank(&self) -> Option<(&'static str, usize)> {
        let (path, heads) = match self.model.as_ref()? {
            Model::Gpt2(model) => (Gpt2::n_head, model.n_head),
            Model::Llama(model) => (Llama::num_attention_heads, model.num_attention_heads),
            Model::Mlp(_) => return None,
        };
        Some((path, heads / self.tensor_size()))
    }

    /// Number of parts of equal length into which the ranks that share a sequence split it.
    pub(crate) fn chunks_of_a_sequence(&self) -> usize {
        // With `context_parallel_degree`, each rank has one chunk from each half of the sequence.
        self.context_size() * if self.mesh.context_parallel_degree > 1 { 2 } else { 1 }
    }
}

/// Returns the path of `key` at the top level, or in the parameter group with that index.
fn in_group(group: Option<usize>, key: &str) -> String {
    group.map_or(key.to_string(), |group| format!("{}.{group}.{key}", Training::param_groups))
}

/// Returns the greatest common divisor; at least 1.
pub(crate) fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a.max(1) } else { common_divisor(b, a % b) }
}
