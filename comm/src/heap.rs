//! How many bytes the program has been given: now, and at most.
//!
//! What a step needs is planned to the byte, and a plan is worth what can be held against it. So the program's global allocator
//! counts: [`Counted`] around whichever allocator it uses. Counted is what was asked for, not what the allocator beneath rounds
//! it up to or keeps for reuse.
//!
//! Allocations below [`SMALL`] are left out: there are thousands of them in a step, they come to a few hundred kilobytes, and
//! their threads would wait for each other's counting. A resized buffer counts as its new size instead of its old one, also
//! while an allocator copies the one to the other.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// Allocations of fewer bytes are not counted.
pub const SMALL: usize = 1024;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static COUNTED: AtomicBool = AtomicBool::new(false);

/// Bytes that are allocated; 0 in a program whose global allocator is not [`Counted`].
#[must_use]
pub fn now() -> usize {
    NOW.load(Relaxed)
}

/// The most that [`now`] was since the program's start or [`reset_peak`].
#[must_use]
pub fn peak() -> usize {
    PEAK.load(Relaxed)
}

/// Begins a new peak, from what is allocated now. Allocations of other threads at the same moment may be missed.
pub fn reset_peak() {
    PEAK.store(now(), Relaxed);
}

/// Whether this program counts.
#[must_use]
pub fn counted() -> bool {
    // An allocation that is counted if any is.
    drop(std::hint::black_box(Vec::<u8>::with_capacity(SMALL)));
    COUNTED.load(Relaxed)
}

/// A global allocator that counts what it hands on.
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

/// What an allocation of this size counts for.
fn weight(size: usize) -> usize {
    if size < SMALL { 0 } else { size }
}

fn replace(old: usize, new: usize) {
    let (old, new) = (weight(old), weight(new));
    if new > old {
        let now = NOW.fetch_add(new - old, Relaxed) + (new - old);
        // Most allocations make no peak: a look is cheaper than a write that every thread sees.
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

// SAFETY: every call is handed on as it is, `alloc_zeroed` and `realloc` too, and what comes back is returned as it is.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Counted<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are those of the allocator inside.
        let address = unsafe { self.0.alloc(layout) };
        if !address.is_null() {
            replace(0, layout.size());
        }
        address
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        let address = unsafe { self.0.alloc_zeroed(layout) };
        if !address.is_null() {
            replace(0, layout.size());
        }
        address
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { self.0.dealloc(address, layout) };
        replace(layout.size(), 0);
    }

    unsafe fn realloc(&self, address: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as above.
        let new = unsafe { self.0.realloc(address, layout, size) };
        if !new.is_null() {
            replace(layout.size(), size);
        }
        new
    }
}
