//! What a rank's process needs before it computes: cores of its own, thread counts and the allocator's thresholds.
//!
//! The last two are read from the environment by candle, rayon and the C library when they start, and NVIDIA's driver reads variables of its
//! own there, so a rank that was not started by our launcher starts itself anew with them set. [`Trainer::from_args`](crate::Trainer::from_args)
//! does all of it; a program with a loop of its own calls [`set_up`].

mod cores;
mod exit;

use std::os::unix::process::CommandExt;
use std::process::Command;

use zero_comm::launcher_environment::LauncherEnvironment;
use zero_config::{Config, Launcher};

pub use cores::Cores;
pub use exit::report_and_wait;
use zero_engine::Error;

/// Set on ranks that our launcher started: they end with it.
pub const LAUNCHED: &str = "ZERO_TRAIN_LAUNCHED";
/// What our launcher tells ranks that it has started again: [`Restarts`](crate::train::Restarts).
pub const RESTARTED: &str = "ZERO_TRAIN_RESTARTED";
/// What our launcher calls its job: the same for all attempts of it, and of no other.
pub const JOB: &str = "ZERO_TRAIN_JOB";
/// Set once the environment is as [`variables`] says, or was chosen by the user.
const READY: &str = "ZERO_TRAIN_READY";

/// How many queues of work a GPU has: streams that share one wait for each other. A rank has streams for what it computes, for copies both
/// ways and for each connection of NCCL's; by default they share eight.
pub const CONNECTIONS: (&str, &str) = ("CUDA_DEVICE_MAX_CONNECTIONS", "32");
/// When the driver loads kernels. By default at their first launch, and it waits for the GPU then: perhaps for a collective that waits for
/// a rank that waits for the driver. Of one rank nothing waits, and what it never launches takes no memory.
pub const LOADING: (&str, &str) = ("CUDA_MODULE_LOADING", "EAGER");

/// Prepares the process of a program that uses [`Engine`](crate::Engine) on its own: thread counts, the allocator's thresholds, cores, and the
/// end together with the launcher. Call it first in `main`: it may start the program anew, with the same arguments and more environment
/// variables. Returns a line that says what it chose.
///
/// # Errors
/// A launcher's environment that contradicts itself; cores that this process may not use; a program that cannot be started anew.
pub fn set_up(config: &Config) -> Result<String, Error> {
    let place = place()?;
    follow_launcher();
    prepare(threads_of_rank(Some(&config.launcher), place.local_world_size), place.world_size)?;
    settle(config, &place)
}

/// The rank that the launcher's environment says this process is.
pub(crate) fn place() -> Result<LauncherEnvironment, Error> {
    LauncherEnvironment::from_environment(|name| std::env::var(name).ok()).map_err(|error| {
        Error::setting("launcher", error.to_string(), "unset the variable, or start the ranks with one launcher")
    })
}

/// The variables of one of `ranks` ranks that computes with `threads` threads, unless the user has set those that are the user's.
///
/// candle allocates large temporaries at every operation. By default the C library maps each anew and gives it back,
/// and a fifth of a step goes into page faults; with these thresholds it keeps them.
#[must_use]
pub fn variables(threads: usize, ranks: usize) -> Vec<(&'static str, String)> {
    let of_driver = of_driver(ranks).filter(|(name, _)| std::env::var_os(name).is_none());
    [
        (READY, "1".into()),
        ("RAYON_NUM_THREADS", threads.to_string()),
        ("CANDLE_NUM_THREADS", threads.to_string()),
        ("MALLOC_MMAP_THRESHOLD_", (4u64 << 30).to_string()),
        ("MALLOC_TRIM_THRESHOLD_", (8u64 << 30).to_string()),
        ("MALLOC_TOP_PAD_", (64u64 << 20).to_string()),
    ]
    .into_iter()
    .chain(of_driver.map(|(name, value)| (name, value.to_string())))
    .collect()
}

/// What NVIDIA's driver reads when it is first called.
fn of_driver(ranks: usize) -> impl Iterator<Item = (&'static str, &'static str)> {
    [CONNECTIONS].into_iter().chain((ranks > 1).then_some(LOADING))
}

/// Starts this process anew with the variables set, unless they are. What the user has set stays.
///
/// # Errors
/// If the program's file cannot be executed again.
pub fn prepare(threads: usize, ranks: usize) -> Result<(), Error> {
    if std::env::var_os(READY).is_some() {
        return Ok(());
    }
    let missing = variables(threads, ranks).into_iter().filter(|(name, _)| std::env::var_os(name).is_none());
    let program = std::env::current_exe().map_err(Error::io("/proc/self/exe"))?;
    let error = Command::new(&program).args(std::env::args_os().skip(1)).envs(missing).exec();
    Err(Error::io(program)(error))
}

/// Compute threads of each of `local_ranks` ranks on this machine, unless the configuration says. A core that has two hardware
/// threads computes no faster with two of ours.
#[must_use]
pub fn threads(launcher: Option<&Launcher>, local_ranks: usize) -> usize {
    let cores = launcher.map_or_else(Cores::allowed, allowed).count().min(quota());
    launcher.and_then(|launcher| launcher.threads_per_rank).unwrap_or((cores / local_ranks.max(1)).max(1))
}

/// As [`threads`], of a rank that another launcher may have bound to cores: they are its own, or those of a few ranks.
#[must_use]
pub fn threads_of_rank(launcher: Option<&Launcher>, local_ranks: usize) -> usize {
    let is_told = launcher.is_some_and(|it| it.threads_per_rank.is_some() || it.bind_core_list.is_some());
    if is_told || launched_by_us() {
        return threads(launcher, local_ranks);
    }
    let bound = Cores::of_parent().and_then(|parent| Cores::allowed().of_bound_rank(&parent, local_ranks));
    bound.map_or_else(|| threads(launcher, local_ranks), |cores| cores.min(quota()))
}

/// The cores that the ranks of this host may use: of those that this process may, the ones on the list.
fn allowed(launcher: &Launcher) -> Cores {
    let all = Cores::allowed();
    match &launcher.bind_core_list {
        Some(list) => Cores::listed(list).unwrap_or_default().and(&all),
        None => all,
    }
}

/// How many threads may run at a time: less than there are cores in a container with a share of the time.
fn quota() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Sets the threads of our operations and of rayon's pool, and binds this rank to its cores, before other threads are
/// started. Returns a line that says so.
///
/// # Errors
/// A list of cores that this process may not use.
pub fn settle(config: &Config, place: &LauncherEnvironment) -> Result<String, Error> {
    let (launcher, ranks) = (&config.launcher, place.local_world_size);
    let cores = allowed(launcher);
    if let Some(list) = &launcher.bind_core_list
        && cores.count() == 0
    {
        return Err(Error::Setting {
            key: "launcher.bind_core_list".into(),
            message: format!("`{list}` names no core that this process may use, which are {}", Cores::allowed()),
            help: "write it as `0-3,8`, or leave the key out".into(),
        });
    }
    let threads = threads_of_rank(Some(launcher), ranks);
    compute_threads(threads);
    let binding = bind(launcher, &cores, threads, place);
    let missing = launcher.bind_core_list.as_ref().filter(|list| Cores::listed(list).as_ref() != Some(&cores));
    let missing = missing.map_or(String::new(), |list| format!(" (of {list} this process may use no others)"));
    Ok(format!("cores {cores}{missing}: {}, {binding}; {ALLOCATOR}", counted(ranks, threads)))
}

/// As [`settle`] for ranks that are threads of this process: they start and end with it, and share its pool.
pub fn settle_threads(config: &Config) -> String {
    let threads = threads(Some(&config.launcher), config.world_size);
    compute_threads(threads);
    let cores = allowed(&config.launcher);
    format!("cores {cores}: {}, not bound: they are threads of one process", counted(config.world_size, threads))
}

const ALLOCATOR: &str = "large buffers in shared memory";

fn counted(ranks: usize, threads: usize) -> String {
    let counted = zero_engine::counted;
    format!("{} × {}", counted(ranks, "rank", "ranks"), counted(threads, "thread", "threads"))
}

/// Binds this rank, if each rank of this host can have cores of its own and nobody else has bound it; says what was done.
fn bind(launcher: &Launcher, cores: &Cores, threads: usize, place: &LauncherEnvironment) -> String {
    if !launched_by_us() && launcher.bind_core_list.is_none() && Cores::of_machine().as_ref() != Some(&Cores::allowed())
    {
        return "bound by its launcher".into();
    }
    let Some(share) = cores.share(place.local_rank, place.local_world_size) else {
        return "not bound: more ranks than cores".into();
    };
    if !launcher.bind_cores_to_rank {
        return "not bound: switched off".into();
    }
    if quota() < Cores::allowed().cpus().len() {
        return "not bound: this container has a share of the time, and no cores".into();
    }
    if threads > share.cpus().len() {
        return "not bound: more threads than cores".into();
    }
    match share.bind() {
        Ok(()) if place.local_world_size == 1 => format!("bound to {share}"),
        Ok(()) => format!("each rank bound to its own (rank {}: {share})", place.rank),
        Err(error) => format!("not bound: {error}"),
    }
}

fn compute_threads(threads: usize) {
    zero_model::ops::set_threads(threads);
    // Somebody may have made the pool already, in a test for example; then it stays as it is.
    let _ = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();
}

/// Whether our own launcher started this process.
pub fn launched_by_us() -> bool {
    std::env::var_os(LAUNCHED).is_some()
}

/// Ends this process with the launcher, if one of ours started it.
pub fn follow_launcher() {
    if launched_by_us() {
        // Not to be had means that a killed launcher leaves this rank to its own deadline.
        let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    }
}
