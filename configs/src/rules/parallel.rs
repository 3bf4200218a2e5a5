//! How ranks share the work: `mesh`, `tensor_parallel`, `sequence_parallel_size`, `training.local_steps` and secondary
//! shards, and the features that do not work with them.

use crate::config::{
    Bf16, Config, Curriculum, CurriculumConfig, Data, FlopsProfiler, Fp16, Gpt2, Llama, LocalSteps, Mesh, Model,
    OffloadDevice, OffloadOptimizer, OffloadParam, Optimizer, PartitionMethod, Pipeline, Quantization, RotateMethod,
    TensorParallel, Training, Zero, ZeroStage,
};
use crate::path::last;
use crate::read::reader::Resolver;
use crate::schema::NO_EFFECT;
use crate::world::World;

impl Mesh {
    pub(crate) fn check(config: &Config, resolver: &mut Resolver<'_>) {
        let mesh = &config.mesh;
        if mesh.context_parallel_rotate_method == RotateMethod::AllToAll && mesh.context_parallel_degree == 1 {
            let (key, degree) = (Self::context_parallel_rotate_method, Self::context_parallel_degree);
            resolver.warn(key, format!("`{key}` {NO_EFFECT}: `{degree}` is not above 1"));
        }
        // Replicates with local steps are useful even if ZeRO shards nothing.
        let is_alone = config.training.local_steps.is_some();
        if config.mesh.data_parallel_replicate_degree == 1 || config.zero.stage != ZeroStage::Zero || is_alone {
            return;
        }
        let written = match config.mesh.data_parallel_shard_degree {
            Some(_) => Self::data_parallel_shard_degree,
            None => Self::data_parallel_replicate_degree,
        };
        let message =
            format!("`{written}` divides ranks into groups that hold the same ZeRO shards, but stage 0 shards nothing");
        let help = format!("set `{}: 1`, 2 or 3, or remove `mesh`", Zero::stage);
        resolver.contradiction(&[written, Zero::stage], message, Some(help));
    }
}

impl Zero {
    /// Checks the requirements of secondary shards: parameters are sharded and in memory, and the shard group is a
    /// multiple of the secondary group.
    pub(crate) fn check_secondary(config: &Config, world: World, resolver: &mut Resolver<'_>) {
        const KEY: &str = Zero::zero_hpz_partition_size;
        let (zero, size) = (&config.zero, config.zero.zero_hpz_partition_size);
        if size <= 1 {
            return;
        }
        if zero.stage != ZeroStage::Three {
            let message =
                format!("`{KEY}: {size}` copies sharded parameters, but stage {} shards none", zero.stage.number());
            let help = format!("set `{}: 3`, or remove `{}`", Zero::stage, last(KEY));
            return resolver.contradiction(&[KEY, Zero::stage], message, Some(help));
        }
        let shards = config.shard_group_size();
        if !shards.is_multiple_of(size) {
            let message = format!("{KEY} {size} does not divide the {shards} ranks across which ZeRO shards");
            let help = format!("use a divisor of {shards}, such as the number of ranks per host");
            let own = [(KEY, resolver.at(KEY))];
            let places: Vec<_> = own.into_iter().chain(world.places(resolver)).collect();
            return resolver.report.contradiction(&places, message, Some(help));
        }
        if config.secondary_group_size().is_some() && zero.offload_param.device == OffloadDevice::Nvme {
            let device = OffloadParam::device;
            let message = format!("`{KEY}: {size}` keeps a copy of the parameters in memory, but `{device}` is nvme");
            let help = format!("set `{device}: cpu`, or remove `{}`", last(KEY));
            resolver.contradiction(&[KEY, device], message, Some(help));
        }
    }
}

/// Checks that sequences can be cut into slices, and rejects features that need whole sequences.
pub(crate) fn check_sequences(config: &Config, resolver: &mut Resolver<'_>) {
    let size = config.context_size();
    if size == 1 {
        return;
    }
    let (key, chunks) = (config.context_key(), config.chunks_of_a_sequence());
    let parts = if chunks == size { format!("{size} slices") } else { format!("2 × {size} chunks") };
    let data = config.data.as_ref();
    if let Some(length) = data.and_then(|data| data.sequence_length).filter(|length| !length.is_multiple_of(chunks)) {
        let message = format!("samples of {length} tokens cannot be split into {parts} of equal length");
        let help = near_multiple(config, length, chunks);
        resolver.contradiction(&[key, Data::sequence_length], message, Some(help));
    }
    let heads = config.heads_of_a_rank().filter(|(_, heads)| config.sequence_parallel_size > (*heads).max(1));
    if let Some((path, heads)) = heads {
        let (key, ranks) = (Config::sequence_parallel_size, config.sequence_parallel_size);
        let message = format!("{heads} heads cannot be divided among {ranks} ranks");
        let help = format!("set `{key}: {heads}` or less, or use `{}`", Mesh::context_parallel_degree);
        resolver.contradiction(&[key, path], message, Some(help));
    }
    if let Some((path, length)) = uneven_length(config, chunks) {
        let message = format!("sequences of {length} tokens cannot be split into {parts} of equal length");
        let help = near_multiple(config, length, chunks);
        resolver.contradiction(&[path, key], message, Some(help));
    }
    // Below stage 2, gradients are first added over micro-batches and then reduced over slices. From stage 2 on, the
    // gradient of each micro-batch is reduced over slices first.
    let adds_first = config.zero.stage < ZeroStage::Two && config.gradient_accumulation_steps > 1;
    if config.training.reproducible && adds_first {
        let message = format!(
            "`{}` with ranks that share sequences needs a reduction of gradients after each micro-batch, \
             but stage {} reduces only their sum",
            Training::reproducible,
            config.zero.stage.number()
        );
        let help = format!("set `{}: 2`, or `{}: 1`", Zero::stage, Config::gradient_accumulation_steps);
        resolver.contradiction(&[key, Zero::stage, Config::gradient_accumulation_steps], message, Some(help));
    }
    let is_mlp = matches!(config.model, Some(Model::Mlp(_)));
    for (is_on, path, why) in [
        (is_mlp, Model::TYPE, "an mlp has no sequences that ranks could share"),
        (
            config.training.gradient_noise_scale.is_some(),
            Training::gradient_noise_scale,
            "the noise scale compares whole samples, but ranks hold slices of samples",
        ),
    ] {
        if is_on {
            let help = format!("remove one of the two, or set `{key}: 1`");
            resolver.contradiction(&[path, key], why.to_string(), Some(help));
        }
    }
}

/// Returns advice for a length that is not a multiple of `chunks`: a multiple that the model supports.
fn near_multiple(config: &Config, length: usize, chunks: usize) -> String {
    let next = length.next_multiple_of(chunks);
    let longest = config.model.as_ref().and_then(Model::max_sequence_length).filter(|&longest| longest < next);
    match longest.map(|longest| (longest, longest - longest % chunks)) {
        None => format!("the next multiple of {chunks} is {next}"),
        Some((longest, 0)) => {
            format!(
                "increase the model's maximum sequence length of {longest} to {next}, the next multiple of {chunks}"
            )
        }
        Some((longest, last)) => {
            format!("the largest multiple of {chunks} up to the model's maximum sequence length of {longest} is {last}")
        }
    }
}

/// Returns the first length of the curriculum that is not a multiple of `chunks`, with its key.
fn uneven_length(config: &Config, chunks: usize) -> Option<(&'static str, usize)> {
    let curriculum = config.data_efficiency.curriculum()?;
    let schedule = &curriculum.schedule_config;
    let ends = [
        (Curriculum::min_difficulty, curriculum.min_difficulty),
        (Curriculum::max_difficulty, curriculum.max_difficulty),
    ];
    let step = schedule.difficulty_step.map(|step| (CurriculumConfig::difficulty_step, step));
    let listed = schedule.difficulty.iter().flatten().map(|&length| (CurriculumConfig::difficulty, length));
    ends.into_iter().chain(step).chain(listed).find(|(_, length)| !length.is_multiple_of(chunks))
}

impl TensorParallel {
    /// Checks that layers can be divided evenly, and rejects features that tensor parallelism does not support.
    pub(crate) fn check(config: &Config, resolver: &mut Resolver<'_>) {
        let (size, key) = (config.tensor_size(), Self::autotp_size);
        if size == 1 {
            if config.tensor_parallel.tp_overlap_comm {
                let message = format!("`{}` {NO_EFFECT}: `{key}` is not above 1", Self::tp_overlap_comm);
                resolver.warn(Self::tp_overlap_comm, message);
            }
            return;
        }
        let mut uneven = |path: &'static str, count: usize, what: &str| {
            if !count.is_multiple_of(size) {
                let message = format!("{what} cannot be divided evenly among {size} ranks: `{path}` is {count}");
                let help = format!("set `{key}` to a divisor of {count}");
                resolver.contradiction(&[key, path], message, Some(help));
            }
        };
        match &config.model {
            Some(Model::Gpt2(model)) => {
                uneven(Gpt2::n_head, model.n_head, "heads");
                uneven(Gpt2::n_inner, model.n_inner, "the feed-forward networks");
            }
            Some(Model::Llama(model)) => {
                uneven(Llama::num_attention_heads, model.num_attention_heads, "heads");
                uneven(Llama::num_key_value_heads, model.num_key_value_heads, "heads of keys and values");
                uneven(Llama::intermediate_size, model.intermediate_size, "the feed-forward networks");
            }
            _ => {}
        }
        let chunks = config.slices_of_a_sequence();
        if let Some(length) = config.data.as_ref().and_then(|data| data.sequence_length) {
            let (path, sharing) = (Data::sequence_length, config.context_size());
            let slice = length / sharing;
            if sharing == 1 {
                uneven(path, length, "the tokens of a sample");
            } else if length.is_multiple_of(chunks / size) && !slice.is_multiple_of(size) {
                // The keys that cut sequences report a length that they cannot cut.
                let message = format!(
                    "slices of {slice} tokens cannot be divided evenly among {size} ranks: `{path}` is {length}, and \
                     {sharing} ranks share each sequence"
                );
                let help = near_multiple(config, length, chunks);
                resolver.contradiction(&[key, path], message, Some(help));
            }
        }
        if let Some((path, length)) = uneven_length(config, chunks) {
            let message = format!("sequences of {length} tokens cannot be split into {chunks} slices of equal length");
            let help = near_multiple(config, length, chunks);
            resolver.contradiction(&[path, key], message, Some(help));
        }
        let quantization = config.quantization_config.as_ref();
        let updates_matrices = |of: &Optimizer| matches!(of, Optimizer::Muon(_) | Optimizer::Adafactor(_));
        let is_custom = config.optimizers().iter().any(|(_, optimizer)| matches!(optimizer, Optimizer::Custom(_)));
        let of_matrices = config.optimizers().iter().any(|(_, optimizer)| updates_matrices(optimizer));
        for (is_on, path, why) in [
            (matches!(config.model, Some(Model::Mlp(_))), Model::TYPE, "tensor parallelism does not support an mlp"),
            (
                quantization.is_some_and(|section| section.bnb_4bit_use_double_quant),
                Quantization::bnb_4bit_use_double_quant,
                "double quantization quantizes the scales of several rows together, but ranks hold parts of rows",
            ),
            (of_matrices, Optimizer::TYPE, "the optimizer updates whole matrices, but ranks hold parts of them"),
            (is_custom, Optimizer::TYPE, "a custom optimizer with tensor parallelism is not implemented"),
            (
                config.pipeline.stages > 1 && config.pipeline.partition_method == PartitionMethod::Time,
                Pipeline::partition_method,
                "`time` measures whole layers, but ranks hold parts of layers",
            ),
            (
                config.training.gradient_noise_scale.is_some(),
                Training::gradient_noise_scale,
                "the gradient noise scale needs the squares of whole gradients, but ranks hold parts of them",
            ),
        ] {
            if is_on {
                let help = format!("remove one of the two, or set `{key}: 1`");
                resolver.contradiction(&[path, key], why.to_string(), Some(help));
            }
        }
    }
}

impl LocalSteps {
    /// Checks that the mesh has more than one replicate, and rejects keys that do not work with local steps.
    pub(crate) fn check(config: &Config, resolver: &mut Resolver<'_>) {
        let Some(local) = config.training.local_steps else { return };
        const KEY: &str = Training::local_steps;
        let (training, zero) = (&config.training, &config.zero);
        if config.mesh.data_parallel_replicate_degree == 1 {
            let message = format!("`{KEY}` needs several replicates, but the mesh has only one");
            let degree = Mesh::data_parallel_replicate_degree;
            let help = match config.mesh_is_auto() {
                true => "`auto` makes each host a replicate, and there is only one host: start the ranks on several hosts, plan with `--hosts`, or set a number".to_string(),
                false => format!("set `{degree}`, or remove `{}`", last(KEY)),
            };
            resolver.contradiction(&[KEY, Mesh::data_parallel_replicate_degree], message, Some(help));
        }
        let is_schedule_free = config.optimizers().iter().any(|(_, of)| matches!(of, Optimizer::ScheduleFree(_)));
        let is_on_disk = |device| device == OffloadDevice::Nvme;
        for (is_on, path, why) in [
            (
                training.reproducible,
                Training::reproducible,
                "gradients are not summed over replicates that train independently",
            ),
            (training.ema.is_some(), Training::ema, "with outer steps, an average of the weights is not implemented"),
            (training.spikes.is_some(), Training::spikes, "each replicate has its own gradient norms"),
            (
                training.gradient_noise_scale.is_some(),
                Training::gradient_noise_scale,
                "each replicate has its own gradients",
            ),
            (
                config.flops_profiler.enabled,
                FlopsProfiler::enabled,
                "the profiler sums the times of all ranks in each step, but replicates communicate only in outer steps",
            ),
            (
                config.memory_breakdown,
                Config::memory_breakdown,
                "the breakdown compares the memory of all ranks, but replicates do not communicate in local steps",
            ),
            (training.save_async, Training::save_async, "copying the states of all replicates is not implemented"),
            (is_schedule_free, Config::optimizer, "with outer steps, averages of the weights are not implemented"),
            (config.fp16.enabled, Fp16::enabled, "a loss scale for each replicate is not implemented"),
            (
                config.bf16.enabled && config.bf16.bf16_master_weights_and_grads,
                Bf16::bf16_master_weights_and_grads,
                "outer steps update the f32 copies of the parameters, which this key removes",
            ),
            (
                is_on_disk(zero.offload_optimizer.device),
                OffloadOptimizer::device,
                "outer steps with optimizer state on disk are not implemented",
            ),
            (
                is_on_disk(zero.offload_param.device),
                OffloadParam::device,
                "outer steps with parameters on disk are not implemented",
            ),
        ] {
            if is_on {
                let message = format!("`{KEY}` cannot be combined with `{path}`: {why}");
                let help = "remove one of the two".to_string();
                resolver.contradiction(&[KEY, path], message, Some(help));
            }
        }
        for (path, every, what) in [
            (Training::eval_every, training.eval_every, "evaluations"),
            (Training::save_every, training.save_every, "checkpoints"),
        ] {
            if !every.is_multiple_of(local.steps) {
                let message = format!(
                    "{what} need identical replicates, which exist only after an outer step, but `{path}` {every} is not a \
                     multiple of the {} local steps",
                    local.steps
                );
                let help = format!(
                    "use a multiple of {}, such as `{}: {}`",
                    local.steps,
                    last(path),
                    every.next_multiple_of(local.steps)
                );
                resolver.contradiction(&[path, Self::steps], message, Some(help));
            }
        }
    }
}
