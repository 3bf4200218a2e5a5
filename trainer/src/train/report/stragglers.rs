//! Ranks that are slower than the others, by name: all wait for the slowest, so the time of a step does not tell.

use zero_comm::Communicator;

use zero_engine::Engine;
use zero_engine::timing::TimeCategory;

/// A rank is slow whose own work takes more than so many times that of the median rank.
const SLOW: f64 = 2.0;
/// Work that takes less is not looked at: a process is off its core for as long now and then.
const SHORT_MS: f64 = 20.0;
/// It is said of a rank that is slow in so many steps in a row: in one, any may be. The log has each.
const IN_A_ROW: u64 = 3;
/// It is said of a rank no more often than every so many steps.
const EVERY: u64 = 100;

/// What the ranks' own work takes.
pub(in crate::train) struct Stragglers {
    /// Of this rank, up to the last step.
    worked: f64,
    /// Which rank was slow in the last steps, and in how many.
    latest: Option<(usize, u64)>,
    /// The step after which it was last said, by rank.
    said: Vec<Option<u64>>,
}

impl Stragglers {
    pub(in crate::train) fn new(comm: &dyn Communicator) -> Self {
        Self { worked: 0.0, latest: None, said: vec![None; comm.size()] }
    }

    /// Milliseconds of the last step in which this rank did not wait for others.
    pub(in crate::train) fn own_ms(&mut self, engine: &Engine) -> f64 {
        let timing = engine.timing();
        let lanes = TimeCategory::ALL.iter().filter(|&&lane| lane != TimeCategory::Communication);
        let worked = lanes.map(|&lane| timing.seconds(lane)).sum::<f64>();
        let before = std::mem::replace(&mut self.worked, worked);
        (worked - before) * 1e3
    }

    /// Which rank is slow, going by the milliseconds of all; the slowest, if one is.
    pub(in crate::train) fn slow(all: &[f64]) -> Option<(usize, f64)> {
        let mut sorted = all.to_vec();
        sorted.sort_by(f64::total_cmp);
        // Of two, the faster one.
        let median = *sorted.get(sorted.len().saturating_sub(1) / 2)?;
        let (rank, &most) = all.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1))?;
        (most > SLOW * median && most > SHORT_MS).then_some((rank, median))
    }

    /// What to say of the rank that is [slow](Self::slow) in this step, if it was not said lately.
    pub(in crate::train) fn word(&mut self, step: u64, all: &[f64], slow: Option<(usize, f64)>) -> Option<String> {
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
            "rank {rank} is slow: {:.0} ms of its own work in step {step}, the median rank {median:.0} ms",
            all[rank]
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_rank_is_named_now_and_then() {
        let mut stragglers = Stragglers { worked: 0.0, latest: None, said: vec![None; 4] };
        let (even, third) = ([100.0, 110.0, 90.0, 199.0], [100.0, 110.0, 90.0, 230.0]);
        let mut words = |steps: std::ops::Range<u64>, all: &[f64]| -> Vec<String> {
            steps.filter_map(|step| stragglers.word(step, all, Stragglers::slow(all))).collect()
        };
        assert!(words(0..9, &even).is_empty(), "not twice the median");
        assert!(words(0..9, &[1.0, 1.0, 1.0, 19.0]).is_empty(), "too short to tell");
        assert!(words(1..3, &third).is_empty(), "twice in a row");
        assert!(words(3..4, &even).is_empty());
        let said = "rank 3 is slow: 230 ms of its own work in step 6, the median rank 100 ms";
        assert_eq!(words(4..60, &third), [said], "and no more soon");
        let first = words(60..63, &[1000.0, 110.0, 90.0, 120.0]);
        assert!(first.len() == 1 && first[0].starts_with("rank 0 "), "another one: {first:?}");
        assert_eq!(words(100..120, &third).len(), 1, "again after a while");
        assert_eq!(Stragglers::slow(&[100.0, 250.0]), Some((1, 100.0)), "of two");
        assert_eq!(Stragglers::slow(&[100.0]), None);
    }
}
