//! Formats the medians and ranges that benchmarks print.

use std::time::Duration;

/// Formats the median, minimum and maximum of times in milliseconds.
pub(super) fn summary(times: &[Duration]) -> String {
    let ms = |d: Option<&Duration>| d.map_or(0.0, |d| d.as_secs_f64() * 1e3);
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    let median = zero_comm::bench::median(times).as_secs_f64() * 1e3;
    format!("{median:>9.3} ms  ({:.3} – {:.3})", ms(sorted.first()), ms(sorted.last()))
}

/// Returns the rate of each run in percent of the rate of its floor. The subject moves `share` times as many bytes as the
/// floor.
pub(super) fn of_floor(subject: &[Duration], floor: &[Duration], share: f64) -> Vec<f64> {
    floor.iter().zip(subject).map(|(f, s)| share * f.as_secs_f64() / s.as_secs_f64() * 100.0).collect()
}

/// Formats the median, minimum and maximum of `values`, followed by their `unit`.
pub(super) fn spread(mut values: Vec<f64>, digits: usize, unit: &str) -> String {
    values.sort_by(f64::total_cmp);
    let at = |index: usize| values.get(index).copied().unwrap_or(0.0);
    let (middle, last) = (at(values.len() / 2), at(values.len().saturating_sub(1)));
    format!("{middle:>9.digits$} {unit}  ({:.digits$} – {last:.digits$})", at(0))
}
