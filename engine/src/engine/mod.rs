//! The engine: a model, a communicator and a configuration, made into steps.

mod evaluation;
mod loop_keys;
mod parts;
mod values;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use zero_comm::launcher_environment::LauncherEnvironment;
use zero_comm::{Buffer, Communicator, ReduceOp};
use zero_config::{Config, PartitionMethod};
use zero_model::{Layers, Model};
use zero_optim::LossScaler;
use zero_optim::norm::Limits;
use zero_partition::{Groups, Layout, Order, ShardedState};
use zero_pipeline::{LayerId, Program, ZeroStage};

use crate::batch::Batch;
use crate::checkpoint::saving::Saving;
use crate::checkpoint::start::Start;
use crate::comm_options::comm_options;
use crate::costs::cut::CutCosts;
use crate::costs::overlap::{Choice, chosen_by_the_first};
use crate::device;
use crate::error::Error;
use crate::executor::activation_offload::{self, ActivationOffload};
use crate::executor::messages::Boundary;
use crate::executor::tracked::Tracked;
use crate::executor::{Context, StepOutput, run};
use crate::settings::Settings;
use crate::stage_plan::StagePlan;
use crate::timing::{self, Timing};

/// What one optimizer step did; the same on every rank but for the time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// From 1.
    pub step: u64,
    /// Mean loss of the global batch, before the update.
    pub loss: f32,
    /// Learning rate of the update.
    pub lr: f64,
    /// Global L2 norm of the gradient before clipping; of the loss itself, also where that is scaled.
    pub grad_norm: f64,
    /// What the loss was multiplied by before the backward, with `fp16`.
    pub loss_scale: Option<f64>,
    /// No update was made: the gradient was not finite, or above [`Engine::skip_beyond`].
    pub skipped: bool,
    /// Wall-clock time of this rank.
    pub duration: Duration,
    /// Payload bytes that this rank sent.
    pub sent_bytes: u64,
}

/// Trains one model on one rank of a world.
pub struct Engine {
    pub(crate) config: Config,
    pub(crate) settings: Settings,
    pub(crate) zero: ShardedState,
    pub(crate) comm: Arc<dyn Communicator>,
    pub(crate) stage_plan: StagePlan,
    program: Program,
    /// By number of micro-batches.
    evaluations: BTreeMap<usize, Program>,
    /// What crossed the boundaries of pipeline stages in the last training step.
    pub(crate) boundaries: HashMap<LayerId, Boundary>,
    pub(crate) timing: Timing,
    tracked: Tracked,
    /// `training.memory_limit`, unless it was lifted.
    memory_limit: Option<u64>,
    pub(crate) kept: Option<ActivationOffload>,
    /// How values go between GPUs, where they do.
    pub(crate) between_gpus: Option<String>,
    /// Whether it communicates while computing, where a cost table decided that.
    pub(crate) choice: Option<Choice>,
    pub(crate) saving: Saving,
    norm_limit: f64,
    /// With `fp16`.
    pub(crate) scaler: Option<LossScaler>,
    pub(crate) step: u64,
    /// Samples of all steps so far: where the data go on.
    pub(crate) samples: u64,
}

impl Engine {
    /// An engine on the rank that the environment names (torchrun, mpirun, srun, our own launcher), or on a world of one.
    ///
    /// The batch sizes of the configuration are resolved anew for the number of ranks that is found. The parameters are those of
    /// `model.pretrained` or `training.initial_weights`, if the configuration has one of them.
    ///
    /// Keys that only a training loop can honour (`training.save_every`, `csv_monitor` and their likes) are no error here: the caller has a
    /// loop, which may read them from [`Engine::config`] and honour them. Rank 0 warns once, on standard error, naming those that the
    /// configuration sets.
    ///
    /// # Errors
    /// A configuration that does not fit the world or the model; weights that do not fit it; ranks that do not meet.
    pub fn new(config: Config, model: Layers) -> Result<Self, Error> {
        let place = LauncherEnvironment::from_environment(|name| std::env::var(name).ok()).map_err(|e| {
            Error::setting("launcher", e.to_string(), "unset the variable, or start the ranks with one launcher")
        })?;
        let comm = zero_comm::connect(&place, &comm_options(&config, &place)?)?;
        Self::with_communicator(config, model, comm)
    }

    /// An engine on a rank of a given communicator, which the configuration is resolved for.
    ///
    /// # Errors
    /// As [`Engine::new`].
    pub fn with_communicator(config: Config, model: Layers, comm: Arc<dyn Communicator>) -> Result<Self, Error> {
        let config = config.for_world_size(comm.size())?;
        loop_keys::warn(&config, comm.rank());
        Self::resolved(config, model, comm)
    }

    /// An engine on a rank of a given communicator, whose layers are dealt out to pipeline stages by the time that they take where
    /// `pipeline.partition_method` is `time`: rank 0 runs each of them on a micro-batch before the engine is made. All ranks call
    /// it.
    ///
    /// # Errors
    /// As [`Engine::new`], and what a layer says.
    pub fn measured(
        config: Config,
        model: Layers,
        comm: Arc<dyn Communicator>,
        micro_batch: &Batch,
    ) -> Result<Self, Error> {
        let config = config.for_world_size(comm.size())?;
        Self::measured_with(config, model, comm, Start::Anew, || Ok(micro_batch.clone()))
    }

    /// The same with a configuration that is resolved, and a micro-batch that is loaded only if it is needed.
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
        let settings = Settings::new(&config)?;
        let built = model.build(settings.dtype)?;
        let measured = CutCosts::measured(&built, &settings, config.training.seed, &*comm, micro_batch);
        let costs = measured.inspect_err(|error| comm.abort(&error.to_string()))?;
        Self::of_model(config, built, comm, Some(&costs), start)
    }

    /// An engine of a configuration that is as it should be for this communicator.
    pub fn resolved(config: Config, model: Layers, comm: Arc<dyn Communicator>) -> Result<Self, Error> {
        let model = Self::built(&config, model, &*comm)?;
        Self::of_model(config, model, comm, None, Start::Anew)
    }

    fn built(config: &Config, model: Layers, comm: &dyn Communicator) -> Result<Model, Error> {
        Ok(model.build_on(Settings::new(config)?.dtype, &device::open(config, comm)?)?)
    }

    fn of_model(
        config: Config,
        model: Model,
        comm: Arc<dyn Communicator>,
        costs: Option<&CutCosts>,
        start: Start,
    ) -> Result<Self, Error> {
        let tracked = Tracked::begin(&*comm);
        let mut config = config;
        let choice = chosen_by_the_first(&config, &model, costs, &*comm)?;
        if let Some(choice) = choice {
            config.zero.overlap_comm = Some(choice.overlap);
        }
        let (mut settings, model) = (Settings::new(&config)?, Arc::new(model));
        let layout = Layout::new(&model, &settings.layout).on_disk(&settings.tiers);
        let stage_plan = StagePlan::new(&config, &settings, &model, &layout, costs)?;
        let mesh = stage_plan.mesh;
        let stage = mesh.coordinates(comm.rank()).stage;
        let mut programs = stage_plan.training(layout.shape());
        stage_plan.validate(&programs, layout.shape())?;
        let mut program = programs.swap_remove(stage);
        program.instructions.shrink_to_fit();
        let kept = activation_offload::open(&config, &settings, &model, &program);
        let kept = kept.inspect_err(|error| comm.abort(&error.to_string()))?;
        let clock = device::timeline(&config, model.device()).inspect_err(|error| comm.abort(&error.to_string()))?;
        let world = device::connect(&config, model.device(), comm.clone(), &mut settings.zero.on_gpu, clock.as_ref());
        let (world, between_gpus) = world.inspect_err(|error| comm.abort(&error.to_string()))?;
        let groups = Groups::new(world, mesh)?;
        let stages = stage_plan.stages.clone();
        let zero = ShardedState::new(model, layout, stages, groups, settings.zero.clone(), config.training.seed);
        // A disk, or the memory of a GPU, may be full for one rank alone.
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
        Ok(Self {
            config,
            settings,
            zero,
            comm,
            stage_plan,
            program,
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
            step: 0,
            samples: 0,
        })
    }

    /// One optimizer step on a global batch of `train_batch_size` samples, of which this rank computes its part.
    ///
    /// Every rank gives the same batch; so a program reads and trains the same on one rank and on many.
    ///
    /// # Errors
    /// A batch of another size, a layer that fails, a lost rank; with `fp16`, gradients that overflow at the smallest loss scale. After
    /// an error the engine is not usable.
    pub fn train_batch(&mut self, batch: &Batch) -> Result<Step, Error> {
        let (rows, wanted) = (batch.rows()?, self.config.train_batch_size);
        if rows != wanted {
            return Err(Error::Batch(format!("it has {rows} samples; `train_batch_size` is {wanted}")));
        }
        let size = self.settings.micro_batch_size;
        self.train_with(|micro_batch| batch.narrow(micro_batch * size, size))
    }

    /// One optimizer step whose micro-batches are made as they are needed. `load` is given an index of the global batch,
    /// below [`Engine::global_micro_batches`], and gives back `train_micro_batch_size_per_gpu` samples.
    ///
    /// # Errors
    /// As [`Engine::train_batch`], and what `load` says.
    pub fn train_with(&mut self, mut load: impl FnMut(usize) -> Result<Batch, Error>) -> Result<Step, Error> {
        let started = Instant::now();
        let loss_scale = self.loss_scale();
        let scale = loss_scale.unwrap_or(1.0);
        let sent_before = self.stats().sent_bytes();
        let step = self.step + 1;
        let (ranks, rank, settings) = (self.replicas(), self.replica(), &self.settings);
        let lr = settings.schedule.lr(settings.base_lr, self.zero.updates() + 1);
        let (deal, micro_batches, size) = (settings.deal, settings.micro_batches, settings.micro_batch_size);
        let global = |local: usize| deal.global(rank, ranks, local, micro_batches);
        let first = self.samples;
        let sample = |local: usize| first + (global(local) * size) as u64;
        let mut load_local = |local: usize| {
            let batch = load(global(local))?;
            let rows = batch.rows()?;
            if rows != size {
                return Err(Error::Batch(format!("a micro-batch of {rows} samples; it should have {size}")));
            }
            Ok((batch.inputs, Some(batch.targets)))
        };
        let mut outcome = run(
            &self.program,
            &mut Context {
                zero: &mut self.zero,
                timing: &mut self.timing,
                tracked: self.tracked,
                memory_limit: self.memory_limit,
                kept: self.kept.as_mut(),
                load: &mut load_local,
                sample: &sample,
                training: true,
                seed: self.config.training.seed,
                step,
                loss_gradient: (f64::from(settings.loss_gradient) * scale) as f32,
                limits: Limits {
                    loss_scale: scale,
                    max_norm: self.config.gradient_clipping,
                    limit: self.norm_limit,
                    skips_overflow: settings.skips_overflow,
                },
                lr,
                observe: None,
            },
        )
        .inspect_err(|error| self.comm.abort(&error.to_string()))?;
        self.kept.iter().for_each(ActivationOffload::rest);
        self.step = step;
        self.samples += self.config.train_batch_size as u64;
        self.boundaries = std::mem::take(&mut outcome.boundaries);
        let loss = self.mean_loss(&outcome)?;
        let (norm, is_admitted) =
            outcome.verdict.map_or((f64::NAN, false), |verdict| (verdict.norm, verdict.is_admitted));
        self.look_after_save()?;
        if let Some(scaler) = &mut self.scaler {
            // The same on all ranks: they have the same norm.
            scaler.update(!norm.is_finite()).map_err(|exhausted| {
                let key = "`fp16.min_loss_scale`";
                Error::Diverged { reason: format!("in step {step} {exhausted} ({key}); the loss is {loss}") }
            })?;
        }
        Ok(Step {
            step,
            loss,
            lr,
            grad_norm: norm,
            loss_scale,
            skipped: !is_admitted,
            duration: started.elapsed(),
            sent_bytes: self.stats().sent_bytes() - sent_before,
        })
    }

    /// The mean over the global batch, added up over the same trees as the gradients, where the last layer is; then it is told
    /// to all.
    fn mean_loss(&self, outcome: &StepOutput) -> Result<f32, Error> {
        let add_up = |losses: &[f32]| match self.settings.zero.order {
            Order::Arrival => losses.iter().copied().reduce(|a, b| a + b).unwrap_or(0.0),
            Order::Tree => tree(losses),
        };
        let is_last = self.has_last_layer();
        let total = match self.settings.layout.zero_stage >= ZeroStage::Two {
            _ if !is_last => 0.0,
            true => add_up(&self.sum_over_replicas(outcome.losses.clone())?),
            false => self.sum_over_replicas(vec![add_up(&outcome.losses)])?[0],
        };
        let total = self.told_by_the_last(vec![total])?[0];
        Ok(total / (self.settings.micro_batches * self.replicas()) as f32)
    }

    fn sum_over_replicas(&self, values: Vec<f32>) -> Result<Vec<f32>, Error> {
        let data = self.zero.groups().data();
        Ok(data.all_reduce(Buffer::F32(values), ReduceOp::Sum).wait()?.into_f32()?)
    }

    /// What the stage of the last layer knows, on all ranks; the others give as many values.
    fn told_by_the_last(&self, values: Vec<f32>) -> Result<Vec<f32>, Error> {
        if self.stage_plan.mesh.pipe() == 1 {
            return Ok(values);
        }
        let root = self.stage_plan.last_rank();
        Ok(self.comm.broadcast(Buffer::F32(values), root).wait()?.into_f32()?)
    }

    fn has_last_layer(&self) -> bool {
        let stages = &self.stage_plan.stages;
        stages.stage_of(stages.layers() - 1) == self.zero.groups().at().stage
    }

    /// From now on a gradient whose global norm is above `limit` makes no update; infinity lets all be.
    pub fn skip_beyond(&mut self, limit: f64) {
        self.norm_limit = limit;
    }

    /// Goes on where a step needs more than `training.memory_limit`.
    pub fn lift_memory_limit(&mut self) {
        self.memory_limit = None;
    }
}

/// The sum over a binary tree, lowest bit first.
fn tree(values: &[f32]) -> f32 {
    match values {
        [] => 0.0,
        [one] => *one,
        many => {
            let level: Vec<f32> =
                many.chunks(2).map(|pair| pair.iter().copied().reduce(|a, b| a + b).unwrap_or(0.0)).collect();
            tree(&level)
        }
    }
}
