//! A team of threads that execute the parts of one operation.
//!
//! A training step is a few hundred operations in sequence, each of a millisecond or less. Its speed depends on how
//! soon the other threads begin, and how soon the caller knows that they are done. A general-purpose pool puts both the
//! caller and its idle threads to sleep. Here the caller works on the parts as well, and an idle thread spins for a
//! moment before it sleeps.

use crate::product::make_room;
use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// How long an idle thread looks for work before it sleeps: longer than the pauses between most operations of a step,
/// and far shorter than those between steps.
const SPIN: Duration = Duration::from_micros(100);

/// Runs `work` for each of `0..parts`, on the calling thread and up to `parts - 1` others. Which thread takes which
/// part is not defined. Returns when all parts are done.
///
/// If another thread of the process is already in `run`, the caller does all parts alone. The same applies to a call
/// from inside a part.
///
/// # Panics
/// Panics if a part panics, after all parts have ended.
pub(crate) fn run(parts: usize, work: &(dyn Fn(usize) + Sync)) {
    static TEAM: Mutex<Team> = Mutex::new(Team::new(start));
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
    // SAFETY: only the lifetime changes. Only threads that have claimed a part follow the pointer, and this function
    // does not return before all claimed parts are done.
    let lasting: *mut Job<'static> = unsafe { std::mem::transmute(std::ptr::from_ref(&job).cast_mut()) };
    // Relaxed: a thread that claims a part has read the store to `claims` below, or a later claim, and therefore sees
    // this store.
    board.job.store(lasting, Ordering::Relaxed);
    // Relaxed: only the holder of the team's lock starts a job. The number has 32 bits and wraps around after 2³²
    // jobs.
    let generation = u64::from(((board.claims.load(Ordering::Relaxed) >> 32) as u32).wrapping_add(1));
    // SeqCst here and on `asleep`: either the member sees the claims before it sleeps, or this thread sees that the
    // member sleeps.
    board.claims.store(generation << 32 | parts as u64, Ordering::SeqCst);
    // There may be fewer members than parts.
    for member in team.members.iter().take(parts - 1) {
        if member.asleep.swap(false, Ordering::SeqCst) {
            member.thread.unpark();
        }
    }
    while let Some(part) = board.claim(generation) {
        job.carry_out(part);
    }
    let mut looks = 0u32;
    // Acquire: reads the last `fetch_add`. These form a release sequence, so everything that the parts wrote is
    // visible.
    while job.done.load(Ordering::Acquire) < parts {
        looks += 1;
        if looks.is_multiple_of(1 << 10) {
            // Another thread may need this core to finish.
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
        // The last access to the job: the caller may return after this.
        self.done.fetch_add(1, Ordering::Release);
    }
}

/// Shared state in which members find work.
struct Board {
    /// The number of the job and, in the lower half, how many of its parts are unclaimed.
    claims: AtomicU64,
    job: AtomicPtr<Job<'static>>,
}

impl Board {
    /// Claims a part of this job for the calling thread.
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
    start: Start,
}

/// Starts the member with the given number.
type Start = fn(usize, Arc<Board>, Arc<AtomicBool>) -> io::Result<Thread>;

fn start(number: usize, board: Arc<Board>, asleep: Arc<AtomicBool>) -> io::Result<Thread> {
    let thread = std::thread::Builder::new().name(format!("zero-model {number}"));
    Ok(thread.spawn(move || serve(&board, &asleep))?.thread().clone())
}

struct Member {
    thread: Thread,
    asleep: Arc<AtomicBool>,
}

impl Team {
    const fn new(start: Start) -> Self {
        Self { members: Vec::new(), board: None, start }
    }

    /// Makes sure that the team has this many members. If the system cannot start more threads, the team stays smaller:
    /// no part needs a particular member.
    fn gather(&mut self, members: usize) -> Arc<Board> {
        let empty = || Arc::new(Board { claims: AtomicU64::new(0), job: AtomicPtr::new(std::ptr::null_mut()) });
        let board = Arc::clone(self.board.get_or_insert_with(empty));
        while self.members.len() < members {
            let asleep = Arc::new(AtomicBool::new(false));
            match (self.start)(self.members.len() + 1, Arc::clone(&board), Arc::clone(&asleep)) {
                Ok(thread) => self.members.push(Member { thread, asleep }),
                Err(_) => break,
            }
        }
        board
    }
}

/// The loop of a member, which runs until the process ends.
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
    fn every_part_is_done_once_with_concurrent_callers() {
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
            caller.join().expect("the caller does not panic");
        }
    }

    #[test]
    fn without_threads_the_caller_does_all_parts() {
        let team = Mutex::new(Team::new(|_, _, _| Err(io::ErrorKind::WouldBlock.into())));
        // The job numbers are about to wrap around.
        team.lock().expect("new").gather(0).claims.store(u64::from(u32::MAX - 1) << 32, Ordering::Relaxed);
        for parts in 2..5 {
            let done: Vec<AtomicUsize> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
            together(team.lock().expect("the lock is not poisoned"), parts, &|part| {
                done[part].fetch_add(1, Ordering::Relaxed);
            });
            assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_stays_usable() {
        for bad in 0..3 {
            let caught = catch_unwind(|| run(3, &|part| assert_ne!(part, bad)));
            assert!(caught.is_err());
        }
        run(3, &|_| {});
    }
}
