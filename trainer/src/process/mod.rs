//! Prepares a rank's process before it computes: cores, thread counts and the allocator's thresholds.
//!
//! candle, rayon and the C library read thread counts and thresholds from the environment when they start, and NVIDIA's
//! driver reads its own variables. A rank that our launcher did not start therefore sets these variables and
//! re-executes itself. [`Trainer::from_args`](crate::Trainer::from_args) does all of this; a program with its own
//! training loop calls [`set_up`].

mod cores;
mod exit;
pub mod launch;
pub mod resident;
pub(crate) mod signals;

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::OnceLock;

use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};
use zero_comm::launcher_environment::LauncherEnvironment;
use zero_config::{Config, Launcher};

pub use cores::Cores;
use exit::STATUS_FILE;
pub(crate) use exit::forget as forget_error;
pub use exit::report_and_wait;
pub(crate) use zero_engine::comm_options::place;
use zero_engine::{Error, counted};

/// Set on ranks that our launcher started. These ranks exit when the launcher exits.
pub const LAUNCHED: &str = "ZERO_TRAIN_LAUNCHED";
/// Describes the earlier attempts. Our launcher sets it on restarted ranks; see [`Restarts`](crate::train::Restarts).
pub const RESTARTED: &str = "ZERO_TRAIN_RESTARTED";
/// The name of our launcher's job, which all attempts of the job share. No other job has the same name.
pub const JOB: &str = "ZERO_TRAIN_JOB";
/// The cores that the ranks of this host share, if this rank was bound to a part of them.
static BOUND_FROM: OnceLock<Cores> = OnceLock::new();
/// Set on a process whose environment already contains the values of [`variables`], or values that the user chose
/// instead.
const READY: &str = "ZERO_TRAIN_READY";

/// The number of the GPU's work queues. Streams that share a queue wait for each other. The default is eight queues,
/// but a rank has a stream for compute, two for copies, and one for each NCCL connection.
pub const CONNECTIONS: (&str, &str) = ("CUDA_DEVICE_MAX_CONNECTIONS", "32");
/// Decides when the driver loads kernels. By default it loads each kernel at the kernel's first launch, and waits for
/// the GPU meanwhile. With several ranks this can deadlock: the GPU may run a collective that waits for another rank,
/// while that rank's driver waits for the GPU. A single rank keeps the default, so that unused kernels take no memory.
pub const LOADING: (&str, &str) = ("CUDA_MODULE_LOADING", "EAGER");

/// Prepares the process of a program that uses [`Engine`](crate::Engine) without [`Trainer`](crate::Trainer): sets
/// thread counts and the allocator's thresholds, binds the rank to cores, and makes it exit together with the launcher.
/// Returns a line that describes the result.
///
/// Call it first in `main`: it may re-execute the program, with the same arguments and additional environment
/// variables.
///
/// # Errors
/// Fails if the launcher's environment is inconsistent, if this process may not use the configured cores, or if the
/// program cannot be re-executed.
pub fn set_up(config: &Config) -> Result<String, Error> {
    let place = place()?;
    follow_launcher();
    prepare(threads_of_rank(Some(&config.launcher), place.local_world_size), place.world_size)?;
    settle(config, &place)
}

/// Returns the environment variables for one of `ranks` ranks that computes with `threads` threads. Omits the driver's
/// variables that the user has set.
///
/// candle allocates large temporaries in every operation. By default the C library maps and unmaps the memory of each
/// temporary, and page faults then take a fifth of a step. With these thresholds the C library keeps the memory. After
/// each operation, candle's threads spin for about half a millisecond on cores that this crate's threads need. Another
/// variable makes candle's threads sleep sooner.
#[must_use]
pub fn variables(threads: usize, ranks: usize) -> Vec<(&'static str, String)> {
    let of_driver = of_driver(ranks).filter(|(name, _)| std::env::var_os(name).is_none());
    [
        (READY, "1".into()),
        ("RAYON_NUM_THREADS", threads.to_string()),
        ("CANDLE_NUM_THREADS", threads.to_string()),
        ("CANDLE_BARRIER_POOL_SPIN_LIMIT", "1000".into()),
        ("MALLOC_MMAP_THRESHOLD_", (4u64 << 30).to_string()),
        ("MALLOC_TRIM_THRESHOLD_", (8u64 << 30).to_string()),
        ("MALLOC_TOP_PAD_", (64u64 << 20).to_string()),
    ]
    .into_iter()
    .chain(of_driver.map(|(name, value)| (name, value.to_string())))
    .collect()
}

/// Returns the variables that NVIDIA's driver reads when it is first called.
fn of_driver(ranks: usize) -> impl Iterator<Item = (&'static str, &'static str)> {
    [CONNECTIONS].into_iter().chain((ranks > 1).then_some(LOADING))
}

/// Re-executes this process with the variables set, unless they are already set. Keeps the values that the user has
/// set.
///
/// # Errors
/// Fails if the program's file cannot be executed again.
pub fn prepare(threads: usize, ranks: usize) -> Result<(), Error> {
    if std::env::var_os(READY).is_some() {
        return Ok(());
    }
    let missing = variables(threads, ranks).into_iter().filter(|(name, _)| std::env::var_os(name).is_none());
    let program = std::env::current_exe().map_err(Error::io("/proc/self/exe"))?;
    let error = Command::new(&program).args(std::env::args_os().skip(1)).envs(missing).exec();
    Err(Error::io(program)(error))
}

/// Returns the number of compute threads for each of `local_ranks` ranks on this machine. Without a configured number,
/// each core gets one thread, because two hardware threads of one core do not compute faster than one.
#[must_use]
pub fn threads(launcher: Option<&Launcher>, local_ranks: usize) -> usize {
    let cores = launcher.map_or_else(Cores::allowed, allowed).count().min(quota());
    launcher.and_then(|launcher| launcher.threads_per_rank).unwrap_or((cores / local_ranks.max(1)).max(1))
}

/// Does the same as [`threads`], but respects the cores to which another launcher may have bound this rank. Several
/// ranks may share these cores.
#[must_use]
pub fn threads_of_rank(launcher: Option<&Launcher>, local_ranks: usize) -> usize {
    let is_told = launcher.is_some_and(|it| it.threads_per_rank.is_some() || it.bind_core_list.is_some());
    if is_told || launched_by_us() {
        return threads(launcher, local_ranks);
    }
    let bound = Cores::of_parent().and_then(|parent| Cores::allowed().of_bound_rank(&parent, local_ranks));
    bound.map_or_else(|| threads(launcher, local_ranks), |cores| cores.min(quota()))
}

/// Returns the cores that the ranks of this host may use: those configured cores to which the operating system gives
/// this process access.
fn allowed(launcher: &Launcher) -> Cores {
    let all = Cores::allowed();
    match &launcher.bind_core_list {
        Some(list) => Cores::listed(list).unwrap_or_default().and(&all),
        None => all,
    }
}

/// Returns the number of threads that can run at once. In a container with a CPU quota this is less than the number of
/// cores.
fn quota() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Sets the thread counts of our operations and of rayon's pool, and binds this rank to its cores. Call it before other
/// threads start. Returns a line that describes the result.
///
/// # Errors
/// Fails if this process has access to none of the configured cores.
pub fn settle(config: &Config, place: &LauncherEnvironment) -> Result<String, Error> {
    let (launcher, ranks) = (&config.launcher, place.local_world_size);
    let cores = allowed(launcher);
    if let Some(list) = &launcher.bind_core_list
        && cores.count() == 0
    {
        return Err(Error::setting(
            "launcher.bind_core_list",
            format!("`{list}` contains none of the cores that this process may use: {}", Cores::allowed()),
            "list some of these cores, as in `0-3,8`, or remove the key",
        ));
    }
    let threads = threads_of_rank(Some(launcher), ranks);
    compute_threads(threads);
    let binding = bind(launcher, &cores, threads, place);
    let missing = launcher.bind_core_list.as_ref().filter(|list| Cores::listed(list).as_ref() != Some(&cores));
    let missing =
        missing.map_or(String::new(), |list| format!(" (this process may not use the other cores of {list})"));
    Ok(format!("cores {cores}{missing}: {}, {binding}; {ALLOCATOR}", ranks_and_threads(ranks, threads)))
}

/// Does the same as [`settle`] for ranks that are threads of this process. They share the process's pool and are not
/// bound to cores.
pub fn settle_threads(config: &Config) -> String {
    let threads = threads(Some(&config.launcher), config.world_size);
    compute_threads(threads);
    let cores = allowed(&config.launcher);
    format!(
        "cores {cores}: {}, not bound because the ranks are threads of one process",
        ranks_and_threads(config.world_size, threads)
    )
}

const ALLOCATOR: &str = "large buffers in shared memory";

fn ranks_and_threads(ranks: usize, threads: usize) -> String {
    format!("{} × {}", counted(ranks, "rank", "ranks"), counted(threads, "thread", "threads"))
}

/// Binds this rank if each rank of this host can have its own cores and no other launcher has bound it. Returns a
/// description of the result.
fn bind(launcher: &Launcher, cores: &Cores, threads: usize, place: &LauncherEnvironment) -> String {
    if !launched_by_us() && launcher.bind_core_list.is_none() && Cores::of_machine().as_ref() != Some(&Cores::allowed())
    {
        return "bound by its launcher".into();
    }
    let Some(share) = cores.share(place.local_rank, place.local_world_size) else {
        return "not bound: more ranks than cores".into();
    };
    if !launcher.bind_cores_to_rank {
        return "not bound: bind_cores_to_rank is false".into();
    }
    if quota() < Cores::allowed().cpus().len() {
        return "not bound: this container has a CPU quota instead of a set of cores".into();
    }
    if threads > share.cpus().len() {
        return "not bound: more threads than cores".into();
    }
    let bound = share.bind();
    if bound.is_ok() {
        let _ = BOUND_FROM.set(cores.clone());
    }
    match bound {
        Ok(()) if place.local_world_size == 1 => format!("bound to {share}"),
        Ok(()) => format!("each rank bound to its own cores (rank {}: {share})", place.rank),
        Err(error) => format!("not bound: {error}"),
    }
}

/// Creates a pool with one thread for each hardware thread of this host's ranks. One rank uses this pool for work while
/// the other ranks wait.
pub(crate) fn pool_of_host() -> Result<ThreadPool, ThreadPoolBuildError> {
    let cores = BOUND_FROM.get();
    let threads = cores.map_or_else(quota, |cores| cores.cpus().len());
    // A new thread inherits the binding of the rank. A thread that cannot be bound to the cores of all ranks stays on
    // this rank's cores.
    let unbind = move |_| drop(cores.map(Cores::bind));
    ThreadPoolBuilder::new().num_threads(threads).start_handler(unbind).build()
}

fn compute_threads(threads: usize) {
    zero_model::ops::set_threads(threads);
    // An existing pool, for example in a test, keeps its number of threads.
    let _ = ThreadPoolBuilder::new().num_threads(threads).build_global();
}

/// Returns whether our own launcher started this process.
pub fn launched_by_us() -> bool {
    std::env::var_os(LAUNCHED).is_some()
}

/// Checks that `asked`, the number of ranks on the command line, is the number that the launcher started. After a
/// restart by our launcher, there may be fewer ranks than the command line requests.
///
/// # Errors
/// Fails if another launcher has started a different number of ranks.
pub fn check_ranks(asked: Option<usize>, place: &LauncherEnvironment) -> Result<(), Error> {
    match asked {
        Some(ranks) if ranks != place.world_size && !launched_by_us() => {
            let started = counted(place.world_size, "rank", "ranks");
            let message =
                format!("the option asks for {}, but the launcher started {started}", counted(ranks, "rank", "ranks"));
            Err(Error::setting("-n", message, "omit the option; the launcher sets the number of ranks"))
        }
        _ => Ok(()),
    }
}

/// Makes this process exit when its launcher exits, if our launcher started it.
pub fn follow_launcher() {
    if launched_by_us() {
        // If the system does not support this, a rank whose launcher was killed ends at its deadline.
        let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    }
}
