//! Cost tables for all candidates. A few tables are measured in short runs, the others are interpolated.
//!
//! A table depends on the number of ranks, threads and samples per micro-batch, and on all settings of the model. For
//! each combination of ranks, threads and settings, the smallest and the largest micro-batch size are measured. Some
//! sizes in between are also measured, so that consecutive measured sizes differ by at most a factor of four where
//! possible.

use std::collections::BTreeMap;

use zero_config::{Config, OffloadDevice};

use super::correction::Setting;
use zero_engine::costs::CostTable;

/// The conditions under which a table is valid, except the size of the micro-batch.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Conditions {
    /// Number of ranks of a pipeline stage, which exchange gradients; all ranks if each stage has one rank.
    pub(super) ranks: usize,
    pub(super) threads: usize,
    /// Settings that may change a layer or its cost.
    pub(super) others: Vec<Setting>,
}

/// The measured tables.
#[derive(Debug, Default)]
pub(super) struct Tables(BTreeMap<Conditions, BTreeMap<usize, CostTable>>);

impl Tables {
    pub(super) fn add(&mut self, conditions: Conditions, table: CostTable) {
        self.0.entry(conditions).or_default().insert(table.micro_batch(), table);
    }

    /// Returns the table for a configuration.
    ///
    /// # Errors
    /// Describes what was not measured.
    pub(super) fn of(&self, conditions: &Conditions, config: &Config) -> Result<CostTable, String> {
        let micro = config.train_micro_batch_size_per_gpu;
        let all = self.0.get(conditions).ok_or("no profile has this number of ranks and threads")?;
        let below = all.range(..=micro).next_back();
        let above = all.range(micro..).next();
        let table = match (below, above) {
            (Some((&exact, table)), _) if exact == micro => table.clone(),
            (Some((_, below)), Some((_, above))) => below.between(above, micro)?,
            _ => {
                return Err(format!(
                    "no profile has a micro-batch of {micro}, and interpolation needs one profile with a smaller and one with a larger micro-batch"
                ));
            }
        };
        if table.has_disk() || !uses_disk(config) {
            return Ok(table);
        }
        let disk = self.0.values().flat_map(BTreeMap::values).find(|table| table.has_disk());
        Ok(table.with_disk_of(disk.ok_or("no profile measured the disk")?))
    }
}

/// Returns whether the configuration offloads anything to a disk.
pub(super) fn uses_disk(config: &Config) -> bool {
    let kept = config.activation_checkpointing.as_ref().map_or(OffloadDevice::None, |kept| kept.device);
    [config.zero.offload_optimizer.device, config.zero.offload_param.device, kept].contains(&OffloadDevice::Nvme)
}

/// Chooses the micro-batch sizes to measure.
pub(super) fn measured(micro_batches: &[usize]) -> Vec<usize> {
    let mut sorted = micro_batches.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    let mut chosen: Vec<usize> = sorted.first().copied().into_iter().collect();
    for pair in sorted.windows(2) {
        let last = chosen.last().copied().unwrap_or(1);
        // The next larger size is more than four times the last chosen size.
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
    fn measured_sizes_are_at_most_a_factor_of_four_apart() {
        assert_eq!(measured(&[1, 2, 4, 8, 16, 32]), [1, 4, 16, 32]);
        assert_eq!(measured(&[8, 1, 8]), [1, 8]);
        assert_eq!(measured(&[1, 2, 4]), [1, 4]);
        assert_eq!(measured(&[3]), [3]);
        assert_eq!(measured(&[1, 3, 4, 6, 12]), [1, 4, 12]);
        assert!(measured(&[]).is_empty());
    }
}
