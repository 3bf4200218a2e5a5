//! The gradient noise scale, the z-loss and the average of the weights in a run's files.

use crate::case;

use case::{Case, sets};

const SETTINGS: [&str; 4] = [
    "training.gradient_noise_scale={smoothing: 0.5}",
    "training.z_loss=0.001",
    "training.ema={decay: 0.9}",
    "training.eval_every=10",
];

/// A resumed run continues the averages of the noise scale and of the weights.
#[test]
fn averages_continue_in_a_resumed_run() {
    let case = Case::new();
    let run = |more: &[&str]| case.train(&[&["-n", "2", "--plain"], &sets(&SETTINGS)[..], more].concat());
    run(&["--out", "whole"]);
    run(&["--out", "parts", "--max-steps", "10"]);
    run(&["--out", "parts", "--resume", "auto"]);
    let (whole, parts) = (case.metrics("whole"), case.metrics("parts"));
    assert_eq!((whole.len(), parts.len()), (20, 20));
    for key in ["loss", "z_loss", "gradient_noise_scale", "eval_loss"] {
        let of = |lines: &[serde_json::Value]| lines.iter().map(|line| line[key].clone()).collect::<Vec<_>>();
        assert_eq!(of(&whole), of(&parts), "{key}");
        assert!(of(&whole).iter().any(serde_json::Value::is_f64), "{key}");
    }
    assert!(whole.iter().all(|line| line["z_loss"].as_f64().unwrap() > 0.0));
    let set = sets(&["training.z_loss=0.001", "training.eval_every=10"]);
    let plain = case.train(&[&["-n", "2", "--plain", "--out", "plain"], &set[..]].concat());
    let plain_metrics = case.metrics("plain");
    assert!(plain_metrics.iter().zip(&whole).all(|(a, b)| a["loss"] == b["loss"]), "{plain}");
    assert_ne!(plain_metrics[19]["eval_loss"], whole[19]["eval_loss"]);
    assert!(plain_metrics[0].get("gradient_noise_scale").is_none());

    case.succeed(&["checkpoint", "export", "parts", "--ema", "--out", "exported"]);
    let error = case.fail(2, &["checkpoint", "export", "plain", "--ema", "--out", "other"]);
    assert!(error.contains("no averaged weights") && error.contains("training.ema"), "{error}");
}

/// A schedule-free run evaluates and exports the averages of its weights. A run that starts from the export with a
/// learning rate of 0 therefore has the same evaluation loss.
#[test]
fn averages_of_a_schedule_free_run_are_evaluated_and_exported() {
    let case = Case::new();
    let free = "optimizer={type: AdamWScheduleFree, params: {lr: 0.01}}";
    case.train(&["--plain", "--out", "run", "--set", free, "--set", "training.eval_every=10"]);
    case.export("run", "exported");
    let set = sets(&[
        "optimizer={type: SGD, params: {lr: 0}}",
        "training.eval_every=1",
        "training.initial_weights=[exported/model.safetensors]",
    ]);
    case.train(&[&["--plain", "--out", "rest", "--max-steps", "1"], &set[..]].concat());
    let last = |run: &str| case.metrics(run).last().unwrap()["eval_loss"].as_f64().unwrap();
    assert_eq!(last("run"), last("rest"));
}
