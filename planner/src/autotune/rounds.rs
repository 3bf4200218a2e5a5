//! Estimates how fast the machine was in each round, so that runs of different rounds can be compared.
//!
//! The logarithm of a run's time is modelled as the sum of a term for its configuration and a term for its round,
//! fitted by least squares. A configuration that ran in several rounds makes these rounds comparable.

use std::collections::BTreeMap;

use super::row::Row;

/// Number of iterations of the solver. Each iteration solves exactly for the terms of the configurations, then for the
/// terms of the rounds. Convergence is slow only if rounds are connected in a long chain, which is rare.
const SWEEPS: usize = 60;

/// Returns, for each round, how many times slower the machine was in this round than in the average round.
pub(super) fn slowness(rows: &[Row]) -> BTreeMap<usize, f64> {
    let runs: Vec<(usize, usize, f64)> =
        rows.iter().flat_map(|row| row.runs.iter().map(|run| (row.id, run.round, run.seconds().ln()))).collect();
    let mut of_round: BTreeMap<usize, f64> = runs.iter().map(|&(_, round, _)| (round, 0.0)).collect();
    for _ in 0..SWEEPS {
        let of_row = means(runs.iter().map(|&(row, round, time)| (row, time - of_round[&round])));
        of_round = means(runs.iter().map(|&(row, round, time)| (round, time - of_row[&row])));
    }
    let middle = of_round.values().sum::<f64>() / of_round.len().max(1) as f64;
    of_round.into_iter().map(|(round, term)| (round, (term - middle).exp())).collect()
}

fn means(values: impl Iterator<Item = (usize, f64)>) -> BTreeMap<usize, f64> {
    let mut sums: BTreeMap<usize, (f64, usize)> = BTreeMap::new();
    for (key, value) in values {
        let sum = sums.entry(key).or_default();
        *sum = (sum.0 + value, sum.1 + 1);
    }
    sums.into_iter().map(|(key, (sum, count))| (key, sum / count as f64)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::autotune::row::{Run, State};
    use crate::autotune::space::Candidate;

    #[test]
    fn a_slow_round_is_detected_from_its_runs() {
        // Row 0 runs in all rounds, and each other row in one round. In round 2 every run takes twice as long.
        let (own, slow) = ([1.0, 0.8, 1.5, 0.7], [1.0, 1.0, 2.0, 1.0]);
        let run = |row: usize, round: usize| Run { round, step_seconds: vec![own[row] * slow[round]], peak_bytes: 0 };
        let rows: Vec<Row> = (0..4)
            .map(|id| Row {
                id,
                candidate: Candidate { ranks: 1, settings: vec![] },
                state: State::Measured,
                reason: None,
                planned: None,
                predicted: None,
                corrected: None,
                runs: if id == 0 { (0..4).map(|round| run(0, round)).collect() } else { vec![run(id, id)] },
            })
            .collect();
        let found = slowness(&rows);
        for round in 1..4 {
            assert!((found[&round] / found[&0] / slow[round] - 1.0).abs() < 1e-9, "{found:?}");
        }
        assert!(slowness(&[]).is_empty());
    }
}
