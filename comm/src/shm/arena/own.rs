//! This process's arena.
//!
//! The first large allocation creates the arena. No code in this module may allocate 256 KiB or more, and none may
//! allocate while the table is locked.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{FallocateFlags, fallocate};

use super::allocator::LARGE;
use super::space::{Space, UNIT};
use crate::lock::lock;
use crate::shm::memfd::{self, Ticket};

/// The mapped file. Its first word is the nonce that distinguishes it from other files.
pub(super) struct Own {
    map: MmapRaw,
    /// Bytes of the mapping before the first address that is a multiple of UNIT, because the operating system aligns
    /// only to pages.
    shift: usize,
    file: File,
    nonce: u64,
}

/// An allocated block.
pub(super) struct Block {
    pub(super) address: *mut u8,
    /// Number of leading bytes that may be nonzero.
    pub(super) used: usize,
}

static OWN: OnceLock<Option<Own>> = OnceLock::new();
static SPACE: Mutex<Space> = Mutex::new(Space::new());

/// Returns the arena, creating it if needed; `None` if the operating system refuses memory files of this size.
pub(super) fn own() -> Option<&'static Own> {
    OWN.get_or_init(|| Own::create().ok()).as_ref()
}

/// Returns the arena if it exists already.
pub(super) fn present() -> Option<&'static Own> {
    OWN.get()?.as_ref()
}

fn space() -> MutexGuard<'static, Space> {
    lock(&SPACE)
}

/// Returns the ticket with which other processes open the arena. Returns `None` if there is no arena, for example
/// because this program does not use the allocator.
pub(crate) fn ticket() -> Option<Ticket> {
    // This allocation creates the arena if `SharedAllocator` is the global allocator and has had no large allocation
    // yet.
    drop(std::hint::black_box(Vec::<u8>::with_capacity(LARGE)));
    let own = present()?;
    Some(Ticket::new(&own.file, own.nonce))
}

/// A buffer that peers may read and write. Dropping a `Lent` retires the memory of its buffer; `returned` ends the loan
/// without retiring the memory.
pub(crate) struct Lent {
    range: Range<usize>,
    place: u64,
}

impl Lent {
    /// Returns the offset of the buffer in the arena's file.
    pub(crate) fn place(&self) -> u64 {
        self.place
    }

    /// Ends the loan after the last access of any peer, without retiring the memory.
    pub(crate) fn returned(self) {
        std::mem::forget(self);
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        space().retire(self.range.clone());
    }
}

/// Lends a buffer to the peers if it is large and lies in the arena.
pub(crate) fn lend(bytes: &[u8]) -> Option<Lent> {
    if bytes.len() < LARGE {
        return None;
    }
    let own = present()?;
    let start = own.offset(bytes.as_ptr())?;
    // A block starts at a multiple of UNIT, and a vector starts where its block starts.
    let place = own.in_file(start);
    start.is_multiple_of(UNIT).then(|| Lent { range: start..start + bytes.len(), place })
}

impl Own {
    fn create() -> io::Result<Own> {
        let length = physical_memory()?.next_multiple_of(UNIT);
        let mapped = length.checked_add(UNIT).ok_or(io::ErrorKind::OutOfMemory)?;
        let file = memfd::create("zero-comm-arena", mapped as u64)?;
        // The file is as large as physical memory, so reserve no swap for the mapping. Without this flag, qemu-user
        // would reserve swap.
        let map = MmapOptions::new().len(mapped).no_reserve_swap().map_raw(&file)?;
        let shift = map.as_ptr().align_offset(UNIT);
        let nonce = getrandom::u64().map_err(|_| io::ErrorKind::Other)?;
        // SAFETY: the mapping is longer than a word, page-aligned, and never unmapped.
        unsafe { &*map.as_ptr().cast::<AtomicU64>() }.store(nonce, Ordering::Release);
        space().open(UNIT..length);
        Ok(Own { map, shift, file, nonce })
    }

    pub(super) fn take(&self, bytes: usize) -> Option<Block> {
        let (start, used) = space().take(bytes)?;
        // SAFETY: the block lies inside the mapping.
        Some(Block { address: unsafe { self.map.as_mut_ptr().add(self.shift + start) }, used })
    }

    fn in_file(&self, start: usize) -> u64 {
        (self.shift + start) as u64
    }

    pub(super) fn give(&self, address: *mut u8, bytes: usize) {
        let Some(start) = self.offset(address) else { return };
        let mut space = space();
        if let Some(range) = space.give(start, bytes) {
            self.punch(range);
        }
    }

    /// Records that the process uses `bytes` outside of the arena. Then returns kept memory to the operating system
    /// until the rest is within the limit.
    pub(super) fn note_elsewhere(&self, bytes: usize) {
        let mut space = space();
        space.note_elsewhere(bytes);
        while let Some(range) = space.excess() {
            self.punch(range);
        }
    }

    /// Returns a range to the operating system. Call it while holding the lock of the table, so that the range is not
    /// allocated in the meantime.
    fn punch(&self, range: Range<usize>) {
        // An error is ignored: the memory then stays resident.
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let _ = fallocate(&self.file, flags, self.in_file(range.start), range.len() as u64);
    }

    pub(super) fn resize(&self, address: *mut u8, old: usize, new: usize) -> bool {
        self.offset(address).is_some_and(|start| space().resize(start, old, new))
    }

    pub(super) fn contains(&self, address: *mut u8) -> bool {
        self.offset(address).is_some()
    }

    fn offset(&self, address: *const u8) -> Option<usize> {
        let offset = (address as usize).checked_sub(self.map.as_ptr() as usize + self.shift)?;
        (offset < self.map.len() - self.shift).then_some(offset)
    }
}

/// Returns the machine's memory in bytes, without allocating.
fn physical_memory() -> io::Result<usize> {
    let info = rustix::system::sysinfo();
    (info.totalram as usize).checked_mul(info.mem_unit as usize).ok_or(io::ErrorKind::OutOfMemory.into())
}
