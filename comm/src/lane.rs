//! A worker thread that owns one end of a connection and does jobs on it in order.
//!
//! One lane carries a group's collectives, one each the messages to and from a peer. So an operation blocks only those behind
//! it in its own lane, and plain blocking code cannot deadlock against the operations of another lane.
//!
//! Who waits for a job may as well do it: changing threads twice takes longer than a small operation. So the jobs are there for
//! whoever gets hold of the endpoint first, the worker or a thread that waits ([`Help`]).

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::thread::JoinHandle;

use crate::inquiry::Waiters;

type Job<E> = Box<dyn FnOnce(&mut E) + Send>;

/// A thread that does jobs on an endpoint of type `E`. Dropping it waits until the jobs are done.
pub(crate) struct Lane<E: ?Sized> {
    work: Arc<SharedQueue<E>>,
    thread: Option<JoinHandle<()>>,
}

/// Does what is to be done on a lane.
pub(crate) trait Help: Send + Sync {
    /// Does the next job on the calling thread, unless another one is being done or there is none. Whether it did.
    fn help(&self) -> bool;

    /// Where those who wait for a job of the lane are counted.
    fn waiters(&self) -> Arc<Waiters>;
}

struct SharedQueue<E: ?Sized> {
    queue: Mutex<Queue<E>>,
    changed: Condvar,
    /// Jobs are taken from the queue by whoever holds this, so they are done in order.
    endpoint: Mutex<Box<E>>,
    waiters: Arc<Waiters>,
}

struct Queue<E: ?Sized> {
    jobs: VecDeque<Job<E>>,
    /// No job will come any more.
    closed: bool,
}

impl<E: ?Sized + Send + 'static> Lane<E> {
    pub(crate) fn start(name: String, endpoint: Box<E>, waiters: Arc<Waiters>) -> std::io::Result<Lane<E>> {
        let queue = Mutex::new(Queue { jobs: VecDeque::new(), closed: false });
        let work = Arc::new(SharedQueue { queue, changed: Condvar::new(), endpoint: Mutex::new(endpoint), waiters });
        let worker = Arc::clone(&work);
        let thread = std::thread::Builder::new().name(name).spawn(move || worker.see_through())?;
        Ok(Lane { work, thread: Some(thread) })
    }

    /// Appends a job. After one that panicked it is dropped, and with it the handle that completes its result.
    pub(crate) fn submit(&self, job: impl FnOnce(&mut E) + Send + 'static) {
        let mut queue = lock(&self.work.queue);
        if !queue.closed {
            queue.jobs.push_back(Box::new(job));
            drop(queue);
            self.work.changed.notify_one();
        }
    }

    /// For those who wait for a job of this lane. Does not keep the endpoint.
    pub(crate) fn help(&self) -> Weak<dyn Help> {
        let work: Weak<SharedQueue<E>> = Arc::downgrade(&self.work);
        work
    }
}

impl<E: ?Sized + Send> SharedQueue<E> {
    /// Does all jobs until the lane is dropped.
    fn see_through(&self) {
        let mut queue = lock(&self.queue);
        loop {
            if !queue.jobs.is_empty() {
                drop(queue);
                self.do_next(&mut lock(&self.endpoint));
                queue = lock(&self.queue);
            } else if queue.closed {
                return;
            } else {
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn do_next(&self, endpoint: &mut E) -> bool {
        let Some(job) = lock(&self.queue).jobs.pop_front() else { return false };
        if catch_unwind(AssertUnwindSafe(|| job(endpoint))).is_err() {
            // Nobody knows in what state it has left the endpoint.
            let mut queue = lock(&self.queue);
            queue.closed = true;
            let abandoned = std::mem::take(&mut queue.jobs);
            drop(queue);
            drop(abandoned);
        }
        true
    }
}

impl<E: ?Sized + Send> Help for SharedQueue<E> {
    fn help(&self) -> bool {
        match self.endpoint.try_lock() {
            Ok(mut endpoint) => self.do_next(&mut endpoint),
            Err(TryLockError::Poisoned(endpoint)) => self.do_next(&mut endpoint.into_inner()),
            Err(TryLockError::WouldBlock) => false,
        }
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

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Jobs do not panic under a lock, but in `do_next`, which catches it.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_are_done_in_order_whoever_does_them() {
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
    fn after_a_job_that_panics_nothing_is_done_but_nobody_waits_for_ever() {
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
