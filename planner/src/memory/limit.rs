//! The memory limits of a rank. On the host, the limit is the configured one, or else the rank's share of the memory of
//! this machine or control group. On a GPU, it is the rank's share of the device's memory.

use std::fs;
use std::path::Path;

use zero_config::{Compute, Config};
use zero_engine::format::bytes;

/// The kinds of memory that a rank uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// The memory of the host.
    Host,
    /// The memory of the rank's GPU.
    Gpu,
}

impl MemoryKind {
    /// Returns the memory in which the layers of a configuration compute.
    #[must_use]
    pub fn of_layers(config: &Config) -> Self {
        match config.training.device {
            Compute::Cpu => Self::Host,
            Compute::Cuda => Self::Gpu,
        }
    }
}

/// A memory limit and its source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    /// The kind of memory that is limited.
    pub memory: MemoryKind,
    /// Number of bytes per rank.
    pub bytes: u64,
    /// The source, in words.
    pub source: &'static str,
}

impl Limit {
    /// Returns all known limits of a rank if `local_ranks` ranks run on this machine. If the rank computes on a GPU,
    /// the limit on the GPU comes first.
    #[must_use]
    pub fn all_of_rank(config: &Config, local_ranks: usize) -> Vec<Self> {
        Self::of_gpu(config, local_ranks).into_iter().chain(Self::of_rank(config, local_ranks)).collect()
    }

    /// Returns a rank's limit on its GPU; ranks on the same GPU share its memory.
    fn of_gpu(config: &Config, local_ranks: usize) -> Option<Self> {
        if config.training.device != Compute::Cuda {
            return None;
        }
        let (gpus, least) = (zero_engine::gpus(), zero_engine::gpu_bytes()?);
        let bytes = least / local_ranks.div_ceil(gpus.max(1)).max(1) as u64;
        Some(Self { memory: MemoryKind::Gpu, bytes, source: "the memory of its GPU" })
    }

    /// Describes how much memory a rank needs and how much it may use.
    #[must_use]
    pub fn told(&self, needs: u64, conjunction: &str) -> String {
        let (needs, has, source) = (bytes(needs), bytes(self.bytes), self.source);
        let place = if self.memory == MemoryKind::Gpu { " on its GPU" } else { "" };
        format!("a rank needs {needs} at its peak{place} {conjunction} may use {has}: {source}")
    }

    /// Returns the limit of a rank's host memory, with `local_ranks` ranks on this machine; `None` if no limit is
    /// known.
    #[must_use]
    pub fn of_rank(config: &Config, local_ranks: usize) -> Option<Self> {
        if let Some(bytes) = config.training.memory_limit {
            return Some(Self { memory: MemoryKind::Host, bytes, source: "`training.memory_limit`" });
        }
        let all = Self::of_machine()?;
        Some(Self { bytes: all.bytes / local_ranks.max(1) as u64, ..all })
    }

    /// Returns the limit for all ranks of this machine together.
    #[must_use]
    pub fn of_machine() -> Option<Self> {
        let of = |bytes, source| Self { memory: MemoryKind::Host, bytes, source };
        let machine = physical().map(|bytes| of(bytes, "its share of this machine's memory"));
        let group = group().map(|bytes| of(bytes, "its share of the cgroup's memory limit"));
        machine.into_iter().chain(group).min_by_key(|limit| limit.bytes)
    }
}

/// Returns the machine's physical memory in bytes.
fn physical() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemTotal:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns the smallest limit of the control groups that this process is in.
fn group() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let limit = |file: &Path| fs::read_to_string(file).ok()?.trim().parse::<u64>().ok();
    let mut smallest = None;
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':');
        let (controllers, path) = (parts.nth(1)?, parts.next()?);
        let (root, name) = match controllers {
            "" => (Path::new("/sys/fs/cgroup"), "memory.max"),
            "memory" => (Path::new("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
            _ => continue,
        };
        // The limits of all parent groups also apply to a control group.
        for folder in Path::new(path.trim_start_matches('/')).ancestors() {
            let found = limit(&root.join(folder).join(name));
            smallest = found.into_iter().chain(smallest).min();
        }
    }
    // If there is no limit, cgroup version 1 reports a number near the largest possible one.
    smallest.filter(|&bytes| bytes < 1 << 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configured_limit_takes_precedence() {
        let config = |text: &str| Config::with_world_size("ds.yaml", text, 1).unwrap();
        let base = "train_micro_batch_size_per_gpu: 1\noptimizer: {type: AdamW}\n";
        let said = Limit::of_rank(&config(&format!("{base}training: {{memory_limit: 6GiB}}")), 4).unwrap();
        assert_eq!(said, Limit { memory: MemoryKind::Host, bytes: 6 << 30, source: "`training.memory_limit`" });
        let (one, four) = (Limit::of_rank(&config(base), 1).unwrap(), Limit::of_rank(&config(base), 4).unwrap());
        assert!(one.bytes >= 4 * four.bytes && one.bytes < 4 * four.bytes + 4);
    }
}
