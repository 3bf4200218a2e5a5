//! This process's arena.
//!
//! It is made when the first large allocation asks for it. Nothing in here may allocate 256 KiB or more, and nothing does
//! allocate while the table is locked.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{FallocateFlags, fallocate};

use super::allocator::LARGE;
use super::space::{Space, UNIT};
use crate::shm::memfd::{self, Ticket};

/// The mapped file. Its first word is the number that tells it from other files.
pub(super) struct Own {
    map: MmapRaw,
    /// Bytes of the mapping before the first address that is a multiple of UNIT: the operating system aligns to pages only.
    shift: usize,
    file: File,
    nonce: u64,
}

/// A block that was given out.
pub(super) struct Block {
    pub(super) address: *mut u8,
    /// How many of its first bytes may be other than zero.
    pub(super) used: usize,
}

static OWN: OnceLock<Option<Own>> = OnceLock::new();
static SPACE: Mutex<Space> = Mutex::new(Space::new());

/// `None` where the operating system refuses memory files of this size.
pub(super) fn own() -> Option<&'static Own> {
    OWN.get_or_init(|| Own::create().ok()).as_ref()
}

/// The arena, if there is one by now.
pub(super) fn present() -> Option<&'static Own> {
    OWN.get()?.as_ref()
}

fn space() -> MutexGuard<'static, Space> {
    SPACE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How others find the arena; `None` if there is none, because this program does not use the allocator, for example.
pub(crate) fn ticket() -> Option<Ticket> {
    // The allocator makes the arena, if it is the global one and has not been asked for anything large yet.
    drop(std::hint::black_box(Vec::<u8>::with_capacity(LARGE)));
    let own = present()?;
    Some(Ticket::new(&own.file, own.nonce))
}

/// A buffer that peers have been told of and may read and write. Retires its memory unless it is `returned`.
pub(crate) struct Lent {
    range: Range<usize>,
    place: u64,
}

impl Lent {
    /// Where in the arena's file the buffer begins.
    pub(crate) fn place(&self) -> u64 {
        self.place
    }

    /// No peer will touch the buffer any more.
    pub(crate) fn returned(self) {
        std::mem::forget(self);
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        space().retire(self.range.clone());
    }
}

/// Prepares a buffer for peers, if it is large and lies in the arena.
pub(crate) fn lend(bytes: &[u8]) -> Option<Lent> {
    if bytes.len() < LARGE {
        return None;
    }
    let own = present()?;
    let start = own.offset(bytes.as_ptr())?;
    // A block begins at a multiple of UNIT, and so does a vector.
    let place = own.in_file(start);
    start.is_multiple_of(UNIT).then(|| Lent { range: start..start + bytes.len(), place })
}

impl Own {
    fn create() -> io::Result<Own> {
        let length = physical_memory()?.next_multiple_of(UNIT);
        let mapped = length.checked_add(UNIT).ok_or(io::ErrorKind::OutOfMemory)?;
        let file = memfd::create("zero-comm-arena", mapped as u64)?;
        // As much as the machine has, of which the system need not promise any: qemu-user asks it for that otherwise.
        let map = MmapOptions::new().len(mapped).no_reserve_swap().map_raw(&file)?;
        let shift = map.as_ptr().align_offset(UNIT);
        let nonce = getrandom::u64().map_err(|_| io::ErrorKind::Other)?;
        // SAFETY: the mapping is longer than a word, page-aligned, and never goes away.
        unsafe { &*map.as_ptr().cast::<AtomicU64>() }.store(nonce, Ordering::Release);
        space().open(UNIT..length);
        Ok(Own { map, shift, file, nonce })
    }

    pub(super) fn take(&self, bytes: usize) -> Option<Block> {
        let (start, used) = space().take(bytes)?;
        // SAFETY: the space lies inside the mapping.
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

    /// Returns to the operating system what is too much beside memory elsewhere.
    pub(super) fn note_elsewhere(&self, bytes: usize) {
        let mut space = space();
        space.note_elsewhere(bytes);
        while let Some(range) = space.excess() {
            self.punch(range);
        }
    }

    /// To be called under the lock: nobody may have been given the range meanwhile.
    fn punch(&self, range: Range<usize>) {
        // Only memory is lost if this fails.
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

/// Bytes of memory of this machine: asked in a way that does not allocate.
fn physical_memory() -> io::Result<usize> {
    let info = rustix::system::sysinfo();
    (info.totalram as usize).checked_mul(info.mem_unit as usize).ok_or(io::ErrorKind::OutOfMemory.into())
}
