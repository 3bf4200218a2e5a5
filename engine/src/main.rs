//! `zero-train`: the command line around the library.

#![forbid(unsafe_code)]

mod bench;
mod cli;
mod cores;
mod launch;
mod rank;
mod surroundings;

use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use cli::{Bench, Cli, Command, ConfigArgs, PlanArgs, TrainArgs};
use zero_comm::SharedAllocator;
use zero_comm::heap::Counted;
use zero_comm::place::Place;
use zero_config::{Config, LogLevel, Source, Transport, Typed};
use zero_train::train::{Output, Resume, RunOptions};

/// Large buffers lie where the other ranks of this host can read them, so that collectives need no copy; and what is allocated
/// is counted.
#[global_allocator]
static ALLOCATOR: Counted<SharedAllocator> = Counted(SharedAllocator);

fn main() -> ExitCode {
    surroundings::follow_launcher();
    let cli = Cli::parse();
    let result = match (cli.command, cli.train) {
        (Some(Command::Check(args)), _) => check(&args.config),
        (Some(Command::Plan(args)), _) => plan(&args),
        (Some(Command::Bench(args)), _) => bench(&args.what),
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
    let Some(path) = &args.config else {
        Cli::command().error(ErrorKind::MissingRequiredArgument, "--config <FILE> is missing").exit()
    };
    let (source, text) = if path.as_os_str() == "-" {
        let source = Source::from_stdin()?;
        let text = source.text.clone();
        (source, Some(text))
    } else {
        (Source::from_path(path)?, None)
    };
    Ok((zero_config::load(source, overrides)?, text))
}

fn check(args: &ConfigArgs) -> anyhow::Result<u8> {
    let (typed, _) = load(args, &args.set)?;
    let config = typed.resolve(args.num_processes.map(|n| n as usize))?;
    print!("{}", config.to_yaml_with_origins());
    warn(&config);
    Ok(0)
}

fn plan(args: &PlanArgs) -> anyhow::Result<u8> {
    let (typed, _) = load(&args.config, &args.config.set)?;
    let config = typed.resolve(args.config.num_processes.map(|n| n as usize))?;
    warn(&config);
    let plan = zero_train::train::plan(&config)?;
    if args.json {
        println!("{:#}", plan.value());
        return Ok(0);
    }
    println!("{plan}");
    if args.grid {
        let terminal = console::Term::stdout();
        let columns = if terminal.is_term() { usize::from(terminal.size().1) } else { 120 };
        println!("\nas if a forward of a chunk took one second, a backward two, and a message no time:");
        print!("{}", plan.grid(columns));
    }
    Ok(0)
}

fn warn(config: &Config) {
    for warning in &config.warnings {
        eprintln!("{warning}");
    }
}

fn train(args: &TrainArgs) -> anyhow::Result<u8> {
    let place = Place::from_environment(|name| std::env::var(name).ok())?;
    let is_rank = place != Place::alone();
    let options = run_options(args);
    if is_rank {
        // Standard input is read once, by the process that stays.
        let threads = threads_before_reading(args, place.local_world_size)?;
        surroundings::prepare(threads)?;
        let (typed, _) = load(&args.config, &args.overrides())?;
        let config = typed.resolve(Some(place.world_size))?;
        return rank::run(&config, &options, &place);
    }
    let (typed, text) = load(&args.config, &args.overrides())?;
    let config = typed.resolve(args.config.num_processes.map(|n| n as usize))?;
    config.model_and_data()?;
    if options.output != Output::Quiet && config.log_level >= LogLevel::Warning {
        warn(&config);
    }
    // What the ranks would all find out is said once, before any is started.
    zero_train::train::check(&config)?;
    let ranks = config.world_size;
    if config.launcher.transport == Transport::Threads {
        return rank::run_as_threads(&config, &options);
    }
    let threads = surroundings::threads(Some(&config.launcher), ranks);
    launch::launch(ranks, threads, text.as_deref())
}

/// The thread count of a rank that another launcher started, without touching standard input.
fn threads_before_reading(args: &TrainArgs, local_ranks: usize) -> anyhow::Result<usize> {
    let launcher = if args.config.config.as_ref().is_some_and(|path| path.as_os_str() == "-") {
        None
    } else {
        let (typed, _) = load(&args.config, &args.overrides())?;
        typed.resolve(None).ok().map(|config| config.launcher)
    };
    Ok(surroundings::threads(launcher.as_ref(), local_ranks))
}

fn run_options(args: &TrainArgs) -> RunOptions {
    RunOptions {
        resume: args.resume.as_deref().map(|from| match from {
            "auto" => Resume::Auto,
            folder => Resume::From(folder.into()),
        }),
        verify: args.verify,
        output: match (args.quiet, args.plain) {
            (true, _) => Output::Quiet,
            (_, true) => Output::Plain,
            _ => Output::Auto,
        },
    }
}

fn bench(what: &Bench) -> anyhow::Result<u8> {
    match what {
        Bench::Adam { millions, repeats } => bench::adam(*millions, *repeats),
        Bench::Comm { num_processes, megabytes, repeats, transport } => {
            bench::comm(*num_processes as usize, *megabytes, *repeats, transport)
        }
        Bench::Ops { repeats } => bench::ops(*repeats as usize),
        Bench::Pipeline { stages, micro_batches, repeats } => {
            let stages: Vec<usize> = stages.iter().map(|&n| n as usize).collect();
            bench::pipeline(&stages, *micro_batches as usize, *repeats as usize)
        }
        Bench::Profile { config, steps } => bench::profile(config, *steps as usize),
        Bench::Step { config, steps, json } => bench::step(config, *steps, *json),
    }
}
