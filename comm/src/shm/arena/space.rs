//! Tracks the free parts of the arena in a table of fixed size: best fit, with adjacent blocks merged.
//!
//! An allocator cannot allocate, so the table is part of the program's zeroed memory. Every request to free a block
//! includes its length, so blocks in use need no entry. Large blocks are few, so a search visits only some dozens of
//! entries. An entry is either resident as a whole or not at all, so adjacent free blocks can be several entries. Such
//! entries form a *run*, and a new block may take memory from several entries of a run.

use std::ops::Range;

/// Blocks start and end at multiples of this many bytes.
pub(super) const UNIT: usize = 64 * 1024;

/// Maximum number of free blocks in the table. If the table is full, freed memory is not reused.
const ENTRIES: usize = 8192;

/// Maximum number of buffers that can be retired individually. If there are more, no freed memory is reused at all.
const RETIRED: usize = 64;

/// The resident bytes may exceed the peak in use by this many bytes, or by 1/SHARE of the peak if that is more.
const SLACK: usize = 16 << 20;
const SHARE: usize = 16;

#[derive(Clone, Copy)]
struct Free {
    start: usize,
    length: usize,
    /// Whether the entry may be resident: it was in use and has not been returned to the operating system since.
    resident: bool,
}

impl Free {
    fn end(&self) -> usize {
        self.start + self.length
    }
}

/// The table of free blocks. A table of zeros describes an arena without any space.
pub(super) struct Space {
    free: [Free; ENTRIES],
    count: usize,
    /// Memory from this offset on was never allocated, so it is zero.
    fresh: usize,
    in_use: usize,
    /// Number of bytes that the process uses outside of the arena, as last reported.
    elsewhere: usize,
    /// Maximum of `in_use + elsewhere`.
    peak: usize,
    /// Number of bytes of the resident free entries.
    kept: usize,
    retired: [(usize, usize); RETIRED],
    retirements: usize,
}

impl Space {
    pub(super) const fn new() -> Space {
        Space {
            free: [Free { start: 0, length: 0, resident: false }; ENTRIES],
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

    /// Adds the never used space of a new arena.
    pub(super) fn open(&mut self, room: Range<usize>) {
        self.fresh = room.start;
        self.insert(0, Free { start: room.start, length: room.len(), resident: false });
    }

    /// Allocates a block of at least `bytes`. Returns its start and the number of its leading bytes that may be
    /// nonzero.
    pub(super) fn take(&mut self, bytes: usize) -> Option<(usize, usize)> {
        let length = rounded(bytes)?;
        let fitting = self.runs().filter(|(_, run)| *run >= length);
        let (index, _) = fitting.min_by_key(|(_, run)| *run)?;
        let start = self.free[index].start;
        let used = self.fresh.saturating_sub(start).min(length);
        self.cut(index, length);
        Some((start, used))
    }

    /// Frees the block at `start` that was allocated for `bytes`. If it returns a range, the caller must return this
    /// range to the operating system before it releases the lock of the table.
    pub(super) fn give(&mut self, start: usize, bytes: usize) -> Option<Range<usize>> {
        let index = self.put_back(start, rounded(bytes)?)?;
        self.is_too_much().then(|| self.empty(index))
    }

    /// Sets the bytes used elsewhere. Call [`Space::excess`] afterwards.
    pub(super) fn note_elsewhere(&mut self, bytes: usize) {
        self.elsewhere = bytes;
        self.peak = self.peak.max(self.in_use + bytes);
    }

    /// Returns a range that the caller must return to the operating system, as for [`Space::give`]. Call it until it
    /// returns `None`.
    pub(super) fn excess(&mut self) -> Option<Range<usize>> {
        let resident = self.entries().iter().enumerate().filter(|(_, free)| free.resident);
        let (index, _) = resident.max_by_key(|(_, free)| free.length)?;
        self.is_too_much().then(|| self.empty(index))
    }

    fn is_too_much(&self) -> bool {
        self.in_use + self.kept + self.elsewhere > self.peak + (self.peak / SHARE).max(SLACK)
    }

    /// Marks a resident entry as not resident and returns its range.
    fn empty(&mut self, index: usize) -> Range<usize> {
        let free = self.free[index];
        self.remove(index);
        self.kept -= free.length;
        self.join(index, Free { resident: false, ..free });
        free.start..free.end()
    }

    /// Resizes the block at `start` from `old` to `new` bytes in place. Returns whether that was possible.
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
        let behind = self.runs().find(|(index, _)| self.free[*index].start == end);
        let fits = behind.filter(|(_, run)| *run >= more);
        if let Some((index, _)) = fits {
            self.cut(index, more);
        }
        fits.is_some()
    }

    /// Excludes the blocks in a range from reuse, because a peer may still write to them. The blocks may be free or
    /// still in use.
    pub(super) fn retire(&mut self, range: Range<usize>) {
        if let Some(entry) = self.retired.get_mut(self.retirements) {
            *entry = (range.start, range.end);
        }
        self.retirements += 1;
    }

    fn entries(&self) -> &[Free] {
        &self.free[..self.count]
    }

    /// Iterates over the runs of adjacent entries as (first entry, total bytes).
    fn runs(&self) -> impl Iterator<Item = (usize, usize)> {
        let entries = self.entries();
        let mut next = 0;
        std::iter::from_fn(move || {
            let first = next;
            let begin = entries.get(first)?.start;
            let mut end = begin;
            while let Some(free) = entries.get(next).filter(|free| free.start == end) {
                end = free.end();
                next += 1;
            }
            Some((first, end - begin))
        })
    }

    /// Takes the first `length` bytes of the run that starts with the entry `index`.
    fn cut(&mut self, index: usize, length: usize) {
        self.in_use += length;
        let mut rest = length;
        while rest > 0 {
            let free = &mut self.free[index];
            let part = free.length.min(rest);
            free.start += part;
            free.length -= part;
            rest -= part;
            self.kept -= if free.resident { part } else { 0 };
            self.fresh = self.fresh.max(free.start);
            if free.length == 0 {
                self.remove(index);
            }
        }
        self.peak = self.peak.max(self.in_use + self.elsewhere);
    }

    /// Adds a block to the free blocks. Returns the index of the entry that now contains it; `None` if the block will
    /// not be reused.
    fn put_back(&mut self, start: usize, length: usize) -> Option<usize> {
        self.in_use -= length;
        let end = start + length;
        let withdrawn = self.retired[..self.retirements.min(RETIRED)].iter();
        if self.retirements > RETIRED || withdrawn.clone().any(|(from, to)| *from < end && start < *to) {
            return None;
        }
        let index = self.entries().partition_point(|free| free.start < start);
        let index = self.join(index, Free { start, length, resident: true })?;
        self.kept += length;
        Some(index)
    }

    /// Inserts a block at `index` and merges it with adjacent entries if all are resident or none is. Returns the index
    /// of the entry that now contains it; `None` if the table is full.
    fn join(&mut self, mut index: usize, mut block: Free) -> Option<usize> {
        let alike = |other: &Free| other.resident == block.resident;
        let next = self.entries().get(index).copied().filter(alike).filter(|next| next.start == block.end());
        let before = index.checked_sub(1).map(|before| self.free[before]).filter(alike);
        if let Some(next) = next {
            block.length += next.length;
            self.remove(index);
        }
        if let Some(before) = before.filter(|before| before.end() == block.start) {
            block = Free { start: before.start, length: before.length + block.length, ..block };
            index -= 1;
            self.remove(index);
        }
        self.insert(index, block).then_some(index)
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

/// Rounds up to a multiple of UNIT; `None` on overflow.
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

    /// Returns the free runs, in units.
    fn free(space: &Space) -> Vec<(usize, usize)> {
        space.runs().map(|(first, run)| (space.free[first].start / UNIT, run / UNIT)).collect()
    }

    fn resident(space: &Space) -> usize {
        space.entries().iter().filter(|free| free.resident).map(|free| free.length).sum()
    }

    #[test]
    fn allocation_is_best_fit_and_merges_adjacent_blocks() {
        let mut space = space(20);
        let blocks: Vec<usize> =
            [3, 1, 2, 1, 4].iter().map(|n| space.take(n * UNIT).expect("space in the arena").0).collect();
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
        assert_eq!((space.in_use, space.kept), (13 * UNIT, 0));
        assert_eq!(space.take(8 * UNIT), None);
        assert_eq!(space.take(usize::MAX), None);
    }

    #[test]
    fn blocks_grow_in_place_into_free_space_behind_them() {
        let mut space = space(10);
        let (first, _) = space.take(2 * UNIT).expect("space in the arena");
        let (second, _) = space.take(UNIT).expect("space in the arena");
        assert!(!space.resize(first, 2 * UNIT, 3 * UNIT));
        assert!(space.resize(first, 2 * UNIT, UNIT + 1));
        assert!(space.resize(first, UNIT + 1, 5));
        space.give(second, UNIT);
        assert!(space.resize(first, 5, 10 * UNIT));
        assert_eq!((free(&space), space.in_use), (vec![], 10 * UNIT));
        assert!(!space.resize(first, 10 * UNIT, 11 * UNIT));
    }

    #[test]
    fn retired_memory_is_never_allocated_again() {
        let mut space = space(4);
        let (first, _) = space.take(UNIT).expect("space in the arena");
        let (second, _) = space.take(UNIT).expect("space in the arena");
        space.retire(first..first + 100);
        space.give(first, UNIT);
        space.give(second, UNIT);
        assert_eq!(free(&space), [(2, 3)]);
        for _ in 0..RETIRED {
            space.retire(0..1);
        }
        let (third, _) = space.take(UNIT).expect("space in the arena");
        space.give(third, UNIT);
        assert_eq!(free(&space), [(3, 2)], "too many retired buffers for the table: no memory is reused");
    }

    #[test]
    fn resident_memory_stays_within_the_peak_plus_slack() {
        const UNITS: usize = 100_000;
        let mut space = space(UNITS);
        // A block of one unit between every two freed blocks keeps them from merging, so each size needs new space.
        let mut most = 0;
        for units in 1..300 {
            let (start, _) = space.take(units * UNIT).expect("space in the arena");
            space.take(UNIT).expect("space in the arena");
            let returned = space.give(start, units * UNIT);
            assert!(returned.is_none_or(|range| range.start <= start && start < range.end));
            most = most.max(space.in_use + space.kept);
            assert!(space.in_use + space.kept <= space.peak + SLACK.max(space.peak / SHARE));
            assert_eq!(space.kept, resident(&space));
        }
        assert!(most > space.peak, "some memory is kept");
    }

    #[test]
    fn only_memory_that_was_touched_counts_as_resident() {
        let mut space = space(100_000);
        // Each block is taken from a run of previously freed memory followed by memory that was never in use.
        let mut sizes = (1..400).cycle();
        let mut held = std::collections::VecDeque::new();
        for _ in 0..4_000 {
            let bytes = sizes.next().expect("a cycle") * UNIT;
            held.push_back((space.take(bytes).expect("space in the arena").0, bytes));
            if held.len() == 4 {
                let (start, bytes) = held.pop_front().expect("four");
                space.give(start, bytes);
            }
            assert_eq!(space.kept, resident(&space));
            assert!(space.fresh - UNIT >= space.in_use + space.kept, "memory that was never touched is not counted");
        }
    }

    #[test]
    fn a_full_table_of_free_blocks_only_leaks_blocks() {
        let mut space = space(3 * ENTRIES);
        let blocks: Vec<usize> = (0..3 * ENTRIES).map(|_| space.take(1).expect("space in the arena").0).collect();
        for block in blocks.iter().step_by(2) {
            space.give(*block, 1);
        }
        assert_eq!(space.count, ENTRIES);
        for block in blocks.iter().skip(1).step_by(2) {
            space.give(*block, 1);
        }
        assert_eq!(space.in_use, 0);
        assert_eq!(space.kept, resident(&space));
        let ends = space.entries().iter().map(|free| free.start + free.length);
        assert!(ends.zip(space.entries().iter().skip(1)).all(|(end, next)| end <= next.start));
        assert!(space.take(ENTRIES * UNIT).is_some(), "merged entries form one block");
    }

    #[test]
    fn memory_outside_the_arena_displaces_resident_free_blocks() {
        let mut space = space(2000);
        let blocks: Vec<usize> = (0..4).map(|_| space.take(SLACK).expect("space in the arena").0).collect();
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
        let (again, _) = space.take(3 * SLACK).expect("space in the arena");
        assert_eq!(space.give(again, 3 * SLACK), None, "memory up to the peak may stay resident");
    }
}
