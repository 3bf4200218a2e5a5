//! A monitor's thread: what it writes to may be slow, full or gone, and no step waits for it.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::metric::Record;
use zero_engine::Error;
use zero_engine::format::counted;

/// Steps that wait to be written; the oldest are given up for newer ones.
const WAITING: usize = 512;
/// Until what failed is tried again.
const PAUSE: Duration = Duration::from_secs(10);
/// What the end of a run waits at a time.
pub(super) const SLICE: Duration = Duration::from_millis(100);

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RunStatus {
    /// It is done.
    Done,
    /// A signal stopped it.
    Stopped,
    /// An error ended it.
    Failed,
}

/// Why a monitor cannot write: place and reason.
#[derive(Debug)]
pub(super) struct Trouble(pub(super) String);

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Self(error.to_string())
    }
}

/// Where a monitor writes to. Its methods run on the monitor's thread alone.
pub(super) trait Sink: Send {
    /// Writes what came of some steps, oldest first. After an error the same come again, with others behind them.
    fn write(&mut self, records: &[Record]) -> Result<(), Trouble>;

    /// What to do about an error.
    fn help(&self) -> String;

    /// Ends it.
    fn finish(&mut self, _outcome: RunStatus) -> Result<(), Trouble> {
        Ok(())
    }
}

/// What thread and run share.
#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Record>,
    /// Steps that were given up.
    lost: u64,
    /// To be said to the user.
    words: Vec<String>,
    ending: Option<RunStatus>,
    has_ended: bool,
}

/// The run's end of it.
pub(super) struct Worker {
    name: &'static str,
    shared: Arc<Shared>,
}

impl Worker {
    /// Starts the thread of the monitor that the configuration calls `name`.
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
            state.words.push(format!("the monitor `{name}` has no thread: {error}; training goes on without it"));
        }
        Self { name, shared }
    }

    /// Hands over a step; never waits.
    pub(super) fn give(&self, record: &Record) {
        let mut state = lock(&self.shared);
        if state.has_ended {
            return;
        }
        if state.waiting.len() >= WAITING {
            state.waiting.pop_front();
            state.lost += 1;
        }
        state.waiting.push_back(record.clone());
        drop(state);
        self.shared.changed.notify_all();
    }

    /// What there is to say since the last call.
    pub(super) fn words(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.shared).words)
    }

    /// Tells the thread that the run has ended.
    pub(super) fn end(&self, outcome: RunStatus) {
        lock(&self.shared).ending.get_or_insert(outcome);
        self.shared.changed.notify_all();
    }

    /// Waits until the thread is done, for as many `slices` of time as are left; then it is left behind, which is said. They are counted,
    /// and no clock is asked: a process that was stopped meanwhile has not waited.
    pub(super) fn wait(&self, slices: &mut u32) {
        let mut state = lock(&self.shared);
        while !state.has_ended {
            if *slices == 0 {
                let word = format!("the monitor `{}` was too slow at the end: it may lack the last steps", self.name);
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
        let (records, ending) = next(shared, is_failing);
        let written = if records.is_empty() { Ok(()) } else { sink.write(&records) };
        let mut state = lock(shared);
        match written {
            Ok(()) if is_failing => {
                is_failing = false;
                let word = match std::mem::take(&mut state.lost) {
                    0 => format!("the monitor `{name}` is written again, and nothing is missing"),
                    lost => {
                        let lost = counted(lost as usize, "step is", "steps are");
                        format!("the monitor `{name}` is written again; {lost} missing")
                    }
                };
                state.words.push(word);
            }
            Ok(()) => {}
            Err(Trouble(error)) => {
                if !std::mem::replace(&mut is_failing, true) {
                    let help = sink.help();
                    state.words.push(format!("the monitor `{name}` is not written: {error}; training goes on; {help}"));
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
        // What came meanwhile is written before the end, unless it cannot be.
        let Some(outcome) = ending.filter(|_| is_failing || state.waiting.is_empty()) else { continue };
        let missing = state.waiting.len() as u64 + state.lost;
        drop(state);
        let finished = if is_failing { Ok(()) } else { sink.finish(outcome) };
        let word = match finished {
            Ok(()) if missing > 0 => {
                Some(format!("the monitor `{name}` lacks {}", counted(missing as usize, "step", "steps")))
            }
            Ok(()) => None,
            Err(Trouble(error)) => Some(format!("the monitor `{name}` is not ended: {error}; {}", sink.help())),
        };
        lock(shared).words.extend(word);
        return;
    }
}

/// What there is to write, and whether it is the last; waits for it. What failed is left alone for a while.
fn next(shared: &Shared, is_failing: bool) -> (Vec<Record>, Option<RunStatus>) {
    let began = Instant::now();
    let mut state = lock(shared);
    loop {
        let rests = is_failing && began.elapsed() < PAUSE;
        if state.ending.is_some() || (!rests && !state.waiting.is_empty()) {
            return (state.waiting.drain(..).collect(), state.ending);
        }
        let left = if rests { PAUSE.saturating_sub(began.elapsed()) } else { Duration::from_secs(3600) };
        state = shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
    }
}

fn lock(shared: &Shared) -> MutexGuard<'_, State> {
    // Plain data: a thread that panicked leaves nothing half done in it.
    shared.state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// Keeps what comes while it works, and waits where it is to.
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
    fn all_steps_come_in_order_also_those_that_failed_once() {
        let sink = Planted::default();
        sink.fails.store(true, Ordering::Relaxed);
        let worker = Worker::start("planted", sink.clone());
        give(&worker, 0..3);
        let began = Instant::now();
        let mut words = worker.words();
        while words.is_empty() && began.elapsed() < Duration::from_secs(60) {
            words = worker.words();
        }
        assert_eq!(words, ["the monitor `planted` is not written: place: no space; training goes on; make room"]);
        sink.fails.store(false, Ordering::Relaxed);
        give(&worker, 3..9);
        assert_eq!(end(&worker, 60), ["the monitor `planted` is written again, and nothing is missing"]);
        assert_eq!(*sink.seen.lock().expect("no panic"), (0..9).collect::<Vec<_>>());
    }

    #[test]
    fn one_that_hangs_is_left_behind_and_what_is_too_much_is_counted() {
        let sink = Planted::default();
        sink.hangs.store(true, Ordering::Relaxed);
        let worker = Worker::start("planted", sink.clone());
        give(&worker, 0..1);
        while !lock(&worker.shared).waiting.is_empty() {
            std::thread::yield_now();
        }
        // The thread is in the first one, and these wait behind it.
        give(&worker, 1..1 + WAITING as u64 + 7);
        let words = end(&worker, 0);
        assert_eq!(words, ["the monitor `planted` was too slow at the end: it may lack the last steps"]);
        sink.hangs.store(false, Ordering::Relaxed);
        worker.wait(&mut 600);
        assert_eq!(worker.words(), ["the monitor `planted` lacks 7 steps"]);
        assert_eq!(sink.seen.lock().expect("no panic").len(), 1 + WAITING);
    }

    #[test]
    fn one_that_fails_to_the_end_says_so_at_once() {
        let sink = Planted::default();
        sink.fails.store(true, Ordering::Relaxed);
        let worker = Worker::start("planted", sink);
        give(&worker, 0..5);
        let words = end(&worker, 60);
        assert_eq!(words.len(), 2, "{words:?}");
        assert_eq!(words[1], "the monitor `planted` lacks 5 steps");
    }
}
