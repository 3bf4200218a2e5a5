//! `zero-train`: the command line around the library.

#![forbid(unsafe_code)]

mod bench;
mod checkpoint;
mod cli;
mod cores;
mod doctor;
mod farewell;
mod launch;
mod progress;
mod rank;
mod surroundings;
mod tuner;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::CommandFactory;
use clap::error::ErrorKind;
use cli::{Bench, Checkpoint, Cli, Command, ConfigArgs, LaunchArgs, PlanArgs};
use zero_comm::SharedAllocator;
use zero_comm::heap::Counted;
use zero_config::{Config, Source, Typed};
use zero_train::{CostLength, Limit, Plan, Planner, Ranks};

/// Large buffers lie where the other ranks of this host can read them, so that collectives need no copy; and what is allocated
/// is counted.
#[global_allocator]
static ALLOCATOR: Counted<SharedAllocator> = Counted(SharedAllocator);

fn main() -> ExitCode {
    let _failpoints = zero_checkpoint::failpoints();
    zero_tier::observe_mapped(SharedAllocator::note_elsewhere);
    surroundings::follow_launcher();
    let cli = Cli::read();
    let result = known_instructions().and_then(|()| match (cli.command, cli.train) {
        (Some(Command::Check(args)), _) => check(&args.config),
        (Some(Command::Plan(args)), _) => plan(&args),
        (Some(Command::Launch(args)), _) => launch(&args),
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
        (None, args) => launch::train(&args),
    });
    match result {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            let (message, status) = (rank::message(&error), rank::exit_status(&error));
            eprintln!("{message}");
            farewell::take_leave(&message, status);
            ExitCode::from(status)
        }
    }
}

/// Refuses every command when the environment names an instruction set that this processor lacks.
fn known_instructions() -> anyhow::Result<()> {
    zero_isa::Isa::choose(None).map_err(|error| zero_train::Error::Setting {
        key: error.source().into(),
        message: error.to_string(),
        help: error.help(),
    })?;
    Ok(())
}

/// A configuration as typed, and its text if it came from standard input.
fn load(args: &ConfigArgs, overrides: &[String]) -> anyhow::Result<(Typed, Option<String>)> {
    let sources = read(args)?;
    let text = standard_input(args, &sources);
    Ok((zero_config::load_files(sources, overrides)?, text))
}

fn is_standard_input(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// What was read from standard input, which is there once.
fn standard_input(args: &ConfigArgs, sources: &[Source]) -> Option<String> {
    let index = args.config.iter().position(|path| is_standard_input(path))?;
    sources.get(index).map(|source| source.text.clone())
}

/// The files of the configuration; one at least.
fn read(args: &ConfigArgs) -> anyhow::Result<Vec<Source>> {
    let paths = &args.config;
    if paths.is_empty() {
        Cli::command().error(ErrorKind::MissingRequiredArgument, "--config <FILE> is missing").exit()
    }
    if paths.iter().filter(|path| is_standard_input(path)).count() > 1 {
        Cli::command().error(ErrorKind::ArgumentConflict, "standard input, -, is one file").exit()
    }
    let read = |path: &PathBuf| if is_standard_input(path) { Source::from_stdin() } else { Source::from_path(path) };
    Ok(paths.iter().map(read).collect::<Result<_, _>>()?)
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
    let planner = zero_train::train::planner(&config)?;
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
            let ranks = zero_train::counted(config.world_size, "rank", "ranks");
            show(&format!("\na step at {ranks}, by the cost table:\n"));
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
    let with = |settings: &[String], ranks: usize| {
        let all = [overrides, settings].concat();
        let typed = load(args, &all).map_err(|e| zero_train::Error::Batch(e.to_string()))?.0;
        Ok(typed.resolve(Some(ranks))?)
    };
    let draft = |config: &Config| planner.draft(config);
    let found = zero_train::advice(config, limit.bytes, |settings| with(settings, config.world_size), draft)?;
    let mut text = format!("does not fit: a rank needs {needs} at a time, and may have {has}: {}", limit.source);
    if !found.is_empty() {
        text += "\n  help: one of these makes it fit";
        found.iter().for_each(|advice| text += &format!("\n    {advice}"));
        return Ok(text);
    }
    // Where all ranks are on this machine, fewer have more each.
    let machine = Limit::of_machine().filter(|all| all.bytes / config.world_size as u64 == limit.bytes);
    let share = |ranks: usize| machine.map_or(limit.bytes, |all| all.bytes / ranks as u64);
    let share: Option<&dyn Fn(usize) -> u64> = if machine.is_some() { Some(&share) } else { None };
    text += "\n  help: no change of ZeRO stage, micro-batch, recomputation and offload makes it fit; ";
    text += &match zero_train::other_ranks(config, limit.bytes, share, with, draft) {
        Some(Ranks { ranks, settings, peak_bytes, limit }) => {
            let settings: String = settings.iter().map(|setting| format!(" --set {setting}")).collect();
            let (needs, has) = (zero_train::bytes(peak_bytes), zero_train::bytes(limit));
            match ranks < config.world_size {
                true => format!("use fewer ranks on this machine: of {ranks} each needs {needs} and may have {has}"),
                false => format!("use more ranks, each with as much memory: of {ranks}{settings} each needs {needs}"),
            }
        }
        None => "nor do more ranks, since what a rank holds of one layer and of its samples is too large: make layers or samples smaller, or \
                 give a rank more memory"
            .to_string(),
    };
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

fn launch(args: &LaunchArgs) -> anyhow::Result<u8> {
    match (args.program.is_empty(), args.train.config.config.is_empty()) {
        (true, _) => launch::launch_training(args),
        (false, true) => launch::launch_program(args),
        (false, false) => Cli::command().error(ErrorKind::ArgumentConflict, "either --config or a program").exit(),
    }
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
        Bench::Ops { only, threads, repeats } => bench::ops(&bench::Selection {
            products_only: only.is_some(),
            threads: *threads as usize,
            repeats: *repeats as usize,
        }),
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
