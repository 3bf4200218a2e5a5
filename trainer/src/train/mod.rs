//! What `zero-train --config ds.yaml` does on each rank: the loop around [`Engine`].

mod autos;
mod corpus;
mod disk;
mod divergence;
mod evaluation;
mod folder;
mod options;
mod progress;
mod report;
mod restart;
mod run;
mod sample;
mod saves;
mod signals;
mod steps;
mod verify;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use candle_core::DType;
use serde_json::Value;
use zero_comm::Communicator;
use zero_config::{Config, LogLevel, Origin, Transport};

use crate::{monitor, resident};
use corpus::Corpus;
use divergence::Divergence;
use evaluation::EarlyStop;
use progress::Progress;
use report::Report;
use run::{Files, Run};
use saves::Saves;
use signals::Requests;
use zero_engine::Engine;
use zero_engine::checkpoint::start::{Start, of_pretrained};
use zero_engine::comm_options::check_interface;
use zero_engine::configured_model;
use zero_engine::files::are_paths;
use zero_engine::format::{bytes, counted, grouped, of_number};
use zero_engine::settings::{Settings, with_total_steps};
use zero_engine::{Error, Layers};
use zero_planner::memory;
use zero_planner::{Plan, Planner};

pub use folder::holds_a_run;
pub use options::{Finished, Resume, RunOptions};
pub use progress::{Bar, DrawBar, Output};
pub use restart::{Restart, Restarts};
pub use signals::note_save_requests;
pub use steps::{Steps, measure_costs};

/// Trains from the configuration alone; a collective.
///
/// # Errors
/// Everything that can go wrong: see [`Error`].
pub fn train(config: &Config, options: &RunOptions, comm: &Arc<dyn Communicator>) -> Result<Finished, Error> {
    let started = Instant::now();
    let requests = Requests::listen();
    let mut config = config.for_world_size(comm.size())?;
    if comm.rank() == 0 {
        monitor::check(&config)?;
    }
    let corpus = Corpus::open(&config)?;
    let no_sample = sample::missing(&config, &corpus)?;
    let steps = match (config.training.max_steps, config.training.epochs) {
        (Some(steps), _) => steps as u64,
        (None, epochs) => corpus.steps(epochs.unwrap_or(1.0), config.train_batch_size),
    };
    config = with_total_steps(config, steps);
    let layers = configured_model::from_config(&config, corpus.vocabulary)?;
    if let Some(steps) = options.verify {
        return verify::verify(&config, &corpus, layers, comm, steps, options.output);
    }
    let rows = config.train_micro_batch_size_per_gpu;
    let sample = || corpus.training_batch(0, rows);
    let resident_before = resident::peak();
    let start = start(&config, options)?;
    let mut engine = Engine::measured_with(config, layers, comm.clone(), start, sample)?;
    if options.force {
        engine.lift_memory_limit();
    }
    let out = PathBuf::from(&engine.config().training.output_dir);
    let main = comm.rank() == 0;
    let mut early = EarlyStop::new(engine.config().training.early_stopping.clone());
    let resumed = resume(&mut engine, options, &out)?;
    let mut divergence = Divergence::new(engine.config());
    if let Some((_, state)) = &resumed {
        early.restore(state);
        divergence.restore(&state["divergence"]);
    }
    // A run in epochs has a number of samples to see, whatever the batch was before.
    let steps = match engine.config().training.max_steps {
        Some(_) => steps,
        None => {
            let batch = engine.config().train_batch_size as u64;
            engine.steps() + (steps * batch).saturating_sub(engine.samples()).div_ceil(batch)
        }
    };
    let output = if main { options.output.at(engine.config().log_level) } else { Output::Quiet };
    let progress = Progress::new(output, options.bar, engine.config().steps_per_print, engine.steps(), steps);
    // A checkpoint of another run's folder begins a run of its own in this one.
    let goes_on = resumed.as_ref().is_some_and(|(from, _)| lies_in(from, &out)) || options.restarts.keeps_folder;
    let logged = resumed.is_some() || goes_on;
    let mut files = if main { Some(Files::open(&mut engine, &out, goes_on, logged, &progress)?) } else { None };
    say_what(&engine, &corpus, &progress, steps, resumed.as_ref().map(|(from, _)| from.as_path()));
    if main && let Some(reason) = no_sample {
        progress.warn(&format!("`training.sample` will write nothing: {reason}"));
    }
    let saves = Saves::new(&out, resumed.map(|_| engine.steps()));
    if main {
        progress.say(&saves.foretell(&engine));
    }
    let report = Report::new(started, resident_before, options.restarts.restarts.clone());
    let mut run = Run::new(engine, corpus, (early, divergence, saves), progress, report);
    let finished = run.train(steps, &requests, files.as_mut())?;
    let saved = run.save_last(finished)?;
    let text = if finished == Finished::Done { run.sample()? } else { None };
    run.finish(files.as_mut(), saved.as_deref(), text.as_deref(), finished)?;
    comm.barrier().wait()?;
    Ok(finished)
}

/// A planner for a configuration. Opens the data only where `vocab_size: auto` is taken from them: so a plan can be made where they are not.
///
/// # Errors
/// As [`planner_of_data`], where the data are opened; samples longer than the model takes.
pub fn planner(config: &Config) -> Result<Planner, Error> {
    let (model, data) = config.model_and_data()?;
    corpus::sequence_length(model, data)?;
    match model {
        zero_config::Model::Gpt2(zero_config::Gpt2 { vocab_size: None, .. })
        | zero_config::Model::Llama(zero_config::Llama { vocab_size: None, .. }) => planner_of_data(config),
        _ => Ok(Planner::new(None)),
    }
}

/// A planner for a configuration whose runs will need its data, which are opened.
///
/// # Errors
/// Data that cannot be read, or that the model cannot take.
pub fn planner_of_data(config: &Config) -> Result<Planner, Error> {
    Ok(Planner::new(Corpus::open(config)?.vocabulary))
}

/// The plan of one configuration that is resolved for its number of ranks; starts nothing.
///
/// # Errors
/// As [`planner`], and whatever would keep the ranks from starting.
pub fn plan(config: &Config) -> Result<Plan, Error> {
    planner(config)?.plan(config)
}

/// Refuses what a run would refuse of a configuration on any machine, without a look at data, disks, networks and GPUs: addresses that
/// this program cannot reach, a device that it was built without, a model that cannot be built or cut. A configuration without a section
/// `model` is for a program that brings its own, which is not looked at.
///
/// # Errors
/// Whatever would keep a run from starting.
pub fn refuse(config: &Config) -> Result<(), Error> {
    refuse_addresses(config)?;
    match config.model {
        Some(_) => {
            if config.data.is_some() {
                corpus::refuse(config)?;
            }
            planned(config).map(drop)
        }
        None => Settings::new(&with_total_steps(config.clone(), 1)).map(drop),
    }
}

/// Whether ranks can be started with a configuration on this machine, without a look at the data: what [`refuse`] refuses, and
/// whether its network interface is there, pretrained weights fit the model, and the disks have room. Gives the plan, in which a
/// vocabulary that would be taken from the data counts as one token.
///
/// # Errors
/// As [`plan`].
pub fn check(config: &Config, options: &RunOptions) -> Result<Plan, Error> {
    refuse_addresses(config)?;
    corpus::refuse(config)?;
    if config.world_size > 1 && config.launcher.transport != Transport::Threads {
        check_interface(config)?;
    }
    if let Some(folder) = config.model.as_ref().and_then(|model| model.pretrained())
        && start(config, options)? == Start::Anew
    {
        let model = layers(config)?.build(DType::F32)?;
        zero_checkpoint::check_pretrained(folder.as_ref(), &model).map_err(of_pretrained)?;
    }
    let plan = planned(config)?;
    plan.check_disks()?;
    Ok(plan)
}

/// Servers, files and folders that are not where this program can reach them.
fn refuse_addresses(config: &Config) -> Result<(), Error> {
    monitor::check(config)?;
    let paths = |key: &str, sources: Option<&[String]>| {
        are_paths(sources.unwrap_or_default()).map_err(|error| Error::from(error).named(key, ""))
    };
    if let Some(data) = &config.data {
        paths("data.train", Some(&data.train))?;
        paths("data.eval", data.eval.as_deref())?;
        if let zero_config::Tokenizer::File(path) = &data.tokenizer {
            paths("data.tokenizer", Some(std::slice::from_ref(path)))?;
        }
    }
    paths("training.initial_weights", config.training.initial_weights.as_deref())?;
    let folder = &config.training.output_dir;
    if are_paths(std::slice::from_ref(folder)).is_err() {
        let message = format!("{folder} is an address, and a run is written to a folder of this machine");
        return Err(Error::setting("training.output_dir", message, "name a folder, and copy it when the run is over"));
    }
    Ok(())
}

/// The plan without a look at the data.
fn planned(config: &Config) -> Result<Plan, Error> {
    Plan::new(with_total_steps(config.clone(), 1), layers(config)?)
}

/// The configured model. A vocabulary that is taken from the data counts as one token, and does not change what fits together.
fn layers(config: &Config) -> Result<Layers, Error> {
    let vocabulary = match &config.model {
        Some(zero_config::Model::Gpt2(m)) => m.vocab_size,
        Some(zero_config::Model::Llama(m)) => m.vocab_size,
        _ => None,
    };
    configured_model::from_config(config, Some(vocabulary.unwrap_or(1)))
}

/// Whether a folder lies in another, however they are named.
fn lies_in(folder: &Path, parent: &Path) -> bool {
    let canonical = |path: &Path| path.canonicalize().ok();
    canonical(folder).zip(canonical(parent)).is_some_and(|(folder, parent)| folder.starts_with(parent))
}

/// Whether there is a checkpoint to go on from.
fn start(config: &Config, options: &RunOptions) -> Result<Start, Error> {
    let root = Path::new(&config.training.output_dir).join("checkpoints");
    Ok(match &options.resume {
        _ if !options.restarts.from.is_empty() => Start::GoesOn,
        None => Start::Anew,
        Some(Resume::From(_)) => Start::GoesOn,
        Some(Resume::Auto) if zero_checkpoint::committed(&root)?.is_empty() => Start::Anew,
        Some(Resume::Auto) => Start::GoesOn,
    })
}

/// Goes on where the options say. `auto` takes the newest checkpoint that is as it was written: of one that is damaged it says so, and
/// tries the one before.
fn resume(engine: &mut Engine, options: &RunOptions, out: &Path) -> Result<Option<(PathBuf, Value)>, Error> {
    let mut candidates = match &options.resume {
        _ if !options.restarts.from.is_empty() => options.restarts.from.clone(),
        None => return Ok(None),
        Some(Resume::From(folder)) => {
            let named = |error: Error| {
                error.named("--resume", "name a checkpoint's folder, a run's, which means the newest in it, or `auto`")
            };
            let folder = zero_checkpoint::newest_meant(folder).map_err(|error| named(error.into()))?;
            let state = engine.load_checkpoint(&folder).map_err(named)?;
            return Ok(Some((folder, state)));
        }
        Some(Resume::Auto) => zero_checkpoint::committed(&out.join("checkpoints"))?,
    };
    let mut damaged = None;
    while let Some((step, folder)) = candidates.pop() {
        match engine.load_checkpoint(&folder) {
            Ok(state) => return Ok(Some((folder, state))),
            Err(error) if error.is_damage() => {
                if engine.communicator().rank() == 0 {
                    eprintln!("warning: step {step} cannot be loaded: {error}");
                }
                damaged = damaged.or(Some(error));
            }
            Err(error) => return Err(error),
        }
    }
    // A run that has checkpoints is not begun anew because none can be read.
    damaged.map_or(Ok(None), Err)
}

fn say_what(engine: &Engine, corpus: &Corpus, progress: &Progress, steps: u64, resumed: Option<&Path>) {
    let config = engine.config();
    let comm = engine.communicator();
    progress.say(&format!(
        "model: {}, {} parameters   data: {} training {}{}",
        counted(engine.model().layers().len(), "layer", "layers"),
        grouped(engine.model().elements() as u64),
        grouped(corpus.train.samples() as u64),
        of_number(corpus.train.samples(), "sample", "samples"),
        corpus
            .eval
            .as_ref()
            .map_or(String::new(), |eval| format!(", {} for evaluation", grouped(eval.samples() as u64)))
    ));
    let state = report::expected(engine).total();
    progress.say(&format!(
        "world: {} over {}, ZeRO stage {}, communication {} computing, {} of state on rank 0, {} each",
        counted(comm.size(), "rank", "ranks"),
        comm.transport(),
        engine.settings().layout.zero_stage.number(),
        if engine.settings().passes.gather.overlap { "during" } else { "between" },
        bytes(state),
        counted(zero_model::ops::threads(), "thread", "threads"),
    ));
    if let Some(choice) = engine.choice() {
        progress.say(&choice.to_string());
    }
    if config.pipeline.stages > 1 {
        progress.say(&engine.stage_plan().describe(engine.zero().layout().shape()));
    }
    if let Some(peaks) = memory::planned(engine) {
        let limit = config.training.memory_limit.map_or(String::new(), |limit| format!(" of {}", bytes(limit)));
        let gpu = match engine.settings().zero.on_gpu.layers {
            true => format!("{} of the GPU and ", bytes(peaks.gpu)),
            false => String::new(),
        };
        progress.say(&format!("memory: {gpu}{}{limit} at most on rank 0, as planned", bytes(peaks.total)));
    }
    engine.between_gpus().iter().for_each(|line| progress.say(line));
    disk::describe(engine).iter().for_each(|line| progress.say(line));
    let (replica, replicas) = if config.pipeline.stages > 1 { ("replica", "replicas") } else { ("rank", "ranks") };
    progress.say(&format!(
        "batch: {} = {} a micro-batch × {} × {}   steps: {steps}",
        counted(config.train_batch_size, "sample", "samples"),
        config.train_micro_batch_size_per_gpu,
        counted(config.gradient_accumulation_steps, "micro-batch", "micro-batches"),
        counted(engine.replicas(), replica, replicas),
    ));
    autos::said(config).iter().for_each(|lines| progress.say(lines));
    if config.dump_state || config.log_level >= LogLevel::Debug {
        progress.say(&format!("step program:\n{}", engine.program()));
    }
    if let Some(folder) = config.model.as_ref().and_then(|model| model.pretrained())
        && resumed.is_none()
    {
        let taken = config.origins.get("data.tokenizer") == Origin::Pretrained;
        progress
            .say(&format!("pretrained: {}{folder}", if taken { "weights and tokenizer of " } else { "weights of " }));
    }
    if let Some(from) = resumed {
        progress.say(&format!("resumed from {} after step {}", from.display(), engine.steps()));
    }
}
