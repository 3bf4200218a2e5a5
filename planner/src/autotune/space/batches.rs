//! Lists the combinations of global batch, micro-batch and accumulation to try.

use std::collections::BTreeSet;

use super::{ACCUMULATION, BATCH, MICRO, Space};
use crate::autotune::correction::Setting;

/// Keys of learning rates, whose values are scaled with the square root of the global batch size.
const RATES: [&str; 5] = [
    "optimizer.params.lr",
    "scheduler.params.warmup_max_lr",
    "scheduler.params.cycle_max_lr",
    "scheduler.params.cycle_min_lr",
    "scheduler.params.lr_range_test_min_lr",
];

impl Space<'_> {
    /// Returns combinations of global batch, micro-batch and accumulation, with the learning rates adjusted to the
    /// batch size.
    pub(super) fn batches(&self, replicas: usize) -> Vec<Vec<Setting>> {
        let tuning = self.tuning;
        let kept = self.base.train_batch_size;
        let parse =
            |values: &[String]| -> Vec<usize> { values.iter().filter_map(|value| value.parse().ok()).collect() };
        let batches = match (self.said(BATCH), tuning.max_train_batch_size) {
            (Some(values), _) => parse(values),
            (None, Some(most)) => {
                let least = tuning.min_train_batch_size;
                let halved = std::iter::successors(Some(kept), |n| n.is_multiple_of(2).then_some(n / 2));
                let doubled = std::iter::successors(Some(kept * 2), |n| Some(n * 2));
                let mut all: Vec<usize> = halved.take_while(|&n| n >= least.max(1)).collect();
                all.extend(doubled.take_while(|&n| n <= most));
                all.retain(|&n| n <= most);
                all
            }
            (None, None) => vec![kept],
        };
        let mut all = vec![];
        for batch in batches {
            let of_rank = batch / replicas;
            if of_rank == 0 || !batch.is_multiple_of(replicas) {
                continue;
            }
            for micro in self.micro_batches(of_rank) {
                if micro == 0 || !of_rank.is_multiple_of(micro) {
                    continue;
                }
                let accumulation = of_rank / micro;
                if self.said(ACCUMULATION).is_some_and(|values| !parse(values).contains(&accumulation)) {
                    continue;
                }
                let mut settings = vec![];
                // Omit a key that the file does not set and that follows from the other two keys.
                if self.is_typed(BATCH) || !self.is_typed(MICRO) {
                    settings.push((BATCH.to_string(), batch.to_string()));
                }
                settings.push((MICRO.to_string(), micro.to_string()));
                if self.is_typed(ACCUMULATION) || !self.is_typed(BATCH) {
                    settings.push((ACCUMULATION.to_string(), accumulation.to_string()));
                }
                if batch != kept {
                    settings.extend(self.rates((batch as f64 / kept as f64).sqrt()));
                }
                all.push(settings);
            }
        }
        all
    }

    fn micro_batches(&self, of_rank: usize) -> Vec<usize> {
        let tuning = self.tuning;
        if let Some(values) = self.said(MICRO) {
            return values.iter().filter_map(|value| value.parse().ok()).collect();
        }
        let (least, most) = (tuning.min_train_micro_batch_size_per_gpu, tuning.max_train_micro_batch_size_per_gpu);
        let own = self.base.train_micro_batch_size_per_gpu;
        let powers = std::iter::successors(Some(1usize), |n| n.checked_mul(2)).take_while(|&n| n <= of_rank.min(most));
        let fits = |&n: &usize| n >= least && n <= most && of_rank.is_multiple_of(n);
        let all: BTreeSet<usize> = powers.chain([own]).filter(fits).collect();
        let all: Vec<usize> = all.into_iter().collect();
        match tuning.num_tuning_micro_batch_sizes {
            // Choose values that are evenly spaced over the range.
            Some(few) if few < all.len() => {
                let at = |index: usize| if few == 1 { all.len() - 1 } else { index * (all.len() - 1) / (few - 1) };
                (0..few).map(|index| all[at(index)]).collect()
            }
            _ => all,
        }
    }

    fn rates(&self, factor: f64) -> Vec<Setting> {
        let scaled = |path: &&str| {
            let rate: f64 = self.values.get(*path)?.parse().ok()?;
            self.is_typed(path).then(|| ((*path).to_string(), format!("{:e}", rate * factor)))
        };
        RATES.iter().filter_map(scaled).collect()
    }
}
