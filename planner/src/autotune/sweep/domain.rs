//! Domains of hyperparameters: either listed values or a range of numbers. A coordinate is the index of a listed value,
//! or a position from 0 to 1 in the range.

use zero_config::{Dimension, Interval};
use zero_model::random::Stream;

/// A coordinate of a point.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Coordinate {
    /// The index of a listed value.
    Index(usize),
    /// The position between the ends of the range, from 0 to 1; on a logarithmic scale if the range is logarithmic.
    Share(f64),
}

/// Converts between a hyperparameter's coordinates and its values.
#[derive(Debug, Clone)]
pub(super) struct Domain<'a>(pub(super) &'a Dimension);

impl Domain<'_> {
    /// Returns the number of values; `None` for a range of real numbers.
    pub(super) fn len(&self) -> Option<u64> {
        match self.0.range {
            None => Some(self.0.values.len() as u64),
            Some(Interval { low, high, is_integer: true, .. }) => Some((high - low) as u64 + 1),
            Some(_) => None,
        }
    }

    /// Maps a uniform number in [0, 1) to a coordinate. In a range of whole numbers, the numbers at its ends are as
    /// likely as the others.
    pub(super) fn at(&self, uniform: f64) -> Coordinate {
        match self.0.range {
            None => Coordinate::Index(((uniform * self.0.values.len() as f64) as usize).min(self.0.values.len() - 1)),
            Some(range) if range.is_integer => {
                let (from, to) = (scale(&range, range.low - 0.5), scale(&range, range.high + 0.5));
                self.settled(share(&range, unscale(&range, from + uniform * (to - from))))
            }
            Some(_) => self.settled(uniform),
        }
    }

    /// Returns the coordinate of the value with this index.
    pub(super) fn nth(&self, index: u64) -> Coordinate {
        match self.0.range {
            None => Coordinate::Index(index as usize),
            Some(range) => Coordinate::Share(share(&range, range.low + index as f64)),
        }
    }

    /// Returns the index of a value; meaningful only if values can be counted.
    pub(super) fn index(&self, coordinate: Coordinate) -> u64 {
        match (coordinate, self.0.range) {
            (Coordinate::Index(index), _) => index as u64,
            (Coordinate::Share(of), Some(range)) => (number(&range, of) - range.low) as u64,
            (Coordinate::Share(_), None) => 0,
        }
    }

    /// Rounds a position to the coordinate of the nearest value that trials may use: a whole number, or a real number
    /// with four digits.
    pub(super) fn settled(&self, of: f64) -> Coordinate {
        let share = |range: &Interval| share(range, number(range, of));
        Coordinate::Share(self.0.range.as_ref().map_or(of, share))
    }

    /// Returns the value, in the syntax of `--set`.
    pub(super) fn text(&self, coordinate: Coordinate) -> String {
        match (coordinate, self.0.range) {
            (Coordinate::Index(index), _) => self.0.values[index].clone(),
            (Coordinate::Share(of), Some(range)) if range.is_integer => format!("{}", number(&range, of)),
            (Coordinate::Share(of), Some(range)) => format!("{:?}", number(&range, of)),
            (Coordinate::Share(of), None) => format!("{of:?}"),
        }
    }
}

fn scale(range: &Interval, x: f64) -> f64 {
    if range.log { x.ln() } else { x }
}

fn unscale(range: &Interval, x: f64) -> f64 {
    if range.log { x.exp() } else { x }
}

fn share(range: &Interval, x: f64) -> f64 {
    let (low, high) = (scale(range, range.low), scale(range, range.high));
    ((scale(range, x.clamp(range.low, range.high)) - low) / (high - low)).clamp(0.0, 1.0)
}

/// Returns the value at a position in the range, rounded to a value that trials may use.
fn number(range: &Interval, share: f64) -> f64 {
    let (low, high) = (scale(range, range.low), scale(range, range.high));
    let x = unscale(range, low + share * (high - low));
    let x = if range.is_integer { x.round() } else { format!("{x:.3e}").parse().unwrap_or(x) };
    x.clamp(range.low, range.high)
}

/// Uniform numbers in [0, 1) for one trial. Each number is a function of the seed, the trial, and the number of earlier
/// draws.
pub(super) struct Draws {
    stream: Stream,
    drawn: u64,
}

impl Draws {
    pub(super) fn new(seed: u64, purpose: &str, trial: usize) -> Self {
        Self { stream: Stream::new(seed, purpose, trial as u64), drawn: 0 }
    }

    pub(super) fn next(&mut self) -> f64 {
        let [a, b, ..] = self.stream.words(self.drawn);
        self.drawn += 1;
        let bits = (u64::from(a) << 32 | u64::from(b)) >> 11;
        bits as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(low: f64, high: f64, log: bool, is_integer: bool) -> Dimension {
        Dimension { path: "key".into(), values: vec![], range: Some(Interval { low, high, log, is_integer }) }
    }

    #[test]
    fn draws_are_uniform_on_the_scale_of_the_range() {
        let mut draws = Draws::new(3, "test", 0);
        let uniform: Vec<f64> = (0..4000).map(|_| draws.next()).collect();
        assert!(uniform.iter().all(|x| (0.0..1.0).contains(x)));
        let log = range(1e-5, 1e-1, true, false);
        let values: Vec<f64> =
            uniform.iter().map(|&u| Domain(&log).text(Domain(&log).at(u)).parse().unwrap()).collect();
        assert!(values.iter().all(|x| (1e-5..=1e-1).contains(x)));
        // Each of the four decades contains a quarter of the values.
        for decade in [1e-5, 1e-4, 1e-3, 1e-2] {
            let inside = values.iter().filter(|&&x| x >= decade && x < decade * 10.0).count();
            assert!((900..1100).contains(&inside), "{decade}: {inside}");
        }
        let whole = range(1.0, 4.0, false, true);
        let domain = Domain(&whole);
        for value in ["1", "2", "3", "4"] {
            let count = uniform.iter().filter(|&&u| domain.text(domain.at(u)) == value).count();
            assert!((900..1100).contains(&count), "{value}: {count}");
        }
    }

    #[test]
    fn a_value_has_four_digits_and_stays_in_its_range() {
        let real = range(0.123_456, 0.123_459, false, false);
        let domain = Domain(&real);
        for share in [0.0, 0.5, 1.0] {
            let value: f64 = domain.text(Coordinate::Share(share)).parse().unwrap();
            assert!((0.123_456..=0.123_459).contains(&value), "{value}");
        }
        let log = range(1e-9, 1.0, true, false);
        assert_eq!(Domain(&log).text(Coordinate::Share(0.5)), "3.162e-5");
        let whole = range(3.0, 7.0, true, true);
        let domain = Domain(&whole);
        assert_eq!(domain.len(), Some(5));
        for index in 0..5 {
            let at = domain.nth(index);
            assert_eq!((domain.index(at), domain.text(at)), (index, (3 + index).to_string()));
        }
    }
}
