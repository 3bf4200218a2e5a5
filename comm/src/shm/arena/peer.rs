//! The arenas of other processes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use memmap2::{MmapOptions, MmapRaw};

use crate::lock::lock;
use crate::shm::memfd::Ticket;

/// A mapped arena of a peer. It stays valid after the peer ends: the file cannot shrink and lives as long as any
/// process maps it.
pub(crate) struct PeerArena {
    map: MmapRaw,
}

impl PeerArena {
    fn open(ticket: &Ticket) -> Option<PeerArena> {
        let map = MmapOptions::new().no_reserve_swap().map_raw(&ticket.open().ok()?).ok()?;
        if map.len() < size_of::<AtomicU64>() {
            return None;
        }
        // SAFETY: the mapping is page-aligned and at least a word long, and all processes access that word only as an
        // atomic.
        let found = unsafe { &*map.as_ptr().cast::<AtomicU64>() }.load(Ordering::Acquire);
        (found == ticket.nonce).then_some(PeerArena { map })
    }

    /// Returns the address of a buffer of `length` bytes; `None` if it would lie outside the arena or be misaligned.
    pub(crate) fn buffer(&self, offset: u64, length: usize) -> Option<*mut u8> {
        self.bytes(offset, length).filter(|_| offset.is_multiple_of(64))
    }

    /// Returns the address of `length` bytes; `None` if they would lie outside the arena.
    pub(crate) fn bytes(&self, offset: u64, length: usize) -> Option<*mut u8> {
        let offset = usize::try_from(offset).ok()?;
        let inside = offset.checked_add(length).is_some_and(|end| end <= self.map.len());
        // SAFETY: the offset is inside the mapping.
        inside.then(|| unsafe { self.map.as_mut_ptr().add(offset) })
    }
}

/// The arenas that this process has mapped, by global rank. An arena that several groups use is mapped only once.
#[derive(Default)]
pub(crate) struct PeerArenas {
    open: Mutex<BTreeMap<usize, Arc<PeerArena>>>,
}

impl PeerArenas {
    /// Returns the arena of a rank; `None` if it cannot be mapped.
    pub(crate) fn get(&self, rank: usize, ticket: &Ticket) -> Option<Arc<PeerArena>> {
        let mut open = lock(&self.open);
        if let Some(arena) = open.get(&rank) {
            return Some(Arc::clone(arena));
        }
        let arena = Arc::new(PeerArena::open(ticket)?);
        open.insert(rank, Arc::clone(&arena));
        Some(arena)
    }
}
