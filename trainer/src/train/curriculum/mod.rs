//! The curriculum of `data_efficiency`. It determines how many tokens of each sample a step trains on.
//!
//! The length depends only on the step, and is equal to the difficulty of DeepSpeed's `CurriculumScheduler`. A step
//! uses the same samples as without a curriculum, and trains on their first tokens. The order of samples therefore does
//! not change, and all ranks truncate to the same length.

use zero_config::{Config, Curriculum, CurriculumSchedule};
use zero_engine::format::counted;

use crate::data::Dataset;

/// The number of tokens per sample at each step.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Lengths {
    curriculum: Curriculum,
    /// Number of tokens of a whole sample.
    whole: usize,
}

impl Lengths {
    /// Returns the configured curriculum for the samples of `data`, if there is one.
    pub(super) fn of(config: &Config, data: &dyn Dataset) -> Option<Self> {
        let curriculum = config.data_efficiency.curriculum()?.clone();
        Some(Self { curriculum, whole: data.tokens_per_sample() })
    }

    /// Returns the tokens per sample at a step, counted from 1.
    pub(super) fn at(&self, step: u64) -> usize {
        let Curriculum { min_difficulty: min, max_difficulty: max, schedule_config: config, .. } = &self.curriculum;
        if let (Some(lengths), Some(steps)) = (&config.difficulty, &config.max_step) {
            // As in DeepSpeed, the length stays at the largest value once it has reached it. A curriculum that begins
            // at the largest value therefore never changes.
            let now = steps.partition_point(|&last| (last as u64) < step);
            let reached = lengths[..=now].iter().find(|length| *length >= max);
            return if min >= max { *min } else { *reached.unwrap_or(&lengths[now]) };
        }
        let (total, multiple) = (config.total_curriculum_step.unwrap_or(1), config.difficulty_step.unwrap_or(1));
        let degree = match self.curriculum.schedule_type {
            CurriculumSchedule::Root => config.root_degree.unwrap_or(1.0),
            CurriculumSchedule::Linear | CurriculumSchedule::Discrete => 1.0,
        };
        let progress = (step as f64 / total as f64).powf(1.0 / degree);
        let length = (progress * (max - min) as f64 + *min as f64).floor() as usize;
        // Lengths are rounded down to a multiple of `difficulty_step`. They are at least the smallest length, rounded
        // up to a multiple, and at most the largest length.
        (length - length % multiple).max(min.next_multiple_of(multiple)).min(*max)
    }

    /// Describes the curriculum in one line.
    pub(super) fn describe(&self) -> String {
        let Curriculum { max_difficulty: max, .. } = self.curriculum;
        let at_most = if max < self.whole {
            format!("; the last {} of a sample are never trained on", self.whole - max)
        } else {
            String::new()
        };
        format!(
            "curriculum: {} of each sample at step 1, at most {max} of {}{at_most}",
            counted(self.at(1), "token", "tokens"),
            self.whole
        )
    }
}

#[cfg(test)]
mod tests;
