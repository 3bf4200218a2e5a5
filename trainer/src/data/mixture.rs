//! The order of samples from several data sets: computes the data set and the sample for each position of the run.
//!
//! An epoch has a fixed number of samples of each data set, spread evenly. If an epoch takes c samples from a data set,
//! sample m of this data set comes at the time (2m + 1) / 2c of the epoch. After any number of samples, the number of
//! samples from each data set therefore differs from its share by at most (k + 1) / 2, for k data sets. Each data set
//! keeps its own position, which continues over epochs: all its samples are used before any sample is repeated. Each
//! index is computed in constant time, without a table.

use super::order::sample_index;

/// Data sets that are mixed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mixture {
    parts: Vec<MixedPart>,
}

/// A data set of a mixture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MixedPart {
    /// Number of samples of the data set, at least 1.
    pub(crate) samples: u64,
    /// Number of samples that an epoch takes from the data set.
    pub(crate) per_epoch: u64,
    /// Number of samples that were taken before this mixture began.
    pub(crate) taken: u64,
}

impl Mixture {
    /// Creates a mixture. At least one part must give a sample to each epoch.
    pub(crate) fn new(parts: Vec<MixedPart>) -> Self {
        assert!(parts.iter().any(|part| part.per_epoch > 0), "an epoch of a mixture has samples");
        Self { parts }
    }

    /// Returns the parts.
    pub(crate) fn parts(&self) -> &[MixedPart] {
        &self.parts
    }

    /// Returns the number of samples of an epoch.
    pub(crate) fn per_epoch(&self) -> u64 {
        self.parts.iter().map(|part| part.per_epoch).sum()
    }

    /// Returns the index of the sample at `position` in the concatenation of the data sets. `position` counts from the
    /// start of the mixture.
    pub(crate) fn index(&self, seed: u64, position: u64, shuffle: bool) -> usize {
        let (epoch, within) = (position / self.per_epoch(), position % self.per_epoch());
        let (part, m) = self.pick(within);
        let MixedPart { samples, per_epoch, taken } = self.parts[part];
        let before: u64 = self.parts[..part].iter().map(|part| part.samples).sum();
        // The seed depends on the part, so that data sets of the same size are shuffled differently.
        let seed = seed.wrapping_add((part as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        before as usize + sample_index(seed, taken + epoch * per_epoch + m, samples as usize, shuffle)
    }

    /// Returns how many samples were taken from each data set after `position` samples of the mixture, including
    /// samples taken before the mixture began.
    pub(crate) fn taken(&self, position: u64) -> Vec<u64> {
        let (epoch, within) = (position / self.per_epoch(), position % self.per_epoch());
        let all = self.parts.iter().enumerate();
        all.map(|(part, of)| of.taken + epoch * of.per_epoch + self.first_at(part, within)).collect()
    }

    /// Returns the data set at a position of the epoch, and how many samples of this data set come earlier in the
    /// epoch.
    fn pick(&self, within: u64) -> (usize, u64) {
        let parts = (0..self.parts.len()).map(|part| (part, self.first_at(part, within)));
        let here = |&(part, m): &(usize, u64)| m < self.parts[part].per_epoch && self.place(part, m) == within;
        parts.into_iter().find(here).expect("each position of an epoch has one sample")
    }

    /// Returns how many samples of a data set have a place before `within` in the epoch.
    fn first_at(&self, part: usize, within: u64) -> u64 {
        let (count, parts) = (self.parts[part].per_epoch, self.parts.len() as u64);
        let share = (u128::from(within) * u128::from(count) / u128::from(self.per_epoch())) as u64;
        let (mut low, mut high) = (share.saturating_sub(parts + 1), count.min(share + parts + 1));
        while low < high {
            let middle = low.midpoint(high);
            match self.place(part, middle) < within {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        low
    }

    /// Returns the place in the epoch of sample `m` of a data set: the number of samples with an earlier time. Samples
    /// with the same time are ordered by their data sets.
    fn place(&self, part: usize, m: u64) -> u64 {
        let (time, own) = (2 * u128::from(m) + 1, u128::from(self.parts[part].per_epoch));
        let earlier = |(other, of): (usize, &MixedPart)| {
            // Sample n is earlier if (2n + 1) / 2c is less than time / 2·own.
            let limit = time * u128::from(of.per_epoch);
            match (other < part, limit.checked_sub(own)) {
                (_, None) => 0,
                (true, Some(rest)) => rest / (2 * own) + 1,
                (false, Some(rest)) => rest.div_ceil(2 * own),
            }
        };
        self.parts.iter().enumerate().map(earlier).sum::<u128>() as u64
    }
}

/// Distributes `total` samples in proportion to the weights, by the largest remainder method. Returns the number of
/// samples for each weight.
pub(crate) fn apportion(weights: &[f64], total: u64) -> Vec<u64> {
    let sum: f64 = weights.iter().sum();
    let shares: Vec<f64> = weights.iter().map(|weight| weight / sum * total as f64).collect();
    let mut counts: Vec<u64> = shares.iter().map(|share| *share as u64).collect();
    let mut order: Vec<usize> = (0..weights.len()).filter(|&index| weights[index] > 0.0).collect();
    order.sort_by(|&a, &b| shares[b].fract().total_cmp(&shares[a].fract()));
    let missing = total.saturating_sub(counts.iter().sum());
    for &index in order.iter().cycle().take(missing as usize) {
        counts[index] += 1;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mixture(parts: &[(u64, u64)]) -> Mixture {
        let part = |&(samples, per_epoch)| MixedPart { samples, per_epoch, taken: 0 };
        Mixture::new(parts.iter().map(part).collect())
    }

    #[test]
    fn every_position_of_an_epoch_has_one_sample() {
        let parts = [
            vec![(5, 5)],
            vec![(5, 5), (5, 5)],
            vec![(10, 1), (3, 7), (9, 0), (4, 4)],
            vec![(1, 1), (1, 1000), (1, 999), (1, 3), (1, 1)],
        ];
        for parts in parts {
            let mixture = mixture(&parts);
            let mut given = vec![0; parts.len()];
            for within in 0..mixture.per_epoch() {
                assert_eq!(mixture.taken(within), given, "{parts:?} at {within}");
                let (part, m) = mixture.pick(within);
                assert_eq!(m, given[part], "{parts:?} at {within}");
                given[part] += 1;
            }
            assert!(given.into_iter().eq(parts.iter().map(|part| part.1)));
        }
    }

    #[test]
    fn shares_are_kept_after_any_number_of_samples() {
        let mixture = mixture(&[(1_000_003, 500_000), (90_000, 300_000), (7, 199_999), (50, 1)]);
        let (all, k) = (mixture.per_epoch(), 4.0);
        let mut given = [0u64; 4];
        for position in 0..1_000_000 {
            let index = mixture.index(1, position, true) as u64;
            let part = [1_000_003, 1_090_003, 1_090_010, u64::MAX].iter().position(|&end| index < end).unwrap();
            given[part] += 1;
            if position % 997 == 0 || position == 999_999 {
                for (given, part) in given.iter().zip(mixture.parts()) {
                    let share = (position + 1) as f64 * part.per_epoch as f64 / all as f64;
                    assert!((*given as f64 - share).abs() <= (k + 1.0) / 2.0, "{given} instead of {share}");
                }
            }
        }
        // After one epoch, exactly the expected number of samples has come from each data set.
        assert_eq!((all, given), (1_000_000, [500_000, 300_000, 199_999, 1]));
    }

    #[test]
    fn all_samples_of_a_data_set_are_used_before_one_is_used_again() {
        // Two and a half epochs use all samples of the second data set, so its second pass begins in the middle of the
        // third epoch.
        let mixture = mixture(&[(9, 9), (25, 10)]);
        let all: Vec<usize> = (0..19 * 5).map(|position| mixture.index(3, position, true)).collect();
        let second: Vec<usize> = all.iter().copied().filter(|&index| index >= 9).collect();
        for pass in second.chunks(25) {
            let mut sorted = pass.to_vec();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(9..34));
        }
        assert_ne!(second[..25], second[25..]);
        let ordered: Vec<usize> = (0..19).map(|position| mixture.index(3, position, false)).collect();
        assert!(ordered.iter().copied().filter(|&index| index < 9).eq(0..9));
    }

    #[test]
    fn a_changed_mixture_continues_where_each_data_set_was() {
        let before = mixture(&[(100, 30), (80, 10)]);
        let taken = before.taken(57);
        assert_eq!((taken.iter().sum::<u64>(), before.taken(40)), (57, vec![30, 10]));
        let part = |samples, per_epoch, taken| MixedPart { samples, per_epoch, taken };
        let after = Mixture::new(vec![part(100, 10, taken[0]), part(80, 30, taken[1])]);
        let first: Vec<usize> = (0..57).map(|position| before.index(1, position, true)).collect();
        let second: Vec<usize> = (0..57).map(|position| after.index(1, position, true)).collect();
        assert!(second.iter().all(|index| !first.contains(index)));
        assert_eq!(after.taken(57).iter().sum::<u64>(), 114);
    }

    #[test]
    fn the_order_is_stable_across_versions() {
        let mixture = mixture(&[(10, 3), (20, 5)]);
        // The samples of the first data set have the times 1/6, 3/6, 5/6. The samples of the second have the times
        // 1/10, 3/10, …, 9/10.
        let found: Vec<usize> = (0..10).map(|position| mixture.index(7, position, false)).collect();
        assert_eq!(found, [10, 0, 11, 1, 12, 13, 2, 14, 15, 3]);
    }

    #[test]
    fn largest_remainders_complete_the_total() {
        assert_eq!(apportion(&[1.0, 1.0, 1.0], 10), [4, 3, 3]);
        assert_eq!(apportion(&[0.7, 0.2, 0.1], 1000), [700, 200, 100]);
        assert_eq!(apportion(&[0.0, 3.0], 7), [0, 7]);
    }
}
