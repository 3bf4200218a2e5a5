//! Distributes the samples of a step to micro-batches by length, to reduce padding.
//!
//! Each step has the same samples as without `data.max_tokens`. They are sorted by length, and each micro-batch is as
//! long as its longest sample. The number of positions of a micro-batch is the number of its samples times this length.
//! It does not exceed `data.max_tokens`. A step has as few micro-batches as possible or, with `training.reproducible`,
//! always the same number of them. Each has about the same number of positions.

use zero_config::Config;

/// Lengths are rounded up to multiples of this number, because vector instructions and tensor cores are then fast.
const FAST: usize = 8;

/// The samples of a micro-batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MicroBatchSamples {
    /// Positions of the samples in the global batch, counted from 0.
    pub(super) samples: Vec<usize>,
    /// Number of tokens to which each padded sample is truncated.
    pub(super) length: usize,
}

impl MicroBatchSamples {
    pub(super) fn positions(&self) -> usize {
        self.samples.len() * self.length
    }
}

/// How the samples of each step are distributed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TokenBatches {
    /// Maximum number of positions of a micro-batch. A micro-batch can always hold one whole sample.
    max_tokens: usize,
    /// Number of tokens of a whole sample.
    whole: usize,
    /// Lengths below `whole` are multiples of this number.
    unit: usize,
    /// The number of micro-batches is a multiple of this number.
    multiple: usize,
    /// The number of micro-batches, if it must be the same in every step.
    count: Option<usize>,
}

impl TokenBatches {
    /// Returns the distribution for `data.max_tokens`, if it is set.
    pub(super) fn of(config: &Config, whole: usize) -> Option<Self> {
        let max_tokens = config.data.as_ref()?.max_tokens?;
        let multiple = config.data_parallel_size();
        let count = config.training.reproducible.then_some(config.gradient_accumulation_steps * multiple);
        // Ranks that share sequences have slices of the same length.
        let slices = config.slices_of_a_sequence();
        let unit = (1..=FAST).map(|n| n * slices).find(|unit| unit.is_multiple_of(FAST)).unwrap_or(slices);
        Some(Self { max_tokens, whole, unit, multiple, count })
    }

    /// Describes the distribution in one line.
    pub(super) fn describe(&self) -> String {
        let count = self.count.map_or(String::new(), |count| format!(", always {count} micro-batches"));
        format!("micro-batches: samples grouped by length, at most {} positions each{count}", self.max_tokens)
    }

    /// Distributes samples with these lengths.
    pub(super) fn distribute(&self, lengths: &[usize]) -> Vec<MicroBatchSamples> {
        let length = |sample: usize| lengths[sample].max(1).next_multiple_of(self.unit).min(self.whole);
        let mut sorted: Vec<usize> = (0..lengths.len()).collect();
        sorted.sort_by_key(|&sample| std::cmp::Reverse(length(sample)));
        let sorted: Vec<(usize, usize)> = sorted.into_iter().map(|sample| (sample, length(sample))).collect();
        let fewest = filled(&sorted, self.max_tokens).len();
        let count = self.count.unwrap_or(fewest).next_multiple_of(self.multiple);
        // Finds the smallest limit that does not need more micro-batches.
        let (mut low, mut high) = (sorted.first().map_or(0, |&(_, length)| length), self.max_tokens);
        while low < high {
            let middle = low.midpoint(high);
            match filled(&sorted, middle).len() <= count {
                true => high = middle,
                false => low = middle + 1,
            }
        }
        let mut parts = filled(&sorted, high);
        while parts.len() < count {
            let most = |part: &&[(usize, usize)]| if part.len() > 1 { part.len() * part[0].1 } else { 0 };
            let (at, _) = parts
                .iter()
                .map(most)
                .enumerate()
                .max_by_key(|&(at, cost)| (cost, std::cmp::Reverse(at)))
                .expect("there are samples");
            let (left, right) = parts[at].split_at(parts[at].len() / 2);
            parts.splice(at..=at, [left, right]);
        }
        let micro_batch = |part: &[(usize, usize)]| MicroBatchSamples {
            samples: part.iter().map(|&(sample, _)| sample).collect(),
            length: part[0].1,
        };
        parts.into_iter().map(micro_batch).collect()
    }
}

/// Fills one micro-batch at a time with samples, in descending order of length.
fn filled(mut sorted: &[(usize, usize)], max_tokens: usize) -> Vec<&[(usize, usize)]> {
    let mut parts = vec![];
    while let Some(&(_, longest)) = sorted.first() {
        let (part, rest) = sorted.split_at((max_tokens / longest).clamp(1, sorted.len()));
        parts.push(part);
        sorted = rest;
    }
    parts
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn samples_of_similar_length_share_a_micro_batch() {
        let distribute = |lengths: &[usize], max_tokens, count| {
            let all = TokenBatches { max_tokens, whole: 64, unit: 8, multiple: 2, count }.distribute(lengths);
            all.into_iter().map(|it| (it.samples, it.length)).collect::<Vec<_>>()
        };
        let lengths = [7, 64, 8, 30, 9, 1, 33, 6];
        assert_eq!(
            distribute(&lengths, 128, None),
            [(vec![1], 64), (vec![6], 40), (vec![3, 4], 32), (vec![0, 2, 5, 7], 8)],
            "three suffice, but two ranks need an even number"
        );
        let of_one = distribute(&lengths, 128, Some(8));
        assert_eq!(of_one.iter().map(|(samples, _)| samples.len()).collect::<Vec<_>>(), [1; 8]);
        assert_eq!(distribute(&[64; 4], 128, None), [(vec![0, 1], 64), (vec![2, 3], 64)]);
    }

    proptest! {
        /// Each micro-batch is within the limit, and the number of micro-batches is a multiple of the number of ranks.
        #[test]
        fn every_sample_is_in_one_micro_batch(
            (ranks, accumulation, micro) in (1_usize..5, 1_usize..5, 1_usize..5),
            (whole, unit) in (1_usize..100, 1_usize..20),
            less in 0.0..1.0,
            is_fixed: bool,
            seed: u64,
        ) {
            let samples = ranks * accumulation * micro;
            let lengths: Vec<usize> =
                (0..samples as u64).map(|i| (seed.wrapping_mul(2 * i + 1) >> 32) as usize % (whole + 1)).collect();
            let most = micro * whole;
            let max_tokens = if is_fixed { most } else { most - ((most - whole) as f64 * less) as usize };
            let count = is_fixed.then_some(ranks * accumulation);
            let micro_batches = TokenBatches { max_tokens, whole, unit, multiple: ranks, count }.distribute(&lengths);
            let mut all: Vec<usize> = micro_batches.iter().flat_map(|it| it.samples.clone()).collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..samples).collect::<Vec<_>>());
            for it in &micro_batches {
                prop_assert!(!it.samples.is_empty() && it.positions() <= max_tokens && it.length <= whole);
                prop_assert!(it.samples.iter().all(|&sample| lengths[sample] <= it.length));
                prop_assert!(it.length.is_multiple_of(unit) || it.length == whole);
            }
            prop_assert!(micro_batches.len().is_multiple_of(ranks));
            prop_assert!(count.is_none_or(|count| count == micro_batches.len()));
        }
    }
}
