//! Trains as a rank under a launcher, or launches this host's ranks.

use std::path::PathBuf;
use std::time::Duration;

use zero_comm::launcher_environment::LauncherEnvironment;
use zero_comm::token;
use zero_config::{Config, LogLevel, Source, Transport};
use zero_planner::Limit;
use zero_train::Error;
use zero_train::process::launch::{
    Before, GRACE, Hosts, Job, Output, Reach, Recovery, Team, What, launch, one_a_gpu, same_batch,
};
use zero_train::train::{Output as Printing, Restarts, Resume, RunOptions};

use crate::arguments::{LaunchArgs, TrainArgs, refuse};
use crate::input::{is_standard_input, load, load_sources, read, standard_input};
use crate::plan::does_not_fit;
use crate::printed::warn;
use crate::rank;
use zero_train::process;
use zero_train::process::Cores;

/// Timeout for the launchers of a program to connect. A program has no configuration that could set the timeout.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Trains as a rank if the launcher's environment is set; otherwise starts the ranks of this machine.
///
/// # Errors
/// Returns the error that ended the run. Fails if `-n` differs from the number of ranks that another launcher has
/// started.
pub(crate) fn train(args: &TrainArgs) -> anyhow::Result<u8> {
    zero_train::train::note_save_requests();
    let place = LauncherEnvironment::from_environment(|name| std::env::var(name).ok())?;
    let ranks = args.config.num_processes.map(|n| n as usize);
    if place != LauncherEnvironment::alone() {
        process::check_ranks(ranks, &place)?;
        return train_as(&place, args);
    }
    lead(args, &Started { hosts: &Hosts::alone(), ranks, output: Output::default(), grace: GRACE })
}

/// Starts the ranks of this host, which may be one of several hosts. A started rank has the same command line and also
/// calls this function, which then trains.
///
/// # Errors
/// Returns the error that ended the run.
pub(crate) fn launch_training(args: &LaunchArgs) -> anyhow::Result<u8> {
    zero_train::train::note_save_requests();
    if process::launched_by_us() {
        let place = LauncherEnvironment::from_environment(|name| std::env::var(name).ok())?;
        return train_as(&place, &args.train);
    }
    let hosts = value_or_exit(args.hosts(|name| std::env::var(name).ok().filter(|value| !value.is_empty())));
    let ranks = value_or_exit(args.ranks_here(Cores::allowed().count(), hosts.count));
    let output = Output { log_dir: args.log_dir.clone(), tee: args.tee.clone(), all: false };
    lead(&args.train, &Started { hosts: &hosts, ranks, output, grace: grace(args) })
}

/// Starts another program as the ranks of this host.
///
/// # Errors
/// Fails if the program cannot be started, or another host is lost.
pub(crate) fn launch_program(args: &LaunchArgs) -> anyhow::Result<u8> {
    let hosts = value_or_exit(args.hosts(|name| std::env::var(name).ok().filter(|value| !value.is_empty())));
    let ranks = value_or_exit(args.ranks_here(Cores::allowed().count(), hosts.count)).unwrap_or(1);
    value_or_exit(args.train.is_unused());
    let reach = if hosts.count > 1 { Some(reach(None, TIMEOUT)?) } else { None };
    let output = Output { log_dir: args.log_dir.clone(), tee: args.tee.clone(), all: true };
    let job = Job { hosts: &hosts, reach, what: What::Program(&args.program), output, grace: grace(args) };
    let recovery = Recovery {
        max_restarts: args.train.max_restarts.unwrap_or(0) as usize,
        min_ranks: None,
        before: None,
        unchanged: &|| Ok(()),
        smaller: &|_| Err(Error::Launch("only a training run can restart with fewer ranks".into())),
    };
    Ok(launch(Team::new(ranks, process::threads(None, ranks)), &job, Some(&recovery))?)
}

fn grace(args: &LaunchArgs) -> Duration {
    Duration::from_secs(args.grace.into())
}

/// Returns the value, or exits with an error about the command line.
fn value_or_exit<T>(told: Result<T, String>) -> T {
    told.unwrap_or_else(|error| refuse(&error))
}

/// Returns the settings with which launchers connect to each other.
fn reach(interface: Option<&str>, timeout: Duration) -> anyhow::Result<Reach> {
    let Some(token) = token::find(|name| std::env::var_os(name)).map_err(Error::Token)? else {
        anyhow::bail!(Error::setting(
            "ZERO_TRAIN_TOKEN_FILE",
            "a run on several hosts needs a job token, and none is set",
            "put the same secret into a file on every host, and set ZERO_TRAIN_TOKEN_FILE to the path of the file",
        ));
    };
    let listen = match interface {
        None => None,
        Some(_) => Some(zero_comm::bind_address(interface).map_err(|error| anyhow::anyhow!(error))?),
    };
    Ok(Reach { listen, token, timeout })
}

/// The number of ranks and the hosts on the command line.
struct Started<'a> {
    hosts: &'a Hosts,
    /// Number of ranks on this host, if given.
    ranks: Option<usize>,
    output: Output,
    grace: Duration,
}

/// Trains as a rank.
fn train_as(place: &LauncherEnvironment, args: &TrainArgs) -> anyhow::Result<u8> {
    let options = run_options(args)?;
    // Standard input can be read only once, so the number of threads is determined without reading it.
    let threads = threads_before_reading(args, place.local_world_size)?;
    process::prepare(threads, place.world_size)?;
    let (typed, _) = load(&args.config, &args.overrides())?;
    let config = typed.on_hosts(place.local_world_size).resolve(Some(place.world_size))?;
    rank::run(&config, &options, place)
}

/// Performs the checks that have the same result on all ranks, starts the ranks of this host, and waits for them.
fn lead(args: &TrainArgs, started: &Started<'_>) -> anyhow::Result<u8> {
    let (options, hosts) = (run_options(args)?, started.hosts);
    let sources = read(&args.config)?;
    let typed = load_sources(&args.config, sources.clone(), &args.overrides())?;
    let ranks = match started.ranks {
        None if hosts.count > 1 => {
            let written = typed.num_processes().or_else(|| one_a_gpu(&typed));
            Some(written.map_or_else(|| Ok(typed.resolve(None)?.world_size), anyhow::Ok)?)
        }
        None => one_a_gpu(&typed),
        ranks => ranks,
    };
    if let (Some(least), Some(ranks)) = (args.min_ranks, started.ranks)
        && least as usize > ranks
    {
        let message = format!("{least} is more than the {ranks} ranks of this run");
        let help = format!("use at most {ranks}, or start more ranks");
        anyhow::bail!(Error::setting("--min-ranks", message, help));
    }
    let config = match ranks {
        Some(ranks) => typed.on_hosts(ranks).resolve(Some(ranks * hosts.count))?,
        None => typed.resolve(None)?,
    };
    config.model_and_data()?;
    if options.output != Printing::Quiet && config.log_level >= LogLevel::Warning && hosts.index == 0 {
        warn(&config);
    }
    let ranks = config.world_size / hosts.count;
    let threads = process::threads(Some(&config.launcher), ranks);
    zero_model::ops::set_threads(threads);
    // Report errors common to all ranks once, before any rank starts.
    let plan = zero_train::train::check(&config, &options)?;
    let limits = limits(&config, ranks, args.force);
    if let Some(limit) = plan.exceeded(&limits) {
        let planner = zero_train::train::planner(&config)?;
        let told = does_not_fit(&plan, limit, &limits, &args.config, &args.overrides(), &config, &planner)?;
        anyhow::bail!(Error::Memory(told));
    }
    if config.launcher.transport == Transport::Threads {
        if hosts.count > 1 || started.output.log_dir.is_some() || started.output.tee.is_some() {
            let message =
                "`threads` runs all ranks in one process, so it does not support several hosts, --log-dir or --tee";
            let help = "remove the key, so that `launch` starts one process per rank";
            anyhow::bail!(Error::setting("launcher.transport", message, help));
        }
        return rank::run_as_threads(&config, &options);
    }
    let standard_input = standard_input(&args.config, &sources);
    let standard_input = standard_input.as_deref();
    let job = Job {
        hosts,
        reach: reach_of(hosts, &config)?,
        what: What::Ourselves { standard_input },
        output: started.output.clone(),
        grace: started.grace,
    };
    let team = Team::new(ranks, threads);
    // A failed verification would fail again after a restart, and an evaluation has no checkpoint to resume from.
    if config.launcher.max_restarts == 0 || options.verify.is_some() || options.evaluate {
        return Ok(launch(team, &job, None)?);
    }
    let recovery = Recovery {
        max_restarts: config.launcher.max_restarts,
        min_ranks: config.launcher.min_ranks,
        before: Some(Before::look(config.training.output_dir.as_ref())?),
        unchanged: &|| unchanged(args, &sources),
        smaller: &|ranks| smaller(args, &sources, &config, ranks).map_err(|e| Error::Launch(format!("{e:#}"))),
    };
    Ok(launch(team, &job, Some(&recovery))?)
}

/// Returns the settings with which the launchers of several hosts connect. Returns `None` for a single host.
fn reach_of(hosts: &Hosts, config: &Config) -> anyhow::Result<Option<Reach>> {
    if hosts.count == 1 {
        return Ok(None);
    }
    if config.launcher.interface.is_none() {
        let message = "a run on several hosts needs the network interface that connects them";
        let help = "set it to the interface's name, for example eth0";
        anyhow::bail!(Error::setting("launcher.interface", message, help));
    }
    if config.launcher.min_ranks.is_some() {
        let message = "a run on several hosts always restarts with all ranks";
        anyhow::bail!(Error::setting("launcher.min_ranks", message, "remove the key, or train on one host"));
    }
    reach(config.launcher.interface.as_deref(), zero_engine::timeout(config)).map(Some)
}

/// Returns the memory limits of one of `ranks` ranks on this host. Returns none if `force` is set.
fn limits(config: &Config, ranks: usize, force: bool) -> Vec<Limit> {
    if force { vec![] } else { Limit::all_of_rank(config, ranks) }
}

/// Checks that the files have not changed. Standard input cannot change.
fn unchanged(args: &TrainArgs, sources: &[Source]) -> Result<(), Error> {
    let files = args.config.config.iter().map(PathBuf::as_path).zip(sources);
    zero_train::process::launch::unchanged(files.filter(|(path, _)| !is_standard_input(path)))
}

/// Returns a team of `ranks` ranks that accumulates more micro-batches to keep the micro-batch size and the global
/// batch size of `config`. Fails if this does not fit on this machine.
fn smaller(args: &TrainArgs, sources: &[Source], config: &Config, ranks: usize) -> anyhow::Result<Team> {
    let changes = same_batch(config);
    let overrides = [args.overrides(), changes.clone()].concat();
    let config = load_sources(&args.config, sources.to_vec(), &overrides)?.resolve(Some(ranks))?;
    let plan = zero_train::train::check(&config, &run_options(args)?)?;
    if let Some(limit) = plan.exceeded(&limits(&config, ranks, args.force)) {
        anyhow::bail!("with {ranks} ranks, {}", limit.told(plan.peak_in(limit.memory), "but"));
    }
    Ok(Team { ranks, threads: process::threads(Some(&config.launcher), ranks), overrides: changes })
}

/// Returns the thread count of a rank that another launcher started. Does not read standard input.
fn threads_before_reading(args: &TrainArgs, local_ranks: usize) -> anyhow::Result<usize> {
    let launcher = if args.config.config.iter().any(|path| is_standard_input(path)) {
        None
    } else {
        let (typed, _) = load(&args.config, &args.overrides())?;
        typed.resolve(None).ok().map(|config| config.launcher)
    };
    Ok(process::threads_of_rank(launcher.as_ref(), local_ranks))
}

fn run_options(args: &TrainArgs) -> anyhow::Result<RunOptions> {
    let mut options = RunOptions {
        resume: args.resume.as_deref().map(|from| match from {
            "auto" => Resume::Auto,
            folder => Resume::From(folder.into()),
        }),
        verify: args.verify,
        evaluate: args.evaluate,
        force: args.force,
        output: match (args.quiet, args.plain) {
            (true, _) => Printing::Quiet,
            (_, true) => Printing::Plain,
            _ => Printing::Auto,
        },
        ..RunOptions::default()
    };
    Restarts::of_launcher(&mut options)?;
    Ok(options)
}
