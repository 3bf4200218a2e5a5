//! Page-aligned buffers that a disk can read and write without a copy, and a pool that reuses them.
//!
//! A buffer begins on a page, as O_DIRECT requires, and uses huge pages where possible; `pages.rs` explains why.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::DiskError;
use crate::pages::Pages;

/// The alignment, in bytes, of file offsets, lengths and memory addresses: one page, a multiple of every logical block
/// size in use.
pub const ALIGNMENT: usize = 4096;

/// Rounds up to the next multiple of [`ALIGNMENT`].
pub fn align(bytes: u64) -> u64 {
    bytes.saturating_add(ALIGNMENT as u64 - 1) & !(ALIGNMENT as u64 - 1)
}

/// An owned buffer of whole aligned pages, of which the first `len` bytes are in use.
pub struct AlignedBuffer {
    pages: Pages,
    len: usize,
}

impl AlignedBuffer {
    /// Allocates a buffer with `len` zero bytes in use.
    ///
    /// # Errors
    /// Returns [`DiskError::Memory`] if the system is out of memory.
    pub fn zeroed(len: usize) -> Result<AlignedBuffer, DiskError> {
        let pages = Pages::zeroed(len).ok_or(DiskError::Memory { bytes: len as u64 })?;
        Ok(AlignedBuffer { pages, len })
    }

    /// Returns the number of bytes in use.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether no byte is in use.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the allocated bytes, a multiple of [`ALIGNMENT`].
    pub fn capacity(&self) -> usize {
        self.pages.len()
    }

    /// Sets the number of bytes in use, capped at the capacity. Bytes that were not in use before keep the values that
    /// they had.
    pub fn set_len(&mut self, len: usize) {
        self.len = len.min(self.capacity());
    }

    /// Returns the bytes in use.
    pub fn as_bytes(&self) -> &[u8] {
        &self.pages[..self.len]
    }

    /// Returns the bytes in use, mutably.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        &mut self.pages[..self.len]
    }

    /// Returns the bytes in use as floats. Up to three trailing bytes that do not fill a float are omitted.
    pub fn as_f32(&self) -> &[f32] {
        bytemuck::cast_slice(&self.pages[..self.len / 4 * 4])
    }

    /// Returns the bytes in use as mutable floats. Up to three trailing bytes that do not fill a float are omitted.
    pub fn as_f32_mut(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(&mut self.pages[..self.len / 4 * 4])
    }

    /// Returns a pointer to the first allocated byte.
    pub(crate) fn start(&mut self) -> *mut u8 {
        self.pages.as_mut_ptr()
    }
}

impl std::fmt::Debug for AlignedBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AlignedBuffer").field("len", &self.len).field("capacity", &self.capacity()).finish()
    }
}

/// A pool of idle buffers by size class. Training steps reuse its buffers instead of allocating new ones.
#[derive(Debug, Default)]
pub struct BufferPool {
    shelves: Mutex<Shelves>,
}

#[derive(Debug, Default)]
struct Shelves {
    idle: BTreeMap<usize, Vec<AlignedBuffer>>,
    usage: PoolUsage,
}

/// Memory held by a [`BufferPool`], and its allocation count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolUsage {
    /// Number of bytes of the idle buffers in the pool.
    pub idle_bytes: u64,
    /// Number of bytes of the buffers that were taken and not yet returned.
    pub lent_bytes: u64,
    /// Number of buffers that were allocated because none was idle.
    pub allocations: u64,
}

impl BufferPool {
    /// Creates an empty pool.
    pub fn new() -> BufferPool {
        BufferPool::default()
    }

    /// Returns the number of bytes allocated for a buffer of `len` bytes. `len` is rounded up to whole pages and, for
    /// larger buffers, to one of eight sizes per power of two, which adds at most an eighth.
    pub fn size_class(len: usize) -> usize {
        let step = (len.checked_next_power_of_two().unwrap_or(len) / 16).max(ALIGNMENT);
        len.max(1).checked_next_multiple_of(step).unwrap_or(len)
    }

    /// Takes a buffer with `len` bytes in use. Their contents are unspecified.
    ///
    /// # Errors
    /// Returns [`DiskError::Memory`] if no buffer is idle and the system is out of memory.
    pub fn take(&self, len: usize) -> Result<AlignedBuffer, DiskError> {
        let class = BufferPool::size_class(len);
        let mut shelves = self.lock();
        let mut buffer = match shelves.idle.get_mut(&class).and_then(Vec::pop) {
            Some(buffer) => {
                shelves.usage.idle_bytes -= buffer.capacity() as u64;
                buffer
            }
            None => {
                let buffer = AlignedBuffer::zeroed(class)?;
                shelves.usage.allocations += 1;
                buffer
            }
        };
        shelves.usage.lent_bytes += buffer.capacity() as u64;
        buffer.set_len(len);
        Ok(buffer)
    }

    /// Returns a buffer to the pool for reuse.
    pub fn put(&self, buffer: AlignedBuffer) {
        let capacity = buffer.capacity();
        let mut shelves = self.lock();
        shelves.usage.idle_bytes += capacity as u64;
        // Saturates because the buffer may have been allocated outside the pool.
        shelves.usage.lent_bytes = shelves.usage.lent_bytes.saturating_sub(capacity as u64);
        // A buffer allocated outside the pool may have a capacity between two classes. No request matches it, so drop
        // it.
        if BufferPool::size_class(capacity) == capacity {
            shelves.idle.entry(capacity).or_default().push(buffer);
        } else {
            shelves.usage.idle_bytes -= capacity as u64;
        }
    }

    /// Frees all idle buffers.
    pub fn clear(&self) {
        let mut shelves = self.lock();
        shelves.idle.clear();
        shelves.usage.idle_bytes = 0;
    }

    /// Returns the current usage.
    pub fn usage(&self) -> PoolUsage {
        self.lock().usage
    }

    fn lock(&self) -> MutexGuard<'_, Shelves> {
        self.shelves.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_whole_aligned_pages_of_zeros() {
        for len in [0, 1, 4095, 4096, 4097, 1_000_003] {
            let mut buffer = AlignedBuffer::zeroed(len).expect("memory");
            assert_eq!((buffer.len(), buffer.is_empty()), (len, len == 0));
            assert!(buffer.capacity() >= len && buffer.capacity().is_multiple_of(ALIGNMENT));
            assert!(buffer.start().addr().is_multiple_of(ALIGNMENT));
            assert!(buffer.as_bytes().iter().all(|&byte| byte == 0));
            assert_eq!(buffer.as_f32().len(), len / 4);
            buffer.as_f32_mut().fill(1.5);
            assert!(buffer.as_bytes().chunks_exact(4).all(|float| float == 1.5f32.to_ne_bytes()));
            buffer.set_len(usize::MAX);
            assert_eq!(buffer.as_bytes_mut().len(), buffer.capacity());
        }
    }

    #[test]
    fn out_of_memory_is_an_error() {
        for len in [usize::MAX, usize::MAX / 2, isize::MAX as usize - 1] {
            let error = AlignedBuffer::zeroed(len).expect_err("more than an address space");
            assert!(matches!(error, DiskError::Memory { bytes, .. } if bytes == len as u64), "{error}");
            assert!(BufferPool::new().take(len).is_err());
        }
    }

    #[test]
    fn pool_reuses_returned_buffers() {
        let pool = BufferPool::new();
        for _ in 0..10 {
            let (large, small) = (pool.take(100_000).expect("memory"), pool.take(10).expect("memory"));
            assert_eq!((large.len(), large.capacity(), small.len(), small.capacity()), (100_000, 106_496, 10, 4096));
            assert_eq!(pool.usage(), PoolUsage { idle_bytes: 0, lent_bytes: 110_592, allocations: 2 });
            pool.put(large);
            pool.put(small);
            assert_eq!(pool.usage(), PoolUsage { idle_bytes: 110_592, lent_bytes: 0, allocations: 2 });
        }
        pool.clear();
        assert_eq!(pool.usage(), PoolUsage { idle_bytes: 0, lent_bytes: 0, allocations: 2 });
    }

    #[test]
    fn size_classes_waste_at_most_an_eighth_and_are_fixed_points() {
        for len in (0..2_000_000).step_by(997).chain([1 << 20, (1 << 20) + 1, 3 << 30]) {
            let class = BufferPool::size_class(len);
            assert!(class >= len && class.is_multiple_of(ALIGNMENT));
            assert!(class - len <= (len / 8).max(ALIGNMENT), "{len} takes {class}");
            assert_eq!(BufferPool::size_class(class), class);
        }
    }
}
