//! The result of an operation in flight.

use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::error::CommError;
use crate::lane::Help;
use crate::lock::lock;

/// The result of an operation that runs on a worker thread.
///
/// The worker owns the operation's buffers until the operation is done, so dropping a `Pending` discards the result but
/// never frees memory that is in use.
#[must_use = "dropping an operation without waiting loses its result and its errors"]
pub struct Pending<T>(Source<T>);

enum Source<T> {
    Operation(Awaited<T>),
    Mapped(Box<dyn Mapped<T> + Send>),
}

/// An operation on a lane.
struct Awaited<T> {
    slot: Arc<Slot<T>>,
    /// The lane that runs the operation; `None` if the operation is already complete.
    lane: Option<Weak<dyn Help>>,
}

/// Another pending value together with the function to apply to its result.
trait Mapped<T> {
    fn is_done(&self) -> bool;
    fn wait(self: Box<Self>) -> Result<T, CommError>;
}

impl<T, U, F: FnOnce(T) -> Result<U, CommError>> Mapped<U> for (Pending<T>, F) {
    fn is_done(&self) -> bool {
        self.0.is_done()
    }

    fn wait(self: Box<Self>) -> Result<U, CommError> {
        self.0.wait().and_then(self.1)
    }
}

impl<T> Pending<T> {
    /// Blocks until the operation has succeeded or failed. Every operation has a deadline, so this always returns.
    ///
    /// # Errors
    /// Returns the error of the operation, or of a function passed to [`map`](Pending::map).
    pub fn wait(self) -> Result<T, CommError> {
        match self.0 {
            Source::Operation(operation) => operation.wait(),
            Source::Mapped(mapped) => mapped.wait(),
        }
    }

    /// Returns whether the operation is done. If so, [`wait`](Pending::wait) returns after running the functions passed
    /// to `map`, without blocking.
    pub fn is_done(&self) -> bool {
        match &self.0 {
            Source::Operation(operation) => operation.is_done(),
            Source::Mapped(mapped) => mapped.is_done(),
        }
    }

    /// Applies `make` to the result, on the thread that calls [`wait`](Pending::wait).
    pub fn map<U>(self, make: impl FnOnce(T) -> Result<U, CommError> + Send + 'static) -> Pending<U>
    where
        T: Send + 'static,
    {
        Pending(Source::Mapped(Box::new((self, make))))
    }

    pub(crate) fn ready(result: Result<T, CommError>) -> Pending<T> {
        let slot = Arc::new(Slot { result: Mutex::new(Some(result)), done: Condvar::new() });
        Pending(Source::Operation(Awaited { slot, lane: None }))
    }

    /// Creates a pending value and the handle that completes it. If the handle is dropped before it completes the
    /// value, the result is the error `abandoned`.
    pub(crate) fn new(abandoned: CommError, lane: Weak<dyn Help>) -> (Completion<T>, Pending<T>) {
        let slot = Arc::new(Slot { result: Mutex::new(None), done: Condvar::new() });
        let completion = Completion { slot: Some(Arc::clone(&slot)), abandoned: Some(abandoned) };
        (completion, Pending(Source::Operation(Awaited { slot, lane: Some(lane) })))
    }
}

impl<T> Awaited<T> {
    fn wait(self) -> Result<T, CommError> {
        let lane = self.lane.as_ref().and_then(Weak::upgrade);
        let _seat = lane.as_ref().map(|lane| lane.waiters().enter());
        // Usually the worker has not woken up yet. This thread would only wait, so it runs the queued jobs itself.
        if let Some(lane) = lane {
            while !self.is_done() && lane.help() {}
        }
        // Spin first: a short operation often takes less time than it takes to wake a sleeping thread (tens of
        // microseconds).
        let spin_until = Instant::now() + SPIN;
        while !self.is_done() && Instant::now() < spin_until {
            std::thread::yield_now();
        }
        let mut result = lock(&self.slot.result);
        loop {
            match result.take() {
                Some(result) => return result,
                None => result = self.slot.done.wait(result).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    fn is_done(&self) -> bool {
        lock(&self.slot.result).is_some()
    }
}

impl<T> std::fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending").field("done", &self.is_done()).finish_non_exhaustive()
    }
}

const SPIN: Duration = Duration::from_micros(20);

#[derive(Debug)]
struct Slot<T> {
    result: Mutex<Option<Result<T, CommError>>>,
    done: Condvar,
}

/// The worker's end of a [`Pending`].
pub(crate) struct Completion<T> {
    slot: Option<Arc<Slot<T>>>,
    abandoned: Option<CommError>,
}

impl<T> Completion<T> {
    pub(crate) fn complete(mut self, result: Result<T, CommError>) {
        self.finish(result);
    }

    fn finish(&mut self, result: Result<T, CommError>) {
        if let Some(slot) = self.slot.take() {
            *lock(&slot.result) = Some(result);
            slot.done.notify_all();
        }
    }
}

impl<T> Drop for Completion<T> {
    fn drop(&mut self) {
        if let Some(error) = self.abandoned.take() {
            self.finish(Err(error));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inquiry::Waiters;

    /// A lane without jobs.
    struct Idle;

    impl Help for Idle {
        fn help(&self) -> bool {
            false
        }

        fn waiters(&self) -> Arc<Waiters> {
            Arc::default()
        }
    }

    fn no_lane() -> Weak<dyn Help> {
        Weak::<Idle>::new()
    }

    fn gone() -> CommError {
        CommError::Io { rank: 0, detail: "the worker ended".into() }
    }

    #[test]
    fn a_result_arrives_from_another_thread() {
        let (completion, pending) = Pending::new(gone(), no_lane());
        assert!(!pending.is_done());
        let worker = std::thread::spawn(move || completion.complete(Ok(7)));
        assert_eq!(pending.wait(), Ok(7));
        worker.join().expect("the worker completes");
    }

    #[test]
    fn a_worker_that_ends_early_is_an_error_instead_of_a_hang() {
        let (completion, pending) = Pending::<()>::new(gone(), no_lane());
        drop(completion);
        assert_eq!(pending.wait(), Err(gone()));
    }

    #[test]
    fn map_runs_on_the_waiting_thread() {
        let (completion, pending) = Pending::new(gone(), no_lane());
        let pending = pending.map(|number: i32| Ok((number + 1, std::thread::current().id())));
        assert!(!pending.is_done());
        std::thread::spawn(move || completion.complete(Ok(7))).join().expect("the worker completes");
        assert!(pending.is_done());
        assert_eq!(pending.wait(), Ok((8, std::thread::current().id())));
        let failed =
            Pending::<i32>::ready(Err(gone())).map(|_| -> Result<(), _> { unreachable!("there is no result") });
        assert_eq!(failed.wait(), Err(gone()));
    }

    #[test]
    fn a_pending_may_be_dropped_before_completion() {
        let (completion, pending) = Pending::new(gone(), no_lane());
        drop(pending);
        completion.complete(Ok(()));
    }
}
