//! The training loop around [`Engine`]. `zero-train --config ds.yaml` runs it on each rank, and
//! [`Trainer`](crate::Trainer) runs it for programs with their own model or data.

mod addresses;
mod checkpoint_store;
mod commands;
mod configured_data;
mod connection;
mod corpus;
mod curriculum;
mod evaluation;
mod files;
mod first_rank;
mod folder;
mod metrics;
mod mixing;
mod options;
mod output;
mod preference;
mod prefetch;
#[cfg(test)]
mod rampup_tests;
mod reference;
mod report;
mod restart;
mod resume;
mod run;
mod sample;
mod saves;
mod stopping;
mod task;
mod token_batches;
#[cfg(test)]
mod trained;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use candle_core::DType;
use zero_comm::Communicator;
use zero_config::{Config, Optimizer, Transport};

use crate::monitor;
use crate::process::resident;
use crate::process::signals::Requests;
use checkpoint_store::{Begun, Uploads};
use files::Files;
use output::preparing::Preparing;
use output::progress::Progress;
use report::Report;
use resume::{resume, start};
use run::Run;
use saves::Saves;
use stopping::best::Best;
use stopping::divergence::Divergence;
use stopping::early_stop::EarlyStop;
use stopping::noise_scale::NoiseScale;
use zero_engine::checkpoint::start::{Start, of_pretrained};
use zero_engine::comm_options::check_interface;
use zero_engine::configured_model;
use zero_engine::settings::{with_total_steps, working_dtype};
use zero_engine::{DataError, Engine, Error, Layers};
use zero_planner::{Plan, Planner};

pub use crate::process::signals::note_save_requests;
pub use crate::report_page::report_page;
pub use addresses::{read_addresses, write_folder};
pub use checkpoint_store::{checkpoints_in_store, fetch_checkpoint};
pub use commands::data_commands::{DataStats, Lengths, PreparedData, data_stats, prepare_data, verify_data};
pub use commands::show::{ShownData, ShownPart, ShownSample, show_data};
pub use commands::steps::{Steps, measure_costs};
pub use connection::connect;
pub use evaluation::Evaluation;
pub use folder::holds_a_run;
pub use metrics::MetricValues;
pub(crate) use metrics::{Function, Metric, Of, Selection};
pub use options::{Finished, Resume, RunOptions};
pub use output::progress::Output;
pub use restart::{Restart, Restarts};
pub use stopping::best::BestCheckpoint;
pub(crate) use task::Task;
pub use task::{CallbackResult, StepInfo, Summary};

/// Trains the configured model on the configured data; a collective.
///
/// # Errors
/// Returns the error that ended the run early; see [`Error`].
pub fn train(config: &Config, options: &RunOptions, comm: &Arc<dyn Communicator>) -> Result<Finished, Error> {
    Ok(fit(config, options, comm, Task::default())?.finished)
}

/// Trains with a program's model, data and callbacks; a collective.
pub(crate) fn fit(
    config: &Config,
    options: &RunOptions,
    comm: &Arc<dyn Communicator>,
    task: Task<'_>,
) -> Result<Summary, Error> {
    let requests = Requests::listen();
    let config = config.for_world_size(comm.size())?;
    let out = PathBuf::from(&config.training.output_dir);
    match begin((config, &out), options, comm, task, &requests) {
        Err(Error::Data(DataError::Stopped)) => {
            Ok(Summary::untrained(Finished::Stopped(requests.stop() as i32), 0, out))
        }
        ended => ended,
    }
}

/// Trains. Fails with [`DataError::Stopped`] if a signal arrives before the first step. A collective.
fn begin(
    (mut config, out): (Config, &Path),
    options: &RunOptions,
    comm: &Arc<dyn Communicator>,
    mut task: Task<'_>,
    requests: &Requests,
) -> Result<Summary, Error> {
    let started = Instant::now();
    if comm.rank() == 0 {
        monitor::check(&config)?;
    }
    let output = options.output.at(config.log_level);
    let preparing = || Preparing::of_rank(comm.rank(), output, requests);
    let mut corpus = task.corpus(&config, &preparing())?;
    corpus.agree(&**comm)?;
    metrics::check(&config, &task.metrics)?;
    if let (Some(preference), Some(_)) = (&config.preference, &corpus.eval) {
        task.metrics.extend(preference::metrics(preference)?);
    }
    let no_sample = sample::missing(&config, &corpus)?;
    let steps = match (config.training.max_steps, config.training.epochs) {
        (Some(steps), _) => steps as u64,
        (None, epochs) => corpus.steps(epochs.unwrap_or(1.0), 0),
    };
    config = with_total_steps(config, steps);
    let layers = task.layers(&config, &corpus)?;
    if let Some(steps) = options.verify {
        let finished = commands::verify::verify(&config, &corpus, layers, comm, steps, options.output)?;
        return Ok(Summary::untrained(finished, steps, out.into()));
    }
    let restarts = restart::found(&options.restarts, options.job.as_deref(), out, &**comm)?;
    let options = RunOptions { restarts, ..options.clone() };
    let options = &checkpoint_store::completed(&options, &config, &**comm, &preparing())?;
    let sample = || corpus.sampler.batch(0);
    let resident_before = resident::peak();
    let start = start(&config, options)?;
    if start == Start::Anew {
        config = addresses::fetch_weights(&config, &preparing())?;
    }
    let mut early = EarlyStop::new(config.training.early_stopping.clone());
    let mut best = Best::new(config.training.keep_best.as_ref(), out);
    let sets = || corpus.eval_sets.iter().map(|set| set.name.as_str());
    early.check(&task.metrics, sets())?;
    best.check(&task.metrics, sets())?;
    if options.evaluate {
        config = config.for_evaluation();
    }
    let mut engine = Engine::measured_with(config, layers, comm.clone(), start, sample)?;
    if options.force {
        engine.lift_memory_limit();
    }
    let main = comm.rank() == 0;
    let resumed = resume(&mut engine, options, out, &preparing())?;
    if options.evaluate {
        let from = resumed.map(|(from, _)| from);
        return commands::evaluate_only::run(engine, corpus, &task.metrics, from, options, out, requests);
    }
    let mut divergence = Divergence::new(engine.config());
    let measured = engine.config().training.gradient_noise_scale;
    let mut noise_scale = NoiseScale::new(measured.map_or(0.0, |section| section.smoothing));
    if let Some((_, state)) = &resumed {
        early.restore(state);
        divergence.restore(&state["divergence"]);
        noise_scale.restore(&state["noise_scale"]);
        corpus.restore(state, engine.samples(), engine.config());
    }
    // `epochs` determines the number of samples. The number of steps is computed again, because the batch size may have
    // changed since the checkpoint.
    let steps = match engine.config().training.max_steps {
        Some(_) => steps,
        None => engine.steps() + corpus.steps(engine.config().training.epochs.unwrap_or(1.0), engine.samples()),
    };
    let progress = Progress::new(
        if main { output } else { Output::Quiet },
        engine.config().steps_per_print,
        engine.steps(),
        steps,
    );
    // A run that resumes from a checkpoint in another folder is a new run in its own folder.
    let goes_on = resumed.as_ref().is_some_and(|(from, _)| lies_in(from, out)) || options.restarts.keeps_folder;
    let logged = resumed.is_some() || goes_on;
    let job = (options.job.as_deref(), &options.restarts);
    let mut files = if main { Some(Files::open(&mut engine, out, job, goes_on, logged, &progress)?) } else { None };
    if let Some((_, state)) = &resumed {
        best.restore(&state["best"], &**comm)?;
        engine.keep_checkpoint(best.step());
    }
    if let Some(rank) = folder::unseen(out, &**comm)?
        && main
    {
        // Not an error: a network file system may show a new folder late.
        progress.warn(&format!(
            "rank {rank} cannot see {}, the run folder: no checkpoint can be saved unless `training.output_dir` is a \
             folder that all hosts share",
            out.display()
        ));
    }
    let from = resumed.map(|(from, _)| from);
    output::intro::say(&engine, &corpus, &progress, steps, from.as_deref());
    if main && let Some(reason) = no_sample {
        progress.warn(&format!("`training.sample` has no effect: {reason}"));
    }
    reference::prepare(&mut engine, &corpus, out, (from.as_deref(), true), &progress)?;
    evaluation::try_metrics(&mut engine, &corpus, &task.metrics)?;
    let uploads = uploads(&engine, options, (out, goes_on), &progress, &preparing())?;
    let saves = Saves::new(out, from.as_ref().map(|_| engine.steps()), best, uploads);
    if main {
        progress.say(&saves.foretell(&engine));
        if let Some(lack) = saves.lack_of_space(&engine) {
            progress.warn(&lack);
        }
    }
    let report = Report::new(started, resident_before, options.restarts.restarts.clone());
    let mut run = Run::new(engine, (corpus, task), (early, divergence, noise_scale, saves), progress, report);
    let finished = run.train(steps, requests, files.as_mut())?;
    let checkpoint = run.save_last(finished, requests)?;
    let text = if finished == Finished::Done { run.sample()? } else { None };
    run.finish(files.as_mut(), checkpoint.as_deref(), text.as_deref(), finished)?;
    comm.barrier().wait()?;
    let (steps, loss, evaluation, best) = (run.steps(), run.loss, run.evaluation.take(), run.best());
    Ok(Summary { finished, steps, loss, evaluation, checkpoint, best, resumed_from: from, folder: out.into() })
}

/// Returns a planner for a configuration. Opens the data only if `vocab_size: auto` depends on it, so most plans do not
/// need the data.
///
/// # Errors
/// Returns the same errors as [`planner_of_data`] if the data is opened. Also fails if samples are longer than the
/// model's maximum sequence length.
pub fn planner(config: &Config) -> Result<Planner, Error> {
    let (model, data) = config.model_and_data()?;
    configured_data::sequence_length(Some(model), data)?;
    match configured_data::classes(model) {
        None => planner_of_data(config),
        Some(_) => Ok(Planner::new(None)),
    }
}

/// Opens the data of a configuration, and returns a planner that knows its vocabulary.
///
/// # Errors
/// Fails if the data cannot be read, or if the model cannot train on it.
pub fn planner_of_data(config: &Config) -> Result<Planner, Error> {
    Ok(Planner::new(configured_data::open(config, false, &Preparing::new(Output::Auto, None))?.vocabulary))
}

/// Returns the plan of a configuration that is resolved for its number of ranks. Does not start any rank.
///
/// # Errors
/// Returns the same errors as [`planner`]. Also fails if the ranks could not start.
pub fn plan(config: &Config) -> Result<Plan, Error> {
    planner(config)?.plan(config)
}

/// Performs the checks of a configuration that need no data, disks, networks or GPUs. Rejects unsupported addresses,
/// devices that this build does not support, and models that cannot be built or split into stages. A configuration
/// without a `model` section is for a program with a custom model, which is not checked.
///
/// # Errors
/// Returns the error that would prevent a run on any machine.
pub fn refuse(config: &Config) -> Result<(), Error> {
    refuse_addresses(config)?;
    match config.model {
        // The optimizer of another program cannot be planned here.
        Some(_) if !matches!(config.optimizer, Optimizer::Custom(_)) => {
            if config.data.is_some() {
                configured_data::refuse(config)?;
            }
            planned(config, config.model.as_ref().and_then(configured_data::classes)).map(drop)
        }
        _ => working_dtype(&with_total_steps(config.clone(), 1)).map(drop),
    }
}

/// Checks whether ranks can start with a configuration on this machine, without reading the data. In addition to the
/// checks of [`refuse`], the network interface must exist, pretrained weights must match the model, and the disks must
/// have enough space. Returns the plan. A vocabulary that is not known without the data counts as one token.
///
/// # Errors
/// Returns the same errors as [`plan`].
pub fn check(config: &Config, options: &RunOptions) -> Result<Plan, Error> {
    refuse_addresses(config)?;
    configured_data::refuse(config)?;
    if config.world_size > 1 && config.launcher.transport != Transport::Threads {
        check_interface(config)?;
    }
    if start(config, options)? == Start::Anew
        && let config = addresses::fetch_weights(config, &Preparing::new(Output::Auto, None))?
        && let Some(folder) = config.model.as_ref().and_then(|model| model.pretrained())
    {
        let model = layers(&config, config.model.as_ref().and_then(configured_data::classes))?.build(DType::F32)?;
        zero_checkpoint::check_pretrained(folder.as_ref(), &model).map_err(of_pretrained)?;
    }
    let plan = planned(config, classes_without_data(config)?)?;
    plan.check_disks()?;
    Ok(plan)
}

/// Rejects unsupported addresses of servers, files and folders.
fn refuse_addresses(config: &Config) -> Result<(), Error> {
    monitor::check(config)?;
    addresses::check(config)
}

/// Computes the plan for a number of tokens or classes that the model distinguishes, or for 1 if it is unknown.
fn planned(config: &Config, classes: Option<usize>) -> Result<Plan, Error> {
    Plan::new(with_total_steps(config.clone(), 1), layers(config, classes)?)
}

/// Builds the configured model for a number of tokens or classes, or for 1 if it is unknown. This number does not
/// affect whether the layers fit together.
fn layers(config: &Config, classes: Option<usize>) -> Result<Layers, Error> {
    configured_model::from_config(config, classes.or(Some(1)))
}

/// Returns the number of tokens or classes that the model distinguishes: the number in the configuration, or the
/// vocabulary of a tokenizer file on this machine. Returns `None` if only the data or a download define the number.
fn classes_without_data(config: &Config) -> Result<Option<usize>, Error> {
    let (model, data) = config.model_and_data()?;
    match (configured_data::classes(model), &data.tokenizer) {
        (None, zero_config::Tokenizer::File(path)) if zero_config::address(path.as_ref()).is_none() => {
            Ok(Some(configured_data::tokenizer_of(data)?.vocabulary()))
        }
        (known, _) => Ok(known),
    }
}

/// Returns whether `folder` lies in `parent`, after resolving links and relative paths.
fn lies_in(folder: &Path, parent: &Path) -> bool {
    let canonical = |path: &Path| path.canonicalize().ok();
    canonical(folder).zip(canonical(parent)).is_some_and(|(folder, parent)| folder.starts_with(parent))
}

/// Starts copying the checkpoints to the configured store, if there is one. Only rank 0 copies. A collective.
fn uploads(
    engine: &Engine,
    options: &RunOptions,
    (out, goes_on): (&Path, bool),
    progress: &Progress,
    preparing: &Preparing<'_>,
) -> Result<Option<Uploads>, Error> {
    let comm = engine.communicator();
    if engine.config().training.checkpoint_store.is_none() {
        return Ok(None);
    }
    let from = match &options.resume {
        Some(Resume::From(folder)) => zero_config::address(folder),
        _ => None,
    };
    let begun = Begun { goes_on, address: from, steps: engine.steps() };
    let begin = || Uploads::begin(engine.config(), engine.retention(), out, begun, progress, preparing);
    let begin = || (comm.rank() == 0).then(begin).transpose();
    zero_checkpoint::patiently(&**comm, begin)?
}
