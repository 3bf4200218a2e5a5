//! The global allocator that places large allocations in the arena.

use std::alloc::{GlobalAlloc, Layout, System};

use super::own::{Own, own, present};
use super::space::UNIT;

/// Allocations of at least this many bytes are placed in the arena. Collectives on smaller vectors are just as fast
/// through rings as in place.
pub(super) const LARGE: usize = 256 * 1024;

/// A global allocator that lets collectives between processes of one host read and write the ranks' vectors in place.
///
/// ```
/// #[global_allocator]
/// static ALLOCATOR: zero_comm::SharedAllocator = zero_comm::SharedAllocator;
/// # fn main() { assert!(vec![0u8; 1 << 20].iter().all(|byte| *byte == 0)); }
/// ```
///
/// Allocations of at least 256 KiB come from one anonymous memory file of this process. Smaller ones, and those that do
/// not fit into the file, come from [`System`]. The file is as large as the machine's memory, but only touched pages
/// are resident. Freed memory is kept for reuse. Because of fragmentation or [memory
/// elsewhere](SharedAllocator::note_elsewhere), the resident bytes can exceed the peak in use. The excess is limited to
/// a sixteenth of the peak, or 16 MiB if that is more. Pages beyond the limit are returned to the operating system.
/// Blocks start and end at multiples of 64 KiB.
///
/// A child created by `fork` without `exec` would share large allocations with its parent, so programs that fork this
/// way cannot use this allocator.
#[derive(Debug, Clone, Copy, Default)]
pub struct SharedAllocator;

impl SharedAllocator {
    /// Allocations of at least this many bytes start at a multiple of 64 KiB.
    pub const LARGE: usize = LARGE;

    /// Sets the number of bytes that the process uses, or is about to use, outside of this allocator. The allocator
    /// returns kept memory to the operating system until the resident bytes inside and outside of it are at most the
    /// peak in use plus the excess allowed above.
    pub fn note_elsewhere(bytes: usize) {
        if let Some(own) = present() {
            own.note_elsewhere(bytes);
        }
    }
}

/// Returns the arena if an allocation with this layout belongs there.
fn arena_for(layout: Layout) -> Option<&'static Own> {
    if layout.size() >= LARGE && layout.align() <= UNIT { own() } else { None }
}

/// Returns the arena if this block lies in it.
fn arena_of(address: *mut u8, layout: Layout) -> Option<&'static Own> {
    if layout.size() >= LARGE { present().filter(|own| own.contains(address)) } else { None }
}

// SAFETY: a block comes from the arena or from System. The arena's blocks are aligned to UNIT and have at least the
// requested size, and blocks that are in use do not overlap. The address of a block shows where it came from, so every
// block is freed where it was allocated.
unsafe impl GlobalAlloc for SharedAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match arena_for(layout).and_then(|own| own.take(layout.size())) {
            Some(block) => block.address,
            // SAFETY: the caller upholds the contract of `System.alloc`, which is the same.
            None => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match arena_for(layout).and_then(|own| own.take(layout.size())) {
            Some(block) => {
                // SAFETY: the first `used` bytes lie within the new block; the remaining bytes are zero already.
                unsafe { block.address.write_bytes(0, block.used) };
                block.address
            }
            // SAFETY: the caller upholds the contract of `System.alloc_zeroed`, which is the same.
            None => unsafe { System.alloc_zeroed(layout) },
        }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        match arena_of(address, layout) {
            Some(own) => own.give(address, layout.size()),
            // SAFETY: the block is not in the arena, so it came from System.
            None => unsafe { System.dealloc(address, layout) },
        }
    }

    unsafe fn realloc(&self, address: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        match arena_of(address, layout) {
            // A block that becomes small must leave the arena, because `arena_of` looks only for large blocks there.
            Some(own) if size >= LARGE && own.resize(address, layout.size(), size) => return address,
            // SAFETY: the block came from System and stays with System.
            None if size < LARGE || layout.size() >= LARGE => return unsafe { System.realloc(address, layout, size) },
            _ => {}
        }
        // SAFETY: the caller promises that `size` and this alignment form a valid layout.
        let new = unsafe { self.alloc(Layout::from_size_align_unchecked(size, layout.align())) };
        if !new.is_null() {
            // SAFETY: both blocks have at least the copied size and do not overlap; the old one is freed and not used
            // again.
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
    fn allocations_keep_their_alignment() {
        for align in [1, 64, 4096, 64 * 1024, 1 << 20] {
            for size in [1, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE] {
                let layout = Layout::from_size_align(size, align).expect("a layout");
                // SAFETY: sizes are not zero, and each block is freed or moved with the layout it was allocated with.
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
