//! `autotuning`: defaults, sweeps, contradictions, and round trips through YAML.

mod spaces;

use std::path::PathBuf;

use zero_config::{Autotuning, Config, Dimension, ErrorKind, Errors, Interval, Metric, Sweep, SweepMethod, TunerType};

use crate::errors;
use crate::texts::round_trip;

const HEAD: &str = "train_micro_batch_size_per_gpu: 1\noptimizer: {type: AdamW}\n";

fn parse(text: &str) -> Config {
    round_trip(&format!("{HEAD}{text}"))
}

fn errors(text: &str) -> Errors {
    Config::parse("ds.yaml", format!("{HEAD}{text}")).expect_err("the text must be rejected")
}

/// Returns the only error: kind, path, line after the head, column, message, help.
fn only(text: &str) -> (ErrorKind, String, usize, usize, String, String) {
    let (kind, path, line, column, message, help) = errors::only(&format!("{HEAD}{text}"));
    (kind, path, line - 2, column, message, help)
}

#[test]
fn without_the_section_every_key_has_its_default() {
    let expected = Autotuning {
        enabled: false,
        fast: false,
        results_dir: PathBuf::from("autotuning_results"),
        overwrite: true,
        metric: Metric::Throughput,
        metric_path: None,
        start_profile_step: 3,
        end_profile_step: 5,
        tuner_type: TunerType::ModelBased,
        tuner_early_stopping: 5,
        tuner_num_trials: 50,
        max_train_batch_size: None,
        min_train_batch_size: 1,
        max_train_micro_batch_size_per_gpu: 1024,
        min_train_micro_batch_size_per_gpu: 1,
        num_tuning_micro_batch_sizes: None,
        space: vec![],
        trial_timeout_seconds: 300,
        budget_seconds: None,
        repeats: 5,
        sweep: None,
    };
    for text in ["", "autotuning: {}", "autotuning: null", "autotuning: {space: {}, metric: auto, fast: auto}"] {
        assert_eq!(parse(text).autotuning, expected, "{text}");
    }
}

#[test]
fn every_key_is_resolved_as_written() {
    let text = "\
autotuning:
  fast: true
  results_dir: here
  overwrite: false
  metric: latency
  metric_path: best.json
  start_profile_step: 2
  end_profile_step: 2
  tuner_type: gridsearch
  tuner_early_stopping: 0
  tuner_num_trials: 7
  max_train_batch_size: 64
  min_train_batch_size: 64
  max_train_micro_batch_size_per_gpu: 8
  min_train_micro_batch_size_per_gpu: 2
  num_tuning_micro_batch_sizes: 3
  mp_size: 1
  trial_timeout_seconds: 9
  budget_seconds: 60
  repeats: 2
  sweep: {space: {training.seed: [1, 2]}, method: random, trials: 3, max_steps: 10, seed: 0}
";
    let expected = Autotuning {
        enabled: false,
        fast: true,
        results_dir: PathBuf::from("here"),
        overwrite: false,
        metric: Metric::Latency,
        metric_path: Some(PathBuf::from("best.json")),
        start_profile_step: 2,
        end_profile_step: 2,
        tuner_type: TunerType::GridSearch,
        tuner_early_stopping: 0,
        tuner_num_trials: 7,
        max_train_batch_size: Some(64),
        min_train_batch_size: 64,
        max_train_micro_batch_size_per_gpu: 8,
        min_train_micro_batch_size_per_gpu: 2,
        num_tuning_micro_batch_sizes: Some(3),
        space: vec![],
        trial_timeout_seconds: 9,
        budget_seconds: Some(60),
        repeats: 2,
        sweep: Some(Sweep {
            space: vec![Dimension {
                path: "training.seed".to_string(),
                values: vec!["1".to_string(), "2".to_string()],
                range: None,
            }],
            method: SweepMethod::Random,
            trials: 3,
            max_steps: Some(10),
            seed: 0,
        }),
    };
    assert_eq!(parse(text).autotuning, expected);
}

#[test]
fn a_training_run_warns_that_it_does_not_tune() {
    let config = parse("autotuning: {enabled: true}");
    let paths: Vec<_> = config.warnings.iter().map(|warning| warning.place.path.as_str()).collect();
    assert_eq!(paths, ["autotuning.enabled"]);
    assert_eq!(parse("autotuning: {enabled: false}").warnings, []);
}

#[test]
fn a_sweep_takes_continuous_ranges() {
    let sweep = |text: &str| parse(&format!("autotuning: {{sweep: {{{text}}}}}")).autotuning.sweep.expect("a sweep");
    let found = sweep(
        "method: tpe, space: {optimizer.params.lr: {low: 1e-5, high: 1e-2, log: true}, training.seed: {low: 1, high: 9}}",
    );
    let ranges: Vec<_> = found.space.iter().map(|dimension| dimension.range.expect("a range")).collect();
    assert!(found.space.iter().all(|dimension| dimension.values.is_empty()));
    let expected = [
        Interval { low: 1e-5, high: 1e-2, log: true, is_integer: false },
        Interval { low: 1.0, high: 9.0, log: false, is_integer: true },
    ];
    assert_eq!(ranges, expected);
    assert_eq!((found.method, found.trials, found.max_steps, found.seed), (SweepMethod::Tpe, 16, None, 42));
    let refused = [
        ("method: tpe, space: {optimizer.params.lr: {low: 1, high: 1}}", "`low` is not less than `high`"),
        ("method: tpe, space: {optimizer.params.lr: {low: 0, high: 1, log: true}}", "`low` must be more than 0"),
        ("method: tpe, space: {optimizer.params.lr: {low: -1, high: 1}}", "found `-1`"),
        ("method: tpe, space: {optimizer.params.lr: {low: 0, high: 1, log: yes}}", "`log`"),
        ("method: tpe, space: {optimizer.params.lr: {low: 0}}", "a continuous range is"),
        ("method: tpe, space: {optimizer.params.lr: {low: 0, hihg: 1}}", "found `hihg`"),
        ("method: tpe, space: {training.seed: {low: 0.5, high: 1}}", "found `0.5`"),
        ("method: tpe, space: {model.tiled_mlp_rows: {low: 64, high: 128}}", "needs `model.type`"),
        ("method: tpe, space: {training.save_last: {low: 0, high: 1}}", "expected a list of values"),
        ("space: {}", "the space has no values to try"),
        ("method: tpe", "`autotuning.sweep.space` is missing"),
    ];
    for (text, message) in refused {
        let found = only(&format!("autotuning: {{sweep: {{{text}}}}}"));
        assert!(found.4.contains(message), "{text}: {}", found.4);
    }
}

#[test]
fn contradictions_are_one_error_that_names_both_keys() {
    let cases = [
        ("autotuning: {start_profile_step: 6}", ["start_profile_step", "end_profile_step"]),
        (
            "autotuning: {min_train_batch_size: 9, max_train_batch_size: 8}",
            ["min_train_batch_size", "max_train_batch_size"],
        ),
        (
            "autotuning: {min_train_micro_batch_size_per_gpu: 2000}",
            ["min_train_micro_batch_size_per_gpu", "max_train_micro_batch_size_per_gpu"],
        ),
        (
            "autotuning: {sweep: {space: {optimizer.params.lr: {low: 0, high: 1}}}}",
            ["sweep.space.optimizer.params.lr", "sweep.method"],
        ),
    ];
    for (text, paths) in cases {
        let errors = errors(text);
        assert_eq!(errors.count(), 1, "{errors}");
        let error = errors.iter().next().expect("at least one error");
        let found: Vec<_> = error.places.iter().map(|place| place.path.clone()).collect();
        assert_eq!((error.kind, found), (ErrorKind::Contradiction, paths.map(|p| format!("autotuning.{p}")).to_vec()));
    }
    let sweep = "data: {train: a}\nautotuning: {sweep: {space: {training.seed: [1]}}}";
    assert!(only(sweep).4.contains("there is no evaluation data"));
    assert!(parse(&sweep.replace("train: a", "train: a, eval: b")).autotuning.sweep.is_some());
}

#[test]
fn invalid_values_are_rejected() {
    for text in [
        "start_profile_step: 0",
        "tuner_num_trials: 0",
        "repeats: 0",
        "metric: loss",
        "tuner_type: bayes",
        "budget_seconds: 0",
        "trial_timeout_seconds: 0",
        "space: [training.seed]",
        "num_tuning_micro_batch_sizes: 0",
        "results_dir: ''",
        "sweep: {space: {training.seed: [1]}, method: bayes}",
        "sweep: {space: {training.seed: [1]}, trials: 0}",
    ] {
        assert_eq!(only(&format!("autotuning: {{{text}}}")).0, ErrorKind::Value, "{text}");
    }
}
