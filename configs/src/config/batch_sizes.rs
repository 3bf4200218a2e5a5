//! `training.rampup_batch_size`: a batch size that grows with the samples that a run has consumed, like Megatron-LM's
//! `--rampup-batch-size`.

use serde::Serialize;

use crate::schema::*;
use crate::table::section;

section! {
    /// `training.rampup_batch_size`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
    pub struct RampUp(keys) in "training.rampup_batch_size" {
        pub start: usize = key(COUNT, REQUIRED, "Samples in the first step");
        pub increment: usize = key(COUNT, REQUIRED, "Samples added to the batch at each increase");
        pub samples: u64 = key(SIZE_1, REQUIRED, "Samples to train on until the batch size reaches train_batch_size; the increases are evenly spaced over these samples");
    }
}

/// The number of samples of each step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchSizes {
    /// `train_batch_size`.
    pub full: usize,
    /// How the batch size grows to `full`; `None` if it is constant.
    pub rampup: Option<RampUp>,
}

impl BatchSizes {
    /// Returns the number of samples of the step that begins after `consumed` samples of the run.
    #[must_use]
    pub fn at(&self, consumed: u64) -> usize {
        match self.rampup {
            Some(RampUp { start, increment, samples }) if consumed <= samples => {
                let increments = self.full.saturating_sub(start) / increment;
                // In f64, as Megatron-LM computes it.
                let grown = (consumed as f64 / (samples as f64 / increments as f64)) as usize;
                (start + grown * increment).min(self.full)
            }
            _ => self.full,
        }
    }

    /// Returns how many samples the run has consumed after `steps` further steps, starting from `consumed` samples.
    #[must_use]
    pub fn after(&self, mut consumed: u64, mut steps: u64) -> u64 {
        while steps > 0 && self.is_growing(consumed) {
            (consumed, steps) = (consumed + self.at(consumed) as u64, steps - 1);
        }
        consumed + steps * self.full as u64
    }

    /// Returns the number of steps that take the run from `consumed` samples to at least `end` samples.
    #[must_use]
    pub fn steps(&self, mut consumed: u64, end: u64) -> u64 {
        let mut steps = 0;
        while consumed < end && self.is_growing(consumed) {
            (consumed, steps) = (consumed + self.at(consumed) as u64, steps + 1);
        }
        steps + end.saturating_sub(consumed).div_ceil(self.full as u64)
    }

    fn is_growing(&self, consumed: u64) -> bool {
        self.rampup.is_some_and(|rampup| consumed <= rampup.samples)
    }
}
