//! A worker thread that owns one end of a connection and runs jobs on it in order.
//!
//! One lane runs a group's collectives. For each peer, one lane sends messages and another receives them. An operation
//! therefore blocks only later operations of its own lane, and its code may simply block without a deadlock between
//! lanes.
//!
//! A thread that waits for a job may run it itself ([`Help`]). This saves two thread switches, which take longer than a
//! small operation. Whichever thread comes first runs the next job: the worker or a waiting thread.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;

use crate::inquiry::Waiters;
use crate::lock::lock;

type Job<E> = Box<dyn FnOnce(&mut E) + Send>;

/// A thread that runs jobs on an endpoint of type `E`. Dropping the lane waits until all jobs are done.
pub(crate) struct Lane<E: ?Sized> {
    work: Arc<SharedQueue<E>>,
    thread: Option<JoinHandle<()>>,
}

/// Runs jobs of a lane on behalf of its worker.
pub(crate) trait Help: Send + Sync {
    /// Runs the next job on the calling thread, unless another job is running or the queue is empty. Returns whether it
    /// ran a job.
    fn help(&self) -> bool;

    /// Returns the counter of the threads that wait for a job of this lane.
    fn waiters(&self) -> Arc<Waiters>;
}

struct SharedQueue<E: ?Sized> {
    queue: Mutex<Queue<E>>,
    /// Signalled when the worker has something to do.
    changed: Condvar,
    /// Locked only by the thread that runs a job, so no thread waits for this lock.
    endpoint: Mutex<Box<E>>,
    waiters: Arc<Waiters>,
}

struct Queue<E: ?Sized> {
    jobs: VecDeque<Job<E>>,
    /// Whether a thread is running a job. Only one does at a time, so jobs run in order.
    running: bool,
    /// Set when no more jobs will be submitted.
    closed: bool,
}

impl<E: ?Sized + Send + 'static> Lane<E> {
    pub(crate) fn start(name: String, endpoint: Box<E>, waiters: Arc<Waiters>) -> std::io::Result<Lane<E>> {
        let queue = Mutex::new(Queue { jobs: VecDeque::new(), running: false, closed: false });
        let work = Arc::new(SharedQueue { queue, changed: Condvar::new(), endpoint: Mutex::new(endpoint), waiters });
        let worker = Arc::clone(&work);
        let thread = std::thread::Builder::new().name(name).spawn(move || worker.run_all())?;
        Ok(Lane { work, thread: Some(thread) })
    }

    /// Appends a job. After a job has panicked, new jobs are dropped, and their results are the error for an abandoned
    /// operation.
    pub(crate) fn submit(&self, job: impl FnOnce(&mut E) + Send + 'static) {
        let mut queue = lock(&self.work.queue);
        if !queue.closed {
            queue.jobs.push_back(Box::new(job));
            // The thread that is running a job will look for the next one, or wake the worker.
            let wakes = !queue.running;
            drop(queue);
            if wakes {
                self.work.changed.notify_one();
            }
        }
    }

    /// Returns a handle for threads that wait for a job of this lane. It does not keep the endpoint alive.
    pub(crate) fn help(&self) -> Weak<dyn Help> {
        let work: Weak<SharedQueue<E>> = Arc::downgrade(&self.work);
        work
    }
}

impl<E: ?Sized + Send> SharedQueue<E> {
    /// Runs all jobs until the lane is dropped.
    fn run_all(&self) {
        let mut queue = lock(&self.queue);
        loop {
            if let Some(job) = queue.next() {
                drop(queue);
                queue = self.run(job);
            } else if queue.closed && !queue.running {
                return;
            } else {
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Runs the job that [`Queue::next`] has returned. Returns the locked queue.
    fn run(&self, job: Job<E>) -> MutexGuard<'_, Queue<E>> {
        let outcome = catch_unwind(AssertUnwindSafe(|| job(&mut lock(&self.endpoint))));
        let mut queue = lock(&self.queue);
        if outcome.is_err() {
            // The panic may have left the endpoint in any state, so no further job may use it.
            queue.closed = true;
            let abandoned = std::mem::take(&mut queue.jobs);
            drop(queue);
            drop(abandoned);
            queue = lock(&self.queue);
        }
        queue.running = false;
        queue
    }
}

impl<E: ?Sized> Queue<E> {
    /// Returns the job to run next, unless a job is running.
    fn next(&mut self) -> Option<Job<E>> {
        let job = if self.running { None } else { self.jobs.pop_front() };
        self.running |= job.is_some();
        job
    }
}

impl<E: ?Sized + Send> Help for SharedQueue<E> {
    fn help(&self) -> bool {
        let Some(job) = lock(&self.queue).next() else { return false };
        let queue = self.run(job);
        // While this job ran, the worker could not start the next one. If the lane is being dropped, the worker waits
        // for the end of this job.
        if !queue.jobs.is_empty() || queue.closed {
            self.changed.notify_one();
        }
        true
    }

    fn waiters(&self) -> Arc<Waiters> {
        Arc::clone(&self.waiters)
    }
}

impl<E: ?Sized> Drop for Lane<E> {
    fn drop(&mut self) {
        lock(&self.work.queue).closed = true;
        let _seat = Arc::clone(&self.work.waiters).enter();
        self.work.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_run_in_order_on_whichever_thread() {
        for round in 0..50 {
            let done = Arc::new(Mutex::new(Vec::new()));
            let lane = Lane::start("test".into(), Box::new(0), Arc::default()).expect("a thread");
            let help = lane.help();
            let helper =
                std::thread::spawn(move || while help.upgrade().is_some_and(|work| work.help() || round % 2 == 0) {});
            for number in 0..100 {
                let done = Arc::clone(&done);
                lane.submit(move |count: &mut i32| {
                    *count += 1;
                    lock(&done).push((number, *count));
                });
            }
            drop(lane);
            helper.join().expect("no panic");
            assert_eq!(*lock(&done), (0..100).map(|number| (number, number + 1)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_panicking_job_closes_the_lane_without_hanging_its_waiters() {
        let lane = Lane::start("test".into(), Box::new(()), Arc::default()).expect("a thread");
        let (sender, receiver) = std::sync::mpsc::channel();
        let first = sender.clone();
        lane.submit(move |()| {
            let _first = first;
            panic!("as intended");
        });
        lane.submit(move |()| sender.send(()).expect("there is a receiver"));
        assert!(receiver.recv().is_err());
        lane.submit(|()| unreachable!());
        drop(lane);
    }
}
