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

/// Installs a handler for SIGUSR1. A run that receives this signal saves a checkpoint after its next step and
/// continues. Without a handler, the signal would end the process. [`train`](super::train) calls this function itself;
/// a program that starts slowly should call it first.
pub fn note_save_requests() {
    LazyLock::force(&SAVE);
}

/// Signals that this process has received.
pub(super) struct Requests {
    received: Arc<AtomicUsize>,
    /// Whether the next signal ends the process.
    ends: Arc<AtomicBool>,
}

impl Requests {
    /// Installs the handlers of a run. If the system does not permit this, the signals keep their default actions.
    pub(super) fn listen() -> Self {
        note_save_requests();
        Self::note()
    }

    /// Installs the handlers of a command without ranks. A second signal ends the process.
    pub(super) fn of_command() -> Self {
        let requests = Self::note();
        for signal in [SIGINT, SIGTERM] {
            let _ = signal_hook::flag::register(signal, requests.ends.clone());
        }
        requests
    }

    fn note() -> Self {
        let requests = Self { received: Arc::default(), ends: Arc::default() };
        for signal in [SIGINT, SIGTERM] {
            let _ = signal_hook::flag::register_conditional_default(signal, requests.ends.clone());
            let _ = signal_hook::flag::register_usize(signal, requests.received.clone(), signal as usize);
        }
        requests
    }

    /// Lets the next signal end the process. Call it when no unfinished work is left that a signal could interrupt.
    pub(super) fn end_at_once(&self) {
        self.ends.store(true, Ordering::Relaxed);
    }

    /// Returns the number of the signal that asked the run to stop, or 0.
    pub(super) fn stop(&self) -> i64 {
        self.received.load(Ordering::Relaxed) as i64
    }

    /// Returns whether a checkpoint was requested since the last call.
    pub(super) fn take_save(&self) -> bool {
        SAVE.swap(false, Ordering::Relaxed)
    }
}
