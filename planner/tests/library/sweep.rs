//! Tests a sweep with a program that stands in for `zero-train`, whose trials have planted losses.

use crate::planted;

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};

use planted::Planted;
use zero_config::Config;
use zero_planner::autotune::{SweepTrial, SweepWatch, Swept, TrialState, sweep};

/// Observes the sweep and may interrupt it.
struct Onlooker<'a> {
    stop: &'a AtomicBool,
    /// Number of trials after which the observer interrupts the sweep.
    stop_after: usize,
    trials: usize,
    said: Vec<String>,
}

impl SweepWatch for Onlooker<'_> {
    fn trial(&mut self, _: &SweepTrial) {
        self.trials += 1;
        if self.trials >= self.stop_after {
            self.stop.store(true, Ordering::Relaxed);
        }
    }

    fn say(&mut self, word: &str) {
        self.said.push(word.to_string());
    }
}

/// Plants a program that runs `script`. The script calls `trains` with the losses of its evaluations, one for every ten
/// steps.
fn plant(more: &str, script: &str) -> Planted {
    let before = "trains() { mkdir -p \"$out\"; step=10; for loss in \"$@\"; do \
                  echo \"{\\\"step\\\": $step, \\\"eval_loss\\\": $loss}\" >> \"$out/metrics.jsonl\"; step=$((step + 10)); done; }";
    Planted::new(", eval_fraction: 0.1", &format!("train_micro_batch_size_per_gpu: 1\n{more}"), before, script)
}

fn search(planted: &Planted, resume: bool, stop_after: usize) -> (Swept, Vec<String>) {
    planted.stop.store(false, Ordering::Relaxed);
    let mut onlooker = Onlooker { stop: &planted.stop, stop_after, trials: 0, said: vec![] };
    let swept = sweep(&planted.request(2, resume), &mut onlooker).unwrap();
    (swept, onlooker.said)
}

fn states(swept: &Swept) -> Vec<TrialState> {
    swept.trials.iter().map(|trial| trial.state).collect()
}

#[test]
fn the_lowest_loss_wins_and_failed_trials_are_recorded() {
    let more = "optimizer: {type: AdamW, params: {lr: 0.5}} # mine\ntraining: {memory_limit: 64MB}\nautotuning:\n  trial_timeout_seconds: 5\n  sweep:\n    max_steps: 50\n    space:\n      \
                optimizer.params.lr: [0.001, 0.002, 0.003, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07]\n";
    let planted = plant(
        more,
        "case \"$set\" in *max_steps=50*eval_every=5*);; *) exit 9;; esac\ncase \"$set\" in *save_last=false*) ;; *) exit 8;; esac\n\
         case \"$set\" in\n\
         *lr=0.001\\ *) trains 3.0 2.5 2.0;;\n\
         *lr=0.002\\ *) trains 3.0 1.5 1.75;;\n\
         *lr=0.003\\ *) trains 3.5 2.5 2.25;;\n\
         *lr=0.01\\ *) trains 1.0; trains 0.5; echo 'error: planted crash' >&2; exit 2;;\n\
         *lr=0.02\\ *) trains 0.5; sleep 600;;\n\
         *lr=0.03\\ *) x=0123456789abcdef; while :; do x=$x$x; done;;\n\
         *lr=0.04\\ *) trains 9.0 8.0; sleep 600;;\n\
         *lr=0.05\\ *) trains 1.0 null; sleep 600;;\n\
         *lr=0.06\\ *) trains 1.0; echo 'error: training diverged: planted' >&2; exit 5;;\n\
         *) exit 0;;\nesac",
    );
    let (swept, said) = search(&planted, false, usize::MAX);
    assert!(said.iter().any(|word| word.contains("evaluated every 5 steps")), "{said:?}");
    use TrialState::{Diverged, Failed, Finished, OutOfMemory, Stopped, TimedOut};
    let expected = [Finished, Finished, Finished, Failed, TimedOut, OutOfMemory, Stopped, Diverged, Diverged, Failed];
    assert_eq!(states(&swept), expected, "{:?}", swept.trials);
    let reasons = [
        (3, "status 2: planted crash"),
        (4, "longer than 5 s"),
        (5, "the trial used "),
        (6, "at step 20"),
        (7, "after step 20 is not finite"),
        (8, "status 5: training diverged"),
        (9, "the trial was never evaluated"),
    ];
    for (id, told) in reasons {
        let reason = swept.trials[id].reason.as_deref();
        assert!(reason.is_some_and(|reason| reason.contains(told)), "{id}: {reason:?}");
    }
    // A finished trial is judged by its best evaluation, not by its last. A trial that did not finish cannot win,
    // however low its losses were.
    let best = &swept.trials[swept.best.unwrap()];
    assert_eq!((best.words().as_str(), best.best().unwrap().step), ("optimizer.params.lr=0.002", 20));
    let text = fs::read_to_string(planted.results().join("sweep-best.yaml")).unwrap();
    assert!(text.contains("# a comment that stays") && text.contains("{lr: 0.002}} # mine"), "{text}");
    Config::with_world_size("sweep-best.yaml", &text, 2).unwrap();
}

#[test]
fn an_interrupted_sweep_continues_with_the_same_points() {
    for method in ["tpe", "random"] {
        let more = format!(
            "optimizer: {{type: AdamW}}\ntraining: {{eval_every: 10}}\nautotuning:\n  sweep:\n    method: {method}\n    trials: 7\n    max_steps: 30\n    seed: 3\n    space:\n      \
             optimizer.params.lr: {{low: 1e-5, high: 1e-1, log: true}}\n      training.seed: {{low: 1, high: 5}}\n"
        );
        // The loss is the first nonzero digit of the learning rate, so it depends on the rate alone.
        let script =
            "rate=${set##*lr=}\nrate=${rate%% *}\ndigit=$(echo \"$rate\" | tr -dc 1-9 | cut -c1)\ntrains 10 9 $digit";
        let planted = plant(&more, script);
        let (whole, _) = search(&planted, false, usize::MAX);
        assert_eq!((whole.trials.len(), planted.runs()), (7, 7), "{whole:?}");
        assert!(whole.trials.iter().all(|trial| trial.best().is_some()), "{whole:?}");
        let (part, _) = search(&planted, false, 4);
        assert!(part.interrupted && part.trials.len() == 4 && part.best.is_some());
        let (rest, said) = search(&planted, true, usize::MAX);
        assert_eq!((&rest.trials, rest.best), (&whole.trials, whole.best));
        assert!(said.iter().any(|word| word == "resumed 4 trials from an earlier sweep"), "{said:?}");
        assert_eq!(planted.runs(), 14);
    }
}

#[test]
fn mistakes_are_reported_before_anything_runs() {
    let told = |more: &str| {
        let planted = plant(more, "exit 1");
        let mut onlooker = Onlooker { stop: &planted.stop, stop_after: 1, trials: 0, said: vec![] };
        let error = sweep(&planted.request(1, false), &mut onlooker).unwrap_err();
        assert!(planted.runs() == 0 && !planted.results().exists());
        error.to_string()
    };
    let error = told("");
    assert!(error.contains("--sweep needs this section") && error.contains("in: autotuning.sweep"), "{error}");
    let lr = "optimizer: {type: AdamW}\nautotuning: {sweep: {space: {optimizer.params.lr: [0.1]}}}\n";
    let error = told("autotuning: {sweep: {space: {launcher.num_processes: [1, 2]}}}\n");
    assert!(error.contains("a sweep cannot search `launcher.num_processes`"), "{error}");
    let error = told(&format!("{lr}training: {{epochs: 1}}\n"));
    assert!(error.contains("in: training.eval_every"), "{error}");
    let error = told(&format!("{lr}training: {{eval_every: 11, max_steps: 10}}\n"));
    assert!(error.contains("11 is more than the 10 steps of a trial"), "{error}");
}

#[test]
fn contradictory_settings_are_refused_and_the_sweep_continues() {
    let more = "gradient_accumulation_steps: 1\ntraining: {eval_every: 10}\nautotuning:\n  sweep:\n    max_steps: 30\n    space: {train_batch_size: [2, 3]}\n";
    let planted = plant(more, "trains 3 2 1");
    let (swept, _) = search(&planted, false, usize::MAX);
    assert_eq!((states(&swept), planted.runs()), (vec![TrialState::Finished, TrialState::Refused], 1));
    assert!(swept.trials[1].reason.as_ref().is_some_and(|reason| !reason.is_empty()), "{:?}", swept.trials[1]);
}
