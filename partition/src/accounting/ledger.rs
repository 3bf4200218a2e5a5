//! Counts memory by category: current bytes and peak bytes.

use std::fmt;

/// Category of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Category {
    /// Working parameters that stay in memory (whole if replicated, else shards and secondary shards), and master
    /// copies.
    Parameters,
    /// Accumulated gradients.
    Gradients,
    /// Optimizer state.
    OptimizerState,
    /// Activations saved by forwards, and the working memory of layers.
    Activations,
    /// Messages between pipeline stages.
    Communication,
    /// Gathered parameters of the layers in use, gradients of the layer in its backward, and buffers for collectives
    /// and for the disk, in use or idle.
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
    /// Peak bytes measured by a counting allocator, if there is one. Takes precedence over `peak_total`.
    measured: Option<u64>,
}

impl Ledger {
    /// Adds `elements` of `width` bytes each.
    pub fn add(&mut self, category: Category, elements: usize, width: usize) {
        let k = category as usize;
        self.now[k] += (elements * width) as u64;
        self.peak[k] = self.peak[k].max(self.now[k]);
        self.peak_total = self.peak_total.max(self.total());
    }

    /// Removes `elements` of `width` bytes each.
    pub fn remove(&mut self, category: Category, elements: usize, width: usize) {
        let k = category as usize;
        self.now[k] = self.now[k].saturating_sub((elements * width) as u64);
    }

    /// Records measured peaks: `bytes` of the category and `total` of the whole process.
    pub fn note(&mut self, category: Category, bytes: u64, total: u64) {
        let peak = &mut self.peak[category as usize];
        *peak = (*peak).max(bytes);
        self.measured = Some(self.measured.unwrap_or(0).max(total));
    }

    /// Returns the current bytes of a category.
    #[must_use]
    pub fn now(&self, category: Category) -> u64 {
        self.now[category as usize]
    }

    /// Returns the peak bytes of a category.
    #[must_use]
    pub fn peak(&self, category: Category) -> u64 {
        self.peak[category as usize]
    }

    /// Returns the current bytes over all categories.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.now.iter().sum()
    }

    /// Returns the peak bytes over all categories.
    #[must_use]
    pub fn peak_total(&self) -> u64 {
        self.measured.unwrap_or(self.peak_total)
    }
}
