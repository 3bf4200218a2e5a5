//! Buffers of values, and how they are allocated, divided and copied.

pub(crate) mod buffer;
pub mod copy;
pub(crate) mod dtype;
pub mod heap;
pub(crate) mod ranges;
