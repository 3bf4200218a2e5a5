//! A tree-structured Parzen estimator (TPE): proposes points that resemble the points of good trials and differ from
//! the others.
//!
//! Bergstra, Bardenet, Bengio, Kégl 2011, "Algorithms for hyper-parameter optimization", section 4. The trials are
//! split by loss. For each hyperparameter, l is the density of the values in good trials, and g the density of the
//! values in the others. Several values are drawn from l, and the value with the largest l/g is tried: it maximizes the
//! expected improvement.

use super::domain::{Coordinate, Domain, Draws};
use super::propose::{Point, Random, Strategy, Tried};

/// Maximum number of random trials at the start. If a third of all trials, rounded up, is less, only that many are
/// random.
const RANDOM: usize = 8;
/// The fraction of trials that count as good: the paper's γ.
const GOOD: f64 = 0.15;
/// Number of draws from l per hyperparameter.
const CANDIDATES: usize = 24;
/// Maximum number of draws to get one value inside the range.
const REDRAWN: usize = 64;

/// The strategy.
pub(super) struct Tpe<'a> {
    random: Random<'a>,
    first: usize,
}

impl<'a> Tpe<'a> {
    pub(super) fn new(random: Random<'a>, trials: usize) -> Self {
        Self { random, first: RANDOM.min(trials.div_ceil(3)) }
    }
}

impl Strategy for Tpe<'_> {
    fn propose(&self, history: &[Tried]) -> Option<Point> {
        if history.len() < self.first {
            return self.random.propose(history);
        }
        // A trial without a loss counts as the worst.
        let mut sorted: Vec<&Tried> = history.iter().collect();
        sorted.sort_by(|a, b| a.1.unwrap_or(f64::INFINITY).total_cmp(&b.1.unwrap_or(f64::INFINITY)));
        let split = (GOOD * sorted.len() as f64).ceil() as usize;
        let (good, others) = sorted.split_at(split.min(sorted.len()));
        let mut draws = Draws::new(self.random.seed, "tpe", history.len());
        let coordinate = |(index, domain): (usize, &Domain<'_>), draws: &mut Draws| {
            let of = |tried: &[&Tried]| tried.iter().map(|(point, _)| point[index]).collect::<Vec<_>>();
            let (l, g) = (Density::of(domain, &of(good)), Density::of(domain, &of(others)));
            let candidates = (0..CANDIDATES).map(|_| match l.draw(draws) {
                Coordinate::Share(share) => domain.settled(share),
                index => index,
            });
            let rated = candidates.map(|at| (l.at(at).ln() - g.at(at).ln(), at));
            // Ties go to the first draw.
            let best = rated.reduce(|best, other| if other.0 > best.0 { other } else { best });
            best.map_or_else(|| domain.at(draws.next()), |(_, at)| at)
        };
        self.random
            .untried(history, || self.random.space.iter().enumerate().map(|of| coordinate(of, &mut draws)).collect())
    }
}

/// A density over one hyperparameter.
enum Density {
    /// Listed values: the probability of each is proportional to its count plus one.
    Counts(Vec<f64>),
    /// A range: a normal density around each observed position, and a uniform density with the weight of one of them.
    Bells(Vec<Bell>),
}

impl Density {
    fn of(domain: &Domain<'_>, coordinates: &[Coordinate]) -> Self {
        if domain.0.range.is_none() {
            let mut counts = vec![1.0; domain.0.values.len()];
            let indices = coordinates.iter().map(|&at| domain.index(at) as usize);
            indices.for_each(|index| counts[index] += 1.0);
            let all: f64 = counts.iter().sum();
            return Self::Counts(counts.into_iter().map(|count| count / all).collect());
        }
        let mut shares: Vec<f64> = coordinates
            .iter()
            .filter_map(|at| match at {
                Coordinate::Share(share) => Some(*share),
                Coordinate::Index(_) => None,
            })
            .collect();
        shares.sort_by(f64::total_cmp);
        // The width is the distance to the farther neighbour; the ends of the range count as neighbours.
        let narrowest = 1.0 / (1.0 + shares.len() as f64).min(100.0);
        let bell = |(index, &middle): (usize, &f64)| {
            let before = if index == 0 { 0.0 } else { shares[index - 1] };
            let after = shares.get(index + 1).copied().unwrap_or(1.0);
            Bell::new(middle, (middle - before).max(after - middle).clamp(narrowest, 1.0))
        };
        Self::Bells(shares.iter().enumerate().map(bell).collect())
    }

    /// Returns the density at a coordinate; always positive.
    fn at(&self, at: Coordinate) -> f64 {
        match (self, at) {
            (Self::Counts(counts), Coordinate::Index(index)) => counts[index],
            (Self::Bells(bells), Coordinate::Share(share)) => {
                let sum: f64 = bells.iter().map(|bell| bell.at(share)).sum();
                (sum + 1.0) / (bells.len() + 1) as f64
            }
            _ => 1.0,
        }
    }

    fn draw(&self, draws: &mut Draws) -> Coordinate {
        let mut uniform = draws.next();
        match self {
            Self::Counts(counts) => {
                let mut index = 0;
                while uniform >= counts[index] && index + 1 < counts.len() {
                    uniform -= counts[index];
                    index += 1;
                }
                Coordinate::Index(index)
            }
            Self::Bells(bells) => {
                let index = (uniform * (bells.len() + 1) as f64) as usize;
                let Some(bell) = bells.get(index) else { return Coordinate::Share(draws.next()) };
                let inside = (0..REDRAWN).map(|_| bell.draw(draws)).find(|share| (0.0..=1.0).contains(share));
                Coordinate::Share(inside.unwrap_or(bell.middle))
            }
        }
    }
}

/// A normal density, truncated to the range from 0 to 1.
struct Bell {
    middle: f64,
    width: f64,
    /// The probability mass of the untruncated density inside the range.
    inside: f64,
}

impl Bell {
    fn new(middle: f64, width: f64) -> Self {
        let below = |x: f64| normal_below((x - middle) / width);
        Self { middle, width, inside: below(1.0) - below(0.0) }
    }

    fn at(&self, x: f64) -> f64 {
        let z = (x - self.middle) / self.width;
        (-0.5 * z * z).exp() / ((2.0 * std::f64::consts::PI).sqrt() * self.width * self.inside)
    }

    /// Draws from the normal distribution by the method of Box and Muller, 1958.
    fn draw(&self, draws: &mut Draws) -> f64 {
        let (a, b) = (1.0 - draws.next(), draws.next());
        self.middle + self.width * (-2.0 * a.ln()).sqrt() * (2.0 * std::f64::consts::PI * b).cos()
    }
}

/// Evaluates the standard normal distribution function to 1e-7: Abramowitz and Stegun 26.2.17.
fn normal_below(z: f64) -> f64 {
    const B: [f64; 5] = [0.319_381_530, -0.356_563_782, 1.781_477_937, -1.821_255_978, 1.330_274_429];
    let t = 1.0 / (1.0 + 0.231_641_9 * z.abs());
    let series = B.iter().rev().fold(0.0, |sum, b| (sum + b) * t);
    let above = (-0.5 * z * z).exp() / (2.0 * std::f64::consts::PI).sqrt() * series;
    if z < 0.0 { above } else { 1.0 - above }
}

#[cfg(test)]
mod tests;
