//! Finds slow ranks. All ranks wait for the slowest rank, so the duration of a step does not show which rank is slow.

use zero_comm::Communicator;

use zero_engine::Engine;
use zero_engine::timing::TimeCategory;

/// A rank is slow if its own work takes longer than this factor times the work of the median rank.
const SLOW: f64 = 2.0;
/// A rank whose own work takes less time than this is not slow, because the scheduler occasionally takes a process off
/// its core for this long.
const SHORT_MS: f64 = 20.0;
/// A rank is reported after it was slow in this many consecutive steps, because any rank may be slow once.
/// `metrics.jsonl` contains every slow step.
const IN_A_ROW: u64 = 3;
/// Minimum number of steps between two reports of a rank.
const EVERY: u64 = 100;

/// The durations of the ranks' own work.
pub(in crate::train) struct Stragglers {
    /// Total own work of this rank up to the last step.
    worked: f64,
    /// The rank that was slow in the latest steps, and the number of these steps.
    latest: Option<(usize, u64)>,
    /// The step of each rank's last report.
    said: Vec<Option<u64>>,
}

impl Stragglers {
    pub(in crate::train) fn new(comm: &dyn Communicator) -> Self {
        Self { worked: 0.0, latest: None, said: vec![None; comm.size()] }
    }

    /// Returns the time of the last step, in milliseconds, during which this rank did not wait for other ranks.
    pub(in crate::train) fn own_ms(&mut self, engine: &Engine) -> f64 {
        let timing = engine.timing();
        let lanes = TimeCategory::ALL.iter().filter(|&&lane| lane != TimeCategory::Communication);
        let worked = lanes.map(|&lane| timing.seconds(lane)).sum::<f64>();
        let before = std::mem::replace(&mut self.worked, worked);
        (worked - before) * 1e3
    }

    /// Returns the slowest rank and the median of `all` in milliseconds, if the slowest rank is slow.
    pub(in crate::train) fn slow(all: &[f64]) -> Option<(usize, f64)> {
        let mut sorted = all.to_vec();
        sorted.sort_by(f64::total_cmp);
        // With two ranks, the faster one is the median.
        let median = *sorted.get(sorted.len().saturating_sub(1) / 2)?;
        let (rank, &most) = all.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1))?;
        (most > SLOW * median && most > SHORT_MS).then_some((rank, median))
    }

    /// Returns the warning about the [slow](Self::slow) rank of this step, unless it was reported recently. `all` is
    /// empty if the ranks did not exchange their times after a step. Such a step neither counts as a slow step nor
    /// interrupts a series of slow steps.
    pub(in crate::train) fn word(&mut self, step: u64, all: &[f64], slow: Option<(usize, f64)>) -> Option<String> {
        if all.is_empty() {
            return None;
        }
        self.latest = slow.map(|(rank, _)| match self.latest {
            Some((before, steps)) if before == rank => (rank, steps + 1),
            _ => (rank, 1),
        });
        let (rank, median) = slow.filter(|_| self.latest.is_some_and(|(_, steps)| steps >= IN_A_ROW))?;
        let said = self.said.get_mut(rank)?;
        if said.is_some_and(|before| step < before + EVERY) {
            return None;
        }
        *said = Some(step);
        Some(format!(
            "rank {rank} is slow: it worked for {:.0} ms in step {step}, but the median rank for {median:.0} ms",
            all[rank]
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_rank_is_reported_at_intervals() {
        let mut stragglers = Stragglers { worked: 0.0, latest: None, said: vec![None; 4] };
        let (even, third) = ([100.0, 110.0, 90.0, 199.0], [100.0, 110.0, 90.0, 230.0]);
        let mut words = |steps: std::ops::Range<u64>, all: &[f64]| -> Vec<String> {
            steps.filter_map(|step| stragglers.word(step, all, Stragglers::slow(all))).collect()
        };
        assert!(words(0..9, &even).is_empty(), "not twice the median");
        assert!(words(0..9, &[1.0, 1.0, 1.0, 19.0]).is_empty(), "too short to tell");
        assert!(words(1..3, &third).is_empty(), "twice in a row");
        assert!(words(3..4, &even).is_empty());
        let said = "rank 3 is slow: it worked for 230 ms in step 6, but the median rank for 100 ms";
        assert_eq!(words(4..60, &third), [said], "and no more soon");
        let first = words(60..63, &[1000.0, 110.0, 90.0, 120.0]);
        assert!(first.len() == 1 && first[0].starts_with("rank 0 "), "another one: {first:?}");
        assert_eq!(words(100..120, &third).len(), 1, "again after a while");
        let alone = words(150..250, &[]);
        let after = [words(250..251, &even), words(251..253, &third), words(253..258, &[]), words(258..259, &third)];
        assert!(alone.is_empty() && after.map(|words| words.len()) == [0, 0, 0, 1], "steps without an exchange");
        assert_eq!(Stragglers::slow(&[100.0, 250.0]), Some((1, 100.0)), "of two");
        assert_eq!(Stragglers::slow(&[100.0]), None);
    }
}
