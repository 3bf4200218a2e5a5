//! Ctrl-C and SIGTERM: noted here, acted on by all ranks together after the step.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};

/// The signal that asks this process to stop.
pub(super) struct StopRequest(Arc<AtomicUsize>);

impl StopRequest {
    /// Starts listening. Where that is not allowed, signals keep their own way.
    pub(super) fn listen() -> Self {
        let received = Arc::new(AtomicUsize::new(0));
        for signal in [SIGINT, SIGTERM] {
            let _ = signal_hook::flag::register_usize(signal, received.clone(), signal as usize);
        }
        Self(received)
    }

    /// The signal's number, or 0.
    pub(super) fn received(&self) -> i64 {
        self.0.load(Ordering::Relaxed) as i64
    }
}
