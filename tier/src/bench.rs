//! Timing a swap file in turn with the disk itself, for `zero-train bench io` and the example of this crate.
//!
//! The floor is the plainest way to move the same bytes between the same file and as much memory at the disk's full rate: eight
//! threads call `pread` or `pwrite` for the next megabyte, past the page cache. No requests, no order, no buffers that come and go: what a
//! [`SwapFile`] takes longer is the price of those. As much memory, because that matters: a disk reads faster into a few
//! megabytes that stay in the processor's cache, but no training step wants its state there.

use std::collections::VecDeque;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::buffer::{AlignedBuffer, BufferPool, align};
use crate::error::DiskError;
use crate::file::{Options, SwapFile};
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

/// What the floor has under way: so many threads, with blocks of so many bytes. More of either was no faster on any disk tried.
const THREADS: usize = 8;
const BLOCK: usize = 1 << 20;

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

/// A swap file with what moves its bytes.
#[derive(Debug)]
pub struct Bench {
    swap: SwapFile,
    pool: BufferPool,
    /// With as much memory as the requests have that are under way.
    plain: Plain,
    size: Size,
}

impl Bench {
    /// Reserves the file and writes it once: what has never been written is read from no disk.
    ///
    /// # Errors
    /// The folder has not the space, there is not the memory, or the disk fails.
    pub fn new(folder: &Path, size: &Size, options: &Options) -> Result<Bench, DiskError> {
        let request = align(size.request.max(1) as u64);
        // Whole requests.
        let file = size.file.max(1).div_ceil(request).saturating_mul(request);
        let size = Size { file, request: request as usize, requests: size.requests.max(1), ..*size };
        let plain = Plain::new(size.request.saturating_mul(size.requests))?;
        let swap = SwapFile::create(folder, file, options)?;
        let mut bench = Bench { swap, pool: BufferPool::new(), plain, size };
        bench.through_swap(Load::Write)?;
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
        let (read, write) = match load {
            Load::Read => (self.size.file, 0),
            Load::Write => (0, self.size.file),
            Load::Update => (self.size.file, self.size.file),
        };
        let (mut subject, mut floor) = (vec![], vec![]);
        for _ in 0..=self.size.repeats {
            subject.push(self.through_swap(load)?);
            floor.push(self.plain.run(&self.swap, read, write)?);
        }
        let bytes = self.size.file * if load == Load::Update { 2 } else { 1 };
        Ok(Comparison { bytes, subject: subject.split_off(1), floor: floor.split_off(1) })
    }

    fn through_swap(&mut self, load: Load) -> Result<Duration, DiskError> {
        let Size { file, request, requests, .. } = self.size;
        let start = Instant::now();
        let (mut reads, mut writes) = (VecDeque::new(), VecDeque::new());
        let (mut next, mut spare) = (0, requests);
        loop {
            while spare > 0 && next < file {
                let buffer = self.pool.take(request)?;
                match load {
                    Load::Write => writes.push_back(self.swap.write(next, buffer, request)),
                    Load::Read | Load::Update => reads.push_back((next, self.swap.read(next, buffer, request))),
                }
                (next, spare) = (next + request as u64, spare - 1);
            }
            // Half of the buffers are being read while the other half is written back.
            let read = if writes.len() < requests.div_ceil(2) { reads.pop_front() } else { None };
            if let Some((at, read)) = read {
                let buffer = Pending::wait(read)?;
                if load == Load::Update {
                    writes.push_back(self.swap.write(at, buffer, request));
                    continue;
                }
                self.pool.put(buffer);
            } else if let Some(write) = writes.pop_front() {
                self.pool.put(Pending::wait(write)?);
            } else {
                return Ok(start.elapsed());
            }
            spare += 1;
        }
    }
}

/// The floor of what moves other numbers of bytes than a [`Load`] does, on a file of its own.
#[derive(Debug)]
pub struct Floor {
    file: SwapFile,
    plain: Plain,
}

impl Floor {
    /// Reserves a file of `size` bytes and writes it once. `memory` is how much the subject has for what is under way.
    ///
    /// # Errors
    /// The folder has not the space, there is not the memory, or the disk fails.
    pub fn new(folder: &Path, size: u64, memory: usize) -> Result<Floor, DiskError> {
        let mut floor =
            Floor { file: SwapFile::create(folder, size, &Options::default())?, plain: Plain::new(memory)? };
        floor.run(0, size)?;
        Ok(floor)
    }

    /// Times so many bytes in whole blocks, at most those of the file, reads and writes evenly mixed. Of a block that is read and
    /// written, what was read is written back.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn run(&mut self, read: u64, write: u64) -> Result<Duration, DiskError> {
        self.plain.run(&self.file, read, write)
    }
}

/// Memory of each thread of the floor.
#[derive(Debug)]
struct Plain(Vec<AlignedBuffer>);

impl Plain {
    fn new(memory: usize) -> Result<Plain, DiskError> {
        let each = memory.div_ceil(THREADS).max(1);
        let each = each.checked_next_multiple_of(BLOCK).unwrap_or(each);
        (0..THREADS).map(|_| AlignedBuffer::zeroed(each)).collect::<Result<_, _>>().map(Plain)
    }

    fn run(&mut self, swap: &SwapFile, read: u64, write: u64) -> Result<Duration, DiskError> {
        let (file, size) = (swap.file(), swap.size());
        let blocks = |bytes: u64| bytes.min(size).div_ceil(BLOCK as u64);
        let (read, write) = (blocks(read), blocks(write));
        let all = read.max(write);
        // So many of all blocks, which lie evenly among them.
        let is_one = |index: u64, of: u64| (index + 1) * of / all > index * of / all;
        let next = AtomicU64::new(0);
        let work = |buffer: &mut AlignedBuffer| -> std::io::Result<()> {
            for memory in (0..buffer.len()).step_by(BLOCK).cycle() {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= all {
                    break;
                }
                let at = index * BLOCK as u64;
                let bytes = &mut buffer.as_bytes_mut()[memory..][..(size - at).min(BLOCK as u64) as usize];
                if is_one(index, read) {
                    file.read_exact_at(bytes, at)?;
                }
                if is_one(index, write) {
                    file.write_all_at(bytes, at)?;
                }
            }
            Ok(())
        };
        let start = Instant::now();
        let results: Vec<std::io::Result<()>> = std::thread::scope(|scope| {
            let threads: Vec<_> = self.0.iter_mut().map(|buffer| scope.spawn(|| work(buffer))).collect();
            threads.into_iter().map(|thread| thread.join().expect("it has no way to panic")).collect()
        });
        let elapsed = start.elapsed();
        let failed = |error| DiskError::refused(swap.folder(), "read and write without a queue", error);
        results.into_iter().collect::<std::io::Result<()>>().map_err(failed)?;
        Ok(elapsed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_load_is_timed_in_turn_with_its_floor_and_moves_its_bytes() {
        let folder = tempfile::tempdir().expect("a folder");
        for (file, request, requests) in [(5 << 20, 1 << 20, 3), (1, 1, 1), (100_000, 10_000, 2)] {
            let size = Size { file, request, requests, repeats: 2 };
            let mut bench = Bench::new(folder.path(), &size, &Options::default()).expect("a file");
            let bytes = bench.swap_file().size();
            assert!(bytes >= file && bytes.is_multiple_of(align(request as u64)));
            for load in Load::ALL {
                let before = bench.swap_file().statistics();
                let times = bench.compare(load).expect("times");
                let after = bench.swap_file().statistics();
                assert_eq!((times.subject.len(), times.floor.len()), (2, 2));
                let [read, written] = match load {
                    Load::Read => [bytes, 0],
                    Load::Write => [0, bytes],
                    Load::Update => [bytes, bytes],
                };
                assert_eq!(times.bytes, read + written);
                // With the run that does not count.
                assert_eq!(after.read_bytes - before.read_bytes, 3 * read);
                assert_eq!(after.written_bytes - before.written_bytes, 3 * written);
            }
        }
    }

    #[test]
    fn ratios_are_of_pairs() {
        let ms = |times: [u64; 3]| times.map(Duration::from_millis).to_vec();
        let comparison = Comparison { bytes: 0, subject: ms([10, 30, 2]), floor: ms([10, 10, 4]) };
        assert_eq!(comparison.ratios(), [0.5, 1.0, 3.0]);
        assert_eq!((median(&comparison.subject), median(&[])), (Duration::from_millis(10), Duration::ZERO));
    }

    #[test]
    fn the_floor_moves_what_it_is_asked_for_and_writes_back_what_it_read() {
        let (folder, block) = (tempfile::tempdir().expect("a folder"), BLOCK as u64);
        let mut floor = Floor::new(folder.path(), 8 * block, 1).expect("a file");
        let written = |floor: &Floor| -> Vec<u8> {
            let mut buffer = AlignedBuffer::zeroed(8 * BLOCK).expect("memory");
            floor.file.file().read_exact_at(buffer.as_bytes_mut(), 0).expect("the file");
            buffer.as_bytes().to_vec()
        };
        floor.plain.0.iter_mut().for_each(|memory| memory.as_bytes_mut().fill(1));
        floor.run(0, 3 * block - 5).expect("three blocks");
        let before = written(&floor);
        assert_eq!(before.iter().filter(|&&byte| byte == 1).count(), 3 * BLOCK);
        floor.run(100 * block, 2 * block).expect("eight and two");
        assert!(written(&floor) == before);
        floor.run(0, 0).expect("nothing");
    }
}
