//! The metrics to optimize and their direction: throughput, latency, or floating-point operations per second.

use zero_config::Metric;

/// The work of a step, in the quantities that the metrics use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepWork {
    /// Number of samples per global batch.
    pub samples: usize,
    /// Number of tokens per sample; `None` if only the data determine it, or if the model has no tokens.
    pub tokens: Option<usize>,
    /// Number of elements of all parameters.
    pub parameters: usize,
    /// Number of ranks that share the work.
    pub ranks: usize,
}

/// Computes the value of `metric` for a step that takes `seconds`.
#[must_use]
pub fn value(metric: Metric, work: &StepWork, seconds: f64) -> f64 {
    let samples = work.samples as f64;
    let tokens = samples * work.tokens.unwrap_or(1) as f64;
    match metric {
        Metric::Throughput => tokens / seconds,
        Metric::Latency => seconds,
        // Kaplan et al. 2020, section 2.1: two operations per weight and token in the forward, four in the backward;
        // recomputation does not count.
        Metric::Flops => 6.0 * work.parameters as f64 * tokens / seconds / work.ranks as f64,
    }
}

/// Computes the cost of a configuration: a lower cost is better for every metric. The ratio of the costs of two
/// configurations tells how many times better one is than the other.
#[must_use]
pub fn cost(metric: Metric, work: &StepWork, seconds: f64) -> f64 {
    let value = value(metric, work, seconds);
    if is_better_higher(metric) { 1.0 / value } else { value }
}

/// Returns whether higher values are better.
#[must_use]
pub fn is_better_higher(metric: Metric) -> bool {
    match metric {
        Metric::Throughput | Metric::Flops => true,
        Metric::Latency => false,
    }
}

/// Returns the unit of the metric's values.
#[must_use]
pub fn unit(metric: Metric, work: &StepWork) -> &'static str {
    match (metric, work.tokens) {
        (Metric::Throughput, Some(_)) => "tokens/s",
        (Metric::Throughput, None) => "samples/s",
        (Metric::Latency, _) => "s",
        (Metric::Flops, _) => "FLOP/s per rank",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One rank is the most efficient, two ranks are faster but less efficient, and a small batch has the lowest
    /// latency.
    #[test]
    fn each_metric_ranks_candidates_in_the_right_direction() {
        let work = |samples, ranks| StepWork { samples, tokens: Some(10), parameters: 1000, ranks };
        let planted = [(work(16, 1), 1.0), (work(16, 2), 0.6), (work(1, 2), 0.1)];
        let best = |metric| {
            let cost = |index: &usize| cost(metric, &planted[*index].0, planted[*index].1);
            (0..planted.len()).min_by(|a, b| cost(a).total_cmp(&cost(b)))
        };
        assert_eq!(best(Metric::Flops), Some(0));
        assert_eq!(best(Metric::Throughput), Some(1));
        assert_eq!(best(Metric::Latency), Some(2));
        assert_eq!(value(Metric::Throughput, &planted[0].0, 2.0), 80.0);
        assert_eq!(value(Metric::Flops, &planted[1].0, 2.0), 6.0 * 1000.0 * 160.0 / 4.0);
    }
}
