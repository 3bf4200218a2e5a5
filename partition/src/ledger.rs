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
    /// Gathered parameters of the layers in use, gradients of the layer in its backward, buffers of collectives.
    Staging,
}

/// All categories, in the order in which reports show them.
pub const CATEGORIES: [Category; 4] =
    [Category::Parameters, Category::Gradients, Category::OptimizerState, Category::Staging];

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Parameters => "parameters",
            Self::Gradients => "gradients",
            Self::OptimizerState => "optimizer_state",
            Self::Staging => "staging",
        })
    }
}

/// Tracked bytes of one rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ledger {
    now: [u64; 4],
    peak: [u64; 4],
    peak_total: u64,
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
        self.peak_total
    }
}
