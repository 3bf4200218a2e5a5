//! Benchmarks a swap file against the bare disk, for `zero-train bench io`.
//!
//! The floor is the plainest way to move the same bytes at the disk's full rate, with the same file and the same amount
//! of memory: eight threads call `pread` or `pwrite` for the next megabyte, bypassing the page cache. The floor has no
//! requests, no ordering and no buffer management. These cost the time that a [`SwapFile`] takes in addition to the
//! floor. The amount of memory must match, because a disk reads faster into a few megabytes that stay in the
//! processor's cache; offloaded state never stays there.

use std::collections::VecDeque;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::buffer::{AlignedBuffer, BufferPool, align};
use crate::error::DiskError;
use crate::file::{Options, SwapFile};
use crate::queue::Pending;

/// The access pattern of a benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// Reads the file from start to end.
    Read,
    /// Writes the file from start to end.
    Write,
    /// Reads and writes back each range, as an optimizer does with its state. Each byte counts twice.
    Update,
}

impl Load {
    /// All loads.
    pub const ALL: [Load; 3] = [Load::Read, Load::Write, Load::Update];

    /// Returns the name in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Load::Read => "read",
            Load::Write => "write",
            Load::Update => "update",
        }
    }
}

/// Times of a load through a swap file (the subject) and on the bare disk (the floor), measured alternately.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Comparison {
    /// Bytes moved per run.
    pub bytes: u64,
    /// Times through the swap file.
    pub subject: Vec<Duration>,
    /// Times on the bare disk.
    pub floor: Vec<Duration>,
}

/// Threads of the floor, and the size in bytes of their blocks. With larger values, the floor was no faster on any disk
/// tried.
const THREADS: usize = 8;
const BLOCK: usize = 1 << 20;

/// Sizes of a benchmark.
#[derive(Debug, Clone)]
pub struct Size {
    /// Size of the file in bytes.
    pub file: u64,
    /// Size in bytes of a request, comparable to a sub-group of the optimizer.
    pub request: usize,
    /// Number of requests in flight.
    pub requests: usize,
    /// Number of measured runs of the swap file and of the floor, each after one warm-up run.
    pub repeats: usize,
}

/// A swap file under test, with its buffers and its floor.
#[derive(Debug)]
pub struct Bench {
    swap: SwapFile,
    pool: BufferPool,
    /// The floor, with as much memory as the requests in flight.
    plain: Plain,
    size: Size,
}

impl Bench {
    /// Reserves the file and writes it once, because a file system reads never-written ranges without the disk.
    ///
    /// # Errors
    /// Fails if the folder has too little space, the system is out of memory, or the disk fails.
    pub fn new(folder: &Path, size: &Size, options: &Options) -> Result<Bench, DiskError> {
        let request = align(size.request.max(1) as u64);
        // Round up to whole requests.
        let file = size.file.max(1).div_ceil(request).saturating_mul(request);
        let size = Size { file, request: request as usize, requests: size.requests.max(1), ..*size };
        let plain = Plain::new(size.request.saturating_mul(size.requests))?;
        let swap = SwapFile::create(folder, file, options)?;
        let mut bench = Bench { swap, pool: BufferPool::new(), plain, size };
        bench.through_swap(Load::Write)?;
        Ok(bench)
    }

    /// Returns the file under test.
    pub fn swap_file(&self) -> &SwapFile {
        &self.swap
    }

    /// Times a load alternately with its floor.
    ///
    /// # Errors
    /// Returns the first error of the disk.
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
            // One half of the buffers is read into while the other half is written back.
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

/// A floor with a separate file, for subjects that do not move the same bytes as a [`Load`].
#[derive(Debug)]
pub struct Floor {
    file: SwapFile,
    plain: Plain,
}

impl Floor {
    /// Reserves a file of `size` bytes and writes it once. `memory` is the size in bytes of the subject's buffers in
    /// flight.
    ///
    /// # Errors
    /// Fails if the folder has too little space, the system is out of memory, or the disk fails.
    pub fn new(folder: &Path, size: u64, memory: usize) -> Result<Floor, DiskError> {
        let mut floor =
            Floor { file: SwapFile::create(folder, size, &Options::default())?, plain: Plain::new(memory)? };
        floor.run(0, size)?;
        Ok(floor)
    }

    /// Times a transfer of `read` and `write` bytes in whole blocks, each capped at the size of the file, with reads
    /// and writes evenly mixed. If a block is both read and written, the bytes that were read are written back.
    ///
    /// # Errors
    /// Returns the first error of the disk.
    pub fn run(&mut self, read: u64, write: u64) -> Result<Duration, DiskError> {
        self.plain.run(&self.file, read, write)
    }
}

/// One buffer per thread of the floor.
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
        // Selects `of` of all blocks, evenly spread.
        let is_selected = |index: u64, of: u64| (index + 1) * of / all > index * of / all;
        let next = AtomicU64::new(0);
        let work = |buffer: &mut AlignedBuffer| -> std::io::Result<()> {
            for memory in (0..buffer.len()).step_by(BLOCK).cycle() {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= all {
                    break;
                }
                let at = index * BLOCK as u64;
                let bytes = &mut buffer.as_bytes_mut()[memory..][..(size - at).min(BLOCK as u64) as usize];
                if is_selected(index, read) {
                    file.read_exact_at(bytes, at)?;
                }
                if is_selected(index, write) {
                    file.write_all_at(bytes, at)?;
                }
            }
            Ok(())
        };
        let start = Instant::now();
        let results: Vec<std::io::Result<()>> = std::thread::scope(|scope| {
            let threads: Vec<_> = self.0.iter_mut().map(|buffer| scope.spawn(|| work(buffer))).collect();
            threads.into_iter().map(|thread| thread.join().expect("these threads do not panic")).collect()
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
    fn every_load_is_timed_alternately_with_its_floor_and_moves_its_bytes() {
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
                // Three runs: the warm-up run counts here.
                assert_eq!(after.read_bytes - before.read_bytes, 3 * read);
                assert_eq!(after.written_bytes - before.written_bytes, 3 * written);
            }
        }
    }

    #[test]
    fn the_floor_moves_the_requested_bytes_and_writes_back_what_it_read() {
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
