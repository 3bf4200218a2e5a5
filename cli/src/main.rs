//! `zero-train`: the command line of the library.

#![deny(unsafe_code)]

mod arguments;
mod bench;
mod checkpoint;
mod data;
mod doctor;
mod generate;
mod input;
mod launch;
mod plan;
mod printed;
mod rank;
mod report;
mod tuner;

use std::process::ExitCode;
use std::time::Duration;

use arguments::{Bench, Checkpoint, Cli, Command, ConfigArgs, Data, LaunchArgs, refuse};
use input::load;
use printed::{show, tell, warn};
use zero_comm::SharedAllocator;
use zero_comm::heap::Counted;
use zero_engine::costs::Length as CostLength;
use zero_train::process;

/// Places large buffers in memory that the other ranks of this host can read, so that collectives need no copy.
/// Also counts the allocated bytes.
#[global_allocator]
static ALLOCATOR: Counted<SharedAllocator> = Counted(SharedAllocator);

fn main() -> ExitCode {
    let _failpoints = zero_checkpoint::failpoints();
    zero_tier::observe_mapped(SharedAllocator::note_elsewhere);
    process::follow_launcher();
    zero_train::train::read_addresses();
    let cli = Cli::read();
    let result = known_instructions().and_then(|()| match (cli.command, cli.train) {
        (Some(Command::Check(args)), _) => check(&args.config),
        (Some(Command::Plan(args)), _) => plan::plan(&args),
        (Some(Command::Launch(args)), _) => launch(&args),
        (Some(Command::Autotune(args)), _) => tuner::autotune(&args),
        (Some(Command::Bench(args)), _) => bench(&args.what),
        (Some(Command::Data(args)), _) => match &args.what {
            Data::Show(args) => data::show_samples(args),
            Data::Prepare(args) => data::prepare(args),
            Data::Stats(args) => data::stats(args),
            Data::Verify(args) => data::verify(args),
        },
        (Some(Command::Generate(args)), _) => generate::generate(&args),
        (Some(Command::Report(args)), _) => report::report(&args),
        (Some(Command::Doctor), _) => {
            show(&doctor::report());
            Ok(0)
        }
        (Some(Command::Checkpoint(args)), _) => match &args.what {
            Checkpoint::Inspect { folder, json } => checkpoint::inspect(folder, *json),
            Checkpoint::Verify { folder } => checkpoint::verify(folder),
            Checkpoint::Import { folder, out } => checkpoint::import(folder, out),
            Checkpoint::Export(args) => checkpoint::export(args, zero_engine::export),
            Checkpoint::Merge(args) => checkpoint::export(args, zero_engine::merge),
        },
        (None, args) => launch::train(&args),
    });
    match result {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            let (message, status) = (rank::message(&error), rank::exit_status(&error));
            tell(&message);
            process::report_and_wait(&message, status);
            ExitCode::from(status)
        }
    }
}

/// Rejects every command if the environment selects an instruction set that this CPU lacks.
fn known_instructions() -> anyhow::Result<()> {
    let refused =
        |error: zero_isa::Unavailable| zero_train::Error::setting(error.source(), error.to_string(), error.help());
    zero_isa::Isa::choose(None).map_err(refused)?;
    Ok(())
}

fn check(args: &ConfigArgs) -> anyhow::Result<u8> {
    let (typed, _) = load(args, &args.set)?;
    let config = typed.resolve(args.ranks(&typed))?;
    zero_train::train::refuse(&config)?;
    show(&config.to_yaml_with_origins());
    warn(&config);
    Ok(0)
}

fn launch(args: &LaunchArgs) -> anyhow::Result<u8> {
    match (args.program.is_empty(), args.train.config.config.is_empty()) {
        (true, _) => launch::launch_training(args),
        (false, true) => launch::launch_program(args),
        (false, false) => refuse("give either --config or a program, not both"),
    }
}

fn bench(what: &Bench) -> anyhow::Result<u8> {
    match what {
        Bench::Adam { millions, repeats } => bench::adam(*millions, *repeats),
        Bench::Optimizers { millions, repeats } => bench::optimizers(*millions, *repeats),
        Bench::Comm { num_processes, megabytes, repeats, transport } => {
            bench::comm(*num_processes as usize, *megabytes, *repeats, transport)
        }
        Bench::Costs { config, out, steps, seconds } => {
            let at_most = seconds.map(|seconds| Duration::from_secs(seconds.into()));
            bench::costs(config, out, &CostLength { steps: *steps as usize, at_most })
        }
        Bench::Io { folder, megabytes, request_megabytes, requests, repeats, threads, json } => {
            let size = zero_tier::measure::Size {
                file: megabytes << 20,
                request: (*request_megabytes as usize) << 20,
                requests: *requests as usize,
            };
            let options = zero_tier::Options { io_uring: !threads, ..Default::default() };
            bench::io(folder, &size, *repeats as usize, &options, *json)
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
