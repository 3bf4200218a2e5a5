//! Large allocations in memory that the ranks of this host can reach, so that collectives need no copy on the way.
//!
//! A buffer is a `Vec`, and a `Vec` lies where the global allocator puts it. A program that declares [`SharedAllocator`] has its
//! large allocations in one memory file per process, the *arena*. Ranks that are processes of one host map each other's
//! arenas when they connect, and a collective whose buffers lie in the arenas of all its ranks reads and writes them in
//! place (`in_place`): an all_reduce in about a third of the time that the bytes need through rings. Everything works without
//! the allocator as well, and when the arena is full or cannot be had; it is only slower.
//!
//! Whoever has mapped an arena can write to all of it. It can be mapped by processes of the same user, who may debug each other
//! anyway, and is by ranks that have proven to know the token of the job. A rank that a collective fails on may not know
//! whether a peer is still writing to the buffer: such a buffer is *retired*, its memory never given out again.

mod allocator;
mod own;
mod peer;
mod space;

pub use allocator::SharedAllocator;
pub(crate) use own::{Lent, lend, ticket};
pub(crate) use peer::{PeerArena, PeerArenas};
