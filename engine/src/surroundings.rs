//! What a rank's process needs before its first line runs: thread counts and the allocator's thresholds.
//!
//! Both are read from the environment by candle, rayon and the C library when they start, so a rank that was not started
//! by our launcher starts itself anew with them set.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// Set on ranks that our launcher started: they end with it.
pub(crate) const LAUNCHED: &str = "ZERO_TRAIN_LAUNCHED";
/// Set once the environment is as [`variables`] says, or was chosen by the user.
const READY: &str = "ZERO_TRAIN_READY";

/// The variables of a rank that computes with `threads` threads.
///
/// candle allocates large temporaries at every operation. By default the C library maps each anew and gives it back,
/// and a fifth of a step goes into page faults; with these thresholds it keeps them.
#[must_use]
pub(crate) fn variables(threads: usize) -> [(&'static str, String); 6] {
    [
        (READY, "1".into()),
        ("RAYON_NUM_THREADS", threads.to_string()),
        ("CANDLE_NUM_THREADS", threads.to_string()),
        ("MALLOC_MMAP_THRESHOLD_", (4u64 << 30).to_string()),
        ("MALLOC_TRIM_THRESHOLD_", (8u64 << 30).to_string()),
        ("MALLOC_TOP_PAD_", (64u64 << 20).to_string()),
    ]
}

/// Starts this process anew with the variables set, unless they are. What the user has set stays.
///
/// # Errors
/// If the program's file cannot be executed again.
pub(crate) fn prepare(threads: usize) -> anyhow::Result<()> {
    if std::env::var_os(READY).is_some() {
        return Ok(());
    }
    let missing = variables(threads).into_iter().filter(|(name, _)| std::env::var_os(name).is_none());
    let error = Command::new(std::env::current_exe()?).args(std::env::args_os().skip(1)).envs(missing).exec();
    Err(error.into())
}

/// Compute threads of each of `local_ranks` ranks on this machine, unless the configuration says.
#[must_use]
pub(crate) fn threads(configured: Option<usize>, local_ranks: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    configured.unwrap_or((cores / local_ranks.max(1)).max(1))
}

/// Whether our own launcher started this process.
pub(crate) fn launched_by_us() -> bool {
    std::env::var_os(LAUNCHED).is_some()
}

/// Ends this process with the launcher, if one of ours started it.
pub(crate) fn follow_launcher() {
    if launched_by_us() {
        // Not to be had means that a killed launcher leaves this rank to its own deadline.
        let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    }
}
