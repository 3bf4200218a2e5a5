//! The loop of a sweep: proposes a point, trains it, records the outcome, and proposes the next point. It does not
//! depend on how trials run, for example as processes.

use std::time::Instant;

use serde_json::Value;
use zero_config::Sweep;

use super::domain::Domain;
use super::median::behind;
use super::propose::{Tried, strategy};
use super::trial::{Evaluation, SweepTrial, TrialOutcome, TrialState};
use crate::autotune::correction::Setting;
use crate::autotune::search::End;
use zero_engine::Error;

/// A function that gets a trial's evaluations so far. It returns the reason if the trial should stop now, and otherwise
/// `None`.
pub(super) type Judge<'a> = dyn Fn(&[Evaluation]) -> Option<String> + 'a;

/// Trains trials.
pub(super) trait Train {
    /// Trains with these settings, and calls `judge` after each evaluation. Returns `None` if the user interrupted.
    fn train(&mut self, id: usize, settings: &[Setting], judge: &Judge<'_>) -> Result<Option<TrialOutcome>, Error>;

    /// Called for each trial that has been trained.
    fn ended(&mut self, trial: &SweepTrial) -> Result<(), Error>;
}

/// Runs all trials. `lines` are the lines that an earlier sweep wrote; its trials are not trained again.
///
/// # Errors
/// Fails if the grid is too large, or if `train` fails.
pub(super) fn run(
    sweep: &Sweep,
    lines: &[Value],
    until: Option<Instant>,
    train: &mut dyn Train,
) -> Result<(Vec<SweepTrial>, End), Error> {
    let (strategy, most) = strategy(sweep)?;
    let (mut trials, mut history): (Vec<SweepTrial>, Vec<Tried>) = (vec![], vec![]);
    while trials.len() < most {
        let Some(point) = strategy.propose(&history) else { break };
        let (id, of) = (trials.len(), sweep.space.iter().zip(&point));
        let settings: Vec<Setting> = of.map(|(of, &at)| (of.path.clone(), Domain(of).text(at))).collect();
        let earlier = lines.iter().find_map(|line| SweepTrial::outcome(line, id, &settings));
        let is_new = earlier.is_none();
        let outcome = match earlier {
            Some(outcome) => outcome,
            None if until.is_some_and(|until| Instant::now() >= until) => return Ok((trials, End::Budget)),
            None => {
                let is_complete = |trial: &&SweepTrial| trial.state == TrialState::Finished;
                let complete: Vec<&[Evaluation]> =
                    trials.iter().filter(is_complete).map(|trial| &trial.evaluations[..]).collect();
                let judge = |own: &[Evaluation]| {
                    let median = behind(own, &complete)?;
                    Some(format!("worse than the median of the other trials, {median:.4} at step {}", own.last()?.step))
                };
                let Some(outcome) = train.train(id, &settings, &judge)? else { return Ok((trials, End::Interrupted)) };
                outcome
            }
        };
        let trial = SweepTrial::new(id, settings, outcome);
        if is_new {
            train.ended(&trial)?;
        }
        let counts = matches!(trial.state, TrialState::Finished | TrialState::Stopped);
        history.push((point, trial.best().filter(|_| counts).map(|of| f64::from(of.loss))));
        trials.push(trial);
    }
    Ok((trials, End::Done))
}

#[cfg(test)]
mod tests {
    use super::*;
    use zero_config::{Dimension, Interval, SweepMethod};

    /// Trains on a planted loss: the distance of the setting from 1e-3, in decades, plus a term that shrinks with each
    /// evaluation.
    #[derive(Default)]
    struct Planted {
        trained: Vec<String>,
        lines: Vec<Value>,
        /// Number of trained trials after which the user interrupts the sweep.
        end_after: Option<usize>,
    }

    impl Train for Planted {
        fn train(&mut self, _: usize, settings: &[Setting], judge: &Judge<'_>) -> Result<Option<TrialOutcome>, Error> {
            if self.end_after == Some(self.trained.len()) {
                return Ok(None);
            }
            let rate: f64 = settings[0].1.parse().unwrap();
            self.trained.push(settings[0].1.clone());
            let mut evaluations = vec![];
            for step in 1..=5 {
                let loss = ((rate / 1e-3).log10().abs() + 1.0 / step as f64) as f32;
                if rate > 0.1 {
                    let (state, reason) = (TrialState::Diverged, Some("planted".into()));
                    return Ok(Some(TrialOutcome { state, reason, evaluations }));
                }
                evaluations.push(Evaluation { step, loss });
                if let Some(reason) = judge(&evaluations) {
                    return Ok(Some(TrialOutcome { state: TrialState::Stopped, reason: Some(reason), evaluations }));
                }
            }
            Ok(Some(TrialOutcome { state: TrialState::Finished, reason: None, evaluations }))
        }

        fn ended(&mut self, trial: &SweepTrial) -> Result<(), Error> {
            self.lines.push(serde_json::from_str(&trial.value().to_string()).unwrap());
            Ok(())
        }
    }

    fn sweep(method: SweepMethod, values: &[&str]) -> Sweep {
        let real = Interval { low: 1e-6, high: 1.0, log: true, is_integer: false };
        let range = values.is_empty().then_some(real);
        let values = values.iter().map(ToString::to_string).collect();
        let space = vec![Dimension { path: "optimizer.params.lr".into(), values, range }];
        Sweep { space, method, trials: 20, max_steps: None, seed: 5 }
    }

    #[test]
    fn trials_behind_the_median_are_stopped_and_the_rest_finish() {
        let grid = sweep(SweepMethod::Grid, &["1e-4", "1e-3", "0.5", "1e-2", "1e-6", "3e-3"]);
        let (trials, end) = run(&grid, &[], None, &mut Planted::default()).unwrap();
        assert_eq!(end, End::Done);
        let states: Vec<TrialState> = trials.iter().map(|trial| trial.state).collect();
        use TrialState::{Diverged, Finished, Stopped};
        assert_eq!(states, [Finished, Finished, Diverged, Finished, Stopped, Finished]);
        assert_eq!(trials[4].evaluations.len(), 2, "it is stopped at its second evaluation");
        assert!(trials[4].reason.as_ref().unwrap().contains("at step 2"), "{:?}", trials[4].reason);
        let best = trials.iter().min_by(|a, b| a.compare(b)).unwrap();
        assert_eq!(best.words(), "optimizer.params.lr=1e-3");
        let mut sorted: Vec<&SweepTrial> = trials.iter().collect();
        sorted.sort_by(|a, b| a.compare(b));
        assert_eq!(sorted.iter().map(|trial| trial.id).collect::<Vec<_>>(), [1, 5, 0, 3, 4, 2]);
    }

    #[test]
    fn trials_of_an_earlier_sweep_are_not_trained_again() {
        for method in [SweepMethod::Tpe, SweepMethod::Random] {
            let sweep = sweep(method, &[]);
            let mut whole = Planted::default();
            let (trials, _) = run(&sweep, &[], None, &mut whole).unwrap();
            assert_eq!(trials.len(), 20);
            for first in [1, 9, 19] {
                let mut part = Planted { end_after: Some(first), ..Planted::default() };
                let (some, end) = run(&sweep, &[], None, &mut part).unwrap();
                assert_eq!((some.len(), end), (first, End::Interrupted));
                let mut rest = Planted::default();
                let (all, end) = run(&sweep, &part.lines, None, &mut rest).unwrap();
                assert_eq!((&all, end), (&trials, End::Done));
                assert_eq!([&part.trained[..], &rest.trained].concat(), whole.trained);
            }
        }
    }

    #[test]
    fn the_budget_ends_a_sweep_but_keeps_its_results() {
        let sweep = sweep(SweepMethod::Random, &[]);
        let mut part = Planted { end_after: Some(4), ..Planted::default() };
        run(&sweep, &[], None, &mut part).unwrap();
        let mut rest = Planted::default();
        let (trials, end) = run(&sweep, &part.lines, Some(Instant::now()), &mut rest).unwrap();
        assert_eq!((trials.len(), end, rest.trained.len()), (4, End::Budget, 0));
    }
}
