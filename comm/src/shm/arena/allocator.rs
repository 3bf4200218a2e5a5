//! The global allocator that puts what is large into the arena.

use std::alloc::{GlobalAlloc, Layout, System};

use super::own::{Own, own, present};
use super::space::UNIT;

/// Allocations from this size on go into the arena: what is smaller travels through a ring as fast.
pub(super) const LARGE: usize = 256 * 1024;

/// A global allocator under which collectives between processes of one host read and write the ranks' vectors in place.
///
/// ```
/// #[global_allocator]
/// static ALLOCATOR: zero_comm::SharedAllocator = zero_comm::SharedAllocator;
/// # fn main() { assert!(vec![0u8; 1 << 20].iter().all(|byte| *byte == 0)); }
/// ```
///
/// Allocations of at least 256 KiB come from one anonymous memory file of this process, all others, and those that it has no
/// room for, from [`System`]. The file is as large as the machine's memory, but only touched pages exist. What is freed is
/// kept for reuse; pages go back to the operating system when, by fragmentation or beside [memory
/// elsewhere](SharedAllocator::note_elsewhere), more of them would be resident than were ever in use at a time, and a sixteenth
/// (at least 16 MiB). Blocks begin and end at multiples of 64 KiB.
///
/// In a child of `fork` that does not `exec`, large allocations are shared with the parent: such programs cannot use it.
#[derive(Debug, Clone, Copy, Default)]
pub struct SharedAllocator;

impl SharedAllocator {
    /// Bytes of the smallest allocation that begins at a multiple of 64 KiB.
    pub const LARGE: usize = LARGE;

    /// Tells how many bytes the process has now, or will have in a moment, that are not of this allocator. Of what is kept for
    /// reuse so much goes back to the operating system that both together stay within what was ever in use at a time.
    pub fn note_elsewhere(bytes: usize) {
        if let Some(own) = present() {
            own.note_elsewhere(bytes);
        }
    }
}

/// The arena, for what is to go there.
fn arena_for(layout: Layout) -> Option<&'static Own> {
    if layout.size() >= LARGE && layout.align() <= UNIT { own() } else { None }
}

/// The arena, for what is there.
fn arena_of(address: *mut u8, layout: Layout) -> Option<&'static Own> {
    if layout.size() >= LARGE { present().filter(|own| own.contains(address)) } else { None }
}

// SAFETY: a block comes either from the arena, which gives out disjoint blocks aligned to UNIT that hold the size asked for
// until they are freed, or from System. Its address says which, so every block is freed where it was taken.
unsafe impl GlobalAlloc for SharedAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match arena_for(layout).and_then(|own| own.take(layout.size())) {
            Some(block) => block.address,
            // SAFETY: the caller's promises are System's.
            None => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match arena_for(layout).and_then(|own| own.take(layout.size())) {
            Some(block) => {
                // SAFETY: the first `used` bytes of a fresh block; what follows is zero already.
                unsafe { block.address.write_bytes(0, block.used) };
                block.address
            }
            // SAFETY: the caller's promises are System's.
            None => unsafe { System.alloc_zeroed(layout) },
        }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        match arena_of(address, layout) {
            Some(own) => own.give(address, layout.size()),
            // SAFETY: not of the arena, so it is System's.
            None => unsafe { System.dealloc(address, layout) },
        }
    }

    unsafe fn realloc(&self, address: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        match arena_of(address, layout) {
            // What is small must not stay in the arena: only large blocks are looked for there.
            Some(own) if size >= LARGE && own.resize(address, layout.size(), size) => return address,
            // SAFETY: System's before and after.
            None if size < LARGE || layout.size() >= LARGE => return unsafe { System.realloc(address, layout, size) },
            _ => {}
        }
        // SAFETY: the caller promises that `size` with this alignment is a layout.
        let new = unsafe { self.alloc(Layout::from_size_align_unchecked(size, layout.align())) };
        if !new.is_null() {
            // SAFETY: two blocks of at least that size, the old one to be freed and not used again.
            unsafe {
                new.copy_from_nonoverlapping(address, size.min(layout.size()));
                self.dealloc(address, layout);
            }
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignment_is_kept() {
        for align in [1, 64, 4096, 64 * 1024, 1 << 20] {
            for size in [1, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE] {
                let layout = Layout::from_size_align(size, align).expect("a layout");
                // SAFETY: sizes are not zero, and each block is freed or moved as it was allocated.
                unsafe {
                    let block = SharedAllocator.alloc(layout);
                    assert!(!block.is_null() && block.addr().is_multiple_of(align));
                    block.write_bytes(7, size);
                    for new in [2 * LARGE, 10, 5 * LARGE] {
                        let first = SharedAllocator.alloc(layout);
                        first.write(9);
                        let moved = SharedAllocator.realloc(first, layout, new);
                        assert!(!moved.is_null() && moved.addr().is_multiple_of(align));
                        assert_eq!(moved.read(), 9);
                        SharedAllocator.dealloc(moved, Layout::from_size_align(new, align).expect("a layout"));
                    }
                    assert!(std::slice::from_raw_parts(block, size).iter().all(|byte| *byte == 7));
                    SharedAllocator.dealloc(block, layout);
                }
            }
        }
    }
}
