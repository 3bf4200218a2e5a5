//! Training in f16: overflows, the loss scale in the metrics and the report, `--verify`.

use crate::case;

use std::fs;

use serde_json::Value;

use case::Case;

/// Each overflow prints a line. The metrics contain the scale. An overflow at the minimum scale ends the run.
#[test]
fn overflows_are_reported_and_an_overflow_at_the_minimum_scale_is_an_error() {
    let case = Case::new();
    let fp16 = |more: &str| format!("fp16={{enabled: true, initial_scale_power: 30, hysteresis: 1{more}}}");
    let output = case.train(&["-n", "2", "--plain", "--set", &fp16(""), "--set", "tensorboard.enabled=true"]);
    assert!(
        output.contains(
            "gradients overflowed at a loss scale of 1073741824, so the update was skipped; the scale is now 536870912"
        ),
        "{output}"
    );
    let metrics = case.metrics("run");
    assert_eq!((&metrics[0]["loss_scale"], &metrics[0]["skipped"]), (&Value::from(1073741824.0), &Value::from(true)));
    assert!(metrics[0]["grad_norm"].is_null() && metrics[19]["skipped"] == false);
    let skipped = metrics.iter().filter(|line| line["skipped"] == true).count();
    let report = case.report("run");
    assert_eq!(report["skipped_steps"], skipped);
    assert_eq!(report["loss_scale"], metrics[19]["loss_scale"]);
    assert_eq!(report["loss_scale"].as_f64().unwrap().log2(), 30.0 - skipped as f64);
    let manifest = fs::read_to_string(case.path("run/checkpoints/step-00000020/manifest.json")).unwrap();
    let manifest: Value = serde_json::from_str(&manifest).unwrap();
    assert_eq!(
        (&manifest["loss_scale"]["scale"], &manifest["loss_scale"]["steps"]),
        (&report["loss_scale"], &Value::from(20))
    );

    let floor = fp16(&format!(", min_loss_scale: {}", 1u32 << 29));
    let errors = case.train_fails(5, &["-n", "2", "--plain", "--set", &floor]);
    let told: Vec<&str> = errors.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(told.len(), 1, "{errors}");
    assert!(told[0].contains("step 2: gradients overflow although the loss scale is 536870912"), "{errors}");
}

#[test]
fn verify_passes_with_a_loss_scale() {
    let case = Case::new();
    let settings = ["-n", "2", "--verify", "6", "--plain", "--set", "fp16={enabled: true, initial_scale_power: 24}"];
    let output = case.train(&settings);
    assert!(output.contains("verified: largest relative difference"), "{output}");
}
