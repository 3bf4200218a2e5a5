//! Means of a few runs, with confidence intervals.

/// A geometric mean with its 95 % confidence interval, for quantities that are compared by ratio.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// The geometric mean.
    pub mean: f64,
    /// The lower end of the interval. For a single sample the ends are 0 and infinity.
    pub low: f64,
    /// The upper end.
    pub high: f64,
}

/// 97.5 % quantiles of Student's t distribution for 1, 2, … degrees of freedom.
const T: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];
/// The quantile for more degrees of freedom: that of the normal distribution.
const NORMAL: f64 = 1.960;

impl Interval {
    /// Computes the interval from positive samples; `None` without samples.
    #[must_use]
    pub fn of(samples: &[f64]) -> Option<Self> {
        let count = samples.len() as f64;
        let mean = samples.iter().map(|sample| sample.ln()).sum::<f64>() / count;
        if samples.is_empty() {
            return None;
        }
        let freedom = samples.len() - 1;
        let half = match freedom {
            0 => f64::INFINITY,
            _ => {
                let variance = samples.iter().map(|sample| (sample.ln() - mean).powi(2)).sum::<f64>() / freedom as f64;
                T.get(freedom - 1).copied().unwrap_or(NORMAL) * (variance / count).sqrt()
            }
        };
        Some(Self { mean: mean.exp(), low: (mean - half).exp(), high: (mean + half).exp() })
    }

    /// Returns whether the whole interval is above `value`.
    #[must_use]
    pub fn is_above(&self, value: f64) -> bool {
        self.low > value
    }
}

/// Returns the median of some times. For an even number, it is the lower of the two middle values; for an empty list,
/// zero.
pub(super) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_samples_give_wide_intervals() {
        assert_eq!(Interval::of(&[]), None);
        let one = Interval::of(&[2.0]).unwrap();
        assert!((one.mean - 2.0).abs() < 1e-12 && one.low == 0.0 && one.high == f64::INFINITY && !one.is_above(0.1));
        let (two, four) = (Interval::of(&[1.0, 1.02]).unwrap(), Interval::of(&[1.0, 1.02, 1.0, 1.02]).unwrap());
        assert!(two.low < four.low && four.high < two.high && four.is_above(0.99) && !two.is_above(0.99));
        let equal = Interval::of(&[3.0; 5]).unwrap();
        assert!((equal.high - equal.low).abs() < 1e-9);
    }

    /// Computes many intervals, each from five samples, and checks that 95 % of them contain the true mean.
    #[test]
    fn intervals_contain_the_mean_at_their_confidence_level() {
        let mut state = 7u64;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        // A sum of twelve uniform numbers is nearly normal, with variance 1.
        let mut normal = || (0..12).map(|_| uniform()).sum::<f64>() - 6.0;
        let holds = (0..4000).filter(|_| {
            let samples: Vec<f64> = (0..5).map(|_| (0.1 * normal()).exp()).collect();
            Interval::of(&samples).is_some_and(|of| of.low <= 1.0 && 1.0 <= of.high)
        });
        let holds = holds.count();
        assert!((3740..=3860).contains(&holds), "{holds} of 4000");
    }
}
