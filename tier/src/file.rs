//! The swap file of one rank.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::io::Errno;

use crate::buffer::{ALIGNMENT, AlignedBuffer, align};
use crate::error::DiskError;
use crate::loan::Lend;
use crate::queue::{Pending, Queue, Statistics};
use crate::ring::Ring;
use crate::schedule::Direction;
use crate::{place, positioned, ring};

/// I/O options of a [`SwapFile`]: the `aio` section of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Block size in bytes, a multiple of [`ALIGNMENT`]. Requests are cut into blocks.
    pub block_size: usize,
    /// Number of blocks in flight per thread, 1 to 1024.
    pub queue_depth: usize,
    /// Submits each block to the kernel separately instead of batching all ready blocks. io_uring only. Batching needs
    /// fewer system calls, but the disk idles until the kernel has prepared the last block of a batch: batched writes
    /// take 1.2 times as long as separately submitted ones.
    pub single_submit: bool,
    /// Starts a new block whenever one completes, instead of when all have. io_uring only.
    pub overlap_events: bool,
    /// Number of threads that serve the file, each with `queue_depth` blocks in flight; 1 to 64.
    pub intra_op_parallelism: usize,
    /// Uses io_uring where the kernel permits it. Otherwise each block in flight has a thread that calls `pread` or
    /// `pwrite`.
    pub io_uring: bool,
    /// Bypasses the page cache with O_DIRECT where the file system supports it.
    pub direct: bool,
    /// Copies vectors through huge pages, because their own pages are small and a disk accepts only a limited number of
    /// pages per transfer. The copies take [`bounce_bytes`](Options::bounce_bytes) of memory for the lifetime of the
    /// file. io_uring only.
    pub bounce: bool,
}

impl Options {
    /// Returns the bytes of memory that the file allocates in addition to the caller's buffers.
    #[must_use]
    pub fn bounce_bytes(&self) -> u64 {
        let bytes = self.intra_op_parallelism * self.queue_depth * self.block_size;
        if self.bounce && self.io_uring { bytes as u64 } else { 0 }
    }
}

impl Default for Options {
    /// The defaults saturate a local disk: it is no faster with blocks above 1 MiB, or with more than eight blocks in
    /// flight.
    fn default() -> Options {
        Options {
            block_size: 1 << 20,
            queue_depth: 8,
            single_submit: true,
            overlap_events: true,
            intra_op_parallelism: 1,
            io_uring: true,
            direct: true,
            bounce: false,
        }
    }
}

/// The I/O mechanism of a swap file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// The kernel, through io_uring.
    IoUring,
    /// Threads that call `pread` and `pwrite`.
    Positioned,
}

/// Maximum number of threads of the positioned backend. More threads wait for each other rather than for the disk.
const MOST_THREADS: usize = 64;

/// A private file in a folder on a disk. It has no name and disappears when this value is dropped or the process ends.
///
/// Requests that do not overlap run concurrently in any order. When two requests overlap and at least one writes, the
/// later one starts after the earlier one completes, so a read sees every write requested before it.
#[derive(Debug)]
pub struct SwapFile {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
    size: u64,
    backend: Backend,
    direct: bool,
    notices: Vec<String>,
    bounce_bytes: u64,
}

impl SwapFile {
    /// Creates a zero-filled file of `size` bytes, rounded up to [`ALIGNMENT`], in `folder`, and reserves its space.
    ///
    /// # Errors
    /// Fails if the folder does not exist, is not writable or has too little space, or if an option is out of range.
    pub fn create(folder: &Path, size: u64, options: &Options) -> Result<SwapFile, DiskError> {
        let invalid = |detail| Err(DiskError::Invalid { folder: folder.into(), detail });
        let Options { block_size, queue_depth, intra_op_parallelism, .. } = *options;
        if block_size == 0 || !block_size.is_multiple_of(ALIGNMENT) {
            return invalid(format!("`block_size` is {block_size}; it must be a multiple of {ALIGNMENT}"));
        }
        if !(1..=1024).contains(&queue_depth) {
            return invalid(format!("`queue_depth` is {queue_depth}; it must be between 1 and 1024"));
        }
        if !(1..=64).contains(&intra_op_parallelism) {
            return invalid(format!("`intra_op_parallelism` is {intra_op_parallelism}; it must be between 1 and 64"));
        }
        let size = align(size);
        let place::Reserved { file, direct, mut notices } = place::reserve(folder, size, options.direct)?;
        let rings = if options.io_uring { rings(options) } else { Ok(Default::default()) };
        let (rings, bells) = rings.unwrap_or_else(|errno| {
            notices.push(format!("io_uring is unavailable ({errno}); threads read and write offloaded data instead"));
            Default::default()
        });
        let backend = if rings.is_empty() { Backend::Positioned } else { Backend::IoUring };
        let queue = Arc::new(Queue::new(file, folder.into(), block_size as u64, bells));
        // Construct the file before its threads: if a thread cannot be started, dropping the file ends the other
        // threads.
        let bounce_bytes = if backend == Backend::IoUring { options.bounce_bytes() } else { 0 };
        let mut swap = SwapFile { queue, threads: vec![], size, backend, direct, notices, bounce_bytes };
        match backend {
            Backend::IoUring => ring::start(&swap.queue, rings, options, &mut swap.threads)?,
            Backend::Positioned => {
                let count = (queue_depth * intra_op_parallelism).min(MOST_THREADS);
                positioned::start(&swap.queue, count, &mut swap.threads)?;
            }
        }
        Ok(swap)
    }

    /// Reads `len` bytes at offset `at` into the start of `buffer`. `at` and `len` must be multiples of [`ALIGNMENT`],
    /// as [`align`] returns; otherwise the [`Pending`] resolves to an error.
    pub fn read(&self, at: u64, buffer: AlignedBuffer, len: usize) -> Pending {
        self.lend(Direction::Read, at, buffer, len)
    }

    /// Submits a request for the first `len` bytes of `buffer`.
    pub(crate) fn lend<B: Lend>(&self, direction: Direction, at: u64, buffer: B, len: usize) -> Pending<B> {
        let is_whole = || match direction {
            Direction::Read => Ok(()),
            Direction::Write => self.is_whole(at, len),
        };
        match self.accepts(at, buffer.room(), len).and_then(|()| is_whole()) {
            Ok(()) => self.queue.submit(direction, at, buffer, len),
            Err(error) => Pending::failed(error),
        }
    }

    /// Writes the first `len` bytes of `buffer` at offset `at`. `len` may exceed the bytes in use, up to the capacity.
    /// `at` and `len` must be multiples of [`ALIGNMENT`], as [`align`] returns; otherwise the [`Pending`] resolves to
    /// an error.
    pub fn write(&self, at: u64, buffer: AlignedBuffer, len: usize) -> Pending {
        self.lend(Direction::Write, at, buffer, len)
    }

    /// Returns the size of the file in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the bytes of memory that the file allocates in addition to the caller's buffers.
    pub fn bounce_bytes(&self) -> u64 {
        self.bounce_bytes
    }

    /// Returns the I/O mechanism in use.
    pub fn backend(&self) -> Backend {
        self.backend
    }

    /// Returns whether reads and writes bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// Returns messages to show the user once: each names a refused feature and the fallback.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Returns the I/O counters so far.
    pub fn statistics(&self) -> Statistics {
        self.queue.statistics()
    }

    /// Returns the file, for reads and writes of the caller that are not ordered with requests in flight. If
    /// [`SwapFile::is_direct`], offsets, lengths and addresses must be multiples of [`ALIGNMENT`].
    pub fn file(&self) -> &File {
        &self.queue.file
    }

    /// Returns the folder that was chosen for the file.
    pub fn folder(&self) -> &Path {
        &self.queue.folder
    }

    fn accepts(&self, at: u64, capacity: usize, len: usize) -> Result<(), DiskError> {
        let end = at.checked_add(len as u64).filter(|&end| end <= self.size);
        let detail = if !at.is_multiple_of(ALIGNMENT as u64) || !len.is_multiple_of(ALIGNMENT) {
            format!("{len} bytes at {at} are not aligned to {ALIGNMENT}")
        } else if len > capacity {
            format!("{len} bytes do not fit into the buffer of {capacity}")
        } else if end.is_none() {
            format!("{len} bytes at {at} are beyond the end of the file at {}", self.size)
        } else {
            return Ok(());
        };
        Err(DiskError::Invalid { folder: self.queue.folder.clone(), detail })
    }

    /// Checks that the file still has its full length. A write past the end of a truncated file would extend it again,
    /// and the hole would read as zeros.
    fn is_whole(&self, at: u64, len: usize) -> Result<(), DiskError> {
        match self.queue.file.metadata() {
            Ok(metadata) if metadata.len() < self.size => Err(self.queue.cut_short(metadata.len(), at, len as u64)),
            Ok(_) => Ok(()),
            Err(error) => Err(DiskError::refused(&self.queue.folder, "read the length of the swap file", error)),
        }
    }
}

/// Checks that this process may use io_uring, which transfers offloaded state at a lower CPU cost than threads do.
///
/// # Errors
/// Returns the kernel's error text if it lacks io_uring or forbids it for this process.
pub fn io_uring() -> Result<(), String> {
    let options = Options { intra_op_parallelism: 1, bounce: false, ..Options::default() };
    rings(&options).map(drop).map_err(|errno| errno.to_string())
}

/// Creates a ring for each thread, and the eventfds that wake the threads.
fn rings(options: &Options) -> Result<(Vec<Ring>, Vec<OwnedFd>), Errno> {
    let bounce = if options.bounce { options.block_size } else { 0 };
    let rings = (0..options.intra_op_parallelism).map(|_| Ring::new(options.queue_depth, bounce));
    let rings = rings.collect::<Result<Vec<_>, _>>()?;
    let bells = rings.iter().map(Ring::bell).collect::<Result<_, _>>()?;
    Ok((rings, bells))
}

impl Drop for SwapFile {
    /// Waits for the blocks in flight. Requests that have not started fail.
    fn drop(&mut self) {
        self.queue.close("the file was dropped");
        for thread in self.threads.drain(..) {
            // A join error means that the thread panicked; its requests have already failed.
            let _ = thread.join();
        }
    }
}
