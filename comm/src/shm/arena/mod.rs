//! Large allocations in memory that all ranks of a host can map, so that collectives need no intermediate copy.
//!
//! A buffer is a `Vec`, and the global allocator decides where a `Vec` lies. A program with the [`SharedAllocator`] has
//! its large allocations in one memory file per process, the *arena*. Processes of one host map each other's arenas
//! when they connect. A collective whose buffers lie in the arenas of all its ranks reads and writes them in place
//! (`in_place`); an all_reduce then takes about a third of the time it takes through rings. Without the allocator, or
//! when the arena is full or unavailable, collectives go through rings, which is only slower.
//!
//! A process that has mapped an arena can write to all of it. Only processes of the same user can map it, and these may
//! debug each other anyway. Ranks map it only after they have proven the job token. When a collective fails, a rank may
//! not know whether a peer is still writing to its buffer. Such a buffer is *retired*: its memory is never allocated
//! again.

mod allocator;
mod own;
mod peer;
mod space;

pub use allocator::SharedAllocator;
pub(crate) use own::{Lent, lend, ticket};
pub(crate) use peer::{PeerArena, PeerArenas};
