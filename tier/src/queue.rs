//! The request queue of a swap file: requests that wait, blocks in flight, and results.
//!
//! Callers submit requests. The backends take blocks and report the system's result for each. Everything independent of
//! the backend is here: order, short transfers, errors, counters and closing.

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
    /// Blocks until the request completes or fails. Returns the buffer with only the bytes that were read changed.
    /// After a failed write, the range in the file holds old or new bytes.
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
    /// Bytes read from the disk.
    pub read_bytes: u64,
    /// Bytes written to the disk.
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
    /// Set once the queue accepts no more requests: the reason.
    closed: Option<DiskError>,
    /// Number of blocks in flight, and `busy_since`, the time from which at least one was.
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

    /// Submits a request for `len` bytes. The caller has checked that they lie within the file and the buffer.
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
        // Drop the block's memory before the request can complete.
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

    /// Closes the queue: hands out no more blocks and fails every request with blocks left. The backends may still
    /// report the blocks in flight.
    pub(crate) fn close(&self, reason: &str) {
        let error = DiskError::Closed { folder: self.folder.clone(), reason: reason.into() };
        let mut state = self.lock();
        state.closed.get_or_insert(error.clone());
        let idle = state.schedule.close(|request| request.error = Some(error.clone()));
        drop(state);
        self.fail(idle, &error);
    }

    /// Closes the queue as [`close`](Queue::close) does, when no backend will report the blocks in flight. Their memory
    /// stays allocated.
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
mod tests {
    use super::*;

    /// A queue on a file of `size` bytes, with one request for four one-page blocks, all of which are in flight.
    fn four_blocks(direction: Direction, size: u64) -> (Queue, Pending, Vec<Block>) {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(size).expect("a length");
        let queue = Queue::new(file, "/nvme".into(), ALIGNMENT as u64, vec![]);
        let buffer = AlignedBuffer::zeroed(4 * ALIGNMENT).expect("memory");
        let pending = queue.submit(direction, 0, buffer, 4 * ALIGNMENT);
        let blocks: Vec<Block> = std::iter::from_fn(|| queue.try_next()).collect();
        assert_eq!(blocks.iter().map(|block| block.at).collect::<Vec<_>>(), [0, 4096, 8192, 12288]);
        (queue, pending, blocks)
    }

    #[test]
    fn a_request_fails_with_its_first_error_after_all_blocks_are_reported() {
        let cases = [
            (Direction::Read, Errno::IO, "/nvme: cannot read 4096 bytes at byte 12288 of the swap file: "),
            (Direction::Write, Errno::IO, "/nvme: cannot write 4096 bytes at byte 12288 of the swap file: "),
            (Direction::Write, Errno::NOSPC, "/nvme: no space left to write 4096 bytes at byte 12288"),
            (Direction::Write, Errno::DQUOT, "/nvme: no space left to write 4096 bytes at byte 12288"),
        ];
        for (direction, errno, text) in cases {
            let (queue, pending, mut blocks) = four_blocks(direction, 1 << 20);
            let outcomes = [Err(errno), Ok(ALIGNMENT), Err(Errno::NXIO), Ok(ALIGNMENT)];
            for outcome in outcomes {
                assert!(pending.state.as_ref().expect("in flight").try_recv().is_err(), "completed too early");
                assert!(queue.report(blocks.pop().expect("four"), outcome).is_none());
            }
            let error = pending.wait().expect_err("two errors").to_string();
            assert!(error.starts_with(text), "{error}");
            let Statistics { reads, writes, read_bytes, written_bytes, .. } = queue.statistics();
            assert_eq!((reads + writes, read_bytes + written_bytes), (0, 8192));
            // The queue still accepts requests.
            let next = queue.submit(direction, 0, AlignedBuffer::zeroed(1).expect("memory"), ALIGNMENT);
            queue.report(queue.try_next().expect("a block"), Ok(ALIGNMENT));
            next.wait().expect("done");
        }
    }

    #[test]
    fn short_transfers_are_resumed() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(1 << 20).expect("a length");
        let queue = Queue::new(file, "/nvme".into(), 1 << 20, vec![]);
        let buffer = || AlignedBuffer::zeroed(4 * ALIGNMENT).expect("memory");
        let pending = queue.submit(Direction::Read, 0, buffer(), 4 * ALIGNMENT);
        let block = queue.report(queue.try_next().expect("a block"), Err(Errno::INTR)).expect("the whole block");
        assert_eq!((block.at, block.part.len()), (0, 4 * ALIGNMENT));
        let block = queue.report(block, Ok(ALIGNMENT + 5)).expect("the rest");
        assert_eq!((block.at, block.part.len()), (4096, 3 * ALIGNMENT));
        assert!(queue.report(block, Ok(3 * ALIGNMENT)).is_none());
        pending.wait().expect("done");
        assert_eq!((queue.statistics().reads, queue.statistics().read_bytes), (1, 4 * 4096));
        // Within the file, a transfer of less than a page is an error, because it cannot be resumed.
        for direction in [Direction::Read, Direction::Write] {
            let pending = queue.submit(direction, 4096, buffer(), ALIGNMENT);
            assert!(queue.report(queue.try_next().expect("a block"), Ok(0)).is_none());
            assert!(matches!(pending.wait(), Err(DiskError::Read { .. } | DiskError::Write { .. })));
        }
    }

    #[test]
    fn closing_fails_waiting_requests_and_completes_blocks_in_flight() {
        let (queue, whole, blocks) = four_blocks(Direction::Write, 1 << 20);
        let waiting = queue.submit(Direction::Read, 0, AlignedBuffer::zeroed(1).expect("memory"), ALIGNMENT);
        queue.close("it was dropped");
        assert!(waiting.wait().expect_err("not started").to_string().contains("it was dropped"));
        let late = queue.submit(Direction::Read, 0, AlignedBuffer::zeroed(1).expect("memory"), ALIGNMENT);
        assert!(matches!(late.wait(), Err(DiskError::Closed { .. })));
        for block in blocks {
            assert!(queue.report(block, Ok(ALIGNMENT)).is_none());
        }
        assert_eq!(whole.wait().expect("all of it was done").len(), 4 * ALIGNMENT);
        assert!(queue.next().is_none());
    }

    #[test]
    fn abandoned_blocks_keep_their_memory() {
        let (queue, pending, mut blocks) = four_blocks(Direction::Read, 1 << 20);
        queue.abandon("io_uring failed");
        assert!(pending.wait().expect_err("an abandoned request").to_string().ends_with("closed: io_uring failed"));
        let mut block = blocks.pop().expect("four");
        block.part.as_room().fill(std::mem::MaybeUninit::new(1));
        assert!(queue.report(block, Ok(ALIGNMENT)).is_none());
    }

    #[test]
    fn a_panic_of_a_service_thread_fails_pending_requests() {
        let (queue, pending, blocks) = four_blocks(Direction::Read, 1 << 20);
        let served = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _watch = Watch(&queue);
            let _blocks = blocks;
            panic!("a mistake of ours");
        }));
        assert!(served.is_err());
        assert!(matches!(pending.wait(), Err(DiskError::Closed { .. })));
    }
}
