//! Runs with `training.local_steps`: replicates train independently between two outer steps.

use crate::case;

use case::{Case, sets};
use serde_json::Value;

const SETTINGS: [&str; 4] = [
    "mesh.data_parallel_replicate_degree=2",
    "training.local_steps={steps: 3}",
    "training.eval_every=6",
    "training.save_every=6",
];

/// Runs 18 steps at once, and again in two parts. The second part uses another ZeRO stage.
#[test]
fn a_resumed_run_continues() {
    let case = Case::new();
    let run = |more: &[&str]| case.train(&[&["-n", "4", "--plain"], &sets(&SETTINGS)[..], more].concat());
    let said = run(&["--out", "whole", "--max-steps", "18"]);
    assert!(
        said.contains("local steps: each replicate trains independently for 3 steps between outer steps; outer SGD with lr 0.7, momentum 0.9"),
        "{said}"
    );
    assert!(said.contains("the run saves a checkpoint after the next outer step"), "{said}");
    run(&["--out", "parts", "--max-steps", "12"]);
    run(&["--out", "parts", "--max-steps", "18", "--resume", "auto", "--set", "zero_optimization.stage=1"]);
    let (whole, parts) = (case.metrics("whole"), case.metrics("parts"));
    assert_eq!((whole.len(), parts.len()), (18, 18));
    for key in ["loss", "grad_norm", "eval_loss", "outer_step"] {
        let of = |lines: &[Value]| lines.iter().map(|line| line[key].clone()).collect::<Vec<_>>();
        assert_eq!(of(&whole), of(&parts), "{key}");
    }
    for line in &whole {
        let step = line["step"].as_u64().unwrap();
        assert_eq!(line["outer_step"], step % 3 == 0, "{line}");
        assert_eq!(line["eval_loss"].is_f64(), step % 6 == 0, "{line}");
    }
    let [report, of_part] = ["whole", "parts"].map(|out| case.report(out));
    assert_eq!((&report["outer_steps"], &of_part["outer_steps"]), (&6.into(), &2.into()));
    // The report counts the instruction `await_outer_step`, which waits for one flat parameter, like other
    // instructions.
    assert!(report["instructions"]["await_outer_step"].as_u64().unwrap() >= 6);
    case.succeed(&["checkpoint", "verify", "parts"]);
}

/// The last outer step may follow fewer local steps than the others.
#[test]
fn a_run_ends_with_an_outer_step() {
    let case = Case::new();
    case.train(&[&["-n", "2", "--plain", "--max-steps", "5"], &sets(&SETTINGS)[..]].concat());
    let averaged: Vec<bool> = case.metrics("run").iter().map(|line| line["outer_step"] == true).collect();
    assert_eq!(averaged, [false, false, true, false, true]);
    assert!(case.path("run/checkpoints/step-00000005/manifest.json").exists());
}

#[test]
fn plan_counts_traffic_and_state_of_outer_steps() {
    let case = Case::new();
    let base = [&["plan", "--config", "ds.yaml", "-n", "4"], &sets(&SETTINGS[..2])[..]].concat();
    for stage in 0..=3u64 {
        let zero = format!("zero_optimization={{stage: {stage}, stage3_param_persistence_threshold: 0}}");
        let of = |more: &[&str]| case.json(&[&base[..], &["--json", "--set", &zero], more].concat());
        let (local, plain) =
            (of(&[]), of(&["--set", "training.local_steps=null", "--set", "zero_optimization.stage=1"]));
        let (found, without) = (&local["stages"][0], &plain["stages"][0]);
        assert_eq!((&local["local_steps"], &plain["local_steps"]), (&3.into(), &Value::Null));
        let parameters = found["parameters"].as_u64().unwrap();
        // The outer state takes 8 bytes per element that a rank updates. Each of the two replicates holds half.
        let own = |of: &Value| of["state_bytes_per_rank"]["optimizer_state"].as_u64().unwrap();
        let inner = if stage == 0 { 8 * parameters } else { own(without) };
        let outer = own(found) - inner;
        assert!(outer.abs_diff(inner / 2) <= 8 * 20, "stage {stage}: {outer}, {inner}");
        // A rank sends half of its elements for the reduction and half for the gather. At stages 1 and 2, it then sends
        // the new values to its shard group.
        let sent = |key: &str| found[key].as_u64().unwrap();
        let (all, between) = (sent("sent_bytes_per_outer_step"), sent("sent_bytes_between_replicates_per_outer_step"));
        assert!(between.abs_diff(outer) <= 8 * 20, "stage {stage}: {between}, {outer}");
        assert_eq!(all - between, if [1, 2].contains(&stage) { inner / 2 } else { 0 }, "stage {stage}");
    }
    let said = case.succeed(&base);
    assert!(said.contains("4 ranks = 1 pipeline stage × 2 shard groups × 2 ranks"), "{said}");
    assert!(said.contains("each replicate trains independently for 3 steps; an outer step sends"), "{said}");
}
