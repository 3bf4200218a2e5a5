//! Decides which configurations to measure, in which order, and when to stop.
//!
//! First, the search measures configurations once each, in the order of `autotuning.tuner_type`: a few per round,
//! together with the best configuration so far. `model_based` takes the best remaining predictions, corrects all
//! predictions by the measurements, and stops when no prediction is better than the best measurement. Then the
//! contenders run round after round. They take turns, so that a slowdown of the machine affects all of them. While
//! there are many contenders, half of them are dropped after each round. A contender is also dropped when it is
//! certainly slower than the leader: the 95 % confidence interval of the ratio of their times, paired by round, is
//! above 1.

use std::time::Duration;

use zero_config::{Autotuning, Metric, TunerType};

use super::correction::{Correction, Setting};
use super::interval::Interval;
use super::rounds::slowness;
use super::row::{Row, Run, State};
use zero_engine::Error;

/// The outcome of a run.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum RunOutcome {
    /// It ran.
    Ran { step_seconds: Vec<f64>, peak_bytes: u64 },
    /// It failed, with this state and for this reason.
    Fell(State, String),
    /// The user interrupted the search.
    Interrupted,
}

/// Runs configurations.
pub(super) trait Measure {
    /// Runs one configuration in a round.
    fn run(&mut self, row: &Row, round: usize) -> Result<RunOutcome, Error>;

    /// Returns the time since the search began, including the preparation before the first run.
    fn elapsed(&self) -> Duration;

    /// Called with all rows whenever a row has changed.
    fn changed(&mut self, rows: &[Row], changed: usize);

    /// Called with a progress message, for example when the exploration ends.
    fn say(&mut self, word: &str);
}

/// Why a search ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// Nothing is left to measure.
    Done,
    /// `autotuning.budget_seconds` have passed.
    Budget,
    /// The user interrupted the search.
    Interrupted,
}

/// Maximum number of contenders in the first round of the comparison.
const CONTENDERS: usize = 8;
/// The cost of a contender is at most this factor times the best cost.
const NEAR: f64 = 1.2;
/// Maximum number of configurations that are measured for the first time in one round.
const AT_A_TIME: usize = 3;
/// The exploration ends after this many measurements in a row without an improvement, if no other configuration is
/// predicted to be better.
const CONVINCED: usize = 3;
/// A configuration ties with the best one if its cost is at most this factor times the lowest cost.
const ALIKE: f64 = 1.01;
/// Number of rounds in which the user's own configuration runs even if it is slower, to determine the gain.
const OWN_ROUNDS: usize = 3;

/// A running search.
pub(super) struct Search<'a> {
    rows: &'a mut [Row],
    tuning: &'a Autotuning,
    /// Total time and number of this search's trials.
    spent: (Duration, u32),
}

impl<'a> Search<'a> {
    pub(super) fn new(rows: &'a mut [Row], tuning: &'a Autotuning) -> Self {
        Self { rows, tuning, spent: (Duration::ZERO, 0) }
    }

    /// Runs the search until nothing is left to measure.
    ///
    /// # Errors
    /// Returns errors of `measure` itself; a failed trial is not an error.
    pub(super) fn run(&mut self, measure: &mut impl Measure) -> Result<End, Error> {
        match self.explore(measure)? {
            Some(end) => Ok(end),
            None => self.compare(measure),
        }
    }

    fn metric(&self) -> Metric {
        self.tuning.metric
    }

    /// Measures configurations once each. Returns `None` if the comparison should follow.
    fn explore(&mut self, measure: &mut impl Measure) -> Result<Option<End>, Error> {
        loop {
            self.correct();
            let left = self.left(measure);
            if left == 0 {
                if self.rows.iter().all(|row| row.runs.is_empty()) {
                    measure.say("no time is left for a run: raise autotuning.budget_seconds");
                }
                return Ok(Some(End::Budget));
            }
            let mut next = self.next(measure);
            if next.is_empty() {
                return Ok(None);
            }
            // If little time is left, comparing two measured configurations is more useful than measuring a third.
            let measured = self.rows.iter().filter(|row| row.state == State::Measured).count();
            if measured > 1 && left <= 2 * OWN_ROUNDS + next.len() {
                measure.say("exploration ends: the rest of autotuning.budget_seconds is reserved for comparing the best configurations");
                return Ok(None);
            }
            // Run the best configuration so far again, because the machine may be slower now than in the round in which
            // that configuration ran.
            next.extend(self.best());
            let round = self.rounds();
            for id in next {
                if self.measure(id, round, measure)? {
                    return Ok(Some(End::Interrupted));
                }
            }
        }
    }

    /// Returns the next configurations to measure for the first time; empty if the exploration should end.
    fn next(&self, measure: &mut impl Measure) -> Vec<usize> {
        let mut open: Vec<&Row> = self.rows.iter().filter(|row| row.state == State::Predicted).collect();
        let tried = self.rows.iter().filter(|row| !row.runs.is_empty() || row.state.has_fallen()).count();
        let left = self.tuning.tuner_num_trials.saturating_sub(tried);
        if left == 0 && !open.is_empty() {
            measure.say(&format!(
                "exploration ends: {tried} configurations were measured, the limit of autotuning.tuner_num_trials"
            ));
        }
        let patience = self.tuning.tuner_early_stopping;
        if left == 0 || open.is_empty() {
            return vec![];
        }
        if patience > 0 && self.without_gain() >= patience {
            measure.say(&format!(
                "exploration ends: the last {patience} configurations were no better (autotuning.tuner_early_stopping)"
            ));
            return vec![];
        }
        let predicted = |row: &Row| row.predicted_cost(self.metric()).unwrap_or(f64::INFINITY);
        match self.tuning.tuner_type {
            TunerType::GridSearch => {}
            TunerType::Random => open.sort_by_key(|row| crc32c::crc32c(&(row.id as u64 ^ 0x5eed).to_le_bytes())),
            TunerType::ModelBased => open.sort_by(|a, b| {
                // Among predictions within 0.1 %, the configuration with the fewest changed settings comes first.
                let rounded = |row: &Row| (predicted(row).ln() * 1000.0).round();
                rounded(a).total_cmp(&rounded(b)).then_with(|| changes(a).cmp(&changes(b)))
            }),
        }
        if self.tuning.tuner_type == TunerType::ModelBased
            && let (Some(best), Some(found)) = (open.first(), self.best().and_then(|id| self.costs()[id]))
        {
            let spread = self.correction().spread;
            // A configuration without a prediction cannot be ruled out.
            let is_hopeless = predicted(best).is_finite() && predicted(best) * (-spread).exp() >= found;
            if is_hopeless && self.without_gain() >= CONVINCED {
                measure.say(&format!(
                    "exploration ends: no other configuration is predicted to be better, allowing for a prediction error of {:.0} %",
                    spread * 100.0
                ));
                return vec![];
            }
        }
        // The user's own configuration comes first, because all others are compared with it.
        open.sort_by_key(|row| row.id != 0);
        let few = if patience > 0 { patience - self.without_gain() } else { AT_A_TIME };
        open.iter().take(AT_A_TIME.min(left).min(few)).map(|row| row.id).collect()
    }

    /// Returns the number of configurations measured since the last improvement.
    fn without_gain(&self) -> usize {
        // A configuration counts as measured in the round of its first run.
        let mut measured: Vec<(usize, f64)> = self
            .rows
            .iter()
            .zip(self.costs())
            .filter_map(|(row, cost)| Some((row.runs.first()?.round, cost?)))
            .collect();
        measured.sort_by_key(|(round, _)| *round);
        let mut best = f64::INFINITY;
        let mut since = 0;
        for (_, cost) in measured {
            since = if cost < best { 0 } else { since + 1 };
            best = best.min(cost);
        }
        since
    }

    /// Runs the contenders in turn.
    fn compare(&mut self, measure: &mut impl Measure) -> Result<End, Error> {
        let Some(best) = self.best() else { return Ok(End::Done) };
        let costs: Vec<f64> = self.costs().into_iter().map(|cost| cost.unwrap_or(f64::INFINITY)).collect();
        let mut contenders: Vec<usize> = (0..costs.len()).filter(|&id| costs[id] <= costs[best] * NEAR).collect();
        contenders.sort_by(|&a, &b| costs[a].total_cmp(&costs[b]));
        let room = (self.left(measure) / OWN_ROUNDS).max(2);
        contenders.truncate(if room > CONTENDERS { CONTENDERS } else { room - 1 });
        if !contenders.contains(&0) && !self.rows[0].runs.is_empty() {
            contenders.push(0);
        }
        for round in 1..=self.tuning.repeats {
            if contenders.len() < 2 {
                break;
            }
            measure.say(&format!("round {round}: comparing {} configurations", contenders.len()));
            // Alternate the order: the first contender of a round is the last contender in the next round.
            contenders.reverse();
            let number = self.rounds();
            for &id in &contenders {
                let end = match self.left(measure) == 0 {
                    true => Some(End::Budget),
                    false => self.measure(id, number, measure)?.then_some(End::Interrupted),
                };
                if let Some(end) = end {
                    // Drop the runs of the incomplete round: not all contenders ran in it, so its runs cannot be
                    // compared.
                    self.rows.iter_mut().for_each(|row| row.runs.retain(|run| run.round != number));
                    return Ok(end);
                }
            }
            contenders.retain(|&id| self.rows[id].state == State::Measured);
            self.thin_out(&mut contenders, round);
        }
        self.correct();
        Ok(End::Done)
    }

    /// Drops contenders that are slower than the leader, or unlikely to be the best.
    fn thin_out(&self, contenders: &mut Vec<usize>, round: usize) {
        let metric = self.metric();
        let costs = self.costs();
        let cost = |id: usize| costs[id].unwrap_or(f64::INFINITY);
        let Some(leader) = contenders.iter().copied().min_by(|&a, &b| cost(a).total_cmp(&cost(b))) else { return };
        contenders.sort_by(|&a, &b| cost(a).total_cmp(&cost(b)));
        let half = contenders.len().div_ceil(2).max(3);
        let likely = contenders[..half.min(contenders.len())].to_vec();
        contenders.retain(|&id| {
            let slower = self.rows[id].over(&self.rows[leader], metric).is_some_and(|ratio| ratio.is_above(1.0));
            match id {
                _ if id == leader => true,
                // The user's own configuration stays a contender until the gain over it is known.
                0 => !slower || round < OWN_ROUNDS.min(self.tuning.repeats),
                _ => !slower && likely.contains(&id),
            }
        });
        // If only the leader is left, because all others are surely slower, no further rounds are needed.
        if contenders[..] == [leader] {
            contenders.clear();
        }
    }

    /// Measures a configuration; returns whether the user interrupted.
    fn measure(&mut self, id: usize, round: usize, measure: &mut impl Measure) -> Result<bool, Error> {
        let began = measure.elapsed();
        let outcome = measure.run(&self.rows[id], round)?;
        self.spent = (self.spent.0 + measure.elapsed().saturating_sub(began), self.spent.1 + 1);
        match outcome {
            RunOutcome::Interrupted => return Ok(true),
            RunOutcome::Ran { step_seconds, peak_bytes } => {
                let row = &mut self.rows[id];
                row.state = State::Measured;
                row.runs.push(Run { round, step_seconds, peak_bytes });
            }
            RunOutcome::Fell(state, reason) => {
                let row = &mut self.rows[id];
                // A configuration that fails now is unreliable, even if it ran before.
                (row.state, row.reason) = (state, Some(reason));
            }
        }
        measure.changed(self.rows, id);
        Ok(false)
    }

    /// Returns the number of the next round.
    fn rounds(&self) -> usize {
        self.rows.iter().flat_map(|row| &row.runs).map(|run| run.round + 1).max().unwrap_or(0)
    }

    /// Returns the number of further trials that the budget allows, if they take as long as the previous ones;
    /// `usize::MAX` without a budget.
    fn left(&self, measure: &impl Measure) -> usize {
        let Some(budget) = self.tuning.budget_seconds else { return usize::MAX };
        let left = Duration::from_secs(budget).saturating_sub(measure.elapsed());
        let each = self.spent.0.as_secs_f64() / f64::from(self.spent.1.max(1));
        match each > 0.0 {
            true => (left.as_secs_f64() / each).ceil() as usize,
            false if left.is_zero() => 0,
            false => usize::MAX,
        }
    }

    /// Returns the measured cost of each row; `None` for a row without a successful measurement.
    fn costs(&self) -> Vec<Option<f64>> {
        costs(self.rows, self.metric())
    }

    /// Returns the best measured configuration.
    fn best(&self) -> Option<usize> {
        best(self.rows, self.metric())
    }

    fn correction(&self) -> Correction {
        let measured = self.rows.iter().zip(self.costs()).filter_map(|(row, measured)| {
            let settings: &[Setting] = &row.candidate.settings;
            let planned = row.planned.as_ref()?;
            let predicted = super::objective::cost(self.metric(), &planned.work, row.predicted?);
            Some((settings, measured? / predicted))
        });
        Correction::fit(&measured.collect::<Vec<_>>())
    }

    fn correct(&mut self) {
        let correction = self.correction();
        for row in self.rows.iter_mut() {
            row.corrected = row.predicted.map(|seconds| seconds * correction.factor(&row.candidate.settings));
        }
    }
}

/// Returns the measured cost of each row; `None` for a row without a successful measurement.
fn costs(rows: &[Row], metric: Metric) -> Vec<Option<f64>> {
    let slowness = slowness(rows);
    let cost = |row: &Row| row.measured_cost(&slowness, metric).filter(|_| row.state == State::Measured);
    rows.iter().map(cost).collect()
}

/// Returns the best configuration. If several configurations have more than one run and took part in the last round,
/// only these compete, so that a single lucky run does not win.
pub(super) fn best(rows: &[Row], metric: Metric) -> Option<usize> {
    let costs = costs(rows, metric);
    let cost = |row: &&Row| costs[row.id].unwrap_or(f64::INFINITY);
    let run = || rows.iter().filter(|row| row.state == State::Measured);
    let last = run().flat_map(|row| &row.runs).map(|run| run.round).max()?;
    let in_turn = run().filter(|row| row.runs.len() > 1 && row.runs.iter().any(|run| run.round == last));
    let finalists: Vec<&Row> = if in_turn.clone().count() > 1 { in_turn.collect() } else { run().collect() };
    let least = finalists.iter().map(cost).fold(f64::INFINITY, f64::min);
    // Runs cannot resolve differences below 1 %. Among such ties, the configuration with the fewest changed settings
    // wins.
    let near = finalists.iter().filter(|row| cost(row) <= least * ALIKE);
    near.min_by(|a, b| changes(a).cmp(&changes(b)).then(cost(a).total_cmp(&cost(b)))).map(|row| row.id)
}

/// Returns how many times better a row is than the user's own configuration. Compares them round by round if both ran
/// in a common round. Otherwise compares their runs after adjusting for the speed of each round; the confidence is then
/// unknown.
pub(super) fn gain(rows: &[Row], of: usize, metric: Metric) -> Option<Interval> {
    let paired = rows[0].over(&rows[of], metric);
    paired.or_else(|| {
        let costs = costs(rows, metric);
        Interval::of(&[costs[0]? / costs[of]?])
    })
}

/// Returns the number of settings that differ from the user's file.
fn changes(row: &Row) -> usize {
    row.candidate.settings.len()
}

#[cfg(test)]
mod tests;
