//! The shared-memory segment of a group and its layout.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};

use super::memfd::{self, Ticket};
use super::ring::{Control, SLOTS};
use crate::bell::Bell;

/// The purpose of a ring: collectives and messages use separate rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RingUse {
    Collectives,
    Messages,
}

/// A mapped segment.
pub(crate) struct Segment {
    map: MmapRaw,
    layout: Layout,
    /// The open file. The process that created the segment keeps it open, so that the other processes can open it.
    _file: File,
}

/// The first words of a segment.
#[repr(C, align(64))]
struct Head {
    nonce: AtomicU64,
    group: AtomicU64,
}

impl Segment {
    pub(super) fn create(size: usize, group: u64) -> Result<(Segment, Ticket), String> {
        let layout = Layout::new(size);
        let nonce = getrandom::u64().map_err(|error| format!("cannot generate a random number: {error}"))?;
        let create =
            || -> io::Result<Segment> { Segment::map(memfd::create("zero-comm", layout.bytes() as u64)?, layout) };
        let segment = create()
            .map_err(|error| format!("cannot create a shared memory segment of {} bytes: {error}", layout.bytes()))?;
        segment.head().nonce.store(nonce, Ordering::Relaxed);
        segment.head().group.store(group, Ordering::Release);
        let ticket = Ticket::new(&segment._file, nonce);
        Ok((segment, ticket))
    }

    pub(super) fn open(ticket: &Ticket, size: usize, group: u64) -> Result<Segment, String> {
        let path = ticket.path();
        let layout = Layout::new(size);
        let open = || -> io::Result<Segment> {
            let file = ticket.open()?;
            if file.metadata()?.len() != layout.bytes() as u64 {
                return Err(io::Error::other("the segment's size does not match this group"));
            }
            Segment::map(file, layout)
        };
        let segment = open().map_err(|error| format!("cannot map the shared memory segment {path}: {error}"))?;
        let found = (segment.head().group.load(Ordering::Acquire), segment.head().nonce.load(Ordering::Relaxed));
        if found != (group, ticket.nonce) {
            return Err(format!("the shared memory segment {path} belongs to another group"));
        }
        Ok(segment)
    }

    fn map(file: File, layout: Layout) -> io::Result<Segment> {
        let map = MmapOptions::new().len(layout.bytes()).map_raw(&file)?;
        Ok(Segment { map, layout, _file: file })
    }

    /// Returns the size of a chunk in bytes.
    pub(super) fn chunk(&self) -> usize {
        self.layout.chunk
    }

    fn head(&self) -> &Head {
        // SAFETY: the segment starts with a Head, and the mapping is page-aligned and lives as long as `self`.
        unsafe { &*self.at(0).cast() }
    }

    /// Returns the bell on which a rank waits for its collectives.
    pub(super) fn bell(&self, rank: usize) -> &Bell {
        assert!(rank < self.layout.size);
        // SAFETY: the layout has a Bell at this offset; it consists of atomics, for which zeroed and shared memory is
        // valid.
        unsafe { &*self.at(self.layout.bells() + rank * size_of::<Bell>()).cast() }
    }

    /// Returns the shared words of the ring from one rank to another.
    pub(super) fn control(&self, lane: RingUse, from: usize, to: usize) -> &Control {
        let ring = self.layout.ring(lane, from, to);
        // SAFETY: the layout has a Control at this offset; it consists of atomics, for which zeroed and shared memory
        // is valid.
        unsafe { &*self.at(self.layout.controls() + ring * size_of::<Control>()).cast() }
    }

    /// Returns the memory of a slot, `chunk` bytes. The ring determines whether the writer or the reader may use it.
    pub(super) fn slot(&self, lane: RingUse, from: usize, to: usize, slot: usize) -> *mut u8 {
        assert!(slot < SLOTS);
        let ring = self.layout.ring(lane, from, to);
        self.at(self.layout.slots() + (ring * SLOTS + slot) * self.layout.chunk)
    }

    fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset < self.layout.bytes());
        // SAFETY: the assertion keeps the offset inside the mapping.
        unsafe { self.map.as_mut_ptr().add(offset) }
    }
}

/// The layout of a segment: head, bells, controls, slots.
#[derive(Debug, Clone, Copy)]
struct Layout {
    size: usize,
    chunk: usize,
}

/// Maximum total size in bytes of a rank's outgoing slots, counting one slot per ring. Holds for up to 32 peers. With
/// this limit, written data stays in the writer's L2 cache, or in a cache that writer and reader share, until it is
/// read.
const CHUNKS_OF_A_RANK: usize = 128 * 1024;

impl Layout {
    fn new(size: usize) -> Layout {
        let peers = size.saturating_sub(1).max(1);
        // The size is a power of two, so that every chunk starts at the start of a cache line.
        let chunk = (CHUNKS_OF_A_RANK / peers.next_power_of_two()).max(4096);
        Layout { size, chunk }
    }

    fn rings(&self) -> usize {
        2 * self.size * self.size
    }

    fn ring(&self, lane: RingUse, from: usize, to: usize) -> usize {
        assert!(from < self.size && to < self.size);
        (lane as usize * self.size + from) * self.size + to
    }

    fn bells(&self) -> usize {
        size_of::<Head>()
    }

    fn controls(&self) -> usize {
        self.bells() + self.size * size_of::<Bell>()
    }

    fn slots(&self) -> usize {
        (self.controls() + self.rings() * size_of::<Control>()).next_multiple_of(4096)
    }

    /// Returns the size of the segment in bytes. Untouched pages, such as the rings from a rank to itself, take no
    /// memory.
    fn bytes(&self) -> usize {
        self.slots() + self.rings() * SLOTS * self.chunk
    }
}
