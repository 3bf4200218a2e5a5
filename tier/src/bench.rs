//! Timing a swap file in turn with the disk itself, for `zero-train bench io` and the example of this crate.
//!
//! The floor is the plainest way to move the same bytes at the disk's full rate: as many threads as there are blocks under way, each with
//! one block of memory, calls `pread` or `pwrite` for the next block, past the page cache, on another file of the same size. No requests,
//! no order, no buffers that come and go: what a [`SwapFile`] takes longer is the price of those.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::buffer::{AlignedBuffer, BufferPool, align};
use crate::error::DiskError;
use crate::file::{Options, SwapFile};
use crate::place;
use crate::queue::Pending;

/// What is moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// The file is read from its start to its end.
    Read,
    /// The file is written from its start to its end.
    Write,
    /// Each range is read and written back, as an optimizer does with its state; the bytes count twice.
    Update,
}

impl Load {
    /// All of them.
    pub const ALL: [Load; 3] = [Load::Read, Load::Write, Load::Update];

    /// In small letters.
    pub fn name(self) -> &'static str {
        match self {
            Load::Read => "read",
            Load::Write => "write",
            Load::Update => "update",
        }
    }
}

/// Times of a load through a swap file and of the same bytes without, taken in turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Comparison {
    /// Bytes that are moved in each run.
    pub bytes: u64,
    /// Through a swap file.
    pub subject: Vec<Duration>,
    /// Without.
    pub floor: Vec<Duration>,
}

impl Comparison {
    /// How many times its floor each run took, from the smallest.
    pub fn ratios(&self) -> Vec<f64> {
        let ratio = |(subject, floor): (&Duration, &Duration)| subject.as_secs_f64() / floor.as_secs_f64().max(1e-9);
        let mut ratios: Vec<f64> = self.subject.iter().zip(&self.floor).map(ratio).collect();
        ratios.sort_by(f64::total_cmp);
        ratios
    }
}

/// The middle value; zero for none.
pub fn median(times: &[Duration]) -> Duration {
    let mut times = times.to_vec();
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// What a benchmark moves, and how.
#[derive(Debug, Clone)]
pub struct Size {
    /// Bytes of each of the two files.
    pub file: u64,
    /// Bytes of a request, as a sub-group of the optimizer would be.
    pub request: usize,
    /// Requests under way at a time.
    pub requests: usize,
    /// Runs of each, after one that does not count.
    pub repeats: usize,
}

/// Two files of the same size in one folder: one is the subject, the other the floor.
pub struct Bench {
    swap: SwapFile,
    plain: File,
    pool: BufferPool,
    size: Size,
    options: Options,
}

impl Bench {
    /// Reserves both files and writes each once: what has never been written is read from no disk.
    ///
    /// # Errors
    /// The folder has not the space, or the disk fails.
    pub fn new(folder: &Path, size: &Size, options: &Options) -> Result<Bench, DiskError> {
        let request = align(size.request.max(1) as u64);
        // Whole requests.
        let file = size.file.max(1).div_ceil(request) * request;
        let size = Size { file, request: request as usize, requests: size.requests.max(1), ..*size };
        place::check(folder, 2 * file)?;
        let swap = SwapFile::create(folder, file, options)?;
        let plain = place::reserve(folder, file, options.direct)?.file;
        let mut bench = Bench { swap, plain, pool: BufferPool::new(), size, options: options.clone() };
        bench.through_swap(Load::Write)?;
        bench.plainly(Load::Write)?;
        Ok(bench)
    }

    /// The file that is measured.
    pub fn swap_file(&self) -> &SwapFile {
        &self.swap
    }

    /// Times a load in turn with its floor.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn compare(&mut self, load: Load) -> Result<Comparison, DiskError> {
        let (mut subject, mut floor) = (vec![], vec![]);
        for _ in 0..=self.size.repeats {
            subject.push(self.through_swap(load)?);
            floor.push(self.plainly(load)?);
        }
        let bytes = self.size.file * if load == Load::Update { 2 } else { 1 };
        Ok(Comparison { bytes, subject: subject.split_off(1), floor: floor.split_off(1) })
    }

    fn through_swap(&mut self, load: Load) -> Result<Duration, DiskError> {
        let Size { file, request, requests, .. } = self.size;
        let start = Instant::now();
        let mut under_way: std::collections::VecDeque<(u64, Pending, bool)> = Default::default();
        let mut next = 0;
        let mut spare = requests;
        loop {
            while spare > 0 && next < file {
                let buffer = self.pool.take(request)?;
                let pending = match load {
                    Load::Write => self.swap.write(next, buffer, request),
                    Load::Read | Load::Update => self.swap.read(next, buffer, request),
                };
                under_way.push_back((next, pending, load == Load::Update));
                (next, spare) = (next + request as u64, spare - 1);
            }
            let Some((at, pending, write_back)) = under_way.pop_front() else { return Ok(start.elapsed()) };
            let buffer = pending.wait()?;
            if write_back {
                under_way.push_back((at, self.swap.write(at, buffer, request), false));
            } else {
                self.pool.put(buffer);
                spare += 1;
            }
        }
    }

    fn plainly(&self, load: Load) -> Result<Duration, DiskError> {
        let block = self.options.block_size as u64;
        let next = AtomicU64::new(0);
        let failed = |error: std::io::Error| DiskError::Refused {
            folder: Default::default(),
            step: format!("{} the file of the floor", load.name()),
            reason: error.to_string(),
        };
        let work = |mut buffer: AlignedBuffer| -> Result<(), DiskError> {
            loop {
                let at = next.fetch_add(block, Ordering::Relaxed);
                if at >= self.size.file {
                    return Ok(());
                }
                let bytes = &mut buffer.as_bytes_mut()[..block.min(self.size.file - at) as usize];
                if load != Load::Write {
                    self.plain.read_exact_at(bytes, at).map_err(failed)?;
                }
                if load != Load::Read {
                    self.plain.write_all_at(bytes, at).map_err(failed)?;
                }
            }
        };
        let buffers = (0..self.options.queue_depth).map(|_| AlignedBuffer::zeroed(self.options.block_size));
        let buffers = buffers.collect::<Result<Vec<_>, _>>()?;
        let start = Instant::now();
        std::thread::scope(|scope| {
            let threads: Vec<_> = buffers.into_iter().map(|buffer| scope.spawn(|| work(buffer))).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("it has no way to panic"))
        })?;
        Ok(start.elapsed())
    }
}
