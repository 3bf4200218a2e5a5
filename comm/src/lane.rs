//! A worker thread that owns one end of a connection and does jobs on it in order.
//!
//! One lane carries a group's collectives, one each the messages to and from a peer. So an operation blocks only those behind
//! it in its own lane, and plain blocking code cannot deadlock against the operations of another lane.

use std::sync::mpsc;
use std::thread::JoinHandle;

type Job<E> = Box<dyn FnOnce(&mut E) + Send>;

/// A thread that does jobs on an endpoint of type `E`. Dropping it waits until the jobs are done.
pub(crate) struct Lane<E: ?Sized> {
    jobs: Option<mpsc::Sender<Job<E>>>,
    thread: Option<JoinHandle<()>>,
}

impl<E: ?Sized + Send + 'static> Lane<E> {
    pub(crate) fn start(name: String, mut endpoint: Box<E>) -> std::io::Result<Lane<E>> {
        let (jobs, queue) = mpsc::channel::<Job<E>>();
        let work = move || {
            while let Ok(job) = queue.recv() {
                job(&mut endpoint);
            }
        };
        let thread = std::thread::Builder::new().name(name).spawn(work)?;
        Ok(Lane { jobs: Some(jobs), thread: Some(thread) })
    }

    /// Appends a job. If the thread has ended the job is dropped, and with it the handle that completes its result.
    pub(crate) fn submit(&self, job: impl FnOnce(&mut E) + Send + 'static) {
        if let Some(jobs) = &self.jobs {
            let _ = jobs.send(Box::new(job));
        }
    }
}

impl<E: ?Sized> Drop for Lane<E> {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
