//! Counts the bytes that the program has allocated: the current number and the peak.
//!
//! The planner predicts the memory of a training step to the byte; these counters let tests and reports compare the
//! prediction with reality. [`Counted`] wraps the program's global allocator and counts the requested sizes. Bytes that
//! the allocator adds by rounding up, or keeps for reuse, are not counted.
//!
//! Allocations smaller than [`SMALL`] are not counted. A training step makes thousands of them, but their total is only
//! a few hundred kilobytes. If they were counted, threads would contend for the counter. A resized buffer counts once,
//! with its new size, even while the allocator copies it and both copies exist.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// Allocations of fewer bytes are not counted.
pub const SMALL: usize = 1024;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static COUNTED: AtomicBool = AtomicBool::new(false);

/// Returns the bytes currently allocated; 0 in a program whose global allocator is not [`Counted`].
#[must_use]
pub fn now() -> usize {
    NOW.load(Relaxed)
}

/// Returns the maximum of [`now`] since the start of the program or the last [`reset_peak`].
#[must_use]
pub fn peak() -> usize {
    PEAK.load(Relaxed)
}

/// Resets the peak to the bytes currently allocated. The new peak may miss allocations that other threads make at the
/// same time.
pub fn reset_peak() {
    PEAK.store(now(), Relaxed);
}

/// Returns whether this program counts allocations.
#[must_use]
pub fn counted() -> bool {
    // This allocation sets `COUNTED` if the global allocator is `Counted`.
    drop(std::hint::black_box(Vec::<u8>::with_capacity(SMALL)));
    COUNTED.load(Relaxed)
}

/// A global allocator that counts the allocations of the allocator it wraps.
///
/// ```
/// use zero_comm::{SharedAllocator, heap};
///
/// #[global_allocator]
/// static ALLOCATOR: heap::Counted<SharedAllocator> = heap::Counted(SharedAllocator);
///
/// # fn main() {
/// let before = heap::now();
/// let buffer = vec![0u8; 1 << 20];
/// assert!(heap::counted() && heap::now() >= before + buffer.len());
/// # }
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Counted<A>(pub A);

/// Returns the bytes that an allocation of this size counts for.
fn weight(size: usize) -> usize {
    if size < SMALL { 0 } else { size }
}

fn replace(old: usize, new: usize) {
    let (old, new) = (weight(old), weight(new));
    if new > old {
        let now = NOW.fetch_add(new - old, Relaxed) + (new - old);
        // Most allocations set no new peak. The load avoids a write, which would invalidate the counter in the caches
        // of all other cores.
        if now > PEAK.load(Relaxed) {
            PEAK.fetch_max(now, Relaxed);
        }
        if !COUNTED.load(Relaxed) {
            COUNTED.store(true, Relaxed);
        }
    } else if old > new {
        NOW.fetch_sub(old - new, Relaxed);
    }
}

// SAFETY: every call, including `alloc_zeroed` and `realloc`, is forwarded unchanged to the inner allocator, and its
// result is returned unchanged.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Counted<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller upholds the contract of `GlobalAlloc`, which is also the contract of the inner allocator.
        let address = unsafe { self.0.alloc(layout) };
        if !address.is_null() {
            replace(0, layout.size());
        }
        address
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as in `alloc`.
        let address = unsafe { self.0.alloc_zeroed(layout) };
        if !address.is_null() {
            replace(0, layout.size());
        }
        address
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        // SAFETY: as in `alloc`; `address` came from the inner allocator because `alloc` returns its pointers
        // unchanged.
        unsafe { self.0.dealloc(address, layout) };
        replace(layout.size(), 0);
    }

    unsafe fn realloc(&self, address: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as in `dealloc`.
        let new = unsafe { self.0.realloc(address, layout, size) };
        if !new.is_null() {
            replace(layout.size(), size);
        }
        new
    }
}
