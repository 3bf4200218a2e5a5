//! Ctrl-C, SIGTERM and SIGUSR1: noted here, acted on by all ranks together after the step.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};

/// Whether this process is to save a checkpoint. Of the process, not of a run: a signal that comes before there is a run counts too.
static SAVE: LazyLock<Arc<AtomicBool>> = LazyLock::new(|| {
    let asked = Arc::new(AtomicBool::new(false));
    // Where that is not allowed, the signal keeps its own way.
    let _ = signal_hook::flag::register(SIGUSR1, asked.clone());
    asked
});

/// Notes SIGUSR1 from now on, which would end the process otherwise: a run saves a checkpoint after its next step, and goes on.
/// [`train`](super::train) does so by itself; a program that starts slowly calls it first.
pub fn note_save_requests() {
    LazyLock::force(&SAVE);
}

/// What this process was asked for by signals.
pub(super) struct Requests(Arc<AtomicUsize>);

impl Requests {
    /// Starts listening. Where that is not allowed, signals keep their own way.
    pub(super) fn listen() -> Self {
        note_save_requests();
        let received = Arc::new(AtomicUsize::new(0));
        for signal in [SIGINT, SIGTERM] {
            let _ = signal_hook::flag::register_usize(signal, received.clone(), signal as usize);
        }
        Self(received)
    }

    /// The number of the signal that asks to stop, or 0.
    pub(super) fn stop(&self) -> i64 {
        self.0.load(Ordering::Relaxed) as i64
    }

    /// Whether a checkpoint is asked for, since this was last called.
    pub(super) fn take_save(&self) -> bool {
        SAVE.swap(false, Ordering::Relaxed)
    }
}
