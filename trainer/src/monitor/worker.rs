//! Runs each monitor on its own thread, so that no step waits for a slow, full or unreachable destination.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::metric::Record;
use zero_engine::Error;
use zero_engine::format::counted;

/// Maximum number of steps that wait to be written. If more steps wait, the oldest are dropped.
const WAITING: usize = 512;
/// Time after which a failed write is retried.
const PAUSE: Duration = Duration::from_secs(10);
/// Time without records after which a monitor tells its destination that the run is alive.
const BEAT: Duration = Duration::from_secs(30);
/// Unit of the time that a run waits for its monitors at its end.
pub(super) const SLICE: Duration = Duration::from_millis(100);

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RunStatus {
    /// The run completed.
    Done,
    /// A signal stopped the run.
    Stopped,
    /// An error ended the run.
    Failed,
}

/// A message that names the destination that cannot be written, and the reason.
#[derive(Debug)]
pub(super) struct Trouble(pub(super) String);

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Self(error.to_string())
    }
}

/// The destination of a monitor. Its methods are called only on the monitor's thread.
pub(super) trait Sink: Send {
    /// Writes the records of some steps, oldest first. After an error, the next call gets the same records again,
    /// followed by newer records.
    fn write(&mut self, records: &[Record]) -> Result<(), Trouble>;

    /// Returns the help that follows an error message.
    fn help(&self) -> String;

    /// Returns the minimum time between two writes. A half-full backlog is written earlier.
    fn pace(&self) -> Duration {
        Duration::ZERO
    }

    /// Tells the destination that the run is alive. Called after [`BEAT`] without a step.
    fn beat(&mut self) -> Result<(), Trouble> {
        Ok(())
    }

    /// Returns the new lines to print since the last call.
    fn lines(&mut self) -> Vec<String> {
        vec![]
    }

    /// Returns the new warnings to print since the last call.
    fn warnings(&mut self) -> Vec<String> {
        vec![]
    }

    /// Marks the run as ended at the destination.
    fn finish(&mut self, _outcome: RunStatus) -> Result<(), Trouble> {
        Ok(())
    }
}

/// State shared by the thread and the run.
#[derive(Default)]
struct Shared {
    state: Mutex<WorkerState>,
    changed: Condvar,
}

#[derive(Default)]
struct WorkerState {
    waiting: VecDeque<Record>,
    /// Number of steps that were dropped.
    lost: u64,
    /// Whether a warning was printed that steps may be dropped.
    has_warned: bool,
    /// Lines to print.
    lines: Vec<String>,
    /// Warnings to print.
    words: Vec<String>,
    ending: Option<RunStatus>,
    has_ended: bool,
}

/// The run's handle to a monitor's thread.
pub(super) struct Worker {
    name: &'static str,
    shared: Arc<Shared>,
}

impl Worker {
    /// Starts the thread of the monitor whose configuration section is `name`.
    pub(super) fn start(name: &'static str, sink: impl Sink + 'static) -> Self {
        let shared = Arc::<Shared>::default();
        let of_thread = shared.clone();
        let started = std::thread::Builder::new().name(name.into()).spawn(move || {
            work(name, sink, &of_thread);
            lock(&of_thread).has_ended = true;
            of_thread.changed.notify_all();
        });
        if let Err(error) = started {
            let mut state = lock(&shared);
            state.has_ended = true;
            state.words.push(format!(
                "cannot start the thread for the monitor `{name}`: {error}; training continues without it"
            ));
        }
        Self { name, shared }
    }

    /// Passes a step to the thread, without waiting.
    pub(super) fn give(&self, record: &Record) {
        let mut state = lock(&self.shared);
        if state.has_ended {
            return;
        }
        if state.waiting.len() >= WAITING {
            state.waiting.pop_front();
            state.lost += 1;
            if !std::mem::replace(&mut state.has_warned, true) {
                let name = self.name;
                state.words.push(format!("the monitor `{name}` is slower than the run; steps will be missing"));
            }
        }
        state.waiting.push_back(record.clone());
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Returns the new lines to print since the last call.
    pub(super) fn lines(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.shared).lines)
    }

    /// Returns the new warnings to print since the last call.
    pub(super) fn words(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.shared).words)
    }

    /// Tells the thread that the run has ended.
    pub(super) fn end(&self, outcome: RunStatus) {
        lock(&self.shared).ending.get_or_insert(outcome);
        self.shared.changed.notify_all();
    }

    /// Waits for the thread for at most `slices` times [`SLICE`], and subtracts the slices used. If none are left, adds
    /// a warning and leaves the thread running. Slices are counted instead of reading a clock, so that the time during
    /// which the process is stopped does not count.
    pub(super) fn wait(&self, slices: &mut u32) {
        let mut state = lock(&self.shared);
        while !state.has_ended {
            if *slices == 0 {
                let word = format!("the monitor `{}` did not finish in time; its last steps may be missing", self.name);
                state.words.push(word);
                return;
            }
            *slices -= 1;
            state = self.shared.changed.wait_timeout(state, SLICE).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

fn work(name: &str, mut sink: impl Sink, shared: &Shared) {
    let mut is_failing = false;
    loop {
        let pace = if is_failing { PAUSE } else { sink.pace() };
        let (records, ending) = next(shared, is_failing, pace);
        let written = match ending {
            _ if !records.is_empty() => sink.write(&records),
            Some(_) if !is_failing => Ok(()),
            _ => sink.beat(),
        };
        let mut state = lock(shared);
        state.lines.extend(sink.lines());
        state.words.extend(sink.warnings());
        match written {
            Ok(()) if is_failing => {
                is_failing = false;
                state.has_warned = false;
                let word = match std::mem::take(&mut state.lost) {
                    0 => format!("the monitor `{name}` is writable again; no step is missing"),
                    lost => {
                        let lost = counted(lost as usize, "step is", "steps are");
                        format!("the monitor `{name}` is writable again; {lost} missing")
                    }
                };
                state.words.push(word);
            }
            Ok(()) => {}
            Err(Trouble(error)) => {
                if !std::mem::replace(&mut is_failing, true) {
                    let help = sink.help();
                    state.has_warned = true;
                    state
                        .words
                        .push(format!("cannot write to the monitor `{name}`: {error}; training continues; {help}"));
                }
                for record in records.into_iter().rev() {
                    if state.waiting.len() < WAITING {
                        state.waiting.push_front(record);
                    } else {
                        state.lost += 1;
                    }
                }
            }
        }
        // Steps that arrived in the meantime are written before the end, unless writing fails.
        let Some(outcome) = ending.filter(|_| is_failing || state.waiting.is_empty()) else { continue };
        let missing = state.waiting.len() as u64 + state.lost;
        drop(state);
        let finished = if is_failing { Ok(()) } else { sink.finish(outcome) };
        let word = match finished {
            Ok(()) if missing > 0 => {
                Some(format!("the monitor `{name}` is missing {}", counted(missing as usize, "step", "steps")))
            }
            Ok(()) => None,
            Err(Trouble(error)) => Some(format!("cannot finish the monitor `{name}`: {error}; {}", sink.help())),
        };
        lock(shared).words.extend(word);
        return;
    }
}

/// Waits for records to write: at least for `pace`, unless the run ends or the backlog is half full. Returns the
/// records, and the run's status if the run has ended. Returns without records after [`BEAT`].
fn next(shared: &Shared, is_failing: bool, pace: Duration) -> (Vec<Record>, Option<RunStatus>) {
    let began = Instant::now();
    let mut state = lock(shared);
    loop {
        let is_urgent = !is_failing && state.waiting.len() >= WAITING / 2;
        let pause = match state.waiting.is_empty() {
            true => BEAT,
            false if is_urgent => Duration::ZERO,
            false => pace,
        };
        let left = pause.saturating_sub(began.elapsed());
        if state.ending.is_some() || left.is_zero() {
            return (state.waiting.drain(..).collect(), state.ending);
        }
        state = shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
    }
}

fn lock(shared: &Shared) -> MutexGuard<'_, WorkerState> {
    // A panicked thread leaves this plain data consistent, so the poison is ignored.
    shared.state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// A sink that stores its records, and blocks or fails on request.
    #[derive(Clone, Default)]
    struct Planted {
        fails: Arc<AtomicBool>,
        hangs: Arc<AtomicBool>,
        seen: Arc<Mutex<Vec<u64>>>,
    }

    impl Sink for Planted {
        fn write(&mut self, records: &[Record]) -> Result<(), Trouble> {
            while self.hangs.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            if self.fails.load(Ordering::Relaxed) {
                return Err(Trouble("place: no space".into()));
            }
            self.seen.lock().expect("no panic").extend(records.iter().map(|record| record.samples));
            Ok(())
        }

        fn help(&self) -> String {
            "make room".into()
        }
    }

    fn give(worker: &Worker, samples: std::ops::Range<u64>) {
        samples.for_each(|samples| worker.give(&Record { samples, ..Record::default() }));
    }

    fn end(worker: &Worker, seconds: u32) -> Vec<String> {
        worker.end(RunStatus::Done);
        worker.wait(&mut { seconds * 10 });
        worker.words()
    }

    #[test]
    fn all_steps_are_written_in_order_even_after_a_failure() {
        let sink = Planted::default();
        sink.fails.store(true, Ordering::Relaxed);
        let worker = Worker::start("planted", sink.clone());
        give(&worker, 0..3);
        let began = Instant::now();
        let mut words = worker.words();
        while words.is_empty() && began.elapsed() < Duration::from_secs(60) {
            words = worker.words();
        }
        assert_eq!(words, ["cannot write to the monitor `planted`: place: no space; training continues; make room"]);
        sink.fails.store(false, Ordering::Relaxed);
        give(&worker, 3..9);
        assert_eq!(end(&worker, 60), ["the monitor `planted` is writable again; no step is missing"]);
        assert_eq!(*sink.seen.lock().expect("no panic"), (0..9).collect::<Vec<_>>());
    }

    #[test]
    fn a_hanging_monitor_is_abandoned_and_dropped_steps_are_counted() {
        let sink = Planted::default();
        sink.hangs.store(true, Ordering::Relaxed);
        let worker = Worker::start("planted", sink.clone());
        give(&worker, 0..1);
        while !lock(&worker.shared).waiting.is_empty() {
            std::thread::yield_now();
        }
        // The thread blocks while it writes the first step, and the other steps wait.
        give(&worker, 1..1 + WAITING as u64 + 7);
        let words = end(&worker, 0);
        let slow = "the monitor `planted` is slower than the run; steps will be missing";
        assert_eq!(words, [slow, "the monitor `planted` did not finish in time; its last steps may be missing"]);
        sink.hangs.store(false, Ordering::Relaxed);
        worker.wait(&mut 600);
        assert_eq!(worker.words(), ["the monitor `planted` is missing 7 steps"]);
        assert_eq!(sink.seen.lock().expect("no panic").len(), 1 + WAITING);
    }

    #[test]
    fn a_monitor_that_fails_until_the_end_reports_missing_steps() {
        let sink = Planted::default();
        sink.fails.store(true, Ordering::Relaxed);
        let worker = Worker::start("planted", sink);
        give(&worker, 0..5);
        let words = end(&worker, 60);
        assert_eq!(words.len(), 2, "{words:?}");
        assert_eq!(words[1], "the monitor `planted` is missing 5 steps");
    }
}
