//! The classes of a language model's head that one rank has, and statistics of logits over the classes of all ranks.

use super::OwnEntries;
use crate::kernel::{Isa, softmax as kernel};
use crate::sequence::SequenceGroup;
use candle_core::Result;

/// The classes of one rank, for a loss over the classes of all ranks.
pub(crate) struct OfRank {
    pub(super) group: SequenceGroup,
    pub(super) entries: OwnEntries,
}

impl OfRank {
    /// Returns the number of classes of all ranks.
    pub(crate) fn classes(&self) -> usize {
        self.entries.all
    }

    /// Returns the group of ranks that split the classes.
    #[cfg(feature = "cuda")]
    pub(crate) fn group(&self) -> &SequenceGroup {
        &self.group
    }

    /// Returns which of all classes this rank has.
    #[cfg(feature = "cuda")]
    pub(crate) fn entries(&self) -> &OwnEntries {
        &self.entries
    }

    /// Returns the number of ranks.
    pub(crate) fn ranks(&self) -> usize {
        self.group.size()
    }

    /// Returns the number of classes of this rank. Further rows of its weight are padding.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the index of a class among this rank's classes, or `None` if another rank has it.
    pub(crate) fn place(&self, class: usize) -> Option<usize> {
        self.entries.place(class)
    }

    /// Returns the largest logit of a row, Σ e^(logit − largest), and the logit of the target, or 0 if another rank has
    /// it.
    pub(crate) fn statistics(&self, isa: Isa, row: &[f32], target: usize) -> [f32; 3] {
        if self.len() == 0 {
            return [f32::NEG_INFINITY, 0.0, 0.0];
        }
        let (largest, sum) = kernel::max_and_sum(isa, &row[..self.len()]);
        [largest, sum, self.place(target).map_or(0.0, |place| row[place])]
    }

    /// Joins the statistics of all ranks, three for each row, into statistics over all classes. Sums are added in f64
    /// in rank order.
    pub(crate) fn joined(&self, parts: Vec<f32>, targets: &[usize]) -> Result<Vec<f32>> {
        let (len, ranks) = (parts.len(), self.ranks());
        let all = self.group.concatenated(parts)?;
        let share = self.classes().div_ceil(ranks);
        let mut joined = Vec::with_capacity(len);
        for (row, &target) in targets.iter().enumerate() {
            let of = |rank: usize| &all[rank * len + 3 * row..rank * len + 3 * row + 3];
            let largest = (0..ranks).map(|rank| of(rank)[0]).fold(f32::NEG_INFINITY, f32::max);
            // A NaN is never the largest logit, but it makes the sum NaN.
            let scaled = |rank: usize| match of(rank)[0] {
                own if own == largest => f64::from(of(rank)[1]),
                own => f64::from(of(rank)[1]) * libm::exp(f64::from(own) - f64::from(largest)),
            };
            let sum: f64 = (0..ranks).map(scaled).sum();
            joined.extend([largest, sum as f32, of(target / share)[2]]);
        }
        Ok(joined)
    }
}
