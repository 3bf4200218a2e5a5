//! Fits lines through measured transfers.

use super::table::{Line, Point};

impl Line {
    /// Fits a line by weighted least squares, assuming that the variance of a measured time is proportional to the
    /// time. Latency and slope are never negative.
    pub(super) fn through(points: Vec<Point>) -> Self {
        // Minimizes the sum of (latency + slope × bytes − seconds)² / seconds. With relative errors, small messages
        // would count as much as large ones. But large messages take most of the time of a step, and caches and link
        // shapers slow down only large messages.
        let mut sums = [0.0f64; 5];
        for Point { bytes, seconds } in &points {
            let weight = 1.0 / seconds.median.max(f64::MIN_POSITIVE);
            let terms = [1.0, *bytes, bytes * bytes, seconds.median, bytes * seconds.median];
            sums.iter_mut().zip(terms).for_each(|(sum, term)| *sum += weight * term);
        }
        let [one, x, xx, y, xy] = sums;
        let determinant = one * xx - x * x;
        let ratio = |a: f64, b: f64| if b > 0.0 { (a / b).max(0.0) } else { 0.0 };
        let slope = ratio(one * xy - x * y, determinant);
        let latency = ratio(y - slope * x, one);
        // If the latency would be negative, fit a line through the origin.
        let slope = if latency > 0.0 { slope } else { ratio(xy, xx) };
        Self { latency, seconds_per_byte: slope, points }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::table::Time;

    fn line(points: &[(f64, f64)]) -> Line {
        let point = |&(bytes, seconds)| Point { bytes, seconds: Time::of(vec![seconds]) };
        Line::through(points.iter().map(point).collect())
    }

    #[test]
    fn exact_points_give_their_latency_and_bandwidth() {
        let found = line(&[(1e4, 6e-6), (1e6, 1.05e-4), (1e7, 1.005e-3)]);
        assert!((found.latency - 5e-6).abs() < 1e-12, "{found:?}");
        assert!((found.seconds_per_byte - 1e-10).abs() < 1e-16, "{found:?}");
    }

    /// The times are those of an all-gather and of a broadcast over a 100 Mb/s link whose shaper lets 256 KiB pass at
    /// once. With relative errors, the smallest message alone would make the predicted all-gather six times as fast as
    /// the measured one.
    #[test]
    fn the_fit_favors_large_messages() {
        let bytes = [12_288.0, 196_608.0, 1_572_864.0, 12_582_912.0];
        for seconds in [[0.09e-3, 10.92e-3, 87.5e-3, 0.8206], [0.13e-3, 21.76e-3, 174.9e-3, 1.4016]] {
            let found = line(&bytes.into_iter().zip(seconds).collect::<Vec<_>>());
            let large = found.latency + found.seconds_per_byte * bytes[3];
            assert!((large / seconds[3] - 1.0).abs() < 0.03, "{found:?}");
            assert!(found.latency < seconds[0], "{found:?}");
        }
    }

    #[test]
    fn neither_latency_nor_slope_is_negative() {
        let falling = line(&[(1e3, 2e-3), (1e6, 1e-3)]);
        assert!(falling.seconds_per_byte == 0.0 && falling.latency > 0.0, "{falling:?}");
        let below = line(&[(1e6, 1e-6), (1e7, 1e-4)]);
        assert!(below.latency == 0.0 && below.seconds_per_byte > 0.0, "{below:?}");
        assert_eq!(line(&[]).latency, 0.0);
    }
}
