//! The engine: turns a model, a communicator and a configuration into training steps.

mod buffers;
pub(crate) mod evaluation;
mod local_steps;
mod loop_keys;
mod parts;
mod run_ahead;
mod step;
mod values;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use zero_comm::Communicator;
use zero_config::{Config, PartitionMethod};
use zero_model::ops::{ByGpu, SequenceGroup, Sharing};
use zero_model::{Layers, Model};
use zero_optim::LossScaler;
use zero_partition::{Groups, Layout, ShardedState};
use zero_pipeline::{LayerId, Program};

use crate::batch::Batch;
use crate::checkpoint::saving::Saving;
use crate::checkpoint::start::Start;
use crate::comm_options::{agree_on, agreed, comm_options, place};
use crate::configured_model;
use crate::costs::cut::CutCosts;
use crate::costs::overlap::{Choice, chosen_by_the_first};
use crate::device;
use crate::error::Error;
use crate::executor::activation_offload::{self, ActivationOffload};
use crate::executor::messages::Boundary;
use crate::executor::tracked::Tracked;
use crate::settings::{Settings, sharing, working_dtype};
use crate::stage_plan::StagePlan;
use crate::timing::{self, Timing};
use run_ahead::Ahead;

pub use step::Step;

/// Trains one model on one rank of a world.
pub struct Engine {
    pub(crate) config: Config,
    pub(crate) settings: Settings,
    pub(crate) zero: ShardedState,
    pub(crate) comm: Arc<dyn Communicator>,
    pub(crate) stage_plan: StagePlan,
    program: Program,
    /// Training programs of earlier steps, by number of micro-batches per replica, without the current `program`.
    other_programs: BTreeMap<usize, Program>,
    ahead: Ahead,
    /// Evaluation programs by number of micro-batches.
    evaluations: BTreeMap<usize, Program>,
    /// Tensors that crossed the boundaries of pipeline stages in the last training step.
    pub(crate) boundaries: HashMap<LayerId, Boundary>,
    pub(crate) timing: Timing,
    tracked: Tracked,
    /// `training.memory_limit`; `None` if unset, or after [`Engine::lift_memory_limit`].
    memory_limit: Option<u64>,
    pub(crate) kept: Option<ActivationOffload>,
    /// Description of the transport between GPUs; `None` if values do not travel between GPUs.
    pub(crate) between_gpus: Option<String>,
    /// Whether communication overlaps with compute; `None` unless a cost table decided that.
    pub(crate) choice: Option<Choice>,
    pub(crate) saving: Saving,
    norm_limit: f64,
    /// `None` without `fp16`.
    pub(crate) scaler: Option<LossScaler>,
    /// The program of an outer step; `None` unless replicates train independently.
    averaging: Option<Program>,
    /// The last step after which the replicates were equal.
    pub(crate) averaged: u64,
    /// The context group or tensor group of this rank; `None` if its sequences and layers are whole.
    sequence: Option<SequenceGroup>,
    pub(crate) step: u64,
    /// Number of samples consumed by all steps so far; the data continue at this index.
    pub(crate) samples: u64,
    /// Whether the averages of the weights currently replace the weights.
    pub(crate) has_exchanged: bool,
}

impl Engine {
    /// Creates an engine for this process's rank, as given by the launcher's environment (torchrun, mpirun, srun,
    /// `zero-train`). Without such an environment, the world has one rank.
    ///
    /// The batch sizes of the configuration are resolved again for the number of ranks that the environment gives. The
    /// parameters are loaded from `model.pretrained` or `training.initial_weights` if the configuration sets one of
    /// them.
    ///
    /// Keys that only a training loop can apply (such as `training.save_every` and `csv_monitor`) are not an error
    /// here, because the caller's loop may read them from [`Engine::config`] and apply them. Rank 0 warns once, on
    /// standard error, and names the keys of this kind that the configuration sets.
    ///
    /// Call `zero_train::process::set_up` before, or set the environment variable `RAYON_NUM_THREADS`: otherwise candle
    /// reads `/proc/cpuinfo` in every matrix product on a CPU.
    ///
    /// # Errors
    /// Fails if the configuration does not match the world or the model, if the weights do not match the model, or if
    /// the ranks cannot connect.
    pub fn new(config: Config, model: Layers) -> Result<Self, Error> {
        let place = place()?;
        loop_keys::warn_without_launcher(&config, &place);
        let comm = zero_comm::connect(&place, &comm_options(&config, &place)?)?;
        let config = config.for_world_size(comm.size())?;
        loop_keys::warn(&config, comm.rank());
        Self::resolved(config, model, comm)
    }

    /// Creates an engine on a rank of `comm`. The configuration is resolved for the size of that communicator.
    ///
    /// # Errors
    /// Fails in the same cases as [`Engine::new`], and if two ranks have different configurations. The error names the
    /// first key that differs.
    pub fn with_communicator(config: Config, model: Layers, comm: Arc<dyn Communicator>) -> Result<Self, Error> {
        let config = agreed(&config, &*comm)?;
        loop_keys::warn(&config, comm.rank());
        Self::resolved(config, model, comm)
    }

    /// Creates an engine on a rank of `comm`, and measures layers if the configuration balances stages by time.
    /// Collective.
    ///
    /// With `pipeline.partition_method: time`, rank 0 runs each layer on `micro_batch` before the engine is created,
    /// and the model is split into pipeline stages by the measured times.
    ///
    /// # Errors
    /// Fails in the same cases as [`Engine::new`], and returns any error of a layer.
    pub fn measured(
        config: Config,
        model: Layers,
        comm: Arc<dyn Communicator>,
        micro_batch: &Batch,
    ) -> Result<Self, Error> {
        let config = agreed(&config, &*comm)?;
        Self::measured_with(config, model, comm, Start::Anew, || Ok(micro_batch.clone()))
    }

    /// Like [`Engine::measured`], for a configuration that is already resolved. `micro_batch` is called only if layers
    /// are timed.
    pub fn measured_with(
        config: Config,
        model: Layers,
        comm: Arc<dyn Communicator>,
        start: Start,
        micro_batch: impl FnOnce() -> Result<Batch, Error>,
    ) -> Result<Self, Error> {
        let by_time = config.pipeline.stages > 1 && config.pipeline.partition_method == PartitionMethod::Time;
        if !by_time {
            let model = Self::built(&config, model, &*comm)?;
            return Self::of_model(config, model, comm, None, start);
        }
        let model = configured_model::cut(&config, model, comm.rank())?;
        let built = configured_model::build(&config, model, working_dtype(&config)?)?;
        let settings = Settings::new(&config, &built)?;
        let measured = CutCosts::measured(&built, &settings, config.training.seed, &*comm, micro_batch);
        let costs = measured.inspect_err(|error| comm.abort(&error.to_string()))?;
        Self::of_model(config, built, comm, Some(&costs), start)
    }

    /// Creates an engine from a configuration that is already resolved for this communicator.
    pub fn resolved(config: Config, model: Layers, comm: Arc<dyn Communicator>) -> Result<Self, Error> {
        let model = Self::built(&config, model, &*comm)?;
        Self::of_model(config, model, comm, None, Start::Anew)
    }

    fn built(config: &Config, model: Layers, comm: &dyn Communicator) -> Result<Model, Error> {
        let model = configured_model::cut(config, model, comm.rank())?;
        configured_model::build_on(config, model, working_dtype(config)?, &device::open(config, comm)?)
    }

    fn of_model(
        config: Config,
        model: Model,
        comm: Arc<dyn Communicator>,
        costs: Option<&CutCosts>,
        start: Start,
    ) -> Result<Self, Error> {
        agree_on(&model, &*comm)?;
        let tracked = Tracked::begin(&*comm);
        let mut config = config;
        let choice = chosen_by_the_first(&config, &model, costs, &*comm)?;
        if let Some(choice) = choice {
            config.zero.overlap_comm = Some(choice.overlap);
        }
        let (mut settings, model) = (Settings::new(&config, &model)?, Arc::new(model));
        let layout = Layout::new(&model, &settings.layout).on_disk(&settings.tiers);
        let stage_plan = StagePlan::new(&config, &settings, &model, &layout, costs)?;
        let whole = stage_plan.whole;
        let place = whole.coordinates(comm.rank());
        let stage = place.stage;
        if let Some(outer) = &mut settings.zero.outer {
            outer.share.replicate = place.replicate;
        }
        let program = stage_plan.kept(stage_plan.training(layout.shape()), stage, layout.shape())?;
        let kept = activation_offload::open(&config, &settings, &model, &program);
        let kept = kept.inspect_err(|error| comm.abort(&error.to_string()))?;
        let clock = device::timeline(&config, model.device()).inspect_err(|error| comm.abort(&error.to_string()))?;
        let world = device::connect(&config, model.device(), comm.clone(), &mut settings.zero.on_gpu, clock.as_ref());
        let (world, between_gpus) = world.inspect_err(|error| comm.abort(&error.to_string()))?;
        let mut groups = match settings.zero.outer {
            Some(_) => Groups::of_replicates_alone(world, whole)?,
            None => Groups::new(world, whole)?,
        };
        let averaging = match settings.zero.outer {
            Some(_) => Some(stage_plan.kept(stage_plan.averaging(layout.shape()), stage, layout.shape())?),
            None => None,
        };
        let on_gpu = settings.zero.on_gpu;
        let by_gpu = ByGpu { moves: on_gpu.gathers, sums: on_gpu.gathers && !config.training.reproducible };
        let context = match (config.sequence_parallel_size, config.mesh.context_parallel_degree) {
            (heads @ 2.., 2..) => groups.divide_context(heads)?.map(|[heads, queries]| {
                let heads = SequenceGroup::new(heads, Sharing::Heads).by_gpu(by_gpu);
                heads.inside(Some(SequenceGroup::new(queries, sharing(&config)).by_gpu(by_gpu)))
            }),
            _ => groups.context().map(|comm| SequenceGroup::new(comm.clone(), sharing(&config)).by_gpu(by_gpu)),
        };
        let sequence = match groups.tensor() {
            Some(comm) => {
                let group = SequenceGroup::new(comm.clone(), Sharing::Layers).by_gpu(by_gpu).inside(context);
                Some(group.overlapping(config.tensor_parallel.tp_overlap_comm))
            }
            None => context,
        };
        let stages = stage_plan.stages.clone();
        let zero = ShardedState::new(model, layout, stages, groups, settings.zero.clone(), config.training.seed);
        // The disk or the GPU memory may be full on one rank only. Abort, so that the other ranks fail too.
        let zero = zero.map_err(|error| device::explained(error.into()));
        let mut zero = zero.inspect_err(|error| comm.abort(&error.to_string()))?;
        start.load(&config, &mut zero, &*comm)?;
        let saving = Saving::new(&config, &mut zero);
        let traced = timing::is_traced(&config);
        if traced {
            comm.barrier().wait()?;
        }
        let timing = Timing::new(traced.then_some(program.instructions.len()), config.memory_breakdown)
            .with_gpu(clock, config.wall_clock_breakdown);
        let memory_limit = config.training.memory_limit;
        let scaler = settings.loss_scaling.map(LossScaler::new);
        let (evaluations, boundaries) = (BTreeMap::new(), HashMap::new());
        let ahead = Ahead::new(&config, &settings.zero.on_gpu);
        Ok(Self {
            config,
            settings,
            zero,
            comm,
            stage_plan,
            program,
            other_programs: BTreeMap::new(),
            ahead,
            evaluations,
            boundaries,
            between_gpus,
            timing,
            tracked,
            memory_limit,
            kept,
            choice,
            saving,
            norm_limit: f64::INFINITY,
            scaler,
            averaging,
            averaged: 0,
            sequence,
            step: 0,
            samples: 0,
            has_exchanged: false,
        })
    }

    /// From now on, skips the update of every step whose global gradient norm exceeds `limit`. `f64::INFINITY` removes
    /// the limit.
    pub fn skip_beyond(&mut self, limit: f64) {
        self.norm_limit = limit;
    }

    /// Lifts `training.memory_limit`: later steps may exceed it.
    pub fn lift_memory_limit(&mut self) {
        self.memory_limit = None;
    }
}
