//! Tests the search with a program that stands in for `zero-train`, whose trials have planted results.

use crate::planted;

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use planted::Planted;
use zero_config::Config;
use zero_planner::autotune::{Row, State, Tuned, Watch, tune};

/// Observes the search and may interrupt it.
struct Onlooker<'a> {
    stop: &'a AtomicBool,
    /// Number of runs after which the observer interrupts the search.
    stop_after: usize,
    runs: usize,
}

impl Watch for Onlooker<'_> {
    fn rows(&mut self, _: &[Row], changed: Option<usize>, _: &zero_config::Autotuning) {
        self.runs += usize::from(changed.is_some());
        if self.runs >= self.stop_after {
            self.stop.store(true, Ordering::Relaxed);
        }
    }

    fn say(&mut self, _: &str) {}
}

/// Plants a program that runs `script` with the variables `$ranks` and `$set` (all overrides in one line). The script
/// prints nothing itself; it calls `takes` with the milliseconds of a step.
fn plant(more: &str, script: &str) -> Planted {
    let before = "case \"$2\" in costs) echo 'error: nothing to profile' >&2; exit 3;; esac\n\
                  takes() { echo \"{\\\"step_ms\\\": [$1, $1, $1], \\\"peak_bytes\\\": 1000}\"; }";
    Planted::new("", more, before, script)
}

fn search(planted: &Planted, ranks: usize, resume: bool, stop_after: usize) -> Tuned {
    planted.stop.store(false, Ordering::Relaxed);
    tune(&planted.request(ranks, resume), &mut Onlooker { stop: &planted.stop, stop_after, runs: 0 }).unwrap()
}

fn best(tuned: &Tuned) -> &Row {
    &tuned.rows[tuned.best.expect("one that ran")]
}

fn setting<'a>(row: &'a Row, key: &str) -> Option<&'a str> {
    row.candidate.settings.iter().find(|(path, _)| path == key).map(|(_, value)| value.as_str())
}

/// One rank is the most efficient, two are faster, and a small batch has the lowest latency.
#[test]
fn each_metric_picks_its_own_best() {
    for (metric, ranks, batch) in [("throughput", 2, None), ("latency", 2, Some("2")), ("flops", 1, None)] {
        let more = format!(
            "train_batch_size: 16\ntrain_micro_batch_size_per_gpu: 1\nautotuning:\n  metric: {metric}\n  fast: true\n  repeats: 2\n  \
             space: {{launcher.num_processes: [1, 2], zero_optimization.stage: [0], train_batch_size: [2, 16], train_micro_batch_size_per_gpu: [1]}}\n"
        );
        let planted = plant(
            &more,
            "case \"$ranks$set\" in\n1*train_batch_size=2*) takes 400;;\n*train_batch_size=2*) takes 100;;\n1*) takes 1000;;\n*) takes 600;;\nesac",
        );
        let tuned = search(&planted, 2, false, usize::MAX);
        let best = best(&tuned);
        assert_eq!((best.candidate.ranks, setting(best, "train_batch_size")), (ranks, batch), "{metric}");
        if batch.is_some() {
            let rate: f64 = setting(best, "optimizer.params.lr").map_or(0.0, |rate| rate.parse().unwrap());
            assert_eq!(rate, 0.0, "a rate that the file does not set is not scaled");
        }
    }
}

#[test]
fn crashes_hangs_and_memory_bombs_do_not_end_the_search() {
    let more = "train_micro_batch_size_per_gpu: 1\ntrain_batch_size: 4\ntraining: {memory_limit: 64MB}\nautotuning:\n  trial_timeout_seconds: 3\n  \
                fast: true\n  repeats: 2\n  space: {train_micro_batch_size_per_gpu: [1, 2]}\n";
    let planted = plant(
        more,
        "case \"$set\" in\n\
         *stage=1*) echo 'step 1: loss error: 0.1' >&2; echo 'error: planted crash' >&2; exit 2;;\n\
         *stage=2*) sleep 600;;\n\
         *stage=3*) x=0123456789abcdef; while :; do x=$x$x; done;;\n\
         *size_per_gpu=2*) echo 'no error: only the word' >&2; takes 50;;\n\
         *) takes 100;;\nesac",
    );
    let tuned = search(&planted, 2, false, usize::MAX);
    assert_eq!(tuned.rows.len(), 8);
    for row in &tuned.rows {
        let state = match setting(row, "zero_optimization.stage") {
            None => State::Measured,
            Some("1") => State::Failed,
            Some("2") => State::TimedOut,
            _ => State::OutOfMemory,
        };
        assert_eq!(row.state, state, "{}: {:?}", row.words(), row.reason);
        let told = match state {
            State::Failed => "status 2: planted crash",
            State::TimedOut => "the trial took longer than 3 s",
            State::OutOfMemory => "the trial used ",
            _ => continue,
        };
        assert!(row.reason.as_deref().is_some_and(|reason| reason.contains(told)), "{:?}", row.reason);
    }
    assert_eq!(setting(best(&tuned), "train_micro_batch_size_per_gpu"), Some("2"));
    let gain = tuned.gain.unwrap();
    assert!((gain.mean - 2.0).abs() < 1e-9, "{gain:?}");
    // `best.yaml` is the user's file with only the necessary changes, and resolves to the configuration that ran.
    let text = fs::read_to_string(planted.results().join("best.yaml")).unwrap();
    assert!(text.contains("# a comment that stays") && text.contains("train_micro_batch_size_per_gpu: 2"), "{text}");
    let config = Config::with_world_size("best.yaml", &text, 2).unwrap();
    assert_eq!((config.train_micro_batch_size_per_gpu, config.train_batch_size), (2, 4));
    let page = fs::read_to_string(planted.results().join("report.html")).unwrap();
    assert!(page.contains("planted crash"));
}

#[test]
fn configurations_that_do_not_fit_are_never_started() {
    let more = "train_micro_batch_size_per_gpu: 1\ntraining: {memory_limit: 1MiB}\nautotuning: {fast: true}\n";
    let mut planted = plant(more, "takes 100");
    planted.text = planted.text.replace("n_embd: 16", "n_embd: 256");
    let tuned = search(&planted, 1, false, usize::MAX);
    assert_eq!((tuned.best, planted.runs()), (None, 0));
    let reason = tuned.rows[0].reason.as_deref().unwrap();
    assert!(tuned.rows[0].state == State::TooLarge && reason.contains("may use 1.0 MB"), "{reason}");
    assert!(!planted.results().join("best.yaml").exists());
}

#[test]
fn an_interrupted_search_continues_without_repeating_measurements() {
    let more = "train_micro_batch_size_per_gpu: 1\ntrain_batch_size: 8\nautotuning: {fast: true, repeats: 1, tuner_early_stopping: 0}\n";
    let script = "case \"$set\" in\n*stage=2*size_per_gpu=4*) takes 10;;\n*) takes 100;;\nesac";
    let planted = plant(more, script);
    let whole = search(&planted, 2, false, usize::MAX);
    let all = planted.runs();
    assert_eq!(setting(best(&whole), "zero_optimization.stage"), Some("2"));
    fs::remove_file(planted.path().join("runs")).unwrap();
    let part = search(&planted, 2, false, 3);
    assert!(part.interrupted && part.best.is_some(), "{:?} {:?}", part.interrupted, part.rows);
    let first = planted.runs();
    let rest = search(&planted, 2, true, usize::MAX);
    assert!(!rest.interrupted);
    assert_eq!(setting(best(&rest), "train_micro_batch_size_per_gpu"), Some("4"));
    assert_eq!(rest.rows.iter().filter(|row| row.runs.is_empty()).count(), 0);
    assert!(first >= 3 && planted.runs() <= all + 6, "{first}, {} of {all}", planted.runs());
    let journal = planted.results().join("results.jsonl");
    let is_json = |line: &str| serde_json::from_str::<serde_json::Value>(line).is_ok();
    assert!(fs::read_to_string(&journal).unwrap().lines().all(is_json));
    results_of_another_search_are_rejected(&journal);
}

fn results_of_another_search_are_rejected(journal: &Path) {
    let other = plant("train_micro_batch_size_per_gpu: 2\n", "takes 1");
    fs::create_dir_all(other.results()).unwrap();
    fs::copy(journal, other.results().join("results.jsonl")).unwrap();
    let stop = AtomicBool::new(false);
    let error = tune(&other.request(1, true), &mut Onlooker { stop: &stop, stop_after: 9, runs: 0 }).unwrap_err();
    assert!(error.to_string().contains("another configuration"), "{error}");
}
