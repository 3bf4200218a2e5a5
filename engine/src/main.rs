//! `zero-train`: the command line around the library.

#![forbid(unsafe_code)]

mod bench;
mod checkpoint;
mod cli;
mod cores;
mod doctor;
mod launch;
mod rank;
mod surroundings;
mod tuner;

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use cli::{Bench, Checkpoint, Cli, Command, ConfigArgs, PlanArgs, TrainArgs};
use launch::{Before, Recovery, Team};
use zero_comm::SharedAllocator;
use zero_comm::heap::Counted;
use zero_comm::place::Place;
use zero_config::{Config, LogLevel, Source, Transport, Typed};
use zero_train::train::{Again, Output, Planner, Resume, RunOptions};
use zero_train::{CostLength, Limit, Plan};

/// Large buffers lie where the other ranks of this host can read them, so that collectives need no copy; and what is allocated
/// is counted.
#[global_allocator]
static ALLOCATOR: Counted<SharedAllocator> = Counted(SharedAllocator);

fn main() -> ExitCode {
    let _failpoints = zero_checkpoint::failpoints();
    zero_tier::observe_mapped(SharedAllocator::note_elsewhere);
    surroundings::follow_launcher();
    let cli = Cli::parse();
    let result = match (cli.command, cli.train) {
        (Some(Command::Check(args)), _) => check(&args.config),
        (Some(Command::Plan(args)), _) => plan(&args),
        (Some(Command::Autotune(args)), _) => tuner::autotune(&args),
        (Some(Command::Bench(args)), _) => bench(&args.what),
        (Some(Command::Doctor), _) => {
            show(&doctor::report());
            Ok(0)
        }
        (Some(Command::Checkpoint(args)), _) => match &args.what {
            Checkpoint::Inspect { folder, json } => checkpoint::inspect(folder, *json),
            Checkpoint::Verify { folder } => checkpoint::verify(folder),
            Checkpoint::Import { folder, out } => checkpoint::import(folder, out),
            Checkpoint::Export { folder, out, dtype, max_shard_size } => {
                checkpoint::export(folder, out, *dtype, *max_shard_size)
            }
        },
        (None, args) => train(&args),
    };
    match result {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            eprintln!("{}", rank::message(&error));
            ExitCode::from(rank::exit_status(&error))
        }
    }
}

/// A configuration as typed, and its text if it came from standard input.
fn load(args: &ConfigArgs, overrides: &[String]) -> anyhow::Result<(Typed, Option<String>)> {
    let source = read(args)?;
    let text = from_standard_input(args).then(|| source.text.clone());
    Ok((zero_config::load(source, overrides)?, text))
}

fn from_standard_input(args: &ConfigArgs) -> bool {
    args.config.as_ref().is_some_and(|path| path.as_os_str() == "-")
}

fn read(args: &ConfigArgs) -> anyhow::Result<Source> {
    let Some(path) = &args.config else {
        Cli::command().error(ErrorKind::MissingRequiredArgument, "--config <FILE> is missing").exit()
    };
    Ok(if from_standard_input(args) { Source::from_stdin()? } else { Source::from_path(path)? })
}

fn check(args: &ConfigArgs) -> anyhow::Result<u8> {
    let (typed, _) = load(args, &args.set)?;
    let config = typed.resolve(args.num_processes.map(|n| n as usize))?;
    show(&config.to_yaml_with_origins());
    warn(&config);
    Ok(0)
}

fn plan(args: &PlanArgs) -> anyhow::Result<u8> {
    let mut overrides = args.config.set.clone();
    overrides.extend(args.costs.iter().map(|table| format!("training.cost_table={:?}", table.display().to_string())));
    let (typed, _) = load(&args.config, &overrides)?;
    let ranks = args.world_size.or(args.config.num_processes);
    let config = typed.resolve(ranks.map(|n| n as usize))?;
    warn(&config);
    zero_model::ops::set_threads(surroundings::threads(Some(&config.launcher), config.world_size));
    let planner = Planner::open(&config)?;
    let plan = planner.plan(&config)?;
    if args.json {
        show(&format!("{:#}\n", plan.value()));
        return Ok(0);
    }
    show(&format!("{plan}\n"));
    // How much other machines have is not known here.
    let here = args.world_size.is_none();
    let limit = match args.device_memory {
        Some(bytes) => Some(Limit { bytes, source: "`--device-memory`" }),
        None if here || config.training.memory_limit.is_some() => Limit::of_rank(&config, config.world_size),
        None => None,
    };
    if let Some(limit) = limit {
        let told = match plan.peak_bytes() <= limit.bytes {
            true => {
                let (needs, has) = (zero_train::bytes(plan.peak_bytes()), zero_train::bytes(limit.bytes));
                format!("fits: a rank needs {needs} at a time, and may have {has}: {}", limit.source)
            }
            false => does_not_fit(&plan, limit, &args.config, &overrides, &config, &planner)?,
        };
        show(&format!("{told}\n"));
    }
    if args.stages {
        show("\nstate of a rank, parameters, gradients and optimizer, without pipeline and offload:\n");
        show(&plan.stages_over_ranks(&[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]));
        if config.training.cost_table.is_some() {
            show(&format!("\na step at {} ranks, by the cost table:\n", config.world_size));
            for stage in 0..=3 {
                let overrides = [&overrides[..], &[format!("zero_optimization.stage={stage}")]].concat();
                let told = match load(&args.config, &overrides)?.0.resolve(Some(config.world_size)) {
                    Err(_) => "does not go together with the rest of the file".to_string(),
                    Ok(config) => match planner.draft(&config)?.prediction() {
                        Some(Ok(time)) => format!("{:.1} ms", time.step_seconds * 1e3),
                        Some(Err(missing)) => format!("no time: {missing}"),
                        None => continue,
                    },
                };
                show(&format!("stage {stage}  {told}\n"));
            }
        }
    }
    if args.grid {
        let terminal = console::Term::stdout();
        let columns = if terminal.is_term() { usize::from(terminal.size().1) } else { 120 };
        show("\nas if a forward of a chunk took one second, a backward two, and a message no time:\n");
        show(&plan.grid(columns));
    }
    Ok(0)
}

/// By how much a plan does not fit into a limit, in words, and what would make it fit.
fn does_not_fit(
    plan: &Plan,
    limit: Limit,
    args: &ConfigArgs,
    overrides: &[String],
    config: &Config,
    planner: &Planner,
) -> anyhow::Result<String> {
    let (needs, has) = (zero_train::bytes(plan.peak_bytes()), zero_train::bytes(limit.bytes));
    let change = |settings: &[String]| {
        let all = [overrides, settings].concat();
        let typed = load(args, &all).map_err(|e| zero_train::Error::Batch(e.to_string()))?.0;
        Ok(typed.resolve(Some(config.world_size))?)
    };
    let found = zero_train::advice(config, limit.bytes, change, |config| planner.draft(config))?;
    let mut text = format!("does not fit: a rank needs {needs} at a time, and may have {has}: {}", limit.source);
    match found.is_empty() {
        true => {
            text +=
                "\n  help: no change of ZeRO stage, micro-batch, recomputation and offload makes it fit; use more ranks"
        }
        false => {
            text += "\n  help: one of these makes it fit";
            found.iter().for_each(|advice| text += &format!("\n    {advice}"));
        }
    }
    Ok(text)
}

/// Prints; whoever reads may have gone, as `head` does.
fn show(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}

fn warn(config: &Config) {
    for warning in &config.warnings {
        eprintln!("{warning}");
    }
}

fn train(args: &TrainArgs) -> anyhow::Result<u8> {
    zero_train::train::note_save_requests();
    let place = Place::from_environment(|name| std::env::var(name).ok())?;
    let is_rank = place != Place::alone();
    let options = run_options(args)?;
    if is_rank {
        // Standard input is read once, by the process that stays.
        let threads = threads_before_reading(args, place.local_world_size)?;
        surroundings::prepare(threads)?;
        let (typed, _) = load(&args.config, &args.overrides())?;
        let config = typed.resolve(Some(place.world_size))?;
        return rank::run(&config, &options, &place);
    }
    let source = read(&args.config)?;
    let typed = zero_config::load(source.clone(), &args.overrides())?;
    let config = typed.resolve(args.config.num_processes.map(|n| n as usize))?;
    config.model_and_data()?;
    if options.output != Output::Quiet && config.log_level >= LogLevel::Warning {
        warn(&config);
    }
    // What the ranks would all find out is said once, before any is started.
    let ranks = config.world_size;
    let threads = surroundings::threads(Some(&config.launcher), ranks);
    zero_model::ops::set_threads(threads);
    let plan = zero_train::train::check(&config, &options)?;
    if let Some(limit) = exceeded(&plan, &config, args.force) {
        let planner = Planner::open(&config)?;
        let told = does_not_fit(&plan, limit, &args.config, &args.overrides(), &config, &planner)?;
        anyhow::bail!(zero_train::Error::Memory(told));
    }
    if config.launcher.transport == Transport::Threads {
        return rank::run_as_threads(&config, &options);
    }
    let standard_input = from_standard_input(&args.config).then_some(source.text.as_str());
    let team = Team::new(ranks, threads);
    // What does not verify will not do so the next time.
    if config.launcher.max_restarts == 0 || options.verify.is_some() {
        return launch::launch(team, standard_input, None);
    }
    let recovery = Recovery {
        max_restarts: config.launcher.max_restarts,
        min_ranks: config.launcher.min_ranks,
        before: Before::look(config.training.output_dir.as_ref())?,
        unchanged: &|| match standard_input.is_some() || read(&args.config)?.text == source.text {
            true => Ok(()),
            false => anyhow::bail!("{} has changed since the run began; go on with --resume auto", source.name),
        },
        smaller: &|ranks| smaller(args, &source, &config, ranks),
    };
    launch::launch(team, standard_input, Some(&recovery))
}

/// The limit that a rank of this plan does not fit into, unless it is to be tried anyway.
fn exceeded(plan: &Plan, config: &Config, force: bool) -> Option<Limit> {
    if force {
        return None;
    }
    Limit::of_rank(config, config.world_size).filter(|limit| plan.peak_bytes() > limit.bytes)
}

/// As many ranks with the micro-batch and the global batch of `config`, and more micro-batches a rank, if that can be trained here.
fn smaller(args: &TrainArgs, source: &Source, config: &Config, ranks: usize) -> anyhow::Result<Team> {
    let changes = vec![
        format!("train_batch_size={}", config.train_batch_size),
        format!("train_micro_batch_size_per_gpu={}", config.train_micro_batch_size_per_gpu),
        "gradient_accumulation_steps=".to_string(),
    ];
    let overrides = [args.overrides(), changes.clone()].concat();
    let config = zero_config::load(source.clone(), &overrides)?.resolve(Some(ranks))?;
    let plan = zero_train::train::check(&config, &run_options(args)?)?;
    if let Some(limit) = exceeded(&plan, &config, args.force) {
        let (needs, has) = (zero_train::bytes(plan.peak_bytes()), zero_train::bytes(limit.bytes));
        anyhow::bail!("each of {ranks} ranks needs {needs} at a time, and may have {has}: {}", limit.source);
    }
    Ok(Team { ranks, threads: surroundings::threads(Some(&config.launcher), ranks), overrides: changes })
}

/// The thread count of a rank that another launcher started, without touching standard input.
fn threads_before_reading(args: &TrainArgs, local_ranks: usize) -> anyhow::Result<usize> {
    let launcher = if from_standard_input(&args.config) {
        None
    } else {
        let (typed, _) = load(&args.config, &args.overrides())?;
        typed.resolve(None).ok().map(|config| config.launcher)
    };
    Ok(surroundings::threads(launcher.as_ref(), local_ranks))
}

fn run_options(args: &TrainArgs) -> anyhow::Result<RunOptions> {
    let again = match std::env::var(surroundings::RESTARTED) {
        Ok(told) if surroundings::launched_by_us() => Again::from_json(&told)
            .with_context(|| format!("{} is not what our launcher sets", surroundings::RESTARTED))?,
        _ => Again::default(),
    };
    Ok(RunOptions {
        again,
        resume: args.resume.as_deref().map(|from| match from {
            "auto" => Resume::Auto,
            folder => Resume::From(folder.into()),
        }),
        verify: args.verify,
        force: args.force,
        output: match (args.quiet, args.plain) {
            (true, _) => Output::Quiet,
            (_, true) => Output::Plain,
            _ => Output::Auto,
        },
    })
}

fn bench(what: &Bench) -> anyhow::Result<u8> {
    match what {
        Bench::Adam { millions, repeats } => bench::adam(*millions, *repeats),
        Bench::Comm { num_processes, megabytes, repeats, transport } => {
            bench::comm(*num_processes as usize, *megabytes, *repeats, transport)
        }
        Bench::Costs { config, out, steps, seconds } => {
            let at_most = seconds.map(|seconds| Duration::from_secs(seconds.into()));
            bench::costs(config, out, &CostLength { steps: *steps as usize, at_most })
        }
        Bench::Io { folder, megabytes, request_megabytes, requests, repeats, threads, json } => {
            let size = zero_tier::bench::Size {
                file: megabytes << 20,
                request: (*request_megabytes as usize) << 20,
                requests: *requests as usize,
                repeats: *repeats as usize,
            };
            let options = zero_tier::Options { io_uring: !threads, ..Default::default() };
            bench::io(folder, &size, &options, *json)
        }
        Bench::Offload { config, steps } => bench::offload(config, *steps as usize),
        Bench::Ops { repeats } => bench::ops(*repeats as usize),
        Bench::Pipeline { stages, micro_batches, repeats } => {
            let stages: Vec<usize> = stages.iter().map(|&n| n as usize).collect();
            bench::pipeline(&stages, *micro_batches as usize, *repeats as usize)
        }
        Bench::Profile { config, steps } => bench::profile(config, *steps as usize),
        Bench::Save { config, folder, repeats } => bench::save(config, folder, *repeats as usize),
        Bench::Step { config, steps, warm_up, seconds, json } => {
            let (steps, warm_up) = (*steps as usize, *warm_up as usize);
            bench::step(
                config,
                &bench::Length { warm_up, steps, at_least: Duration::from_secs((*seconds).into()) },
                *json,
            )
        }
    }
}
