//! [`Trainer`]: trains a model on a data set as configured.

mod arguments;
mod ranks;

use std::ffi::OsString;
use std::sync::Arc;

use candle_core::{Result as CandleResult, Tensor};
use zero_comm::Communicator;
use zero_config::{Config, LogLevel, Source};
use zero_engine::optimizer::CustomOptimizer;
use zero_engine::{Activations, DataError, Error, Layers};

use crate::data::Dataset;
use crate::process;
use crate::train::{
    self, CallbackResult, Evaluation, Function, Metric, MetricValues, Of, Output, Restarts, Resume, RunOptions,
    Selection, StepInfo, Summary, Task,
};
use arguments::Arguments;
use zero_engine::printed::{show_line, tell};

/// Trains a model on any number of ranks, with evaluation, metrics, checkpoints, resume, restarts, early stopping,
/// monitors and a run folder. It runs the same loop as the program `zero-train` and honours the same configuration.
///
/// ```no_run
/// use candle_nn::{VarBuilder, linear, loss::cross_entropy};
/// use zero_train::{Layers, Trainer, data::csv, metrics::accuracy};
///
/// let trainer = Trainer::from_args()?;
/// let (train, valid) = (csv(["train.csv"], 3)?, csv(["valid.csv"], 3)?);
/// let model = Layers::new().layer("classes", |vb: VarBuilder| linear(4, 3, vb)).loss(cross_entropy);
/// let summary = trainer.model(model).data(train, valid).metric("accuracy", accuracy).fit()?;
/// println!("{:?}", summary.evaluation);
/// # Ok::<(), zero_train::Error>(())
/// ```
///
/// Every process is one rank and runs the same program. `PROGRAM -n 4` starts four ranks on this machine. A launcher
/// starts ranks on several hosts (`zero-train launch --nnodes 2 PROGRAM`, torchrun, mpirun, srun). With
/// `launcher.max_restarts`, all ranks are restarted after one dies, and the run resumes from its newest checkpoint.
///
/// Without [`Trainer::model`], the trainer builds the model of the configuration's `model` section. Without
/// [`Trainer::data`], it opens the files of the `data` section. If a program calls one of these functions and the
/// configuration also has the corresponding section, `fit` returns an error.
#[must_use = "a trainer does nothing before `fit`"]
pub struct Trainer<'a> {
    config: Config,
    options: RunOptions,
    task: Task<'a>,
    comm: Option<Arc<dyn Communicator>>,
    /// Lines about the process, which rank 0 prints.
    said: Vec<String>,
    /// The first mistake in the calls so far. [`fit`](Self::fit) returns it.
    mistake: Option<Error>,
}

impl<'a> Trainer<'a> {
    /// Creates a trainer. [`fit`](Self::fit) resolves `config` again for the actual number of ranks. Does not bind the
    /// process to cores or set thread counts; [`process::set_up`] does.
    pub fn new(config: Config) -> Self {
        let task = Task { evaluates_last: true, ..Task::default() };
        Self { config, options: RunOptions::default(), task, comm: None, said: vec![], mistake: None }
    }

    /// Creates a trainer from this program's command line (`--config`, `--set`, `-n`, `--max-steps`, `--out`,
    /// `--resume`, `--evaluate`, `--quiet`; `--help` lists all options) and the launcher's environment.
    ///
    /// Call it first in `main`: it prepares the process as [`process::set_up`] does, and may re-execute the program
    /// with the same arguments. With `-n N`, it starts the program N times and does not return: it exits when the ranks
    /// have ended.
    ///
    /// # Errors
    /// Fails on unknown arguments, on mistakes in the configuration, and if the launcher's environment is inconsistent.
    pub fn from_args() -> Result<Self, Error> {
        Self::read(std::env::args_os().skip(1), None)
    }

    /// Creates a trainer as [`Trainer::from_args`] does. `text` is a configuration in the program, which `--config` and
    /// `--set` override. Messages refer to this configuration as `name`. The default run folder is `runs/` followed by
    /// `name` without its extension.
    ///
    /// # Errors
    /// Returns the same errors as [`Trainer::from_args`].
    pub fn from_args_over(name: &str, text: &str) -> Result<Self, Error> {
        Self::from_arguments(std::env::args_os().skip(1), name, text)
    }

    /// Creates a trainer as [`Trainer::from_args_over`] does, for a program that has removed its own arguments. With an
    /// empty `text`, `--config` is required.
    ///
    /// # Errors
    /// Returns the same errors as [`Trainer::from_args`].
    pub fn from_arguments(
        arguments: impl IntoIterator<Item = OsString>,
        name: &str,
        text: &str,
    ) -> Result<Self, Error> {
        let own = (!text.is_empty()).then(|| Source { name: name.into(), text: text.into() });
        Self::read(arguments, own)
    }

    fn read(arguments: impl IntoIterator<Item = OsString>, own: Option<Source>) -> Result<Self, Error> {
        process::follow_launcher();
        train::note_save_requests();
        let arguments = Arguments::parse(arguments)?;
        if arguments.help {
            println!("{}", Arguments::help());
            std::process::exit(0);
        }
        let place = process::place()?;
        let sources = arguments.sources(own)?;
        let typed = arguments.load(sources.clone(), &[])?;
        if let Some(ranks) = ranks::to_start(arguments.ranks, || ranks::configured(&typed), &place)? {
            std::process::exit(ranks::run(&arguments, &sources, typed, ranks)?.into());
        }
        let config = typed.on_hosts(place.local_world_size).resolve(Some(place.world_size))?;
        let threads = process::threads_of_rank(Some(&config.launcher), place.local_world_size);
        process::prepare(threads, place.world_size)?;
        let cores = process::settle(&config, &place)?;
        let Arguments { resume, evaluate, force, output, .. } = arguments;
        let mut trainer = Self::new(config);
        trainer.options = RunOptions { resume, evaluate, force, output, ..trainer.options };
        trainer.said.push(cores);
        Ok(trainer)
    }

    /// Returns the rank of this process, or of this thread with [`Trainer::communicator`].
    ///
    /// # Errors
    /// Fails if the launcher's environment is inconsistent.
    pub fn rank(&self) -> Result<usize, Error> {
        self.comm.as_ref().map_or_else(|| Ok(process::place()?.rank), |comm| Ok(comm.rank()))
    }

    /// Returns the number of ranks.
    ///
    /// # Errors
    /// Fails if the launcher's environment is inconsistent.
    pub fn world_size(&self) -> Result<usize, Error> {
        self.comm.as_ref().map_or_else(|| Ok(process::place()?.world_size), |comm| Ok(comm.size()))
    }

    /// Sets the model and its loss.
    pub fn model(mut self, layers: Layers) -> Self {
        self.task.layers = Some(layers);
        self
    }

    /// Sets the optimizer of a configuration whose `optimizer.type` is `Custom`. `lr` and `weight_decay` in its
    /// `params`, schedules and `training.param_groups` also apply to this optimizer.
    pub fn optimizer(mut self, optimizer: impl CustomOptimizer + 'static) -> Self {
        self.task.optimizer = Some(Arc::new(optimizer));
        self
    }

    /// Multiplies the optimizer's learning rate by `factor(steps)`, like `torch.optim.lr_scheduler.LambdaLR`. `steps`
    /// is the number of optimizer steps taken so far, 0 for the first; a step that a gradient overflow skips does not
    /// count. Rank 0 calls the function for all ranks. The configuration must not have a `scheduler`.
    pub fn lr_lambda(mut self, factor: impl Fn(u64) -> f64 + Send + Sync + 'static) -> Self {
        self.task.lr_lambda = Some(Arc::new(factor));
        self
    }

    /// Sets the training and evaluation data. Evaluations run every `training.eval_every` steps and after the last
    /// step. They use every sample unless `training.eval_batches` is set.
    pub fn data(mut self, train: impl Dataset + 'static, valid: impl Dataset + 'static) -> Self {
        self.task.data = Some((Arc::new(train), Some(Arc::new(valid))));
        self
    }

    /// Sets the training data of a run that does not evaluate.
    pub fn train_data(mut self, train: impl Dataset + 'static) -> Self {
        self.task.data = Some((Arc::new(train), None));
        self
    }

    /// Sets whether samples are shuffled in each epoch. The default is `true`. The shuffled order depends only on the
    /// seed and the epoch. For data in the configuration's `data` section, `data.shuffle` decides instead.
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.task.shuffle = shuffle;
        self
    }

    /// Adds a metric. Evaluations compute it from the model's only output and the only target of each micro-batch.
    ///
    /// The function returns a tensor whose first dimension counts samples, with one or more values per sample, or a
    /// scalar mean over the samples. An evaluation reports the mean over all evaluation data. If each value depends
    /// only on its own sample, the mean is bit-identical on any number of ranks. The function can also return two
    /// tensors of this shape: the values, and their weights in the mean. A weight of 0 excludes a value.
    ///
    /// The metric appears as `eval_<name>` in `metrics.jsonl` and in monitors, and can be used in
    /// `training.early_stopping.metric`. [`Trainer::dataset_metric`] adds a metric that is not a mean.
    pub fn metric<V: Into<MetricValues>>(
        self,
        name: &str,
        metric: impl Fn(&Tensor, &Tensor) -> CandleResult<V> + Send + Sync + 'static,
    ) -> Self {
        self.add_mean(name, Selection::Single, move |outputs, targets| metric(outputs.single()?, targets.single()?))
    }

    /// Adds a metric as [`Trainer::metric`] does, for a last layer with several outputs.
    pub fn metric_of_all<V: Into<MetricValues>>(
        self,
        name: &str,
        metric: impl Fn(&Activations, &Tensor) -> CandleResult<V> + Send + Sync + 'static,
    ) -> Self {
        self.add_mean(name, Selection::All, move |outputs, targets| metric(outputs, targets.single()?))
    }

    /// Adds a metric as [`Trainer::metric`] does. The function receives the named outputs, which the loss must also
    /// receive ([`Layers::loss_of`]), and the named targets, in this order.
    pub fn metric_of<V: Into<MetricValues>, const O: usize, const T: usize>(
        self,
        name: &str,
        outputs: [&str; O],
        targets: [&str; T],
        metric: impl Fn([&Tensor; O], [&Tensor; T]) -> CandleResult<V> + Send + Sync + 'static,
    ) -> Self {
        self.add_mean(name, Selection::named(outputs, targets), move |outputs, targets| {
            metric(outputs.array()?, targets.array()?)
        })
    }

    /// Adds a metric of the whole evaluation data set that is not a mean over the samples, such as F1 or AUC. The
    /// function receives the model's only output and the only target of all evaluation samples, concatenated in the
    /// order of the samples along the first dimension, in host memory. It is called once per evaluation on every rank,
    /// with the same tensors.
    ///
    /// Every rank holds the outputs of all evaluation samples at that moment. All micro-batches must have outputs of
    /// the same shape, except for the number of samples. [`metrics`](crate::metrics) has ready-made functions.
    pub fn dataset_metric(
        self,
        name: &str,
        metric: impl Fn(&Tensor, &Tensor) -> CandleResult<f64> + Send + Sync + 'static,
    ) -> Self {
        let function = move |outputs: &Activations, targets: &Activations| metric(outputs.single()?, targets.single()?);
        self.add_metric(name, Selection::Single, Function::Dataset(Box::new(function)))
    }

    /// Adds a metric as [`Trainer::dataset_metric`] does. The function receives the named outputs, which the loss must
    /// also receive ([`Layers::loss_of`]), and the named targets, in this order.
    pub fn dataset_metric_of<const O: usize, const T: usize>(
        self,
        name: &str,
        outputs: [&str; O],
        targets: [&str; T],
        metric: impl Fn([&Tensor; O], [&Tensor; T]) -> CandleResult<f64> + Send + Sync + 'static,
    ) -> Self {
        let function = move |outputs: &Activations, targets: &Activations| metric(outputs.array()?, targets.array()?);
        self.add_metric(name, Selection::named(outputs, targets), Function::Dataset(Box::new(function)))
    }

    fn add_mean<V: Into<MetricValues>>(
        self,
        name: &str,
        selection: Selection,
        metric: impl Fn(&Activations, &Activations) -> CandleResult<V> + Send + Sync + 'static,
    ) -> Self {
        let function: Of<MetricValues> = Box::new(move |outputs, targets| Ok(metric(outputs, targets)?.into()));
        self.add_metric(name, selection, Function::Mean(function))
    }

    fn add_metric(mut self, name: &str, selection: Selection, function: Function) -> Self {
        match Metric::new(name, &self.task.metrics, selection, function) {
            Ok(metric) => self.task.metrics.push(metric),
            Err(error) => self.mistake = self.mistake.or(Some(error)),
        }
        self
    }

    /// Calls a function after each optimizer step, on rank 0 only. If it returns [`ControlFlow::Break`], the run ends
    /// after this step, as after an early stop: all ranks save the last checkpoint and return a [`Summary`].
    ///
    /// [`ControlFlow::Break`]: std::ops::ControlFlow::Break
    pub fn on_step<R: CallbackResult>(mut self, mut on_step: impl FnMut(&StepInfo) -> R + 'a) -> Self {
        self.task.on_step.push(Box::new(move |step| on_step(step).stops()));
        self
    }

    /// Calls a function after each evaluation, on rank 0 only. It can end the run in the same way as the function of
    /// [`Trainer::on_step`].
    pub fn on_evaluation<R: CallbackResult>(mut self, mut on_evaluation: impl FnMut(&Evaluation) -> R + 'a) -> Self {
        self.task.on_evaluation.push(Box::new(move |evaluation| on_evaluation(evaluation).stops()));
        self
    }

    /// Resumes from a checkpoint.
    pub fn resume(mut self, from: Resume) -> Self {
        self.options.resume = Some(from);
        self
    }

    /// Sets what the run prints.
    pub fn output(mut self, output: Output) -> Self {
        self.options.output = output;
        self
    }

    /// Uses this communicator instead of connecting through the launcher's environment. This allows ranks that are
    /// threads of one process ([`ranks::threads`](crate::ranks::threads)).
    pub fn communicator(mut self, comm: Arc<dyn Communicator>) -> Self {
        self.comm = Some(comm);
        self
    }

    /// Evaluates the model on the evaluation data, without training it and without writing files. The weights are those
    /// of the checkpoint of [`Trainer::resume`] or, without it, the initial weights: of `model.pretrained`, of
    /// `training.initial_weights`, or drawn from the seed. All ranks must call it.
    ///
    /// # Errors
    /// Fails without evaluation data, and with the errors of [`Trainer::fit`].
    pub fn evaluate(mut self) -> Result<Evaluation, Error> {
        self.options.evaluate = true;
        self.fit()?.evaluation.ok_or(Error::Data(DataError::Stopped))
    }

    /// Trains until the last step, an early stop or a signal. SIGINT and SIGTERM save a checkpoint before the run ends.
    /// With `--evaluate` on the command line, it only evaluates, as [`Trainer::evaluate`] does. All ranks must call it.
    ///
    /// # Errors
    /// Returns the error that ended the run early. It is the same on all ranks, except on a lost rank; see [`Error`].
    pub fn fit(self) -> Result<Summary, Error> {
        let Self { config, mut options, task, comm, said, mistake } = self;
        if let Some(mistake) = mistake {
            return Err(mistake);
        }
        let is_a_process = comm.is_none();
        let comm = match comm {
            Some(comm) => comm,
            None => {
                process::forget_error();
                Restarts::of_launcher(&mut options)?;
                train::connect(&config, &options, &process::place()?)?
            }
        };
        if comm.rank() == 0 {
            let says = options.output.at(config.log_level) != Output::Quiet;
            said.iter().filter(|_| says).for_each(|line| show_line(line));
            if options.output != Output::Quiet && config.log_level >= LogLevel::Warning {
                config.warnings.iter().for_each(|warning| tell(&warning.to_string()));
            }
        }
        // Processes have already compared their configurations when they connected.
        let agreed = if is_a_process { Ok(config) } else { zero_engine::comm_options::agreed(&config, &*comm) };
        agreed.and_then(|config| train::fit(&config, &options, &comm, task)).inspect_err(|error| {
            // Without `abort`, the other ranks would wait until their deadline passes.
            comm.abort(&error.to_string());
            if is_a_process {
                process::report_and_wait(&error.to_string(), error.exit_status());
            }
        })
    }
}

#[cfg(test)]
mod tests;
