//! The arenas of other processes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::{MmapOptions, MmapRaw};

use crate::shm::memfd::Ticket;

/// A mapped arena of a peer. Stays valid when the peer ends: the file cannot shrink, and lives as long as somebody maps it.
pub(crate) struct PeerArena {
    map: MmapRaw,
}

impl PeerArena {
    fn open(ticket: &Ticket) -> Option<PeerArena> {
        let map = MmapOptions::new().no_reserve_swap().map_raw(&ticket.open().ok()?).ok()?;
        if map.len() < size_of::<AtomicU64>() {
            return None;
        }
        // SAFETY: the mapping is page-aligned and longer than a word, which all processes use as an atomic only.
        let found = unsafe { &*map.as_ptr().cast::<AtomicU64>() }.load(Ordering::Acquire);
        (found == ticket.nonce).then_some(PeerArena { map })
    }

    /// Where a buffer of `length` bytes begins; `None` if the arena has no such place or the buffer would be misaligned.
    pub(crate) fn buffer(&self, offset: u64, length: usize) -> Option<*mut u8> {
        let offset = usize::try_from(offset).ok().filter(|offset| offset.is_multiple_of(64))?;
        let inside = offset.checked_add(length).is_some_and(|end| end <= self.map.len());
        // SAFETY: inside the mapping.
        inside.then(|| unsafe { self.map.as_mut_ptr().add(offset) })
    }
}

/// The arenas that this process has mapped, by rank of the world: once each, whatever number of groups they are used in.
#[derive(Default)]
pub(crate) struct PeerArenas {
    open: Mutex<BTreeMap<usize, Arc<PeerArena>>>,
}

impl PeerArenas {
    /// The arena of a rank; `None` if it cannot be mapped.
    pub(crate) fn get(&self, rank: usize, ticket: &Ticket) -> Option<Arc<PeerArena>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(arena) = open.get(&rank) {
            return Some(Arc::clone(arena));
        }
        let arena = Arc::new(PeerArena::open(ticket)?);
        open.insert(rank, Arc::clone(&arena));
        Some(arena)
    }
}
