//! Handles Ctrl-C, SIGTERM and SIGUSR1. A handler records the signal, and all ranks act on it together after the step.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};

/// Whether this process was asked to save a checkpoint. The flag is global, because a signal may arrive before the run
/// begins.
static SAVE: LazyLock<Arc<AtomicBool>> = LazyLock::new(|| {
    let asked = Arc::new(AtomicBool::new(false));
    // If a handler cannot be installed, the signal keeps its default action.
    let _ = signal_hook::flag::register(SIGUSR1, asked.clone());
    asked
});

/// The flags of SIGINT and SIGTERM, which all runs of this process share. A handler cannot be removed, so it must not
/// belong to one run.
static STOP: LazyLock<Flags> = LazyLock::new(Flags::listen);
/// Number of runs in progress in this process.
static RUNS: AtomicUsize = AtomicUsize::new(0);

/// Installs a handler for SIGUSR1. A run that receives this signal saves a checkpoint after its next step and
/// continues. Without a handler, the signal would end the process. A run calls this function itself; a program that
/// starts slowly should call it first.
pub fn note_save_requests() {
    LazyLock::force(&SAVE);
}

/// The state of the handlers of SIGINT and SIGTERM.
#[derive(Clone, Default)]
struct Flags {
    received: Arc<AtomicUsize>,
    /// Whether the next signal ends the process.
    ends: Arc<AtomicBool>,
}

impl Flags {
    /// Installs handlers. If the system does not permit this, the signals keep their default actions.
    fn listen() -> Self {
        let flags = Self::default();
        for signal in [SIGINT, SIGTERM] {
            let _ = signal_hook::flag::register_conditional_default(signal, flags.ends.clone());
            let _ = signal_hook::flag::register_usize(signal, flags.received.clone(), signal as usize);
        }
        flags
    }
}

/// Signals that this process has received.
pub(crate) struct Requests {
    flags: Flags,
    is_run: bool,
}

impl Requests {
    /// Installs the handlers of a run. After the last run of the process, the signals have their default actions again,
    /// so Ctrl-C ends a program that continues after its training.
    pub(crate) fn listen() -> Self {
        note_save_requests();
        let flags = STOP.clone();
        if RUNS.fetch_add(1, Ordering::Relaxed) == 0 {
            flags.received.store(0, Ordering::Relaxed);
            flags.ends.store(false, Ordering::Relaxed);
        }
        Self { flags, is_run: true }
    }

    /// Installs the handlers of a command without ranks. A second signal ends the process.
    pub(crate) fn of_command() -> Self {
        let flags = Flags::listen();
        for signal in [SIGINT, SIGTERM] {
            let _ = signal_hook::flag::register(signal, flags.ends.clone());
        }
        Self { flags, is_run: false }
    }

    /// Lets the next signal end the process. Call it when no unfinished work is left that a signal could interrupt.
    pub(crate) fn end_at_once(&self) {
        self.flags.ends.store(true, Ordering::Relaxed);
    }

    /// Returns the number of the signal that asked the run to stop, or 0.
    pub(crate) fn stop(&self) -> i64 {
        self.flags.received.load(Ordering::Relaxed) as i64
    }

    /// Returns whether a checkpoint was requested since the last call.
    pub(crate) fn take_save(&self) -> bool {
        SAVE.swap(false, Ordering::Relaxed)
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        if self.is_run && RUNS.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.end_at_once();
        }
    }
}

/// While this value exists, SIGINT and SIGTERM do not end the process.
pub(crate) struct Held;

/// Keeps SIGINT and SIGTERM from ending the process until the result is dropped. After that, the signals end the
/// process, unless a run is in progress.
#[must_use]
pub(crate) fn hold_signals() -> Held {
    STOP.ends.store(false, Ordering::Relaxed);
    Held
}

impl Drop for Held {
    fn drop(&mut self) {
        STOP.ends.store(RUNS.load(Ordering::Relaxed) == 0, Ordering::Relaxed);
    }
}
