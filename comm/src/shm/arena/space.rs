//! Which parts of the arena are free: best fit, neighbours joined, in a table of fixed size.
//!
//! An allocator cannot allocate, so the table is part of the program's zeroed memory. The length of a block comes with every
//! request to free it, so blocks that are in use need no entry. Large blocks are few: a search is a walk over some dozens of
//! entries.

use std::ops::Range;

/// Blocks begin and end at multiples of this.
pub(super) const UNIT: usize = 64 * 1024;

/// Free blocks that can be remembered. What is freed beyond that is lost to reuse.
const ENTRIES: usize = 8192;

/// Buffers that can be withdrawn from reuse one by one; after that many failures nothing is reused any more.
const RETIRED: usize = 64;

/// Bytes that may be resident beyond the most that was ever in use: so many, or this share of it if that is more.
const SLACK: usize = 16 << 20;
const SHARE: usize = 16;

#[derive(Clone, Copy)]
struct Free {
    start: usize,
    length: usize,
    /// Bytes of it that may occupy memory.
    resident: usize,
}

/// The table. All zeros is an arena without room.
pub(super) struct Space {
    free: [Free; ENTRIES],
    count: usize,
    /// Nobody has ever had what lies from here on: it is zero.
    fresh: usize,
    in_use: usize,
    /// Memory of the process that is not of the arena, as far as it is told.
    elsewhere: usize,
    /// The most that both were together.
    peak: usize,
    /// Sum of `resident`.
    kept: usize,
    retired: [(usize, usize); RETIRED],
    retirements: usize,
}

impl Space {
    pub(super) const fn new() -> Space {
        Space {
            free: [Free { start: 0, length: 0, resident: 0 }; ENTRIES],
            count: 0,
            fresh: 0,
            in_use: 0,
            elsewhere: 0,
            peak: 0,
            kept: 0,
            retired: [(0, 0); RETIRED],
            retirements: 0,
        }
    }

    /// Hands over the room that there is, never used before.
    pub(super) fn open(&mut self, room: Range<usize>) {
        self.fresh = room.start;
        self.insert(0, Free { start: room.start, length: room.len(), resident: 0 });
    }

    /// A block of at least `bytes`, and how many of its first bytes may be other than zero.
    pub(super) fn take(&mut self, bytes: usize) -> Option<(usize, usize)> {
        let length = rounded(bytes)?;
        let fitting = self.entries().iter().enumerate().filter(|(_, free)| free.length >= length);
        let (index, _) = fitting.min_by_key(|(_, free)| free.length)?;
        let start = self.free[index].start;
        let used = self.fresh.saturating_sub(start).min(length);
        self.cut(index, length);
        Some((start, used))
    }

    /// Takes back the block at `start` that was taken for `bytes`. Gives what should be returned to the operating system; the
    /// caller must do that before anybody else comes to the table.
    pub(super) fn give(&mut self, start: usize, bytes: usize) -> Option<Range<usize>> {
        let index = self.put_back(start, rounded(bytes)?)?;
        self.is_too_much().then(|| self.empty(index))
    }

    /// Is told how much there is elsewhere; [`Space::excess`] is to be asked afterwards.
    pub(super) fn note_elsewhere(&mut self, bytes: usize) {
        self.elsewhere = bytes;
        self.peak = self.peak.max(self.in_use + bytes);
    }

    /// What should be returned to the operating system, as with [`Space::give`], one block at a time.
    pub(super) fn excess(&mut self) -> Option<Range<usize>> {
        let (index, free) = self.entries().iter().enumerate().max_by_key(|(_, free)| free.resident)?;
        (free.resident > 0 && self.is_too_much()).then(|| self.empty(index))
    }

    fn is_too_much(&self) -> bool {
        self.in_use + self.kept + self.elsewhere > self.peak + (self.peak / SHARE).max(SLACK)
    }

    /// Counts a free block as not resident; gives what may have been.
    fn empty(&mut self, index: usize) -> Range<usize> {
        let free = &mut self.free[index];
        self.kept -= std::mem::take(&mut free.resident);
        free.start..(free.start + free.length).min(self.fresh)
    }

    /// Makes the block at `start` hold `new` bytes instead of `old`, if that is possible where it lies.
    pub(super) fn resize(&mut self, start: usize, old: usize, new: usize) -> bool {
        let (Some(before), Some(after)) = (rounded(old), rounded(new)) else { return false };
        if after < before {
            self.put_back(start + after, before - after);
            return true;
        }
        if after == before {
            return true;
        }
        let (end, more) = (start + before, after - before);
        let index = self.entries().partition_point(|free| free.start < end);
        let fits = index < self.count && self.free[index].start == end && self.free[index].length >= more;
        if fits {
            self.cut(index, more);
        }
        fits
    }

    /// Withdraws the blocks in a range from reuse, now or when they are freed: somebody may still write there.
    pub(super) fn retire(&mut self, range: Range<usize>) {
        if let Some(entry) = self.retired.get_mut(self.retirements) {
            *entry = (range.start, range.end);
        }
        self.retirements += 1;
    }

    fn entries(&self) -> &[Free] {
        &self.free[..self.count]
    }

    /// Takes the first `length` bytes from a free block.
    fn cut(&mut self, index: usize, length: usize) {
        let free = &mut self.free[index];
        free.start += length;
        free.length -= length;
        let resident = free.resident.min(free.length);
        self.kept -= free.resident - resident;
        free.resident = resident;
        self.fresh = self.fresh.max(free.start);
        if free.length == 0 {
            self.remove(index);
        }
        self.in_use += length;
        self.peak = self.peak.max(self.in_use + self.elsewhere);
    }

    /// Joins a block with its free neighbours; the entry it is part of now. `None` if it is not to be reused.
    fn put_back(&mut self, start: usize, length: usize) -> Option<usize> {
        self.in_use -= length;
        let end = start + length;
        let withdrawn = self.retired[..self.retirements.min(RETIRED)].iter();
        if self.retirements > RETIRED || withdrawn.clone().any(|(from, to)| *from < end && start < *to) {
            return None;
        }
        let mut block = Free { start, length, resident: length };
        let mut index = self.entries().partition_point(|free| free.start < start);
        if let Some(next) = self.entries().get(index).copied().filter(|next| next.start == end) {
            block.length += next.length;
            block.resident += next.resident;
            self.remove(index);
        }
        let before = index.checked_sub(1).map(|before| self.free[before]);
        if let Some(before) = before.filter(|before| before.start + before.length == start) {
            block.start = before.start;
            block.length += before.length;
            block.resident += before.resident;
            index -= 1;
            self.remove(index);
        }
        self.insert(index, block).then(|| {
            self.kept += length;
            index
        })
    }

    fn insert(&mut self, index: usize, block: Free) -> bool {
        if self.count == ENTRIES {
            return false;
        }
        self.free.copy_within(index..self.count, index + 1);
        self.free[index] = block;
        self.count += 1;
        true
    }

    fn remove(&mut self, index: usize) {
        self.free.copy_within(index + 1..self.count, index);
        self.count -= 1;
    }
}

/// `None` for more than any arena has.
fn rounded(bytes: usize) -> Option<usize> {
    bytes.max(1).checked_next_multiple_of(UNIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space(units: usize) -> Box<Space> {
        let mut space = Box::new(Space::new());
        space.open(UNIT..(units + 1) * UNIT);
        space
    }

    /// What is free, in units.
    fn free(space: &Space) -> Vec<(usize, usize)> {
        space.entries().iter().map(|free| (free.start / UNIT, free.length / UNIT)).collect()
    }

    #[test]
    fn the_smallest_block_that_fits_is_taken_and_neighbours_are_joined() {
        let mut space = space(20);
        let blocks: Vec<usize> = [3, 1, 2, 1, 4].iter().map(|n| space.take(n * UNIT).expect("room").0).collect();
        assert_eq!(blocks, [1, 4, 5, 7, 8].map(|unit| unit * UNIT));
        space.give(blocks[0], 3 * UNIT);
        space.give(blocks[2], 2 * UNIT);
        assert_eq!(free(&space), [(1, 3), (5, 2), (12, 9)]);
        assert_eq!(space.take(UNIT + 1), Some((5 * UNIT, 2 * UNIT)), "two units, both used before");
        space.give(5 * UNIT, UNIT + 1);
        space.give(blocks[1], UNIT);
        assert_eq!(free(&space), [(1, 6), (12, 9)]);
        space.give(blocks[4], 4 * UNIT);
        space.give(blocks[3], UNIT);
        assert_eq!(free(&space), [(1, 20)]);
        assert_eq!((space.in_use, space.kept), (0, 11 * UNIT));
        assert_eq!(space.take(13 * UNIT), Some((UNIT, 11 * UNIT)), "two units are fresh");
        assert_eq!(space.take(8 * UNIT), None);
        assert_eq!(space.take(usize::MAX), None);
    }

    #[test]
    fn a_block_is_resized_where_it_lies_if_there_is_room_behind() {
        let mut space = space(10);
        let (first, _) = space.take(2 * UNIT).expect("room");
        let (second, _) = space.take(UNIT).expect("room");
        assert!(!space.resize(first, 2 * UNIT, 3 * UNIT));
        assert!(space.resize(first, 2 * UNIT, UNIT + 1));
        assert!(space.resize(first, UNIT + 1, 5));
        space.give(second, UNIT);
        assert!(space.resize(first, 5, 10 * UNIT));
        assert_eq!((free(&space), space.in_use), (vec![], 10 * UNIT));
        assert!(!space.resize(first, 10 * UNIT, 11 * UNIT));
    }

    #[test]
    fn what_is_retired_is_never_given_out_again() {
        let mut space = space(4);
        let (first, _) = space.take(UNIT).expect("room");
        let (second, _) = space.take(UNIT).expect("room");
        space.retire(first..first + 100);
        space.give(first, UNIT);
        space.give(second, UNIT);
        assert_eq!(free(&space), [(2, 3)]);
        for _ in 0..RETIRED {
            space.retire(0..1);
        }
        let (third, _) = space.take(UNIT).expect("room");
        space.give(third, UNIT);
        assert_eq!(free(&space), [(3, 2)], "too many to tell apart: nothing is reused");
    }

    #[test]
    fn no_more_stays_resident_than_was_ever_in_use_and_a_slack() {
        const UNITS: usize = 100_000;
        let mut space = space(UNITS);
        // Blocks of one unit in between keep the freed ones from being joined, so that each size needs new room.
        let mut most = 0;
        for units in 1..300 {
            let (start, _) = space.take(units * UNIT).expect("room");
            space.take(UNIT).expect("room");
            let returned = space.give(start, units * UNIT);
            assert!(returned.is_none_or(|range| range.start <= start && start < range.end));
            most = most.max(space.in_use + space.kept);
            assert!(space.in_use + space.kept <= space.peak + SLACK.max(space.peak / SHARE));
            assert_eq!(space.kept, space.entries().iter().map(|free| free.resident).sum::<usize>());
        }
        assert!(most > space.peak, "some is kept");
    }

    #[test]
    fn a_full_table_loses_blocks_but_nothing_else() {
        let mut space = space(3 * ENTRIES);
        let blocks: Vec<usize> = (0..3 * ENTRIES).map(|_| space.take(1).expect("room").0).collect();
        for block in blocks.iter().step_by(2) {
            space.give(*block, 1);
        }
        assert_eq!(space.count, ENTRIES);
        for block in blocks.iter().skip(1).step_by(2) {
            space.give(*block, 1);
        }
        assert_eq!(space.in_use, 0);
        assert_eq!(space.kept, space.entries().iter().map(|free| free.resident).sum::<usize>());
        let ends = space.entries().iter().map(|free| free.start + free.length);
        assert!(ends.zip(space.entries().iter().skip(1)).all(|(end, next)| end <= next.start));
        assert!(space.take(ENTRIES * UNIT).is_some(), "what was joined is one block");
    }

    #[test]
    fn memory_elsewhere_takes_the_place_of_what_is_kept() {
        let mut space = space(2000);
        let blocks: Vec<usize> = (0..4).map(|_| space.take(SLACK).expect("room").0).collect();
        let (first, rest) = blocks.split_first().expect("four");
        rest.iter().for_each(|&block| assert_eq!(space.give(block, SLACK), None));
        space.note_elsewhere(SLACK);
        assert_eq!(space.excess(), None, "within the slack");
        space.note_elsewhere(2 * SLACK);
        assert_eq!(space.excess(), Some(first + SLACK..first + 4 * SLACK));
        assert_eq!((space.excess(), space.kept, space.peak), (None, 0, 4 * SLACK));
        space.note_elsewhere(4 * SLACK);
        assert_eq!(space.peak, 5 * SLACK);
        space.note_elsewhere(0);
        let (again, _) = space.take(3 * SLACK).expect("room");
        assert_eq!(space.give(again, 3 * SLACK), None, "as much as there was at most may stay");
    }
}
