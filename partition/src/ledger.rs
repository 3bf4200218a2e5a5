//! Bytes by category: what is held now and the most that was.

use std::fmt;

/// What memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Category {
    /// Working parameters that stay: replicated ones in full, shards of the others; and master copies.
    Parameters,
    /// Accumulated gradients.
    Gradients,
    /// Optimizer state.
    OptimizerState,
    /// What forwards keep for backwards, and what layers need while they run.
    Activations,
    /// Messages between pipeline stages.
    Communication,
    /// Gathered parameters of the layers in use, gradients of the layer in its backward, buffers of collectives and of the disk,
    /// in use or waiting for their next use.
    Staging,
}

/// All categories, in the order in which reports show them.
pub const CATEGORIES: [Category; 6] = [
    Category::Parameters,
    Category::Gradients,
    Category::OptimizerState,
    Category::Activations,
    Category::Communication,
    Category::Staging,
];

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Parameters => "parameters",
            Self::Gradients => "gradients",
            Self::OptimizerState => "optimizer_state",
            Self::Activations => "activations",
            Self::Communication => "communication",
            Self::Staging => "staging",
        })
    }
}

/// Tracked bytes of one rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ledger {
    now: [u64; CATEGORIES.len()],
    peak: [u64; CATEGORIES.len()],
    peak_total: u64,
    /// What the allocator has counted at most, if it counts: then that is what is true.
    measured: Option<u64>,
}

impl Ledger {
    /// Counts `elements` of `width` bytes as held.
    pub fn add(&mut self, category: Category, elements: usize, width: usize) {
        let k = category as usize;
        self.now[k] += (elements * width) as u64;
        self.peak[k] = self.peak[k].max(self.now[k]);
        self.peak_total = self.peak_total.max(self.total());
    }

    /// Counts them as given up.
    pub fn remove(&mut self, category: Category, elements: usize, width: usize) {
        let k = category as usize;
        self.now[k] = self.now[k].saturating_sub((elements * width) as u64);
    }

    /// What something else has measured of a category: so many bytes at a time, and so many of all.
    pub fn note(&mut self, category: Category, bytes: u64, total: u64) {
        let peak = &mut self.peak[category as usize];
        *peak = (*peak).max(bytes);
        self.measured = Some(self.measured.unwrap_or(0).max(total));
    }

    /// Bytes held now.
    #[must_use]
    pub fn now(&self, category: Category) -> u64 {
        self.now[category as usize]
    }

    /// The most bytes held at a time in the category.
    #[must_use]
    pub fn peak(&self, category: Category) -> u64 {
        self.peak[category as usize]
    }

    /// Bytes held now, all categories.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.now.iter().sum()
    }

    /// The most bytes held at a time, all categories.
    #[must_use]
    pub fn peak_total(&self) -> u64 {
        self.measured.unwrap_or(self.peak_total)
    }
}
