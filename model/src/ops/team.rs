//! The threads that carry out the parts of one operation together.
//!
//! A training step is a few hundred operations of a millisecond or less, one after the other, so what counts is how soon
//! the other threads begin and how soon the caller knows that they are done. A general pool puts the caller to sleep and
//! its threads too; here the caller works on the parts as well, and a thread that has nothing to do spins for a moment
//! before it sleeps.

use super::product::make_room;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// How long a thread without work looks for some before it sleeps: longer than the pauses between most operations of a
/// step, far shorter than those between steps.
const SPIN: Duration = Duration::from_micros(100);

/// Runs `work` for each of `0..parts`, on the calling thread and up to `parts - 1` others; which one does which part is
/// open. Returns when all are done.
///
/// While another thread of the process is in here, the caller does all parts alone, as it does inside of a part.
///
/// # Panics
/// If a part does, after all have ended.
pub(crate) fn run(parts: usize, work: &(dyn Fn(usize) + Sync)) {
    static TEAM: Mutex<Team> = Mutex::new(Team { members: Vec::new(), board: None });
    if parts > 1
        && let Ok(team) = TEAM.try_lock()
    {
        return together(team, parts, work);
    }
    (0..parts).for_each(work);
}

fn together(mut team: MutexGuard<'_, Team>, parts: usize, work: &(dyn Fn(usize) + Sync)) {
    let board = team.gather(parts - 1);
    let job = Job { work, done: AtomicUsize::new(0), panic: Mutex::new(None) };
    // SAFETY: only the lifetime changes. The pointer is followed by those who have claimed a part alone, and this
    // function does not return before all claimed parts are done.
    let lasting: *mut Job<'static> = unsafe { std::mem::transmute(std::ptr::from_ref(&job).cast_mut()) };
    board.job.store(lasting, Ordering::Relaxed);
    let generation = (board.claims.load(Ordering::Relaxed) >> 32) + 1;
    board.claims.store(generation << 32 | parts as u64, Ordering::SeqCst);
    for member in &team.members[..parts - 1] {
        if member.asleep.swap(false, Ordering::SeqCst) {
            member.thread.unpark();
        }
    }
    while let Some(part) = board.claim(generation) {
        job.carry_out(part);
    }
    let mut looks = 0u32;
    while job.done.load(Ordering::Acquire) < parts {
        looks += 1;
        if looks.is_multiple_of(1 << 10) {
            // Someone may need this very core to finish.
            std::thread::yield_now();
        }
        std::hint::spin_loop();
    }
    let panic = job.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
    drop(team);
    if let Some(panic) = panic {
        resume_unwind(panic);
    }
}

/// One call of [`run`].
struct Job<'a> {
    work: &'a (dyn Fn(usize) + Sync),
    done: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Job<'_> {
    fn carry_out(&self, part: usize) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (self.work)(part))) {
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
        }
        // The last access: the caller may return from here on.
        self.done.fetch_add(1, Ordering::Release);
    }
}

/// Where members find work.
struct Board {
    /// The number of the job and, in the lower half, how many of its parts nobody has claimed.
    claims: AtomicU64,
    job: AtomicPtr<Job<'static>>,
}

impl Board {
    /// A part of this job that is now the caller's.
    fn claim(&self, generation: u64) -> Option<usize> {
        let open = |claims: u64| claims >> 32 == generation && claims as u32 > 0;
        let take = |claims| open(claims).then(|| claims - 1);
        let before = self.claims.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).ok()?;
        Some(before as u32 as usize - 1)
    }
}

struct Team {
    members: Vec<Member>,
    board: Option<Arc<Board>>,
}

struct Member {
    thread: Thread,
    asleep: Arc<AtomicBool>,
}

impl Team {
    /// Makes sure that there are that many members, as far as the system gives threads: parts wait for nobody.
    fn gather(&mut self, members: usize) -> Arc<Board> {
        let empty = || Arc::new(Board { claims: AtomicU64::new(0), job: AtomicPtr::new(std::ptr::null_mut()) });
        let board = Arc::clone(self.board.get_or_insert_with(empty));
        while self.members.len() < members {
            let (theirs, asleep) = (Arc::clone(&board), Arc::new(AtomicBool::new(false)));
            let flag = Arc::clone(&asleep);
            let name = format!("zero-model {}", self.members.len() + 1);
            match std::thread::Builder::new().name(name).spawn(move || serve(&theirs, &flag)) {
                Ok(handle) => self.members.push(Member { thread: handle.thread().clone(), asleep }),
                Err(_) => break,
            }
        }
        board
    }
}

/// What a member does for the rest of the process.
fn serve(board: &Board, asleep: &AtomicBool) {
    make_room();
    let mut idle_since = Instant::now();
    loop {
        let claims = board.claims.load(Ordering::SeqCst);
        if let Some(part) = board.claim(claims >> 32) {
            // SAFETY: a part of this job is claimed and not done, so its caller is still in `together`.
            unsafe { &*board.job.load(Ordering::Acquire) }.carry_out(part);
            idle_since = Instant::now();
            continue;
        }
        if idle_since.elapsed() < SPIN {
            for _ in 0..32 {
                std::hint::spin_loop();
            }
            continue;
        }
        asleep.store(true, Ordering::SeqCst);
        while asleep.load(Ordering::SeqCst) && board.claims.load(Ordering::SeqCst) as u32 == 0 {
            std::thread::park();
        }
        asleep.store(false, Ordering::SeqCst);
        idle_since = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_done_once_whoever_calls() {
        let callers = (0..4).map(|_| {
            std::thread::spawn(|| {
                for round in 0..500 {
                    let parts = round % 7;
                    let done: Vec<AtomicUsize> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
                    run(parts, &|part| {
                        done[part].fetch_add(1, Ordering::Relaxed);
                        run(2, &|_| {
                            done[part].fetch_add(10, Ordering::Relaxed);
                        });
                    });
                    assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 21));
                    if round % 100 == 0 {
                        std::thread::sleep(2 * SPIN);
                    }
                }
            })
        });
        for caller in callers.collect::<Vec<_>>() {
            caller.join().expect("no panic");
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_goes_on() {
        for bad in 0..3 {
            let caught = catch_unwind(|| run(3, &|part| assert_ne!(part, bad)));
            assert!(caught.is_err());
        }
        run(3, &|_| {});
    }
}
