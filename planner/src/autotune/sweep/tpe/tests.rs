//! Tests the estimator on planted losses.

use zero_config::{Dimension, Interval, Sweep, SweepMethod};

use super::*;
use crate::autotune::sweep::propose::strategy;

fn range(path: &str, low: f64, high: f64) -> Dimension {
    let range = Interval { low, high, log: true, is_integer: false };
    Dimension { path: path.into(), values: vec![], range: Some(range) }
}

fn run(sweep: &Sweep, loss: impl Fn(&[String]) -> Option<f64>) -> Vec<Tried> {
    let (strategy, trials) = strategy(sweep).unwrap();
    let mut history: Vec<Tried> = vec![];
    while let Some(point) = strategy.propose(&history).filter(|_| history.len() < trials) {
        let texts: Vec<String> = sweep.space.iter().zip(&point).map(|(of, &at)| Domain(of).text(at)).collect();
        history.push((point, loss(&texts)));
    }
    history
}

fn best(history: &[Tried]) -> f64 {
    history.iter().filter_map(|(_, loss)| *loss).fold(f64::INFINITY, f64::min)
}

/// A quadratic loss in the logarithms of two values, with its minimum at 1e-3 and 3e-2.
fn bowl(texts: &[String]) -> Option<f64> {
    let of = |index: usize, floor: f64| (texts[index].parse::<f64>().unwrap() / floor).log10().powi(2);
    Some(of(0, 1e-3) + of(1, 3e-2))
}

#[test]
fn the_estimator_beats_random_search_on_a_bowl_function() {
    let space = vec![range("a", 1e-6, 1.0), range("b", 1e-5, 1e1)];
    let mean = |method: SweepMethod| {
        let of = |seed| best(&run(&Sweep { space: space.clone(), method, trials: 40, max_steps: None, seed }, bowl));
        (0..50).map(of).sum::<f64>() / 50.0
    };
    let (tpe, random) = (mean(SweepMethod::Tpe), mean(SweepMethod::Random));
    println!("mean of the best loss after 40 trials: {tpe:.4} by TPE, {random:.4} at random");
    assert!(tpe < 0.6 * random, "{tpe} {random}");
}

#[test]
fn the_estimator_finds_the_good_value_although_some_trials_fail() {
    let names = ["p", "q", "r", "s", "t", "u", "v", "w"].map(String::from).to_vec();
    let kind = Dimension { path: "kind".into(), values: names, range: None };
    let space = vec![kind, range("a", 1e-6, 1.0)];
    let loss = |texts: &[String]| match texts[0].as_str() {
        "p" | "q" => None,
        "t" => Some((texts[1].parse::<f64>().unwrap() / 1e-4).log10().abs()),
        _ => Some(10.0),
    };
    let good = |method: SweepMethod| {
        let of = |seed| {
            let sweep = Sweep { space: space.clone(), method, trials: 40, max_steps: None, seed };
            run(&sweep, loss).iter().filter(|(point, _)| point[0] == Coordinate::Index(4)).count()
        };
        (0..20).map(of).sum::<usize>()
    };
    let (tpe, random) = (good(SweepMethod::Tpe), good(SweepMethod::Random));
    assert!(tpe > 2 * random, "{tpe} {random}");
}

#[test]
fn the_same_history_gives_the_same_point() {
    let space = vec![range("a", 1e-6, 1.0), range("b", 1e-5, 1e1)];
    let sweep = Sweep { space, method: SweepMethod::Tpe, trials: 30, max_steps: None, seed: 7 };
    let whole = run(&sweep, bowl);
    assert_eq!(whole, run(&sweep, bowl));
    let (strategy, _) = strategy(&sweep).unwrap();
    for end in [0, 3, 8, 9, 20] {
        assert_eq!(strategy.propose(&whole[..end]).as_ref(), Some(&whole[end].0), "{end}");
    }
}

#[test]
fn densities_sum_to_one() {
    let dimension = range("a", 1e-6, 1.0);
    let domain = Domain(&dimension);
    for shares in [vec![], vec![0.0], vec![0.2, 0.21, 0.9], vec![0.5; 5]] {
        let coordinates: Vec<Coordinate> = shares.iter().map(|&share| Coordinate::Share(share)).collect();
        let density = Density::of(&domain, &coordinates);
        let sum: f64 = (0..10_000).map(|i| density.at(Coordinate::Share((f64::from(i) + 0.5) / 1e4)) / 1e4).sum();
        assert!((sum - 1.0).abs() < 1e-4, "{shares:?}: {sum}");
    }
    assert!((normal_below(1.0) - 0.841_344_746).abs() < 1e-7 && (normal_below(-1.0) - 0.158_655_254).abs() < 1e-7);
}
