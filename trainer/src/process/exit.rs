//! How a rank that has failed ends, so that the launcher which started it blames the right one.
//!
//! torchrun and DeepSpeed's launcher look at their processes now and then, and blame the first that they find ended. A rank that has lost
//! another one ends within milliseconds of it; so it says at once what has happened, and waits before it ends.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};
use signal_hook::consts::{SIGINT, SIGTERM};

/// Where torchrun looks for what its report says of a rank.
const ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";
/// DeepSpeed's launcher looks once a second.
const WAIT: Duration = Duration::from_secs(3);
/// The exit status of a rank that has lost another.
const LOST_PEER: u8 = 4;

/// Leaves what the user has read for the launcher's report, and ends not before the launcher has seen who was lost.
pub fn report_and_wait(message: &str, status: u8) {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let looks = set("TORCHELASTIC_RUN_ID") || set("CROSS_SIZE") && set("LOCAL_SIZE");
    let waits = status == LOST_PEER && looks && !super::launched_by_us();
    if set(ERROR_FILE) {
        // torchrun takes the earliest for the cause: the time of a rank that waits is when it ends.
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let ends = if waits { now + WAIT } else { now };
        // Whoever can do without the file can do without a second error.
        let _ = std::env::var(ERROR_FILE).map(|path| fs::write(path, reply(message, ends).to_string()));
    }
    if waits {
        wait();
    }
}

fn reply(message: &str, ends: Duration) -> Value {
    json!({"message": {"message": message, "extraInfo": {"timestamp": ends.as_secs().to_string()}}})
}

/// Until the launcher says that all shall end.
fn wait() {
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
    fn torchrun_finds_message_and_time_where_it_looks() {
        let reply = reply("error: a\n  help: b", Duration::from_millis(7900));
        assert_eq!(reply["message"]["message"], "error: a\n  help: b");
        assert_eq!(reply["message"]["extraInfo"], json!({"timestamp": "7"}));
    }
}
