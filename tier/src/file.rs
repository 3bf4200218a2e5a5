//! One rank's file on the disk tier.

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

/// How a [`SwapFile`] reads and writes: the `aio` section of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Requests are cut into blocks of so many bytes, a multiple of [`ALIGNMENT`].
    pub block_size: usize,
    /// So many blocks are under way at a time, 1 to 1024.
    pub queue_depth: usize,
    /// Each block is given to the kernel by itself, instead of all that are ready together. io_uring only. Together they cost fewer
    /// system calls, but the kernel hands the first on to the disk when it has prepared the last, and the disk waits: writes take
    /// 1.2 times as long.
    pub single_submit: bool,
    /// New blocks are begun as others are done, instead of when all are. io_uring only.
    pub overlap_events: bool,
    /// So many threads serve the file, each with `queue_depth` blocks; 1 to 64.
    pub intra_op_parallelism: usize,
    /// io_uring where it is permitted; else positioned reads and writes, on a thread for each block under way.
    pub io_uring: bool,
    /// Past the page cache where the file system can.
    pub direct: bool,
    /// Vectors go through memory of large pages, [`bounce_bytes`](Options::bounce_bytes) of it for as long as there is the file: their
    /// own pages are small, of which disks take few at a time. io_uring only.
    pub bounce: bool,
}

impl Options {
    /// Bytes of memory of a file beside the buffers that its user gives.
    #[must_use]
    pub fn bounce_bytes(&self) -> u64 {
        let bytes = self.intra_op_parallelism * self.queue_depth * self.block_size;
        if self.bounce && self.io_uring { bytes as u64 } else { 0 }
    }
}

impl Default for Options {
    /// Larger blocks than 1 MiB and more than eight of them are no faster on a local disk.
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

/// Who carries out reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// The kernel, asked through a ring.
    IoUring,
    /// Threads that call `pread` and `pwrite`.
    Positioned,
}

/// Threads of the positioned backend at most: more wait for each other, not for the disk.
const MOST_THREADS: usize = 64;

/// A file that only this value knows, in a folder on a disk. It has no name and is gone when this is dropped or the process ends.
///
/// Requests that do not overlap run at the same time in any order. Of two that overlap, unless both read, the later begins when
/// the earlier is done: a read sees all that was written before it was asked for.
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
    /// Makes a file of `size` bytes, rounded up to [`ALIGNMENT`], in `folder`, and reserves its space. It reads as zeros.
    ///
    /// # Errors
    /// The folder is not there, cannot be written to, or has not the space; the options are out of range.
    pub fn create(folder: &Path, size: u64, options: &Options) -> Result<SwapFile, DiskError> {
        let invalid = |detail| Err(DiskError::Invalid { folder: folder.into(), detail });
        let Options { block_size, queue_depth, intra_op_parallelism, .. } = *options;
        if block_size == 0 || !block_size.is_multiple_of(ALIGNMENT) {
            return invalid(format!("`block_size` is {block_size}, not a multiple of {ALIGNMENT}"));
        }
        if !(1..=1024).contains(&queue_depth) {
            return invalid(format!("`queue_depth` is {queue_depth}, not 1 to 1024"));
        }
        if !(1..=64).contains(&intra_op_parallelism) {
            return invalid(format!("`intra_op_parallelism` is {intra_op_parallelism}, not 1 to 64"));
        }
        let size = align(size);
        let place::Reserved { file, direct, mut notices } = place::reserve(folder, size, options.direct)?;
        let rings = if options.io_uring { rings(options) } else { Ok(Default::default()) };
        let (rings, bells) = rings.unwrap_or_else(|errno| {
            notices.push(format!("io_uring is refused here ({errno}), so threads read and write what is offloaded"));
            Default::default()
        });
        let backend = if rings.is_empty() { Backend::Positioned } else { Backend::IoUring };
        let queue = Arc::new(Queue::new(file, folder.into(), block_size as u64, bells));
        // Before its threads, so that those which were started end if another cannot be.
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

    /// Reads `len` bytes at `at` to the start of `buffer`. `at` and `len` are multiples of [`ALIGNMENT`], for which the caller
    /// sees with [`align`]; anything else is an error of the [`Pending`].
    pub fn read(&self, at: u64, buffer: AlignedBuffer, len: usize) -> Pending {
        self.lend(Direction::Read, at, buffer, len)
    }

    /// A request for the first `len` bytes of what is lent.
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

    /// Writes the first `len` bytes of `buffer`, beyond those in use if there are fewer, at `at`. `at` and `len` are multiples of
    /// [`ALIGNMENT`], for which the caller sees with [`align`]; anything else is an error of the [`Pending`].
    pub fn write(&self, at: u64, buffer: AlignedBuffer, len: usize) -> Pending {
        self.lend(Direction::Write, at, buffer, len)
    }

    /// Bytes of the file.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Bytes of memory beside the buffers that are read and written.
    pub fn bounce_bytes(&self) -> u64 {
        self.bounce_bytes
    }

    /// Who carries out reads and writes.
    pub fn backend(&self) -> Backend {
        self.backend
    }

    /// Whether reads and writes go past the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// What the user should be told once: what was refused, and what is done instead.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// What was read and written so far.
    pub fn statistics(&self) -> Statistics {
        self.queue.statistics()
    }

    pub(crate) fn file(&self) -> &File {
        &self.queue.file
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.queue.folder
    }

    fn accepts(&self, at: u64, capacity: usize, len: usize) -> Result<(), DiskError> {
        let end = at.checked_add(len as u64).filter(|&end| end <= self.size);
        let detail = if !at.is_multiple_of(ALIGNMENT as u64) || !len.is_multiple_of(ALIGNMENT) {
            format!("{len} bytes at {at} are not aligned to {ALIGNMENT}")
        } else if len > capacity {
            format!("{len} bytes are more than the {capacity} of the buffer")
        } else if end.is_none() {
            format!("{len} bytes at {at} lie beyond its {} bytes", self.size)
        } else {
            return Ok(());
        };
        Err(DiskError::Invalid { folder: self.queue.folder.clone(), detail })
    }

    /// A write behind the end of a file that was cut short would make it longer again, and the hole would read as zeros.
    fn is_whole(&self, at: u64, len: usize) -> Result<(), DiskError> {
        match self.queue.file.metadata() {
            Ok(metadata) if metadata.len() < self.size => Err(self.queue.cut_short(metadata.len(), at, len as u64)),
            Ok(_) => Ok(()),
            Err(error) => Err(DiskError::refused(&self.queue.folder, "tell the length of the swap file", error)),
        }
    }
}

/// Whether this process may use io_uring, by which offloaded state is read and written with less work than by threads.
///
/// # Errors
/// What the kernel says: that it has none, or that it is forbidden here.
pub fn io_uring() -> Result<(), String> {
    let options = Options { intra_op_parallelism: 1, bounce: false, ..Options::default() };
    rings(&options).map(drop).map_err(|errno| errno.to_string())
}

/// A ring for each thread, and the bells that wake them.
fn rings(options: &Options) -> Result<(Vec<Ring>, Vec<OwnedFd>), Errno> {
    let bounce = if options.bounce { options.block_size } else { 0 };
    let rings = (0..options.intra_op_parallelism).map(|_| Ring::new(options.queue_depth, bounce));
    let rings = rings.collect::<Result<Vec<_>, _>>()?;
    let bells = rings.iter().map(Ring::bell).collect::<Result<_, _>>()?;
    Ok((rings, bells))
}

impl Drop for SwapFile {
    /// Waits for what is under way. What has not begun fails.
    fn drop(&mut self) {
        self.queue.close("it was dropped");
        for thread in self.threads.drain(..) {
            // It ended by a panic, which its requests have been told.
            let _ = thread.join();
        }
    }
}
