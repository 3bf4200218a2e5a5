//! Curves over the steps of a run, thinned so that a page stays small.

use serde_json::{Value, json};

/// Maximum number of points of a curve.
pub(super) const MOST_POINTS: usize = 3_000;

/// A point: the step, and its value, or `None` if the value is not finite.
pub(super) type Point = (u64, Option<f64>);

/// Thins a curve to at most `most` points, where `most` is at least 5. Each bucket of neighbouring points keeps its
/// smallest value, its largest value and one value that is not finite, so that spikes and gaps stay visible. The first
/// and the last point are kept too.
pub(super) fn thinned(points: &[Point], most: usize) -> Vec<Point> {
    if points.len() <= most {
        return points.to_vec();
    }
    let inner = &points[1..points.len() - 1];
    let size = inner.len().div_ceil((most - 2) / 3);
    let mut kept = vec![points[0]];
    for bucket in inner.chunks(size) {
        let values = || bucket.iter().enumerate().filter_map(|(index, (_, value))| value.map(|value| (index, value)));
        let smallest = values().min_by(|a, b| a.1.total_cmp(&b.1)).map(|(index, _)| index);
        let largest = values().max_by(|a, b| a.1.total_cmp(&b.1)).map(|(index, _)| index);
        let gap = bucket.iter().position(|(_, value)| value.is_none());
        let mut indices: Vec<usize> = [smallest, largest, gap].into_iter().flatten().collect();
        indices.sort_unstable();
        indices.dedup();
        kept.extend(indices.into_iter().map(|index| bucket[index]));
    }
    kept.push(points[points.len() - 1]);
    kept
}

/// Returns a curve as JSON: the thinned `steps` and `values`, and the original number of points. Returns null without
/// points.
pub(super) fn curve(points: &[Point]) -> Value {
    if points.is_empty() {
        return Value::Null;
    }
    let (steps, values): (Vec<u64>, Vec<Option<f64>>) = thinned(points, MOST_POINTS).into_iter().unzip();
    json!({ "steps": steps, "values": values, "points": points.len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thinning_keeps_extremes_gaps_and_ends() {
        let value = |step: u64| match step {
            7_777 => Some(1e6),
            55_555 => Some(-1e6),
            33_333 => None,
            _ => Some((step as f64 * 0.01).sin()),
        };
        let points: Vec<Point> = (1..=100_000).map(|step| (step, value(step))).collect();
        let kept = thinned(&points, MOST_POINTS);
        assert!(kept.len() <= MOST_POINTS && kept.len() > MOST_POINTS / 2, "{} points", kept.len());
        for step in [1, 7_777, 33_333, 55_555, 100_000] {
            assert!(kept.contains(&(step, value(step))), "step {step} is lost");
        }
        assert!(kept.windows(2).all(|pair| pair[0].0 < pair[1].0), "in order, and none twice");
        assert_eq!(curve(&points)["points"], 100_000);
    }

    #[test]
    fn short_curves_are_kept_as_they_are() {
        let points: Vec<Point> = (1..=MOST_POINTS as u64).map(|step| (step, Some(0.5))).collect();
        assert_eq!(thinned(&points, MOST_POINTS), points);
        assert_eq!(thinned(&points, 5).len(), 4, "the ends, and two of one bucket");
        assert_eq!(curve(&[]), Value::Null);
    }
}
