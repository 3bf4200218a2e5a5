//! Runs a trial as a process group with a deadline and a memory limit. However the trial ends, the tuner continues.

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

/// Interval between checks of a trial.
const EVERY: Duration = Duration::from_millis(20);
/// Memory use is read once per this many checks, because the kernel takes some time to compute it.
const MEMORY_EVERY: u32 = 10;
/// Maximum number of bytes kept of a trial's output.
const KEPT: u64 = 1 << 20;

/// A trial to run.
pub(super) struct Trial<'a> {
    pub(super) program: &'a Path,
    pub(super) arguments: Vec<OsString>,
    /// Time limit of the trial.
    pub(super) deadline: Duration,
    /// Number of bytes that all processes of the trial may use together.
    pub(super) memory: Option<u64>,
    /// Set when the user interrupts the search.
    pub(super) stop: &'a AtomicBool,
}

/// Returns the arguments that select a configuration, a number of ranks and overrides.
pub(super) fn arguments(file: &Path, ranks: usize, overrides: &[String]) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = vec!["--config".into(), file.into(), "-n".into(), ranks.to_string().into()];
    arguments.extend(overrides.iter().flat_map(|change| ["--set".into(), change.into()]));
    arguments
}

/// How a trial ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ended {
    /// Successfully, with its output.
    Well(String),
    /// It ended with an error; has the exit status, if any, and the reason.
    Badly { status: Option<i32>, reason: String },
    /// `goes_on` returned false, so it was stopped.
    Dropped,
    /// It was stopped at its deadline.
    TimedOut,
    /// It was stopped when it used this many bytes.
    TooLarge(u64),
    /// The user interrupted the search.
    Interrupted,
}

impl Trial<'_> {
    /// Runs the trial to its end. Afterwards, none of its processes is left.
    pub(super) fn run(self) -> Ended {
        self.run_while(&|| true)
    }

    /// Like [`run`](Self::run), but stops the trial when `goes_on` returns false. `goes_on` is polled.
    pub(super) fn run_while(self, goes_on: &dyn Fn() -> bool) -> Ended {
        // A trial can end before `watch` reads the flag.
        if self.stop.load(Ordering::Relaxed) {
            return Ended::Interrupted;
        }
        let mut command = Command::new(self.program);
        command
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
            command.env_remove(name);
        }
        let child = match command.spawn() {
            Ok(child) => child,
            Err(error) => {
                let reason = format!("cannot start {}: {error}", self.program.display());
                return Ended::Badly { status: None, reason };
            }
        };
        let mut running = Running::new(child);
        let ended = self.watch(&mut running, goes_on);
        let (out, errors) = running.end();
        match ended {
            Some(status) if status.success() => Ended::Well(out),
            Some(status) => Ended::Badly { status: status.code(), reason: reason(status, &errors) },
            None if self.stop.load(Ordering::Relaxed) => Ended::Interrupted,
            None if self.memory.is_some_and(|limit| running.most > limit) => Ended::TooLarge(running.most),
            None if running.is_dropped => Ended::Dropped,
            None => Ended::TimedOut,
        }
    }

    /// Waits for the trial; returns its status if it ended by itself.
    fn watch(&self, running: &mut Running, goes_on: &dyn Fn() -> bool) -> Option<ExitStatus> {
        let started = Instant::now();
        for look in 0u32.. {
            match running.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) => {}
                Err(_) => return None,
            }
            if self.stop.load(Ordering::Relaxed) || started.elapsed() >= self.deadline {
                return None;
            }
            if !goes_on() {
                running.is_dropped = true;
                return None;
            }
            if let Some(limit) = self.memory.filter(|_| look.is_multiple_of(MEMORY_EVERY)) {
                running.most = running.most.max(held(running.group, limit));
                if running.most > limit {
                    return None;
                }
            }
            std::thread::sleep(EVERY);
        }
        None
    }
}

/// A running process group.
struct Running {
    child: Child,
    group: Pid,
    readers: Option<[JoinHandle<String>; 2]>,
    /// Maximum number of bytes seen so far.
    most: u64,
    /// Whether the caller stopped the trial.
    is_dropped: bool,
}

impl Running {
    fn new(mut child: Child) -> Self {
        let group = Pid::from_child(&child);
        let out = child.stdout.take().map(|pipe| std::thread::spawn(move || read(pipe)));
        let errors = child.stderr.take().map(|pipe| std::thread::spawn(move || read(pipe)));
        Self { child, group, readers: out.zip(errors).map(|(out, errors)| [out, errors]), most: 0, is_dropped: false }
    }

    /// Kills the rest of the group and returns its output.
    fn end(&mut self) -> (String, String) {
        // The group may already be empty.
        let _ = kill_process_group(self.group, Signal::KILL);
        let _ = self.child.wait();
        let [out, errors] = self
            .readers
            .take()
            .map_or_else(Default::default, |readers| readers.map(|reader| reader.join().unwrap_or_default()));
        (out, errors)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.readers.is_some() {
            self.end();
        }
    }
}

/// Reads a pipe to its end, and returns the beginning of the output.
fn read(pipe: impl Read) -> String {
    let mut pipe = pipe;
    let mut kept = vec![];
    let _ = pipe.by_ref().take(KEPT).read_to_end(&mut kept);
    let _ = std::io::copy(&mut pipe, &mut std::io::sink());
    String::from_utf8_lossy(&kept).into_owned()
}

/// Returns the reason for the failure: the trial's own error message if it printed one.
fn reason(status: ExitStatus, errors: &str) -> String {
    let lines: Vec<&str> = errors.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    let said = lines.iter().position(|line| line.starts_with("error: ")).map(|at| &lines[at..]);
    let how = match (status.code(), status.signal()) {
        (Some(code), _) => format!("status {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "no status".into(),
    };
    match (said, lines.last()) {
        (Some(said), _) => format!("{how}: {}", said[0].trim_start_matches("error: ")),
        (None, Some(last)) => format!("{how}: {last}"),
        (None, None) => how,
    }
}

/// Returns the bytes that the processes of a group use. If their sum exceeds `limit`, counts again so that shared pages
/// count only once, which takes longer.
fn held(group: Pid, limit: u64) -> u64 {
    let processes = members(group);
    let resident: u64 = processes.iter().filter_map(|&pid| field(&format!("/proc/{pid}/status"), "VmRSS:")).sum();
    if resident <= limit {
        return resident;
    }
    let shares = processes.iter().filter_map(|&pid| field(&format!("/proc/{pid}/smaps_rollup"), "Pss:"));
    shares.sum()
}

/// Returns the processes of a group.
fn members(group: Pid) -> Vec<i32> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return vec![] };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    // The format is `pid (name) state parent group …`, and the name may contain anything.
    let is_member = |pid: &i32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let rest = stat.rsplit_once(')').map(|(_, rest)| rest);
        rest.and_then(|rest| rest.split_whitespace().nth(2)?.parse::<i32>().ok()) == Some(group.as_raw_nonzero().get())
    };
    pids.filter(is_member).collect()
}

/// Returns a field given in kilobytes, in bytes.
fn field(path: &str, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(script: &str, deadline: Duration, memory: Option<u64>, stop: &AtomicBool) -> Ended {
        let arguments = ["-c", script].map(OsString::from).to_vec();
        Trial { program: Path::new("sh"), arguments, deadline, memory, stop }.run()
    }

    fn badly(status: Option<i32>, reason: &str) -> Ended {
        Ended::Badly { status, reason: reason.into() }
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_trial_gives_its_output_or_the_reason_of_its_failure() {
        let stop = AtomicBool::new(false);
        assert_eq!(run("echo one; echo two", LONG, None, &stop), Ended::Well("one\ntwo\n".into()));
        let error = "echo training >&2; printf 'error: no such file\\n  help: none\\n' >&2; exit 3";
        assert_eq!(run(error, LONG, None, &stop), badly(Some(3), "status 3: no such file"));
        // The word "error" in the output does not make a trial fail.
        assert_eq!(run("echo 'error: 0.1' >&2", LONG, None, &stop), Ended::Well(String::new()));
        assert_eq!(
            run("echo core dumped >&2; kill -SEGV $$", LONG, None, &stop),
            badly(None, "signal 11: core dumped")
        );
        assert_eq!(run("exit 1", LONG, None, &stop), badly(Some(1), "status 1"));
        let none =
            Trial { program: Path::new("/nowhere"), arguments: vec![], deadline: LONG, memory: None, stop: &stop };
        assert!(matches!(none.run(), Ended::Badly { reason, .. } if reason.starts_with("cannot start /nowhere: ")));
    }

    #[test]
    fn a_hanging_trial_is_stopped_with_all_its_processes() {
        let stop = AtomicBool::new(false);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("pid");
        // The script starts a child that would outlive it.
        let script = format!("sleep 600 & echo $! > {}; sleep 600", file.display());
        assert_eq!(run(&script, Duration::from_millis(500), None, &stop), Ended::TimedOut);
        let pid: i32 = std::fs::read_to_string(&file).unwrap().trim().parse().unwrap();
        let state = || std::fs::read_to_string(format!("/proc/{pid}/stat")).ok();
        let gone = || state().is_none_or(|stat| stat.contains(") Z "));
        let started = Instant::now();
        while !gone() {
            assert!(started.elapsed() < LONG, "{:?}", state());
            std::thread::sleep(EVERY);
        }
    }

    #[test]
    fn a_trial_above_the_memory_limit_is_stopped() {
        let stop = AtomicBool::new(false);
        // The shell doubles a string until the trial is stopped.
        let bomb = "x=0123456789abcdef; while :; do x=$x$x; done";
        match run(bomb, LONG, Some(64 << 20), &stop) {
            Ended::TooLarge(bytes) => assert!(bytes > 64 << 20),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_user_can_interrupt_a_trial() {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let trial = scope.spawn(|| run("sleep 600", LONG, None, &stop));
            std::thread::sleep(4 * EVERY);
            stop.store(true, Ordering::Relaxed);
            assert_eq!(trial.join().unwrap(), Ended::Interrupted);
        });
        // After an interruption, no other trial starts.
        assert_eq!(run("exit 0", LONG, None, &stop), Ended::Interrupted);
    }

    #[test]
    fn a_dropped_trial_is_stopped() {
        let (stop, looks) = (AtomicBool::new(false), std::cell::Cell::new(0));
        let arguments = ["-c", "sleep 600"].map(OsString::from).to_vec();
        let trial = Trial { program: Path::new("sh"), arguments, deadline: LONG, memory: None, stop: &stop };
        let goes_on = || {
            looks.set(looks.get() + 1);
            looks.get() < 5
        };
        assert_eq!((trial.run_while(&goes_on), looks.get()), (Ended::Dropped, 5));
    }
}
