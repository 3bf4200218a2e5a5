//! `training.rampup_batch_size`: a batch size that grows with the samples that a run has consumed, like Megatron-LM's
//! `--rampup-batch-size`.

use serde::Serialize;

use crate::config::{Config, PipelineSchedule, Training};
use crate::read::reader::Resolver;
use crate::schema::*;
use crate::table::section;

section! {
    /// `training.rampup_batch_size`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
    pub struct RampUp(keys) in Training::rampup_batch_size {
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

impl Config {
    /// Returns the number of samples of each step.
    #[must_use]
    pub fn batch_sizes(&self) -> BatchSizes {
        BatchSizes { full: self.train_batch_size, rampup: self.training.rampup_batch_size }
    }
}

impl RampUp {
    /// Checks the section against the batch size.
    pub(crate) fn check(&self, config: &Config, resolver: &mut Resolver<'_>) {
        let (full, micro) = (config.train_batch_size, config.train_micro_batch_size_per_gpu);
        let is_interleaved = config.pipeline.schedule == PipelineSchedule::Interleaved;
        let groups = if is_interleaved { config.pipeline.stages } else { 1 };
        let unit = full / config.gradient_accumulation_steps.max(1) * groups;
        if config.training.trace {
            let message = "a trace needs steps of equal size, so the batch size must not grow".to_string();
            let help = Some("remove `trace` or `rampup_batch_size`".to_string());
            resolver.contradiction(&[Training::rampup_batch_size, Training::trace], message, help);
        }
        if self.start >= full || !(full - self.start).is_multiple_of(self.increment) {
            let message = format!(
                "a batch size that starts at {} cannot reach `{}` {full} in increments of {}",
                self.start,
                Config::train_batch_size,
                self.increment
            );
            resolver.contradiction(&[Self::start, Self::increment, Config::train_batch_size], message, None);
        } else if let Some((key, count)) = [(Self::start, self.start), (Self::increment, self.increment)]
            .into_iter()
            .find(|(_, n)| !n.is_multiple_of(unit))
        {
            let what = if is_interleaved { "one micro-batch per stage" } else { "one micro-batch" };
            let message = format!(
                "{count} samples are not a multiple of {unit}, the number of samples in {what} on every replica"
            );
            let help =
                Some(format!("use a multiple of {unit}, or a smaller `{}`", Config::train_micro_batch_size_per_gpu));
            resolver.contradiction(&[key, Config::train_micro_batch_size_per_gpu], message, help);
        } else if config.training.reproducible
            && let Some(size) =
                (self.start..=full).step_by(self.increment).find(|size| !(size / micro).is_power_of_two())
        {
            let message = format!(
                "with `reproducible: true`, the number of micro-batches per step must be a power of two, but a step \
                 of {size} samples has {}",
                size / micro
            );
            let help = Some(format!("set `start` and `increment` to half of `{}`", Config::train_batch_size));
            resolver.contradiction(&[Training::reproducible, Self::increment], message, help);
        }
    }
}
