//! Runs `zero-train autotune --sweep` on a tiny model.

use crate::case;

use std::fs;

use serde_json::Value;

use case::Case;

const SWEEP: &str = "autotuning={sweep: {max_steps: 40, space: {optimizer.params.lr: [1e-5, 1e-4, 3e-3, 1e-2, 3e3]}}}";

#[test]
fn a_good_learning_rate_wins_and_its_file_reproduces_the_trial() {
    let case = Case::new();
    let sweep = |more: &[&str]| {
        let arguments = ["autotune", "--sweep", "--config", "ds.yaml", "--out", "tuned", "--set", SWEEP];
        case.succeed(&[&arguments, more].concat())
    };
    let said = sweep(&[]);
    for word in [
        "5 trials of 1 hyperparameter, by grid",
        "evaluated every 4 steps",
        "rank        loss",
        "\nbest: ",
        "tuned/sweep-best.yaml",
    ] {
        assert!(said.contains(word), "{word}: {said}");
    }
    let journal = fs::read_to_string(case.path("tuned/sweep.jsonl")).unwrap();
    let lines: Vec<Value> = journal.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let trials: Vec<&Value> = lines.iter().filter(|line| line["event"] == "trial").collect();
    assert_eq!(trials.len(), 5, "{said}");
    let best = lines.last().unwrap()["best"].as_u64().unwrap();
    assert!([2, 3].contains(&best), "{said}");
    assert!(matches!(trials[4]["state"].as_str(), Some("stopped early" | "diverged")), "{said}");
    // Training with the best file gives losses that are bit-identical to those of the trial.
    let rate = trials[best as usize]["settings"]["optimizer.params.lr"].as_str().unwrap();
    let run = ["--quiet", "--max-steps", "40", "--set", "training.eval_every=4", "--out", "best"];
    case.succeed(&[&["--config", "tuned/sweep-best.yaml"], &run[..]].concat());
    let again = case.metrics("best");
    let losses: Vec<(u64, f32)> =
        again.iter().filter_map(|line| Some((line["step"].as_u64()?, line["eval_loss"].as_f64()? as f32))).collect();
    let evaluations = trials[best as usize]["evaluations"].as_array().unwrap();
    let of_trial: Vec<(u64, f32)> =
        evaluations.iter().map(|of| (of[0].as_u64().unwrap(), of[1].as_f64().unwrap() as f32)).collect();
    assert_eq!(of_trial, losses, "{rate}");
    // Trials leave no checkpoints, and `--resume` trains no trial twice.
    let folder = case.path("tuned/sweep/002");
    let is_saved = fs::read_dir(folder.join("checkpoints")).is_ok_and(|mut entries| {
        entries.any(|entry| entry.unwrap().file_name().to_string_lossy().starts_with("step-"))
    });
    assert!(folder.join("metrics.jsonl").exists() && !is_saved);
    let said = sweep(&["--resume"]);
    assert!(said.contains("resumed 5 trials from an earlier sweep") && !said.contains("  trial 1"), "{said}");
}

#[test]
fn a_missing_sweep_section_is_an_error_and_an_unused_one_is_reported() {
    let case = Case::new();
    let errors = case.fail(2, &["autotune", "--sweep", "--config", "ds.yaml"]);
    assert!(
        errors.starts_with("error: --sweep needs this section") && errors.contains("in: autotuning.sweep"),
        "{errors}"
    );
    let few = "autotuning={fast: true, repeats: 1, sweep: {space: {optimizer.params.lr: [0.1]}}, space: {train_micro_batch_size_per_gpu: [2]}}";
    let said = case.succeed(&["autotune", "--config", "ds.yaml", "--set", few]);
    assert!(said.contains("autotuning.sweep has no effect without --sweep"), "{said}");
}
