//! The engine: turns a model, a communicator and a configuration into training steps.

mod buffers;
pub(crate) mod evaluation;
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
use crate::comm_options::{agreed, comm_options};
use crate::configured_model;
use crate::costs::cut::CutCosts;
use crate::costs::overlap::{Choice, chosen_by_the_first};
use crate::device;
use crate::error::Error;
use crate::executor::activation_offload::{self, ActivationOffload};
use crate::executor::messages::Boundary;
use crate::executor::tracked::Tracked;
use crate::executor::{Context, StepOutput, run};
use crate::loss_weights::{LossWeights, Mean};
use crate::settings::{Settings, loss_gradient};
use crate::stage_plan::StagePlan;
use crate::timing::{self, Timing};

/// The result of one optimizer step. All fields but `duration` and `sent_bytes` are the same on every rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// Number of the step, counted from 1.
    pub step: u64,
    /// Mean loss of the global batch, before the update.
    pub loss: f32,
    /// Learning rate of the update.
    pub lr: f64,
    /// Global L2 norm of the gradient before clipping, with the loss scale divided out.
    pub grad_norm: f64,
    /// Factor that the loss was multiplied by before the backward; `None` without `fp16`.
    pub loss_scale: Option<f64>,
    /// Whether the update was skipped because the gradient was not finite or its norm exceeded [`Engine::skip_beyond`].
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
    /// Training programs of earlier steps by number of micro-batches per replica, without `program`.
    other_programs: BTreeMap<usize, Program>,
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
    /// Present with `fp16`.
    pub(crate) scaler: Option<LossScaler>,
    pub(crate) step: u64,
    /// Samples consumed by all steps so far; the data continue at this index.
    pub(crate) samples: u64,
}

impl Engine {
    /// Creates an engine on the rank that the launcher's environment names (torchrun, mpirun, srun, `zero-train`).
    /// Without such an environment, the world has one rank.
    ///
    /// The batch sizes of the configuration are resolved again for the number of ranks that the environment gives. The
    /// parameters are loaded from `model.pretrained` or `training.initial_weights` if the configuration sets one of
    /// them.
    ///
    /// Keys that only a training loop can honour (`training.save_every`, `csv_monitor` and their likes) are no error here: the caller has a
    /// loop, which may read them from [`Engine::config`] and honour them. Rank 0 warns once, on standard error, naming those that the
    /// configuration sets.
    ///
    /// # Errors
    /// Fails if the configuration does not fit the world or the model, if the weights do not fit the model, or if the
    /// ranks do not meet.
    pub fn new(config: Config, model: Layers) -> Result<Self, Error> {
        let place = LauncherEnvironment::from_environment(|name| std::env::var(name).ok()).map_err(|e| {
            Error::setting("launcher", e.to_string(), "unset the variable, or start all ranks with one launcher")
        })?;
        let comm = zero_comm::connect(&place, &comm_options(&config, &place)?)?;
        let config = config.for_world_size(comm.size())?;
        loop_keys::warn(&config, comm.rank());
        Self::resolved(config, model, comm)
    }

    /// Creates an engine on a rank of `comm`. The configuration is resolved for the size of that communicator.
    ///
    /// # Errors
    /// As [`Engine::new`], and if two ranks have different configurations; the error names the first key that differs.
    pub fn with_communicator(config: Config, model: Layers, comm: Arc<dyn Communicator>) -> Result<Self, Error> {
        let config = agreed(&config, &*comm)?;
        loop_keys::warn(&config, comm.rank());
        Self::resolved(config, model, comm)
    }

    /// Creates an engine on a rank of `comm`, and measures layers if the stages are to be balanced by time. Collective.
    ///
    /// With `pipeline.partition_method: time`, rank 0 runs each layer on `micro_batch` before the engine is created,
    /// and the pipeline stages are cut by the measured times.
    ///
    /// # Errors
    /// As [`Engine::new`], and any error of a layer.
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
        let settings = Settings::new(&config)?;
        let built = configured_model::build(&config, model, settings.dtype)?;
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
        configured_model::build_on(config, model, Settings::new(config)?.dtype, &device::open(config, comm)?)
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
        // A disk or a GPU's memory may be full on one rank only: abort, so that the other ranks fail too.
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
            other_programs: BTreeMap::new(),
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

    /// Runs one optimizer step on a global batch of `train_batch_size` samples. This rank computes its share.
    ///
    /// If the loss has weights ([`Layers::loss_weight`]; for a language model, i64 targets), the loss of the global
    /// batch is the mean over all of its targets that are not ignored, however they are distributed over micro-batches.
    ///
    /// Every rank passes the same batch, so the same program runs on one rank and on many.
    ///
    /// # Errors
    /// Fails if the batch has another size, all of its targets are ignored, a layer fails or a rank is lost; with
    /// `fp16`, also if gradients overflow at the smallest loss scale. The engine is not usable after an error.
    pub fn train_batch(&mut self, batch: &Batch) -> Result<Step, Error> {
        let (rows, wanted) = (batch.rows()?, self.config.train_batch_size);
        if rows != wanted {
            return Err(Error::Batch(format!("it has {rows} samples, but `train_batch_size` is {wanted}")));
        }
        batch.fits(self.model().signature(), true)?;
        let size = self.settings.micro_batch_size;
        self.train_with(|micro_batch| batch.narrow(micro_batch * size, size))
    }

    /// Runs one optimizer step and loads each micro-batch when the program needs it. `load` gets a micro-batch index of
    /// the global batch, below [`Engine::global_micro_batches`], and returns `train_micro_batch_size_per_gpu` samples. If
    /// micro-batches have weights, the last pipeline stage loads all of its micro-batches at the beginning of the step.
    ///
    /// # Errors
    /// As [`Engine::train_batch`], and any error of `load`.
    pub fn train_with(&mut self, load: impl FnMut(usize) -> Result<Batch, Error>) -> Result<Step, Error> {
        self.train_dealt(&vec![self.settings.micro_batch_size; self.global_micro_batches()], load)
    }

    /// Runs one optimizer step whose global batch is dealt to micro-batches of these numbers of samples, together
    /// `train_batch_size`. The number of micro-batches is a multiple of [`Engine::replicas`], and may differ from step to
    /// step. `load` gets an index of `rows` and returns as many samples. Tensors of different micro-batches may have
    /// different lengths. The loss of the global batch is the same mean as in [`Engine::train_batch`]; without weights, it is the mean over samples.
    ///
    /// Every rank passes the same `rows`.
    ///
    /// # Errors
    /// As [`Engine::train_with`], and if `rows` does not fit. With several pipeline stages, all micro-batches must have
    /// `train_micro_batch_size_per_gpu` samples.
    pub fn train_dealt(
        &mut self,
        rows: &[usize],
        mut load: impl FnMut(usize) -> Result<Batch, Error>,
    ) -> Result<Step, Error> {
        let started = Instant::now();
        self.deal(rows).inspect_err(|error| self.comm.abort(&error.to_string()))?;
        let loss_scale = self.loss_scale();
        let scale = loss_scale.unwrap_or(1.0);
        let sent_before = self.stats().sent_bytes();
        let step = self.step + 1;
        let (ranks, rank, settings) = (self.replicas(), self.replica(), &self.settings);
        let rate = settings.schedule.rate(settings.base_lr, self.zero.updates() + 1);
        let (deal, micro_batches) = (settings.deal, settings.micro_batches);
        let global = |local: usize| deal.global(rank, ranks, local, micro_batches);
        let first = self.samples;
        let sample = |local: usize| first + rows[..global(local)].iter().sum::<usize>() as u64;
        let signature = self.model().signature().clone();
        let load_local = |local: usize| {
            let batch = load(global(local))?;
            let (found, expected) = (batch.rows()?, rows[global(local)]);
            if found != expected {
                return Err(Error::Batch(format!("a micro-batch has {found} samples, expected {expected}")));
            }
            batch.fits(&signature, true)?;
            Ok(batch)
        };
        let (model, data, weights) =
            (self.zero.model().clone(), self.zero.groups().data().clone(), LossWeights::default());
        let stage = (&*model, &*data, self.has_last_layer());
        let mean = if rows.iter().all(|&count| count == rows[0]) { Mean::Step } else { Mean::StepOfSamples };
        let mut load = weights.loader(stage, (mean, micro_batches), load_local);
        let mut outcome = run(
            &self.program,
            &mut Context {
                zero: &mut self.zero,
                timing: &mut self.timing,
                tracked: self.tracked,
                memory_limit: self.memory_limit,
                kept: self.kept.as_mut(),
                load: &mut load,
                sample: &sample,
                training: true,
                scored: true,
                seed: self.config.training.seed,
                step,
                loss_gradient: f64::from(settings.loss_gradient) * scale,
                weights: &weights,
                limits: Limits {
                    loss_scale: scale,
                    max_norm: self.config.gradient_clipping,
                    limit: self.norm_limit,
                    skips_overflow: settings.skips_overflow,
                },
                rate,
                observe: None,
            },
        )
        .inspect_err(|error| self.comm.abort(&error.to_string()))?;
        self.kept.iter().for_each(ActivationOffload::rest);
        self.step = step;
        self.samples += self.config.train_batch_size as u64;
        self.boundaries = std::mem::take(&mut outcome.boundaries);
        self.settle_buffers(&outcome)?;
        let loss = self.mean_loss(&outcome)?;
        let (norm, is_admitted) =
            outcome.verdict.map_or((f64::NAN, false), |verdict| (verdict.norm, verdict.is_admitted));
        self.look_after_save()?;
        if let Some(scaler) = &mut self.scaler {
            // All ranks have the same norm, so their scalers stay equal.
            scaler.update(!norm.is_finite()).map_err(|exhausted| {
                let key = "`fp16.min_loss_scale`";
                Error::Diverged { reason: format!("step {step}: {exhausted} ({key}); the loss is {loss}") }
            })?;
        }
        Ok(Step {
            step,
            loss,
            lr: rate.lr,
            grad_norm: norm,
            loss_scale,
            skipped: !is_admitted,
            duration: started.elapsed(),
            sent_bytes: self.stats().sent_bytes() - sent_before,
        })
    }

    /// Takes the program for this distribution of a step's samples to micro-batches.
    fn deal(&mut self, rows: &[usize]) -> Result<(), Error> {
        let (replicas, wanted) = (self.replicas(), self.config.train_batch_size);
        let (count, samples) = (rows.len() / replicas, rows.iter().sum::<usize>());
        if count == 0 || !rows.len().is_multiple_of(replicas) || rows.contains(&0) || samples != wanted {
            return Err(Error::Batch(format!(
                "it is dealt to micro-batches of {rows:?} samples, but they must be a multiple of {replicas}, not empty, and have {wanted} samples together"
            )));
        }
        if self.stage_plan.mesh.pipe() > 1 && rows.iter().any(|&count| count != self.settings.micro_batch_size) {
            let message = "micro-batches of different sizes cannot pass through the stages of a pipeline";
            return Err(Error::setting("pipeline.stages", message, "use one stage"));
        }
        let now = self.settings.micro_batches;
        if count == now {
            return Ok(());
        }
        (self.settings.micro_batches, self.stage_plan.micro_batches) = (count, count);
        self.settings.loss_gradient = loss_gradient(&self.config, count);
        let program = match self.other_programs.remove(&count) {
            Some(program) => program,
            None => {
                let shape = self.zero.layout().shape();
                let mut programs = self.stage_plan.training(shape);
                self.stage_plan.validate(&programs, shape)?;
                let mut program = programs.swap_remove(0);
                program.instructions.shrink_to_fit();
                program
            }
        };
        self.other_programs.insert(now, std::mem::replace(&mut self.program, program));
        Ok(())
    }

    /// Computes the mean loss of the global batch on the last pipeline stage and broadcasts it to all ranks.
    fn mean_loss(&self, outcome: &StepOutput) -> Result<f32, Error> {
        let total = match self.has_last_layer() {
            true => self.sum_over_micro_batches(outcome.losses.iter().map(|&loss| vec![loss]).collect())?[0],
            false => 0.0,
        };
        let total = self.told_by_the_last(Buffer::F32(vec![total]))?.into_f32()?[0];
        Ok(total / (self.settings.micro_batches * self.replicas()) as f32)
    }

    /// Sums one vector per local micro-batch over all micro-batches of the global batch, over the same trees as the
    /// gradients. All vectors of the replicas have the same length.
    fn sum_over_micro_batches(&self, values: Vec<Vec<f32>>) -> Result<Vec<f32>, Error> {
        let add_up = |values: Vec<Vec<f32>>| match self.settings.zero.order {
            Order::Arrival => values.into_iter().reduce(sum).unwrap_or_default(),
            Order::Tree => tree(values),
        };
        if self.settings.layout.zero_stage < ZeroStage::Two {
            return self.sum_over_replicas(add_up(values));
        }
        let length = values.first().map_or(0, Vec::len);
        let sums = self.sum_over_replicas(values.concat())?;
        Ok(add_up(sums.chunks(length.max(1)).map(<[f32]>::to_vec).collect()))
    }

    fn sum_over_replicas(&self, values: Vec<f32>) -> Result<Vec<f32>, Error> {
        let data = self.zero.groups().data();
        Ok(data.all_reduce(Buffer::F32(values), ReduceOp::Sum).wait()?.into_f32()?)
    }

    /// Broadcasts values from the stage of the last layer to all ranks. The other stages pass a buffer of the same
    /// length, whose values are ignored.
    fn told_by_the_last(&self, values: Buffer) -> Result<Buffer, Error> {
        if self.stage_plan.mesh.pipe() == 1 {
            return Ok(values);
        }
        Ok(self.comm.broadcast(values, self.stage_plan.last_rank()).wait()?)
    }

    fn has_last_layer(&self) -> bool {
        let stages = &self.stage_plan.stages;
        stages.stage_of(stages.layers() - 1) == self.zero.groups().at().stage
    }

    /// Skips the update of every later step whose global gradient norm exceeds `limit`. `f64::INFINITY` disables this.
    pub fn skip_beyond(&mut self, limit: f64) {
        self.norm_limit = limit;
    }

    /// Lifts `training.memory_limit`: later steps may exceed it.
    pub fn lift_memory_limit(&mut self) {
        self.memory_limit = None;
    }
}

/// Sums the vectors over a binary tree, lowest bit first.
fn tree(mut values: Vec<Vec<f32>>) -> Vec<f32> {
    while values.len() > 1 {
        let mut level = values.into_iter();
        values = std::iter::from_fn(|| level.next().map(|a| (a, level.next())))
            .map(|(a, b)| match b {
                Some(b) => sum(a, b),
                None => a,
            })
            .collect();
    }
    values.pop().unwrap_or_default()
}

fn sum(mut a: Vec<f32>, b: Vec<f32>) -> Vec<f32> {
    a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
    a
}
