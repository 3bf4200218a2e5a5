//! Chooses the next point of the space: on a grid or at random. (The module `tpe` uses earlier results.)

use zero_config::{Sweep, SweepMethod};

use super::domain::{Coordinate, Domain, Draws};
use super::tpe::Tpe;
use zero_engine::Error;

/// Maximum number of combinations of a grid.
const MOST: u64 = 10_000;
/// Maximum number of times to draw again if a drawn point was already tried. After that, the next untried point is
/// taken.
const REDRAWN: usize = 64;

/// A coordinate for each hyperparameter, in the order of the file.
pub(super) type Point = Vec<Coordinate>;

/// A point that was tried, and its loss; `None` if the trial has no loss.
pub(super) type Tried = (Point, Option<f64>);

/// Chooses points. The same history always leads to the same next point.
pub(super) trait Strategy {
    /// Returns the next point; `None` if none is left.
    fn propose(&self, history: &[Tried]) -> Option<Point>;
}

/// Returns the strategy of a sweep, and its maximum number of trials.
///
/// # Errors
/// Fails if the grid is too large.
pub(super) fn strategy(sweep: &Sweep) -> Result<(Box<dyn Strategy + '_>, usize), Error> {
    let space: Vec<Domain<'_>> = sweep.space.iter().map(Domain).collect();
    let all = count(&space);
    let random = |space| Random { space, seed: sweep.seed };
    let trials = all.map_or(sweep.trials, |all| sweep.trials.min(usize::try_from(all).unwrap_or(usize::MAX)));
    Ok(match (sweep.method, all) {
        (SweepMethod::Grid, Some(all)) if all <= MOST => (Box::new(Grid { space }), all as usize),
        (SweepMethod::Grid, _) => {
            let message = format!("the grid has more than {MOST} combinations");
            return Err(Error::setting("autotuning.sweep.space", message, "remove some values, or set `method: tpe`"));
        }
        (SweepMethod::Random, _) => (Box::new(random(space)), trials),
        (SweepMethod::Tpe, _) => (Box::new(Tpe::new(random(space), sweep.trials)), trials),
    })
}

/// Returns the number of points of a space; `None` if it is infinite.
fn count(space: &[Domain<'_>]) -> Option<u64> {
    space.iter().try_fold(1u64, |all, domain| Some(all.saturating_mul(domain.len()?)))
}

/// Returns the point with this index; the last hyperparameter changes fastest.
fn nth(space: &[Domain<'_>], mut index: u64) -> Point {
    let mut point: Point = vec![];
    for domain in space.iter().rev() {
        let many = domain.len().unwrap_or(1);
        point.push(domain.nth(index % many));
        index /= many;
    }
    point.reverse();
    point
}

fn index(space: &[Domain<'_>], point: &Point) -> u64 {
    let digit = |index: u64, (domain, &at): (&Domain<'_>, &Coordinate)| {
        index.saturating_mul(domain.len().unwrap_or(1)).saturating_add(domain.index(at))
    };
    space.iter().zip(point).fold(0, digit)
}

struct Grid<'a> {
    space: Vec<Domain<'a>>,
}

impl Strategy for Grid<'_> {
    fn propose(&self, history: &[Tried]) -> Option<Point> {
        let next = history.len() as u64;
        (next < count(&self.space)?).then(|| nth(&self.space, next))
    }
}

/// Proposes independent draws. If points can be counted, no point is proposed twice.
pub(super) struct Random<'a> {
    pub(super) space: Vec<Domain<'a>>,
    pub(super) seed: u64,
}

impl Random<'_> {
    /// Returns an untried point that `draw` draws or, if all draws were tried, the next untried point; `None` if all
    /// points were tried. If points cannot be counted, returns the first draw.
    pub(super) fn untried(&self, history: &[Tried], mut draw: impl FnMut() -> Point) -> Option<Point> {
        let is_new = |point: &Point| !history.iter().any(|(tried, _)| tried == point);
        let mut point = draw();
        let Some(all) = count(&self.space) else { return Some(point) };
        for _ in 0..REDRAWN {
            if is_new(&point) {
                return Some(point);
            }
            point = draw();
        }
        let first = index(&self.space, &point);
        // If n points were tried, any n + 1 distinct points include an untried one.
        let near = (0..all.min(history.len() as u64 + 1)).map(|by| nth(&self.space, (first + by) % all));
        { near }.find(is_new)
    }
}

impl Strategy for Random<'_> {
    fn propose(&self, history: &[Tried]) -> Option<Point> {
        let mut draws = Draws::new(self.seed, "sweep", history.len());
        self.untried(history, || self.space.iter().map(|domain| domain.at(draws.next())).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zero_config::{Dimension, Interval};

    fn values(of: &[&str]) -> Dimension {
        Dimension { path: "key".into(), values: of.iter().map(ToString::to_string).collect(), range: None }
    }

    fn sweep(space: Vec<Dimension>, method: SweepMethod, trials: usize) -> Sweep {
        Sweep { space, method, trials, max_steps: None, seed: 42 }
    }

    fn all(sweep: &Sweep, most: usize) -> Vec<String> {
        let (strategy, _) = strategy(sweep).unwrap();
        let mut history: Vec<Tried> = vec![];
        while let Some(point) = strategy.propose(&history).filter(|_| history.len() < most) {
            history.push((point, Some(1.0)));
        }
        let text = |point: &Point| {
            let texts: Vec<String> = sweep.space.iter().zip(point).map(|(of, &at)| Domain(of).text(at)).collect();
            texts.join(" ")
        };
        history.iter().map(|(point, _)| text(point)).collect()
    }

    #[test]
    fn a_grid_visits_all_combinations_once() {
        let space = vec![values(&["a", "b"]), values(&["1", "2", "3"])];
        let grid = sweep(space, SweepMethod::Grid, 2);
        assert_eq!(all(&grid, 100), ["a 1", "a 2", "a 3", "b 1", "b 2", "b 3"]);
        assert_eq!(strategy(&grid).unwrap().1, 6);
        let many: Vec<String> = (0..101).map(|n| n.to_string()).collect();
        let many = values(&many.iter().map(String::as_str).collect::<Vec<_>>());
        let error = strategy(&sweep(vec![many.clone(), many], SweepMethod::Grid, 2)).err().unwrap().to_string();
        assert!(error.contains("more than 10000 combinations"), "{error}");
    }

    #[test]
    fn few_points_are_drawn_without_repetition() {
        let whole = Interval { low: 1.0, high: 7.0, log: true, is_integer: true };
        let space =
            vec![values(&["a", "b", "c"]), Dimension { path: "other".into(), values: vec![], range: Some(whole) }];
        for method in [SweepMethod::Random, SweepMethod::Tpe] {
            let mut drawn = all(&sweep(space.clone(), method, 100), 100);
            assert_eq!(drawn.len(), 21, "{method}: {drawn:?}");
            assert_eq!(strategy(&sweep(space.clone(), method, 100)).unwrap().1, 21);
            let in_order = drawn.is_sorted();
            drawn.sort();
            drawn.dedup();
            assert_eq!(drawn.len(), 21, "{method}: {drawn:?}");
            assert!(!in_order);
        }
    }

    #[test]
    fn the_seed_determines_the_points() {
        let real = Interval { low: 0.0, high: 1.0, log: false, is_integer: false };
        let space = vec![Dimension { path: "key".into(), values: vec![], range: Some(real) }];
        let one = sweep(space, SweepMethod::Random, 5);
        let other = Sweep { seed: 43, ..one.clone() };
        assert_eq!(all(&one, 5), all(&one, 5));
        assert!(all(&one, 5) != all(&other, 5));
        assert_eq!(all(&one, 5).len(), 5);
    }
}
