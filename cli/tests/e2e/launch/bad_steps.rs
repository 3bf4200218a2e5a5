//! Bad steps: gradients that are not finite, and spikes of the gradient norm.

use crate::case;

use std::fs;

use case::{Case, text};

/// Creates a case whose data contain one row in which every input is `value`. Also returns the arguments of its runs.
fn with_row(columns: usize, value: &str) -> (Case, Vec<String>) {
    let case = Case::new();
    let cell = |row: usize, column: usize| if row == 40 { value.to_string() } else { ((row * column) % 7).to_string() };
    let row =
        |row: usize| (1..=columns).map(|column| cell(row, column) + ",").collect::<String>() + &(row % 2).to_string();
    let rows: Vec<String> = (0..90).map(row).collect();
    fs::write(case.path("table.csv"), rows.join("\n")).unwrap();
    let model = format!("model={{type: mlp, input_size: {columns}, hidden_sizes: [64], output_size: 2}}");
    let args =
        ["--quiet", "-n", "2", "--set", "training.max_steps=22", "--set", "data={train: table.csv}", "--set", &model];
    (case, args.map(String::from).to_vec())
}

/// Trains, and returns the skipped steps, standard error and the exit status.
fn skipped(case: &Case, args: &[&str], more: &[&str], out: &str) -> (Vec<u64>, String, Option<i32>) {
    let run = case.run(&[args, more, &["--out", out]].concat());
    let steps = case.metrics(out);
    let skipped = steps.iter().filter(|line| line["skipped"] == true).map(|line| line["step"].as_u64().unwrap());
    (skipped.collect(), text(&run.stderr), run.status.code())
}

#[test]
fn a_gradient_that_is_not_finite_is_skipped_or_ends_the_run() {
    let (case, args) = with_row(16, "3e38");
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let (steps, said, status) = skipped(&case, &args, &[], "skips");
    let [step] = steps[..] else { panic!("{steps:?}: {said}") };
    assert_eq!(status, Some(0), "{said}");
    let expected = format!("warning: step {step}: loss ");
    assert!(said.starts_with(&expected) && said.contains(", so the update was skipped"), "{said}");
    assert_eq!(case.metrics("skips").len(), 22);
    let (steps, said, status) = skipped(&case, &args, &["--set", "training.nonfinite=stop"], "stops");
    assert_eq!((steps, status), (vec![step], Some(5)), "{said}");
    let last = said.lines().last().unwrap();
    assert!(last.starts_with(&format!("error: training diverged: step {step}: ")), "{said}");
    let most = ["--set", "training.max_skipped_steps=1"];
    let (_, said, status) = skipped(&case, &args, &most, "most");
    assert!(status == Some(5) && said.contains("1 consecutive steps were skipped or not finite"), "{said}");
}

#[test]
fn a_spike_is_reported_or_skipped_or_ends_the_run() {
    let (case, args) = with_row(2, "30000");
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let spikes = |action: &str| format!("training.spikes={{window: 4, factor: 20, action: {action}}}");
    let (steps, said, status) = skipped(&case, &args, &["--set", &spikes("skip")], "skips");
    let [step] = steps[..] else { panic!("{steps:?}: {said}") };
    assert!(status == Some(0) && said.contains(&format!("warning: step {step}: gradient norm ")), "{said}");
    assert!(said.contains("median of the previous steps") && said.contains(", so the update was skipped"), "{said}");
    let (steps, said, status) = skipped(&case, &args, &["--set", &spikes("warn")], "warns");
    assert_eq!((steps, status), (vec![], Some(0)), "{said}");
    assert!(said.contains(&format!("warning: step {step}: gradient norm ")), "{said}");
    assert!(!said.contains("the update was skipped"), "{said}");
    let (steps, said, status) = skipped(&case, &args, &["--set", &spikes("stop")], "stops");
    assert_eq!((steps, status), (vec![step], Some(5)), "{said}");
    // Without `training.spikes`, spikes have no effect.
    let (steps, said, _) = skipped(&case, &args, &[], "none");
    assert!(steps.is_empty() && said.is_empty(), "{said}");
    // A resumed run detects the same spike, because the checkpoint contains the previous norms.
    let before = (step - 1).to_string();
    let skip = spikes("skip");
    let part = [&args[..], &["--set", &skip, "--out", "parts"]].concat();
    case.train(&[&part[..], &["--max-steps", &before]].concat());
    case.train(&[&part[..], &["--resume", "auto"]].concat());
    assert_eq!(case.losses("parts"), case.losses("skips"));
    assert_eq!(case.shards("parts", 22), case.shards("skips", 22));
}
