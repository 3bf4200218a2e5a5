//! Cost tables for all candidates: few of them are measured, in short runs, and the rest lies between.
//!
//! A table holds for ranks, threads, micro-batch and whatever the model is built of. Of each combination of the others, the smallest and the
//! largest micro-batch are measured, and as many between that no two neighbours are further apart than a factor of four.

use std::collections::BTreeMap;

use zero_config::{Config, OffloadDevice};

use super::correction::Setting;
use zero_engine::costs::CostTable;

/// What a table holds for, the micro-batch aside.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Conditions {
    /// Ranks that exchange gradients; where each is a stage of its own, all of them.
    pub(super) ranks: usize,
    pub(super) threads: usize,
    /// Settings that may change what a layer is, or takes.
    pub(super) others: Vec<Setting>,
}

/// The tables that there are.
#[derive(Debug, Default)]
pub(super) struct Tables(BTreeMap<Conditions, BTreeMap<usize, CostTable>>);

impl Tables {
    pub(super) fn add(&mut self, conditions: Conditions, table: CostTable) {
        self.0.entry(conditions).or_default().insert(table.micro_batch(), table);
    }

    /// The table for a configuration.
    ///
    /// # Errors
    /// What there is not, in words.
    pub(super) fn of(&self, conditions: &Conditions, config: &Config) -> Result<CostTable, String> {
        let micro = config.train_micro_batch_size_per_gpu;
        let all = self.0.get(conditions).ok_or("no layer was measured with these ranks and threads")?;
        let below = all.range(..=micro).next_back();
        let above = all.range(micro..).next();
        let table = match (below, above) {
            (Some((&exact, table)), _) if exact == micro => table.clone(),
            (Some((_, below)), Some((_, above))) => below.between(above, micro)?,
            _ => {
                return Err(format!("no layer was measured with a micro-batch of {micro}, or one below and one above"));
            }
        };
        if table.has_disk() || !uses_disk(config) {
            return Ok(table);
        }
        let disk = self.0.values().flat_map(BTreeMap::values).find(|table| table.has_disk());
        Ok(table.with_disk_of(disk.ok_or("the disk was not measured")?))
    }
}

/// Whether something lives on a disk.
pub(super) fn uses_disk(config: &Config) -> bool {
    let kept = config.activation_checkpointing.as_ref().map_or(OffloadDevice::None, |kept| kept.device);
    [config.zero.offload_optimizer.device, config.zero.offload_param.device, kept].contains(&OffloadDevice::Nvme)
}

/// Which of some micro-batches are measured.
pub(super) fn measured(micro_batches: &[usize]) -> Vec<usize> {
    let mut sorted = micro_batches.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    let mut chosen: Vec<usize> = sorted.first().copied().into_iter().collect();
    for pair in sorted.windows(2) {
        let last = chosen.last().copied().unwrap_or(1);
        // The next one would be too far away.
        if pair[1] > 4 * last && pair[0] != last {
            chosen.push(pair[0]);
        }
    }
    chosen.extend(sorted.last().filter(|last| chosen.last() != Some(last)));
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_no_more_than_a_factor_of_four_apart() {
        assert_eq!(measured(&[1, 2, 4, 8, 16, 32]), [1, 4, 16, 32]);
        assert_eq!(measured(&[8, 1, 8]), [1, 8]);
        assert_eq!(measured(&[1, 2, 4]), [1, 4]);
        assert_eq!(measured(&[3]), [3]);
        assert_eq!(measured(&[1, 3, 4, 6, 12]), [1, 4, 12]);
        assert!(measured(&[]).is_empty());
    }
}
