//! Counts bytes by category while a program is walked, and tracks the buffers that are kept for reuse.

use std::collections::BTreeMap;

use zero_partition::{CATEGORIES, Category};

/// Peak bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Peaks {
    /// Peak of the sum over all categories on the host.
    pub total: u64,
    /// Peak of the sum over all categories on the GPU.
    pub gpu: u64,
    /// Peak of each category, in the order of [`CATEGORIES`].
    pub by_category: [u64; CATEGORIES.len()],
}

/// The bytes in use now, and their peaks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Meter {
    now: [u64; CATEGORIES.len()],
    on_gpu: u64,
    /// Whether each category is on the GPU by default; `add_at` and `free_at` override this.
    pub(crate) usually_on_gpu: [bool; CATEGORIES.len()],
    pub(crate) peaks: Peaks,
}

impl Meter {
    pub(crate) fn add(&mut self, category: Category, bytes: u64) {
        self.add_at(category, bytes, self.usually_on_gpu[category as usize]);
    }

    pub(crate) fn free(&mut self, category: Category, bytes: u64) {
        self.free_at(category, bytes, self.usually_on_gpu[category as usize]);
    }

    /// Adds bytes on the GPU or on the host.
    pub(crate) fn add_at(&mut self, category: Category, bytes: u64, on_gpu: bool) {
        self.now[category as usize] += bytes;
        self.on_gpu += if on_gpu { bytes } else { 0 };
        self.note();
    }

    pub(crate) fn free_at(&mut self, category: Category, bytes: u64, on_gpu: bool) {
        let now = &mut self.now[category as usize];
        debug_assert!(*now >= bytes, "cannot free {bytes} bytes of {category}: only {now} are allocated");
        *now = now.saturating_sub(bytes);
        self.on_gpu = self.on_gpu.saturating_sub(if on_gpu { bytes } else { 0 });
    }

    /// Adds bytes and frees them immediately, so that they affect only the peaks.
    pub(crate) fn flash(&mut self, category: Category, bytes: u64) {
        self.add(category, bytes);
        self.free(category, bytes);
    }

    fn note(&mut self) {
        self.peaks.total = self.peaks.total.max(self.now.iter().sum::<u64>().saturating_sub(self.on_gpu));
        self.peaks.gpu = self.peaks.gpu.max(self.on_gpu);
        for (peak, now) in self.peaks.by_category.iter_mut().zip(self.now) {
            *peak = (*peak).max(now);
        }
    }
}

/// Idle buffers by size. Sizes are in elements for `zero_partition`'s pool, and in bytes for disk buffers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Idle(BTreeMap<u64, usize>);

impl Idle {
    /// Takes an idle buffer of this size; returns false if there is none.
    pub(crate) fn take(&mut self, size: u64) -> bool {
        match self.0.get_mut(&size) {
            Some(count) if *count > 0 => {
                *count -= 1;
                true
            }
            _ => false,
        }
    }

    pub(crate) fn give(&mut self, size: u64) {
        *self.0.entry(size).or_default() += 1;
    }

    /// Drops all buffers; returns the sum of their sizes.
    pub(crate) fn clear(&mut self) -> u64 {
        std::mem::take(&mut self.0).into_iter().map(|(size, count)| size * count as u64).sum()
    }
}
