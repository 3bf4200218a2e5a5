//! Forwards the signals that the launcher receives to the ranks.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};

/// Signals that were received but not forwarded yet.
pub(super) struct Signals {
    stops: [(Arc<AtomicBool>, Signal); 2],
    saves: Arc<AtomicBool>,
    stopped: Cell<bool>,
}

impl Signals {
    /// Installs the handlers of SIGINT, SIGTERM and SIGUSR1.
    pub(super) fn listen() -> std::io::Result<Self> {
        let flag = |number| {
            let flag = Arc::new(AtomicBool::new(false));
            signal_hook::flag::register(number, flag.clone()).map(|_| flag)
        };
        let stops = [(flag(SIGINT)?, Signal::INT), (flag(SIGTERM)?, Signal::TERM)];
        Ok(Self { stops, saves: flag(SIGUSR1)?, stopped: Cell::new(false) })
    }

    /// Forwards the received signals to the running ranks.
    ///
    /// A request to stop goes to all ranks. A request to save goes only to the first rank, which tells the others. If
    /// all ranks received the signal, they might notice it after different steps, and the run would save twice.
    pub(super) fn hand_on(&self, ranks: &[Pid]) {
        for (flag, signal) in &self.stops {
            if flag.swap(false, Ordering::Relaxed) {
                self.stopped.set(true);
                send(ranks, *signal);
            }
        }
        if let Some(&first) = ranks.first()
            && self.saves.load(Ordering::Relaxed)
            // SIGUSR1 would kill a process without a handler.
            && catches(first, SIGUSR1)
        {
            self.saves.store(false, Ordering::Relaxed);
            send(&[first], Signal::USR1);
        }
    }

    /// Returns whether this launcher has received a request to stop.
    pub(super) fn have_stopped(&self) -> bool {
        self.stopped.get() || self.stops.iter().any(|(flag, _)| flag.load(Ordering::Relaxed))
    }
}

pub(super) fn send(ranks: &[Pid], signal: Signal) {
    for &rank in ranks {
        // Sending fails if the rank has ended in the meantime.
        let _ = kill_process(rank, signal);
    }
}

/// Returns whether a process has a handler for a signal.
pub(super) fn catches(process: Pid, signal: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.as_raw_nonzero())).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signal_handlers_are_detected() {
        let own = rustix::process::getpid();
        assert!(!catches(own, signal_hook::consts::SIGWINCH));
        signal_hook::flag::register(signal_hook::consts::SIGWINCH, Arc::default()).expect("a handler can be installed");
        assert!(catches(own, signal_hook::consts::SIGWINCH));
    }
}
