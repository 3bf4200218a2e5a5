//! The request queue of a swap file: requests that wait, blocks in flight, and results.
//!
//! Callers submit requests. The backends take blocks and report the system's result for each. This module holds
//! everything that does not depend on the backend: order, short transfers, errors, counters and closing.

use std::any::Any;
use std::fs::File;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::io::Errno;

use crate::buffer::{ALIGNMENT, AlignedBuffer};
use crate::error::DiskError;
use crate::loan::{Lend, Loan, Part};
use crate::schedule::{Direction, Schedule};

/// A request in flight, which owns its buffer.
///
/// Dropping this value loses the buffer and the error, but the request keeps the memory alive until the disk is done
/// with it. A wait has no deadline, because the kernel cannot cancel a transfer that it has issued to a disk.
#[derive(Debug)]
#[must_use = "dropping a request without waiting loses its buffer and its error"]
pub struct Pending<B = AlignedBuffer> {
    state: Result<Receiver<RequestResult>, DiskError>,
    folder: PathBuf,
    lent: PhantomData<B>,
}

/// The lent buffer, or why its request failed.
type RequestResult = Result<Box<dyn Any + Send>, DiskError>;

impl<B: 'static> Pending<B> {
    /// Blocks until the request completes or fails. Returns the buffer, in which only the bytes that were read have
    /// changed. After a failed write, the range in the file holds old or new bytes.
    ///
    /// # Errors
    /// Returns the error of the disk or the system, or [`DiskError::Invalid`] if the arguments of the request were
    /// wrong.
    pub fn wait(self) -> Result<B, DiskError> {
        let closed = |reason: &str| DiskError::Closed { folder: self.folder.clone(), reason: reason.into() };
        let lent = self.state?.recv().unwrap_or_else(|_| Err(closed("the I/O thread ended")))?;
        lent.downcast().map(|lent| *lent).map_err(|_| closed("the I/O thread returned another buffer"))
    }

    /// Creates a request that failed before it started.
    pub(crate) fn failed(error: DiskError) -> Pending<B> {
        Pending { state: Err(error), folder: PathBuf::new(), lent: PhantomData }
    }
}

/// I/O counters of a swap file.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Statistics {
    /// Completed read requests.
    pub reads: u64,
    /// Completed write requests.
    pub writes: u64,
    /// Number of bytes read from the disk.
    pub read_bytes: u64,
    /// Number of bytes written to the disk.
    pub written_bytes: u64,
    /// Seconds in which at least one block was in flight.
    pub busy_seconds: f64,
}

/// A block of a request with its memory, for the backend that carries it out.
pub(crate) struct Block {
    id: u64,
    pub(crate) direction: Direction,
    /// Offset in the file.
    pub(crate) at: u64,
    pub(crate) part: Part,
}

/// See the [module](self).
pub(crate) struct Queue {
    pub(crate) file: File,
    pub(crate) folder: PathBuf,
    state: Mutex<State>,
    /// Signalled when blocks may be ready or the queue is closed.
    work: Condvar,
    /// The same signal for threads that sleep in the kernel: eventfds.
    bells: Vec<OwnedFd>,
}

struct State {
    schedule: Schedule<Request>,
    /// Why the queue accepts no more requests; set when it is closed.
    closed: Option<DiskError>,
    /// Number of blocks in flight. If it is not 0, it has been above 0 since `busy_since`.
    out: usize,
    busy_since: Instant,
    statistics: Statistics,
}

struct Request {
    loan: Loan,
    error: Option<DiskError>,
    result: SyncSender<RequestResult>,
}

impl Request {
    /// Sends the result to the waiter, if any.
    fn settle(self, folder: &Path) {
        let result = match self.error {
            Some(error) => Err(error),
            None => self.loan.end().ok_or_else(|| DiskError::Closed {
                folder: folder.into(),
                reason: "the request ended before the disk had released its buffer".into(),
            }),
        };
        // An error means that the `Pending` was dropped.
        let _ = self.result.send(result);
    }
}

impl Queue {
    pub(crate) fn new(file: File, folder: PathBuf, block_size: u64, bells: Vec<OwnedFd>) -> Queue {
        let state = State {
            schedule: Schedule::new(block_size),
            closed: None,
            out: 0,
            busy_since: Instant::now(),
            statistics: Statistics::default(),
        };
        Queue { file, folder, state: Mutex::new(state), work: Condvar::new(), bells }
    }

    /// Submits a request for `len` bytes. The caller has checked that these bytes lie within the file and the buffer.
    pub(crate) fn submit<B: Lend>(&self, direction: Direction, at: u64, buffer: B, len: usize) -> Pending<B> {
        let (result, receiver) = sync_channel(1);
        let request = Request { loan: Loan::new(buffer, direction), error: None, result };
        let mut state = self.lock();
        if let Some(error) = &state.closed {
            return Pending::failed(error.clone());
        }
        if len == 0 {
            request.settle(&self.folder);
        } else {
            state.schedule.add(direction, at..at + len as u64, request);
            drop(state);
            self.wake();
        }
        Pending { state: Ok(receiver), folder: self.folder.clone(), lent: PhantomData }
    }

    /// Returns the next block that is ready, if any.
    pub(crate) fn try_next(&self) -> Option<Block> {
        self.lock().next()
    }

    /// Waits for the next ready block. Returns `None` once the queue is closed.
    pub(crate) fn next(&self) -> Option<Block> {
        let mut state = self.lock();
        loop {
            match state.next() {
                Some(block) => return Some(block),
                None if state.closed.is_some() => return None,
                None => state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Reports the result of a block: the bytes transferred by the system, or its error. Returns the rest of the block
    /// after a short or interrupted transfer.
    pub(crate) fn report(&self, mut block: Block, outcome: Result<usize, Errno>) -> Option<Block> {
        let left = block.part.len();
        let outcome = match outcome {
            Err(Errno::INTR) => return Some(block),
            // A transfer may end early, at any multiple of the disk's block size.
            Ok(bytes) if bytes < left && bytes >= ALIGNMENT => {
                let bytes = bytes / ALIGNMENT * ALIGNMENT;
                self.lock().count(block.direction, bytes);
                block.part.skip(bytes);
                block.at += bytes as u64;
                return Some(block);
            }
            Ok(bytes) if bytes >= left => Ok(()),
            Ok(bytes) => Err(self.short(&block, bytes)),
            Err(errno) => Err(self.failure(&block, errno)),
        };
        let (id, direction) = (block.id, block.direction);
        // Drop the block's memory before the request can complete: the buffer returns to its owner only if no block
        // holds it.
        drop(block);
        let mut state = self.lock();
        state.count(direction, if outcome.is_ok() { left } else { 0 });
        state.out -= 1;
        if state.out == 0 {
            state.statistics.busy_seconds += state.busy_since.elapsed().as_secs_f64();
        }
        if let Err(error) = outcome {
            state.schedule.stop(id);
            if let Some(request) = state.schedule.payload(id) {
                request.error.get_or_insert(error);
            }
        }
        if let Some(request) = state.schedule.done(id) {
            match direction {
                _ if request.error.is_some() => {}
                Direction::Read => state.statistics.reads += 1,
                Direction::Write => state.statistics.writes += 1,
            }
            drop(state);
            request.settle(&self.folder);
            self.wake();
        }
        None
    }

    /// Closes the queue: hands out no more blocks, and fails every request that still had blocks to hand out. The
    /// backends may still report the blocks in flight.
    pub(crate) fn close(&self, reason: &str) {
        let error = DiskError::Closed { folder: self.folder.clone(), reason: reason.into() };
        let mut state = self.lock();
        state.closed.get_or_insert(error.clone());
        let idle = state.schedule.close(|request| request.error = Some(error.clone()));
        drop(state);
        self.fail(idle, &error);
    }

    /// Closes the queue as [`close`](Queue::close) does, but also fails the requests that have blocks in flight,
    /// because no backend will report these blocks. Their memory stays allocated.
    pub(crate) fn abandon(&self, reason: &str) {
        let error = DiskError::Closed { folder: self.folder.clone(), reason: reason.into() };
        let mut state = self.lock();
        state.closed.get_or_insert(error.clone());
        let all = state.schedule.abandon();
        drop(state);
        self.fail(all, &error);
    }

    fn fail(&self, requests: Vec<Request>, error: &DiskError) {
        for mut request in requests {
            request.error.get_or_insert(error.clone());
            request.settle(&self.folder);
        }
        self.wake();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed.is_some()
    }

    pub(crate) fn statistics(&self) -> Statistics {
        let state = self.lock();
        let mut statistics = state.statistics;
        if state.out > 0 {
            statistics.busy_seconds += state.busy_since.elapsed().as_secs_f64();
        }
        statistics
    }

    fn wake(&self) {
        self.work.notify_all();
        for bell in &self.bells {
            // The write fails only if the eventfd's counter would overflow, after 2^64 unread rings.
            let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the error for a transfer that ended within a page.
    fn short(&self, block: &Block, bytes: usize) -> DiskError {
        let (at, left) = (block.at, block.part.len() as u64);
        match (self.file.metadata().map(|metadata| metadata.len()), block.direction) {
            (Ok(end), _) if end < at + left => self.cut_short(end, at, left),
            (_, Direction::Read) => self.failure_text(block, format!("only {bytes} bytes were read")),
            (_, Direction::Write) => self.failure_text(block, format!("only {bytes} bytes were written")),
        }
    }

    /// Returns the error for bytes past the end of the file.
    pub(crate) fn cut_short(&self, end: u64, at: u64, bytes: u64) -> DiskError {
        DiskError::CutShort { folder: self.folder.clone(), end, at, bytes }
    }

    fn failure(&self, block: &Block, errno: Errno) -> DiskError {
        match (errno, block.direction) {
            (Errno::NOSPC | Errno::DQUOT, Direction::Write) => {
                DiskError::Full { folder: self.folder.clone(), at: block.at, bytes: block.part.len() as u64 }
            }
            _ => self.failure_text(block, errno.to_string()),
        }
    }

    fn failure_text(&self, block: &Block, reason: String) -> DiskError {
        let (folder, at, bytes) = (self.folder.clone(), block.at, block.part.len() as u64);
        match block.direction {
            Direction::Read => DiskError::Read { folder, at, bytes, reason },
            Direction::Write => DiskError::Write { folder, at, bytes, reason },
        }
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").field("folder", &self.folder).finish_non_exhaustive()
    }
}

/// Guard held by a thread that serves a queue. If the thread panics, all pending requests fail.
pub(crate) struct Watch<'a>(pub(crate) &'a Queue);

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abandon("an I/O thread panicked");
        }
    }
}

impl State {
    fn next(&mut self) -> Option<Block> {
        let (piece, request) = self.schedule.next()?;
        // Fits in `usize`: a request is no longer than its buffer.
        let part = request.loan.cut(piece.len as usize);
        if self.out == 0 {
            self.busy_since = Instant::now();
        }
        self.out += 1;
        Some(Block { id: piece.id, direction: piece.direction, at: piece.at, part })
    }

    fn count(&mut self, direction: Direction, bytes: usize) {
        match direction {
            Direction::Read => self.statistics.read_bytes += bytes as u64,
            Direction::Write => self.statistics.written_bytes += bytes as u64,
        }
    }
}

#[cfg(test)]
mod tests;
