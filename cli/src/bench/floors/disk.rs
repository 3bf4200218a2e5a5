//! The floor of disk I/O: the plainest way to move the same bytes at the disk's full rate, with the same file and the
//! same amount of memory.
//!
//! Eight threads call `pread` or `pwrite` for the next megabyte, bypassing the page cache. The floor has no requests,
//! no ordering and no buffer management. The time that a [`SwapFile`] takes in addition to the floor is the cost of
//! these. The amount of memory must match, because a disk reads faster into a few megabytes that stay in the
//! processor's cache; offloaded state never stays there.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use zero_tier::{AlignedBuffer, DiskError, SwapFile};

/// Threads of the floor, and the size in bytes of their blocks. With larger values, the floor was no faster on any disk
/// tried.
const THREADS: usize = 8;
const BLOCK: usize = 1 << 20;

/// One buffer per thread.
pub(crate) struct Floor(Vec<AlignedBuffer>);

impl Floor {
    /// Allocates the buffers. `memory` is the size in bytes of the subject's buffers in flight.
    ///
    /// # Errors
    /// Fails if the system is out of memory.
    pub(crate) fn new(memory: usize) -> Result<Self, DiskError> {
        let each = memory.div_ceil(THREADS).max(1);
        let each = each.checked_next_multiple_of(BLOCK).unwrap_or(each);
        (0..THREADS).map(|_| AlignedBuffer::zeroed(each)).collect::<Result<_, _>>().map(Self)
    }

    /// Times a transfer of `read` and `write` bytes in whole blocks, each capped at the size of the file, with reads
    /// and writes evenly mixed. If a block is both read and written, the bytes that were read are written back.
    ///
    /// # Errors
    /// Returns the first error of the disk.
    pub(crate) fn run(&mut self, swap: &SwapFile, [read, write]: [u64; 2]) -> Result<Duration, DiskError> {
        let (file, size) = (swap.file(), swap.size());
        let blocks = |bytes: u64| bytes.min(size).div_ceil(BLOCK as u64);
        let (read, write) = (blocks(read), blocks(write));
        let all = read.max(write);
        // Whether block `index` is one of `of` blocks that are spread evenly over all blocks.
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
        let failed = |error: std::io::Error| DiskError::Refused {
            folder: swap.folder().into(),
            step: "read and write without a queue".into(),
            reason: error.to_string(),
        };
        results.into_iter().collect::<std::io::Result<()>>().map_err(failed)?;
        Ok(elapsed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zero_tier::Options;

    #[test]
    fn the_floor_moves_the_requested_bytes_and_writes_back_what_it_read() {
        let (folder, block) = (tempfile::tempdir().expect("a folder"), BLOCK as u64);
        let file = SwapFile::create(folder.path(), 8 * block, &Options::default()).expect("a file");
        let mut floor = Floor::new(1).expect("memory");
        let written = || -> Vec<u8> {
            let mut buffer = AlignedBuffer::zeroed(8 * BLOCK).expect("memory");
            file.file().read_exact_at(buffer.as_bytes_mut(), 0).expect("the file");
            buffer.as_bytes().to_vec()
        };
        floor.run(&file, [0, 8 * block]).expect("all blocks");
        floor.0.iter_mut().for_each(|memory| memory.as_bytes_mut().fill(1));
        floor.run(&file, [0, 3 * block - 5]).expect("three blocks");
        let before = written();
        assert_eq!(before.iter().filter(|&&byte| byte == 1).count(), 3 * BLOCK);
        floor.run(&file, [100 * block, 2 * block]).expect("eight and two");
        assert!(written() == before);
        floor.run(&file, [0, 0]).expect("nothing");
    }
}
