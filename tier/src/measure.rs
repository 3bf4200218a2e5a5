//! Times the transfers of a swap file, for cost tables and benchmarks.

use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::buffer::{BufferPool, align};
use crate::error::DiskError;
use crate::file::{Options, SwapFile};
use crate::queue::Pending;

/// An access pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// Reads the file from start to end.
    Read,
    /// Writes the file from start to end.
    Write,
    /// Reads and writes back each range, as an optimizer does with its state.
    Update,
}

impl Load {
    /// All loads.
    pub const ALL: [Load; 3] = [Load::Read, Load::Write, Load::Update];

    /// Returns the bytes that a run reads and writes in a file of `size` bytes.
    pub fn moved(self, size: u64) -> [u64; 2] {
        match self {
            Load::Read => [size, 0],
            Load::Write => [0, size],
            Load::Update => [size, size],
        }
    }
}

/// Sizes of the file and of its transfers.
#[derive(Debug, Clone)]
pub struct Size {
    /// Size of the file in bytes.
    pub file: u64,
    /// Size in bytes of a request, comparable to a sub-group of the optimizer.
    pub request: usize,
    /// Number of requests in flight.
    pub requests: usize,
}

/// A swap file under test, with its buffers.
#[derive(Debug)]
pub struct Transfers {
    swap: SwapFile,
    pool: BufferPool,
    size: Size,
}

impl Transfers {
    /// Reserves the file and writes it once, because a file system reads never-written ranges without the disk.
    ///
    /// # Errors
    /// Fails if the folder has too little space, the system is out of memory, or the disk fails.
    pub fn new(folder: &Path, size: &Size, options: &Options) -> Result<Transfers, DiskError> {
        let request = align(size.request.max(1) as u64);
        // Round up to whole requests.
        let file = size.file.max(1).div_ceil(request).saturating_mul(request);
        let size = Size { file, request: request as usize, requests: size.requests.max(1) };
        let transfers = Transfers { swap: SwapFile::create(folder, file, options)?, pool: BufferPool::new(), size };
        transfers.run(Load::Write)?;
        Ok(transfers)
    }

    /// Returns the file under test.
    pub fn swap_file(&self) -> &SwapFile {
        &self.swap
    }

    /// Times one run of a load.
    ///
    /// # Errors
    /// Returns the first error of the disk.
    pub fn run(&self, load: Load) -> Result<Duration, DiskError> {
        let Size { file, request, requests } = self.size;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_load_moves_its_bytes() {
        let folder = tempfile::tempdir().expect("a folder");
        for (file, request, requests) in [(5 << 20, 1 << 20, 3), (1, 1, 1), (100_000, 10_000, 2)] {
            let size = Size { file, request, requests };
            let transfers = Transfers::new(folder.path(), &size, &Options::default()).expect("a file");
            let bytes = transfers.swap_file().size();
            assert!(bytes >= file && bytes.is_multiple_of(align(request as u64)));
            for load in Load::ALL {
                let before = transfers.swap_file().statistics();
                transfers.run(load).expect("a run");
                let after = transfers.swap_file().statistics();
                let moved = [after.read_bytes - before.read_bytes, after.written_bytes - before.written_bytes];
                assert_eq!(moved, load.moved(bytes), "{load:?}");
            }
        }
    }
}
