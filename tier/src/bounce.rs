//! Memory of large pages through which blocks go whose own pages are small.
//!
//! The kernel gives a disk a list of the pages of a transfer. A megabyte in pages of 4 KiB is more of them than many disks take at a
//! time, and becomes several transfers: one disk read 0.75 GB/s so, and 1.4 GB/s into pages of 2 MiB. It is faster to copy.

use crate::loan::Part;
use crate::pages::Pages;
use crate::schedule::Direction;

/// A place for each block that is under way.
pub(crate) struct Bounce {
    pages: Pages,
    block: usize,
}

impl Bounce {
    /// For so many blocks of at most so many bytes at a time; `None` if there is no memory for them.
    pub(crate) fn new(slots: usize, block: usize) -> Option<Bounce> {
        Some(Bounce { pages: Pages::zeroed(slots * block)?, block })
    }

    /// Where the disk is to read a part to, or to write it from: at a place, or where it is.
    pub(crate) fn prepare(&mut self, slot: usize, part: &mut Part) -> *mut u8 {
        if !self.takes(part) {
            return part.as_mut_ptr();
        }
        let place = &mut self.pages[slot * self.block..][..self.block];
        let written = part.as_bytes();
        place[..written.len()].copy_from_slice(written);
        place.as_mut_ptr()
    }

    /// Takes the first bytes of a part, which the disk has read, to where they belong.
    pub(crate) fn deliver(&self, slot: usize, part: &mut Part, bytes: usize) {
        if self.takes(part) && part.direction() == Direction::Read {
            let read = &self.pages[slot * self.block..][..bytes.min(part.len())];
            part.as_room()[..read.len()].write_copy_of_slice(read);
        }
    }

    fn takes(&self, part: &Part) -> bool {
        part.is_scattered() && part.len() <= self.block
    }
}
