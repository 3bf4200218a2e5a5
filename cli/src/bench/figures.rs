//! Times a subject and its floor, and formats the medians and ranges that benchmarks print.

use std::time::{Duration, Instant};

/// Times of a subject and of its floor, measured alternately.
#[derive(Debug, Default)]
pub(super) struct Comparison {
    pub(super) subject: Vec<Duration>,
    pub(super) floor: Vec<Duration>,
}

impl FromIterator<(Duration, Duration)> for Comparison {
    /// Collects runs: the time of the subject, then that of the floor.
    fn from_iter<I: IntoIterator<Item = (Duration, Duration)>>(runs: I) -> Self {
        let (subject, floor) = runs.into_iter().unzip();
        Self { subject, floor }
    }
}

impl Comparison {
    /// Returns the ratio of the subject's time to the floor's time for each run.
    pub(super) fn ratios(&self) -> Vec<f64> {
        let ratio = |(subject, floor): (&Duration, &Duration)| subject.as_secs_f64() / floor.as_secs_f64().max(1e-9);
        self.subject.iter().zip(&self.floor).map(ratio).collect()
    }

    /// Returns for each run the rate of the subject, in percent of the rate of the floor. The subject moves `share`
    /// times as many bytes as the floor.
    pub(super) fn shares(&self, share: f64) -> Vec<f64> {
        self.ratios().into_iter().map(|ratio| share / ratio * 100.0).collect()
    }
}

/// Returns how long `work` takes.
pub(super) fn timed(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

/// Returns the median; zero for an empty slice.
pub(super) fn median(times: &[Duration]) -> Duration {
    let mut times = times.to_vec();
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// Returns the median, minimum and maximum of `values`; zeros if it is empty.
pub(super) fn range(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    let at = |index: usize| values.get(index).copied().unwrap_or(0.0);
    [at(values.len() / 2), at(0), at(values.len().saturating_sub(1))]
}

/// Formats the median, minimum and maximum of `values`, followed by their `unit`.
pub(super) fn spread(values: Vec<f64>, digits: usize, unit: &str) -> String {
    let [middle, low, high] = range(values);
    format!("{middle:>9.digits$} {unit}  ({low:.digits$} – {high:.digits$})")
}

/// Formats the median, minimum and maximum of times in milliseconds.
pub(super) fn summary(times: &[Duration]) -> String {
    spread(times.iter().map(|time| time.as_secs_f64() * 1e3).collect(), 3, "ms")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_and_shares_compare_paired_runs() {
        let ms = |times: [u64; 3]| times.map(Duration::from_millis).to_vec();
        let times = Comparison { subject: ms([10, 30, 2]), floor: ms([10, 10, 4]) };
        assert_eq!(times.ratios(), [1.0, 3.0, 0.5]);
        assert_eq!(times.shares(0.5), [50.0, 0.5 / 3.0 * 100.0, 100.0]);
        assert_eq!((median(&times.subject), median(&[])), (Duration::from_millis(10), Duration::ZERO));
    }
}
