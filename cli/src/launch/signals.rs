//! Signals that the launcher gets and hands on.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};

/// What has come and was not handed on yet.
pub(super) struct Signals {
    stops: [(Arc<AtomicBool>, Signal); 2],
    saves: Arc<AtomicBool>,
    stopped: Cell<bool>,
}

impl Signals {
    /// Starts listening.
    pub(super) fn listen() -> std::io::Result<Self> {
        let flag = |number| {
            let flag = Arc::new(AtomicBool::new(false));
            signal_hook::flag::register(number, flag.clone()).map(|_| flag)
        };
        let stops = [(flag(SIGINT)?, Signal::INT), (flag(SIGTERM)?, Signal::TERM)];
        Ok(Self { stops, saves: flag(SIGUSR1)?, stopped: Cell::new(false) })
    }

    /// Hands on what has come. A request to stop goes to all; a request to save to the first, which tells the others: if all were
    /// told they might hear of it after different steps, and save twice.
    pub(super) fn hand_on(&self, ranks: &[Pid]) {
        for (flag, signal) in &self.stops {
            if flag.swap(false, Ordering::Relaxed) {
                self.stopped.set(true);
                send(ranks, *signal);
            }
        }
        if let Some(&first) = ranks.first()
            && self.saves.load(Ordering::Relaxed)
            // A process that does not listen yet would end of it.
            && catches(first, SIGUSR1)
        {
            self.saves.store(false, Ordering::Relaxed);
            send(&[first], Signal::USR1);
        }
    }

    /// Whether the user has asked to stop.
    pub(super) fn have_stopped(&self) -> bool {
        self.stopped.get() || self.stops.iter().any(|(flag, _)| flag.load(Ordering::Relaxed))
    }
}

pub(super) fn send(ranks: &[Pid], signal: Signal) {
    for &rank in ranks {
        // It may have ended meanwhile.
        let _ = kill_process(rank, signal);
    }
}

/// Whether a process has a handler for a signal.
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
    fn a_handler_is_seen() {
        let own = rustix::process::getpid();
        assert!(!catches(own, signal_hook::consts::SIGWINCH));
        signal_hook::flag::register(signal_hook::consts::SIGWINCH, Arc::default()).expect("allowed");
        assert!(catches(own, signal_hook::consts::SIGWINCH));
    }
}
