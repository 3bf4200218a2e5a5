//! Ends a failed rank so that its launcher can blame the right rank.
//!
//! torchrun and DeepSpeed's launcher poll their processes, and blame the first process that they find exited. A rank
//! that loses a peer would exit only milliseconds after the peer, so the launcher could blame the wrong rank. The rank
//! therefore reports the failure at once, but waits before it exits.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};
use signal_hook::consts::{SIGINT, SIGTERM};

use super::signals::hold_signals;

/// Names the file from which our launcher reads the exit status of a rank's error. A program that returns the error
/// from `main` exits with status 1, whatever the error is.
pub(super) const STATUS_FILE: &str = "ZERO_TRAIN_STATUS_FILE";
/// Names the file from which torchrun reads a rank's error for its report.
const ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";
/// How long a rank that has lost a peer waits before it exits. This is longer than the poll interval of DeepSpeed's
/// launcher, one second.
const WAIT: Duration = Duration::from_secs(3);
/// The exit status of a rank that has lost a peer.
const LOST_PEER: u8 = 4;

/// Forgets the error of an earlier run of this process, which the program has handled.
pub(crate) fn forget() {
    let _ = std::env::var(STATUS_FILE).map(fs::remove_file);
}

/// Tells our launcher the exit status of an error, and writes `message` to torchrun's error file, if the environment
/// names one. If this rank has lost a peer, waits long enough for a polling launcher to notice the lost rank first.
pub fn report_and_wait(message: &str, status: u8) {
    // Without the file, the launcher uses the exit status of the process.
    let _ = std::env::var(STATUS_FILE).map(|path| fs::write(path, status.to_string()));
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let looks = set("TORCHELASTIC_RUN_ID") || set("CROSS_SIZE") && set("LOCAL_SIZE");
    let waits = status == LOST_PEER && looks && !super::launched_by_us();
    if set(ERROR_FILE) {
        // torchrun blames the rank with the earliest timestamp, so a rank that waits writes the time of its exit.
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let ends = if waits { now + WAIT } else { now };
        // The file is optional, so a failure to write it is not reported.
        let _ = std::env::var(ERROR_FILE).map(|path| fs::write(path, reply(message, ends).to_string()));
    }
    if waits {
        wait();
    }
}

fn reply(message: &str, ends: Duration) -> Value {
    json!({"message": {"message": message, "extraInfo": {"timestamp": ends.as_secs().to_string()}}})
}

/// Waits until the launcher sends SIGTERM or SIGINT, but no longer than [`WAIT`].
fn wait() {
    let _held = hold_signals();
    let told = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        if signal_hook::flag::register(signal, Arc::clone(&told)).is_err() {
            return;
        }
    }
    let end = Instant::now() + WAIT;
    while !told.load(Ordering::Relaxed) && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_file_has_the_fields_that_torchrun_reads() {
        let reply = reply("error: a\n  help: b", Duration::from_millis(7900));
        assert_eq!(reply["message"]["message"], "error: a\n  help: b");
        assert_eq!(reply["message"]["extraInfo"], json!({"timestamp": "7"}));
    }
}
