//! Determines the cores of this host that the job may use, and each rank's share of them.
//!
//! A rank that migrates between cores competes with other ranks and loses its cached data. A collective then waits for
//! this rank. Each rank is therefore bound to its own cores, which its compute threads and its communication share. A
//! rank gets whole cores, because two hardware threads of one core do not compute faster than one.

use std::fs;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// An ordered list of cores, each with its hardware threads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cores(Vec<Vec<usize>>);

impl Cores {
    /// Returns the cores that this process may run on.
    pub fn allowed() -> Self {
        let set = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
        Self::grouped((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)), siblings)
    }

    /// Parses a list of hardware threads such as `0-27,32-59`; `None` if the list is invalid or empty.
    pub fn listed(list: &str) -> Option<Self> {
        let cpus = parse(list)?;
        (!cpus.is_empty()).then(|| Self::grouped(cpus.into_iter(), siblings))
    }

    /// Returns the cores of `self` that are also in `other`.
    pub fn and(&self, other: &Self) -> Self {
        let both = other.cpus();
        let kept = self.0.iter().map(|core| core.iter().copied().filter(|cpu| both.contains(cpu)).collect::<Vec<_>>());
        Self(kept.filter(|core| !core.is_empty()).collect())
    }

    /// Returns all online cores of this machine; `None` if the system does not report them.
    pub fn of_machine() -> Option<Self> {
        Self::listed(fs::read_to_string("/sys/devices/system/cpu/online").ok()?.trim())
    }

    /// Returns the cores that the parent process may run on; `None` if its status cannot be read.
    pub fn of_parent() -> Option<Self> {
        let parent = rustix::process::getppid()?.as_raw_nonzero();
        let status = fs::read_to_string(format!("/proc/{parent}/status")).ok()?;
        Self::listed(status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.trim())
    }

    /// Returns how many cores each of `ranks` ranks can use, if a launcher has bound this rank to the cores `self`.
    /// `parent` are the launcher's cores. Returns `None` if the launcher has not bound this rank.
    ///
    /// The launcher may have bound each rank to its own cores, or several ranks to the same cores.
    pub fn of_bound_rank(&self, parent: &Self, ranks: usize) -> Option<usize> {
        let is_bound = parent.and(self) == *self && parent.cpus().len() > self.cpus().len();
        is_bound.then(|| self.count().min(parent.count() / ranks.max(1)).max(1))
    }

    fn grouped(cpus: impl Iterator<Item = usize>, core_of: impl Fn(usize) -> usize) -> Self {
        let mut named: Vec<(usize, usize)> = cpus.map(|cpu| (core_of(cpu), cpu)).collect();
        named.sort_unstable();
        named.dedup();
        Self(named.chunk_by(|a, b| a.0 == b.0).map(|core| core.iter().map(|(_, cpu)| *cpu).collect()).collect())
    }

    /// Returns the number of cores.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Returns all hardware threads in ascending order.
    pub fn cpus(&self) -> Vec<usize> {
        let mut all: Vec<usize> = self.0.iter().flatten().copied().collect();
        all.sort_unstable();
        all
    }

    /// Returns the cores of `rank`, which are neighbours. The numbers of cores of any two ranks differ by at most one.
    /// Returns `None` if there are fewer cores than ranks.
    pub fn share(&self, rank: usize, ranks: usize) -> Option<Self> {
        let n = self.count();
        (n >= ranks).then(|| Self(self.0[rank * n / ranks..(rank + 1) * n / ranks].to_vec()))
    }

    /// Binds this thread, and all threads that it starts from now on, to these cores.
    ///
    /// # Errors
    /// Returns the error of the operating system.
    pub fn bind(&self) -> std::io::Result<()> {
        let mut set = CpuSet::new();
        self.cpus().into_iter().filter(|&cpu| cpu < CpuSet::MAX_CPU).for_each(|cpu| set.set(cpu));
        Ok(sched_setaffinity(None, &set)?)
    }
}

/// Formats the hardware threads as a list such as `0-1,4`.
impl std::fmt::Display for Cores {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, run) in self.cpus().chunk_by(|a, b| a + 1 == *b).enumerate() {
            let comma = if index > 0 { "," } else { "" };
            match run {
                [one] => write!(f, "{comma}{one}")?,
                [first, .., last] => write!(f, "{comma}{first}-{last}")?,
                [] => {}
            }
        }
        Ok(())
    }
}

/// Returns the first hardware thread of the core to which the hardware thread `cpu` belongs.
fn siblings(cpu: usize) -> usize {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    let list = fs::read_to_string(path).ok().and_then(|list| parse(list.trim()));
    list.and_then(|list| list.into_iter().min()).unwrap_or(cpu)
}

fn parse(list: &str) -> Option<Vec<usize>> {
    let number = |text: &str| text.trim().parse::<usize>().ok().filter(|&cpu| cpu < CpuSet::MAX_CPU);
    let mut all = vec![];
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return None;
        }
        all.extend(first..=last);
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_parsed_and_formatted() {
        for list in ["0", "0-3", "0-1,4", "2,4,6-9"] {
            let cores = Cores::grouped(parse(list).expect("a valid list").into_iter(), |cpu| cpu);
            assert_eq!(cores.to_string(), list);
            assert_eq!(cores.and(&cores), cores);
        }
        for wrong in ["", "a", "3-1", "0-", "-1", "0,,1", "0-99999999999", "1e3"] {
            assert_eq!(Cores::listed(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_bound_rank_uses_its_own_cores_or_its_part_of_shared_cores() {
        let cores = |cpus: std::ops::Range<usize>| Cores::grouped(cpus, |cpu| cpu);
        let parent = cores(0..16);
        for (own, ranks, expected) in
            [(0..1, 2, 1), (4..8, 4, 4), (4..8, 2, 4), (8..16, 4, 4), (8..16, 16, 1), (0..1, 99, 1)]
        {
            assert_eq!(cores(own.clone()).of_bound_rank(&parent, ranks), Some(expected), "{own:?} {ranks}");
        }
        // The rank is not bound if its cores are those of the parent, or if some of them do not belong to the parent.
        assert_eq!(parent.of_bound_rank(&parent, 2), None);
        assert_eq!(cores(14..18).of_bound_rank(&parent, 2), None);
        assert!(Cores::of_parent().is_some_and(|parent| parent.count() > 0));
    }

    #[test]
    fn every_core_goes_to_one_rank_and_hardware_threads_stay_together() {
        // The numbers of the two hardware threads of a core differ by four. On many machines, they differ by the number
        // of cores.
        let cores = Cores::grouped(0..8, |cpu| cpu % 4);
        assert_eq!(cores.count(), 4);
        for ranks in 1..=4 {
            let shares: Vec<Cores> = (0..ranks).filter_map(|rank| cores.share(rank, ranks)).collect();
            let mut all: Vec<usize> = shares.iter().flat_map(Cores::cpus).collect();
            all.sort_unstable();
            assert_eq!(all, (0..8).collect::<Vec<_>>());
            let sizes: Vec<usize> = shares.iter().map(Cores::count).collect();
            assert!(sizes.iter().max().expect("a share") - sizes.iter().min().expect("a share") <= 1);
        }
        assert_eq!(cores.share(1, 2).expect("enough cores").cpus(), [2, 3, 6, 7]);
        assert_eq!(cores.share(0, 5), None);
    }

    #[test]
    fn a_binding_is_inherited_by_new_threads() {
        std::thread::spawn(|| {
            let all = Cores::allowed();
            let one = all.share(all.count() - 1, all.count()).expect("a core");
            one.bind().expect("a core that this process may use");
            assert_eq!(Cores::allowed(), one);
            let child = std::thread::spawn(Cores::allowed).join().expect("the child thread panicked");
            assert_eq!(child, one);
        })
        .join()
        .expect("the bound thread panicked");
    }
}
