//! The gradient noise scale, the z-loss and the average of the weights in a run's files.

use crate::case;

use case::{Case, text};

const SETTINGS: [&str; 8] = [
    "--set",
    "training.gradient_noise_scale={smoothing: 0.5}",
    "--set",
    "training.z_loss=0.001",
    "--set",
    "training.ema={decay: 0.9}",
    "--set",
    "training.eval_every=10",
];

/// A resumed run continues the averages of the noise scale and of the weights.
#[test]
fn averages_continue_in_a_resumed_run() {
    let case = Case::new();
    let run = |more: &[&str]| case.train(&[&["-n", "2", "--plain"], &SETTINGS[..], more].concat());
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
    let plain = case.train(&[
        "-n",
        "2",
        "--plain",
        "--out",
        "plain",
        "--set",
        "training.z_loss=0.001",
        "--set",
        "training.eval_every=10",
    ]);
    let plain_metrics = case.metrics("plain");
    assert!(plain_metrics.iter().zip(&whole).all(|(a, b)| a["loss"] == b["loss"]), "{plain}");
    assert_ne!(plain_metrics[19]["eval_loss"], whole[19]["eval_loss"]);
    assert!(plain_metrics[0].get("gradient_noise_scale").is_none());

    let output = case.command(&["checkpoint", "export", "parts", "--ema", "--out", "exported"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let output = case.command(&["checkpoint", "export", "plain", "--ema", "--out", "other"]).output().unwrap();
    let error = text(&output.stderr);
    assert!(error.contains("no averages of the weights") && error.contains("training.ema"), "{error}");
}

/// A schedule-free run evaluates and exports the averages of its weights. A run that starts from the export with a
/// learning rate of 0 therefore has the same evaluation loss.
#[test]
fn averages_of_a_schedule_free_run_are_evaluated_and_exported() {
    let case = Case::new();
    let free = "optimizer={type: AdamWScheduleFree, params: {lr: 0.01}}";
    case.train(&["--plain", "--out", "run", "--set", free, "--set", "training.eval_every=10"]);
    let output = case.command(&["checkpoint", "export", "run", "--out", "exported"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    case.train(&[
        "--plain",
        "--out",
        "rest",
        "--max-steps",
        "1",
        "--set",
        "optimizer={type: SGD, params: {lr: 0}}",
        "--set",
        "training.eval_every=1",
        "--set",
        "training.initial_weights=[exported/model.safetensors]",
    ]);
    let last = |run: &str| case.metrics(run).last().unwrap()["eval_loss"].as_f64().unwrap();
    assert_eq!(last("run"), last("rest"));
}
