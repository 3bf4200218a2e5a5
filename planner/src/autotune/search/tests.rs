//! Tests searches over planted step times, where the best configuration is known.

use std::time::Duration;

use super::*;
use crate::autotune::objective::StepWork;
use crate::autotune::row::Planned;
use crate::autotune::space::Candidate;

/// Generates normally distributed numbers.
struct Random(u64);

impl Random {
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.uniform()).sum::<f64>() - 6.0
    }
}

/// Configurations of three keys with four values each, with planted step times and failures.
struct Planted {
    seconds: Vec<f64>,
    falls: Vec<Option<State>>,
    noise: f64,
    /// Relative slowdown of the machine in each round.
    drift: f64,
    random: Random,
    /// Elapsed time of the simulated clock, and the time that each run takes.
    elapsed: Duration,
    each: Duration,
    runs: usize,
    stop_after: usize,
    words: Vec<String>,
}

impl Measure for Planted {
    fn run(&mut self, row: &Row, round: usize) -> Result<RunOutcome, Error> {
        if self.runs >= self.stop_after {
            return Ok(RunOutcome::Interrupted);
        }
        self.runs += 1;
        self.elapsed += self.each;
        if let Some(state) = self.falls[row.id] {
            return Ok(RunOutcome::Fell(state, "planted".into()));
        }
        let slower = (1.0 + self.drift).powi(round as i32) * (self.noise * self.random.normal()).exp();
        Ok(RunOutcome::Ran { step_seconds: vec![self.seconds[row.id] * slower; 3], peak_bytes: 1 })
    }

    fn elapsed(&self) -> Duration {
        self.elapsed
    }

    fn changed(&mut self, _: &[Row], _: usize) {}

    fn say(&mut self, word: &str) {
        self.words.push(word.into());
    }
}

fn tuning(text: &str) -> Autotuning {
    let text = format!("train_micro_batch_size_per_gpu: 1\nautotuning: {{{text}}}");
    zero_config::Config::with_world_size("ds.yaml", &text, 1).unwrap().autotuning
}

/// Creates 64 configurations. Predictions have two kinds of errors: a factor for each value of a key, and random noise.
fn planted(seed: u64) -> (Vec<Row>, Planted) {
    let mut random = Random(seed);
    let keys = ["zero_optimization.stage", "train_micro_batch_size_per_gpu", "pipeline.stages"];
    let effects: Vec<[(f64, f64); 4]> =
        keys.iter().map(|_| [0; 4].map(|_| ((0.2 * random.normal()).exp(), (0.06 * random.normal()).exp()))).collect();
    let (mut rows, mut seconds) = (vec![], vec![]);
    for id in 0..64 {
        let digits = [id % 4, id / 4 % 4, id / 16];
        let of = |which: fn(&(f64, f64)) -> f64| -> f64 {
            digits.iter().zip(&effects).map(|(&d, of)| which(&of[d])).product()
        };
        let real = of(|effect| effect.0) * (0.03 * random.normal()).exp();
        let predicted = real * of(|effect| effect.1) * (0.05 * random.normal()).exp();
        let settings = keys.iter().zip(digits).filter(|(_, digit)| *digit > 0);
        let settings = settings.map(|(key, digit)| ((*key).to_string(), digit.to_string())).collect();
        seconds.push(real);
        rows.push(Row {
            id,
            candidate: Candidate { ranks: 1, settings },
            state: State::Predicted,
            reason: None,
            planned: Some(Planned {
                peak_bytes: 1,
                disk_bytes: 0,
                limit_bytes: None,
                work: StepWork { samples: 1, tokens: None, parameters: 1, ranks: 1 },
            }),
            predicted: Some(predicted),
            corrected: None,
            runs: vec![],
        });
    }
    let falls = vec![None; 64];
    let planted = Planted {
        seconds,
        falls,
        noise: 0.02,
        drift: 0.0,
        random,
        elapsed: Duration::ZERO,
        each: Duration::from_secs(10),
        runs: 0,
        stop_after: usize::MAX,
        words: vec![],
    };
    (rows, planted)
}

fn search(rows: &mut [Row], planted: &mut Planted, tuning: &Autotuning) -> End {
    Search::new(rows, tuning).run(planted).unwrap()
}

/// Returns how much slower the chosen configuration is than the best one.
fn regret(rows: &[Row], planted: &Planted, metric: Metric) -> f64 {
    let least = planted.seconds.iter().copied().fold(f64::INFINITY, f64::min);
    best(rows, metric).map_or(f64::INFINITY, |id| planted.seconds[id] / least - 1.0)
}

fn tried(rows: &[Row]) -> usize {
    rows.iter().filter(|row| !row.runs.is_empty() || row.state.has_fallen()).count()
}

#[test]
fn a_fifth_of_the_configurations_is_enough_to_be_near_the_best() {
    let tuning = tuning("");
    let mut regrets = vec![];
    for seed in 0..100 {
        let (mut rows, mut planted) = planted(seed);
        assert_eq!(search(&mut rows, &mut planted, &tuning), End::Done);
        assert!(tried(&rows) <= 64 / 5, "{} of 64 were tried: {:?}", tried(&rows), planted.words);
        regrets.push(regret(&rows, &planted, tuning.metric));
    }
    regrets.sort_by(f64::total_cmp);
    assert!(regrets[95] <= 0.05, "{:?}", &regrets[85..]);
}

/// The machine becomes slower and slower. If configurations did not take turns, the first one to run would win.
#[test]
fn a_machine_that_slows_down_does_not_change_the_result() {
    let tuning = tuning("");
    let mut regrets = vec![];
    for seed in 0..40 {
        let (mut rows, mut planted) = planted(seed);
        planted.drift = 0.05;
        search(&mut rows, &mut planted, &tuning);
        assert!(tried(&rows) <= 64 / 5, "{} of 64 were tried: {:?}", tried(&rows), planted.words);
        regrets.push(regret(&rows, &planted, tuning.metric));
    }
    regrets.sort_by(f64::total_cmp);
    assert!(regrets[38] <= 0.05, "{:?}", &regrets[30..]);
}

#[test]
fn grid_and_random_search_respect_their_limits() {
    for kind in ["gridsearch", "random"] {
        let text = format!("tuner_type: {kind}, tuner_num_trials: 10, tuner_early_stopping: 0, repeats: 2");
        let (mut rows, mut planted) = planted(1);
        search(&mut rows, &mut planted, &tuning(&text));
        assert_eq!(tried(&rows), 10, "{kind}");
        let first_ten = rows.iter().take(10).all(|row| !row.runs.is_empty());
        assert_eq!(first_ten, kind == "gridsearch");
        assert!(!rows[0].runs.is_empty(), "the user's own configuration always runs");
    }
    let (mut rows, mut planted) = planted(1);
    // The first configuration is the best, so none after it is better.
    planted.seconds[0] = 0.01;
    search(&mut rows, &mut planted, &tuning("tuner_type: gridsearch, tuner_early_stopping: 4, repeats: 1"));
    assert_eq!(tried(&rows), 5);
    let all = tuning("tuner_type: gridsearch, tuner_early_stopping: 0, tuner_num_trials: 100, repeats: 1");
    let (mut rows, mut planted) = planted_one();
    search(&mut rows, &mut planted, &all);
    assert_eq!((tried(&rows), best(&rows, all.metric)), (1, Some(0)));
}

/// Returns only the user's configuration.
fn planted_one() -> (Vec<Row>, Planted) {
    let (mut rows, planted) = planted(1);
    rows.truncate(1);
    (rows, planted)
}

#[test]
fn a_failed_run_does_not_end_the_search() {
    let tuning = tuning("");
    let (mut rows, mut planted) = planted(3);
    // The user's own configuration fails, as do the configurations with the best predictions.
    let mut order: Vec<usize> = (1..64).collect();
    order.sort_by(|&a, &b| rows[a].predicted.unwrap().total_cmp(&rows[b].predicted.unwrap()));
    let states = [State::Failed, State::TimedOut, State::OutOfMemory];
    planted.falls[0] = Some(State::Failed);
    for (&id, state) in order.iter().zip(states) {
        planted.falls[id] = Some(state);
        planted.seconds[id] = f64::INFINITY;
    }
    planted.seconds[0] = f64::INFINITY;
    assert_eq!(search(&mut rows, &mut planted, &tuning), End::Done);
    for (&id, state) in order.iter().zip(states) {
        assert_eq!((rows[id].state, rows[id].reason.as_deref()), (state, Some("planted")));
    }
    assert!(regret(&rows, &planted, tuning.metric) < 0.1);
    let (mut rows, mut planted) = self::planted(3);
    planted.falls = vec![Some(State::Failed); 64];
    assert_eq!(search(&mut rows, &mut planted, &tuning), End::Done);
    assert_eq!(best(&rows, tuning.metric), None, "nothing ran");
    assert!(tried(&rows) <= tuning.tuner_num_trials);
}

#[test]
fn an_interrupted_search_keeps_its_measurements_and_continues() {
    let tuning = tuning("");
    let (mut rows, mut planted) = planted(5);
    planted.stop_after = 4;
    assert_eq!(search(&mut rows, &mut planted, &tuning), End::Interrupted);
    assert_eq!(tried(&rows), 4);
    assert!(best(&rows, tuning.metric).is_some());
    planted.stop_after = usize::MAX;
    assert_eq!(search(&mut rows, &mut planted, &tuning), End::Done);
    assert!(tried(&rows) > 4 && regret(&rows, &planted, tuning.metric) <= 0.05);
}

#[test]
fn a_budget_that_profiles_use_up_is_reported() {
    let tuning = tuning("budget_seconds: 5");
    let (mut rows, mut planted) = planted(1);
    planted.elapsed = Duration::from_secs(5);
    let end = Search::new(&mut rows, &tuning).run(&mut planted).unwrap();
    assert_eq!((end, planted.runs), (End::Budget, 0));
    assert_eq!(planted.words, ["no time is left for a run: raise autotuning.budget_seconds"]);
}

/// Each run takes ten seconds. The search must compare the best configuration with the user's own before the budget is
/// used up.
#[test]
fn a_search_that_runs_out_of_budget_has_a_known_gain() {
    for (budget, least) in [(120, 3), (300, 5)] {
        let tuning = tuning(&format!("budget_seconds: {budget}"));
        for seed in 0..20 {
            let (mut rows, mut planted) = planted(seed);
            search(&mut rows, &mut planted, &tuning);
            assert!(planted.elapsed.as_secs() <= budget, "{:?}: {:?}", planted.elapsed, planted.words);
            assert!(tried(&rows) >= least, "{}: {:?}", tried(&rows), planted.words);
            let found = best(&rows, tuning.metric).unwrap();
            let gain = gain(&rows, found, tuning.metric).unwrap();
            assert!(found == 0 || gain.high.is_finite(), "{gain:?}: {:?}", planted.words);
        }
    }
    let tuning = tuning("budget_seconds: 60");
    let (mut rows, mut planted) = planted(5);
    planted.elapsed = Duration::from_secs(61);
    assert_eq!((search(&mut rows, &mut planted, &tuning), tried(&rows)), (End::Budget, 0));
}

/// The gain between runs of different rounds is computed with the help of configurations that ran in both rounds.
#[test]
fn a_gain_is_computed_across_rounds() {
    let metric = Metric::Throughput;
    let (mut rows, _) = planted(5);
    let run = |round, seconds| Run { round, step_seconds: vec![seconds], peak_bytes: 1 };
    rows.iter_mut().take(3).for_each(|row| row.state = State::Measured);
    rows[0].runs = vec![run(0, 2.0)];
    // The machine was half as fast in the second round.
    (rows[1].runs, rows[2].runs) = (vec![run(0, 1.5), run(1, 3.0)], vec![run(1, 2.0)]);
    assert!(rows[0].over(&rows[2], metric).is_none());
    let gain = gain(&rows, 2, metric).unwrap();
    assert!((gain.mean - 2.0).abs() < 1e-6 && gain.high.is_infinite(), "{gain:?}");
}

/// Without cost tables there are no predictions; the search then goes through the list in order.
#[test]
fn without_predictions_the_search_stops_early() {
    let tuning = tuning("");
    let (mut rows, mut planted) = planted(2);
    rows.iter_mut().for_each(|row| row.predicted = None);
    assert_eq!(search(&mut rows, &mut planted, &tuning), End::Done);
    assert!(tried(&rows) > tuning.tuner_early_stopping, "{}", tried(&rows));
}

#[test]
fn the_gain_is_known_when_a_better_one_is_found() {
    let tuning = tuning("");
    let (mut rows, mut planted) = planted(4);
    planted.seconds[0] = 2.0 * planted.seconds.iter().copied().fold(0.0, f64::max);
    search(&mut rows, &mut planted, &tuning);
    let found = best(&rows, tuning.metric).unwrap();
    let gain = rows[0].over(&rows[found], tuning.metric).unwrap();
    let real = planted.seconds[0] / planted.seconds[found];
    assert!(gain.low <= real * 1.02 && real <= gain.high * 1.02 && gain.is_above(1.0), "{gain:?}, really {real}");
}
