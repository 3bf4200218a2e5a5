//! [`Trainer`]: a model, a data set and a configuration, trained.

mod arguments;

use std::ffi::OsString;
use std::sync::Arc;

use candle_core::{Result as CandleResult, Tensor};
use zero_comm::Communicator;
use zero_comm::launcher_environment::LauncherEnvironment;
use zero_config::{Config, LogLevel, Source};
use zero_engine::{Activations, Error, Layers};

use crate::data::Dataset;
use crate::process;
use crate::train::{self, DrawBar, Evaluation, Metric, Output, Restarts, Resume, RunOptions, StepInfo, Summary, Task};
use arguments::Arguments;

/// Trains a model on data, with evaluation, metrics, checkpoints, resume, restarts, early stopping, monitors and the run's folder, on any
/// number of ranks. It runs the loop of the program `zero-train`, and honours the same configuration.
///
/// ```no_run
/// use candle_nn::{VarBuilder, linear, loss::cross_entropy};
/// use zero_train::{Layers, Trainer, data::csv, metrics::accuracy};
///
/// let (train, valid) = (csv(["train.csv"], 3)?, csv(["valid.csv"], 3)?);
/// let model = Layers::new().layer("classes", |vb: VarBuilder| linear(4, 3, vb)).loss(cross_entropy);
/// let summary = Trainer::from_args()?.model(model).data(train, valid).metric("accuracy", accuracy).fit()?;
/// println!("{:?}", summary.evaluation);
/// # Ok::<(), zero_train::Error>(())
/// ```
///
/// Every rank runs the same program: one process is one rank, alone or among others that a launcher has started
/// (`zero-train launch --nproc-per-node 4 PROGRAM`, torchrun, mpirun, srun). With `--max-restarts K` the launcher starts the ranks again when
/// one has died, and the run goes on from its newest checkpoint.
///
/// What the configuration has in `model` and `data` can be left to it: a trainer without [`Trainer::model`] builds the configuration's model,
/// one without [`Trainer::data`] opens the configuration's files. Giving both is an error.
#[must_use = "a trainer does nothing before `fit`"]
pub struct Trainer<'a> {
    config: Config,
    options: RunOptions,
    task: Task<'a>,
    comm: Option<Arc<dyn Communicator>>,
    /// Lines about the process, for rank 0.
    said: Vec<String>,
    /// The first mistake in the calls so far.
    mistake: Option<Error>,
}

impl<'a> Trainer<'a> {
    /// A trainer with a configuration, which is resolved for the number of ranks that are found. The process stays as it is:
    /// [`process::set_up`] prepares it.
    pub fn new(config: Config) -> Self {
        let task = Task { evaluates_last: true, ..Task::default() };
        let options = RunOptions { bar: Some(train::draw), ..RunOptions::default() };
        Self { config, options, task, comm: None, said: vec![], mistake: None }
    }

    /// A trainer for this program's command line (`--config`, `--set`, `--max-steps`, `--out`, `--resume`, `--quiet`; `--help` names all) and the
    /// launcher's environment. Prepares the process as [`process::set_up`] does, so it comes first in `main`: it may start the program
    /// anew, with the same arguments.
    ///
    /// # Errors
    /// Arguments that do not exist, a configuration with mistakes, a launcher's environment that contradicts itself.
    pub fn from_args() -> Result<Self, Error> {
        Self::read(std::env::args_os().skip(1), None)
    }

    /// [`Trainer::from_args`] over a configuration of the program's own, which `--config` and `--set` change. `name` is its name in messages, and
    /// without its ending that of the run's folder.
    ///
    /// # Errors
    /// As [`Trainer::from_args`].
    pub fn from_args_over(name: &str, text: &str) -> Result<Self, Error> {
        Self::from_arguments(std::env::args_os().skip(1), name, text)
    }

    /// [`Trainer::from_args_over`] for a program that has taken its own arguments out. An empty `text` leaves the configuration to `--config`.
    ///
    /// # Errors
    /// As [`Trainer::from_args`].
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
        let typed = arguments.load(own)?;
        one_process_is_one_rank(arguments.ranks, typed.num_processes(), &place)?;
        let config = typed.resolve(Some(place.world_size))?;
        let threads = process::threads_of_rank(Some(&config.launcher), place.local_world_size);
        process::prepare(threads, place.world_size)?;
        let cores = process::settle(&config, &place)?;
        let (resume, force, output) = (arguments.resume, arguments.force, arguments.output);
        let mut trainer = Self::new(config);
        trainer.options = RunOptions { resume, force, output, ..trainer.options };
        trainer.said.push(cores);
        Ok(trainer)
    }

    /// The model and its loss.
    pub fn model(mut self, layers: Layers) -> Self {
        self.task.layers = Some(layers);
        self
    }

    /// What to train on, and what to evaluate on. Evaluations come every `training.eval_every` steps and after the last; they look at every
    /// sample, unless `training.eval_batches` is written.
    pub fn data(mut self, train: impl Dataset + 'static, valid: impl Dataset + 'static) -> Self {
        self.task.data = Some((Arc::new(train), Some(Arc::new(valid))));
        self
    }

    /// What to train on, without evaluation.
    pub fn train_data(mut self, train: impl Dataset + 'static) -> Self {
        self.task.data = Some((Arc::new(train), None));
        self
    }

    /// Whether the samples of an epoch come in a random order, which depends on the seed and the epoch alone, or in that of the data set.
    /// They do unless this says otherwise. Of the configuration's own data, `data.shuffle` decides.
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.task.shuffle = shuffle;
        self
    }

    /// A metric of evaluations: a function of the last layer's only output and the targets of some samples. It gives a value for each
    /// sample, or several, as a tensor whose first dimension counts samples; or their mean as a scalar. Reported is the mean over the
    /// evaluation data, which has the same bits on any number of ranks where each value depends on its own sample alone. It is
    /// `eval_<name>` in `metrics.jsonl` and in monitors, and what `training.early_stopping.metric` may name.
    pub fn metric(
        self,
        name: &str,
        metric: impl Fn(&Tensor, &Tensor) -> CandleResult<Tensor> + Send + Sync + 'static,
    ) -> Self {
        self.metric_of_all(name, move |outputs, targets| metric(outputs.single()?, targets))
    }

    /// [`Trainer::metric`] for a last layer with several outputs.
    pub fn metric_of_all(
        mut self,
        name: &str,
        metric: impl Fn(&Activations, &Tensor) -> CandleResult<Tensor> + Send + Sync + 'static,
    ) -> Self {
        match Metric::new(name, &self.task.metrics, Box::new(metric)) {
            Ok(metric) => self.task.metrics.push(metric),
            Err(error) => self.mistake = self.mistake.or(Some(error)),
        }
        self
    }

    /// Calls a function after each optimizer step, on rank 0: what it prints is printed once.
    pub fn on_step(mut self, on_step: impl FnMut(&StepInfo) + 'a) -> Self {
        self.task.on_step.push(Box::new(on_step));
        self
    }

    /// Calls a function after each evaluation, on rank 0.
    pub fn on_evaluation(mut self, on_evaluation: impl FnMut(&Evaluation) + 'a) -> Self {
        self.task.on_evaluation.push(Box::new(on_evaluation));
        self
    }

    /// Goes on from a checkpoint.
    pub fn resume(mut self, from: Resume) -> Self {
        self.options.resume = Some(from);
        self
    }

    /// How much is printed.
    pub fn output(mut self, output: Output) -> Self {
        self.options.output = output;
        self
    }

    /// Draws the progress bar of a terminal, in place of the usual one.
    pub fn progress_bar(mut self, draw: DrawBar) -> Self {
        self.options.bar = Some(draw);
        self
    }

    /// Trains on a rank of this communicator instead of the one that the launcher's environment names: for ranks that are threads of one
    /// process ([`comm::threads`](crate::comm::threads)).
    pub fn communicator(mut self, comm: Arc<dyn Communicator>) -> Self {
        self.comm = Some(comm);
        self
    }

    /// Trains until the last step, an early stop or a signal (SIGINT, SIGTERM), which leaves a checkpoint. All ranks call it.
    ///
    /// # Errors
    /// Whatever ends the run before its time, the same on all ranks but for a rank that is lost: see [`Error`].
    pub fn fit(self) -> Result<Summary, Error> {
        let Self { config, mut options, task, comm, said, mistake } = self;
        if let Some(mistake) = mistake {
            return Err(mistake);
        }
        let is_a_process = comm.is_none();
        let comm = match comm {
            Some(comm) => comm,
            None => {
                Restarts::of_launcher(&mut options)?;
                train::connect(&config, &options, &process::place()?)?
            }
        };
        if comm.rank() == 0 {
            let says = options.output.at(config.log_level) != Output::Quiet;
            said.iter().filter(|_| says).for_each(|line| println!("{line}"));
            if options.output != Output::Quiet && config.log_level >= LogLevel::Warning {
                config.warnings.iter().for_each(|warning| eprintln!("{warning}"));
            }
        }
        train::fit(&config, &options, &comm, task).inspect_err(|error| {
            // The others end now, and not when their deadline passes.
            comm.abort(&error.to_string());
            if is_a_process {
                process::report_and_wait(&error.to_string(), error.exit_status());
            }
        })
    }
}

/// A program that is asked for several ranks, and is not one of several, names what starts them.
fn one_process_is_one_rank(
    asked: Option<usize>,
    written: Option<usize>,
    place: &LauncherEnvironment,
) -> Result<(), Error> {
    let (key, ranks) = match (asked, written) {
        (Some(ranks), _) => ("-n", ranks),
        (None, Some(ranks)) => ("launcher.num_processes", ranks),
        (None, None) => return Ok(()),
    };
    if ranks == place.world_size || asked.is_none() && *place != LauncherEnvironment::alone() {
        return Ok(());
    }
    let started = zero_engine::counted(place.world_size, "rank is", "ranks are");
    let program = std::env::args().next().unwrap_or_default();
    Err(Error::setting(
        key,
        format!("it asks for {} and {started} started", zero_engine::counted(ranks, "rank", "ranks")),
        format!("start the ranks with `zero-train launch --nproc-per-node {ranks} {program}`, or with torchrun"),
    ))
}

#[cfg(test)]
mod tests;
