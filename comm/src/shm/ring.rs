//! A lock-free ring of chunks from one process to another, with one writer and one reader.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::bell::Bell;

/// Number of chunks in a ring.
pub(super) const SLOTS: usize = 4;

/// The shared words of a ring. Zeroed memory is an empty ring. Except for the bells, only one side writes to each cache
/// line.
#[repr(C, align(64))]
pub(super) struct Control {
    written: Line,
    read: Line,
    /// Bytes in each slot.
    lengths: [AtomicU32; SLOTS],
    /// The bells on which the two ends of a ring of messages wait. For collectives, each rank instead has one bell for
    /// all its rings.
    pub(super) reader: Bell,
    pub(super) writer: Bell,
}

#[repr(C, align(64))]
struct Line {
    count: AtomicU64,
}

impl Control {
    /// Returns the slot to write next, if one is free.
    pub(super) fn free_slot(&self) -> Option<usize> {
        let written = self.written.count.load(Ordering::Relaxed);
        let read = self.read.count.load(Ordering::Acquire);
        (written.wrapping_sub(read) < SLOTS as u64).then_some(written as usize % SLOTS)
    }

    /// Passes the slot from `free_slot` to the reader.
    pub(super) fn publish(&self, slot: usize, length: usize) {
        self.lengths[slot].store(length as u32, Ordering::Relaxed);
        let written = self.written.count.load(Ordering::Relaxed);
        self.written.count.store(written.wrapping_add(1), Ordering::Release);
    }

    /// Returns whether the reader has released every slot. Called by the writer.
    pub(super) fn is_empty(&self) -> bool {
        self.read.count.load(Ordering::Acquire) == self.written.count.load(Ordering::Relaxed)
    }

    /// Returns the oldest published slot and its length in bytes.
    pub(super) fn full_slot(&self) -> Option<(usize, usize)> {
        let read = self.read.count.load(Ordering::Relaxed);
        let written = self.written.count.load(Ordering::Acquire);
        let slot = read as usize % SLOTS;
        (written != read).then(|| (slot, self.lengths[slot].load(Ordering::Relaxed) as usize))
    }

    /// Returns the slot from `full_slot` to the writer.
    pub(super) fn release(&self) {
        let read = self.read.count.load(Ordering::Relaxed);
        self.read.count.store(read.wrapping_add(1), Ordering::Release);
    }
}
