//! `--evaluate`: the loss of a checkpoint or of initial weights, without training.

use crate::case::Case;

#[test]
fn a_checkpoint_is_evaluated_on_all_samples() {
    let case = Case::new();
    // 102 micro-batches of one sample cover all evaluation samples.
    let settings = ["--set", "training.eval_every=4", "--set", "train_micro_batch_size_per_gpu=1"];
    case.train(&[&settings[..], &["-n", "1", "--max-steps", "4", "--set", "training.eval_batches=102"]].concat());
    let expected = case.metrics("run")[3]["eval_loss"].as_f64().unwrap();
    let evaluate = |args: &[&str]| case.train(&[&["--evaluate", "--resume", "run"], &settings[..], args].concat());
    for args in [&["-n", "1"][..], &["-n", "2"], &["-n", "2", "--set", "pipeline.stages=2"]] {
        let said = evaluate(&[args, &["--out", "other"]].concat());
        assert!(
            said.contains("data: 102 evaluation samples\nweights: run/checkpoints/step-00000004, step 4\n"),
            "{said}"
        );
        let value = |name: &str| -> f64 {
            let rest = said.split(name).nth(1).unwrap_or_else(|| panic!("{name}: {said}"));
            rest.split_whitespace().next().unwrap().parse().unwrap()
        };
        assert!((value("evaluation loss ") - expected).abs() < 1e-4, "{expected}: {said}");
        assert!((value("  perplexity ") / expected.exp() - 1.0).abs() < 1e-4, "{expected}: {said}");
        assert!(said.ends_with("  102 samples\n") && !said.contains("step      "), "{said}");
    }
    assert!(evaluate(&["-n", "1", "--set", "training.eval_batches=5"]).ends_with("  5 samples\n"));
    assert!(!case.path("other").exists() && case.metrics("run").len() == 4);
}

#[test]
fn pairs_are_evaluated_with_the_reference_of_their_run() {
    let case = Case::new();
    let data = case.pairs(40, "eval_fraction: 0.2");
    let model = "model={type: gpt2, vocab_size: 64, n_positions: 64, n_embd: 16, n_layer: 2, n_head: 2}";
    let set = ["-n", "2", "--set", &data, "--set", model, "--set", "preference={}", "--set", "training.eval_batches=2"];
    case.train(&[&set[..], &["--max-steps", "8", "--set", "training.eval_every=8"]].concat());
    let expected = case.metrics("run")[7]["eval_reward_margin"].as_f64().unwrap();
    let said = case.train(&[&set[..], &["--evaluate", "--resume", "run", "--out", "other"]].concat());
    assert!(
        said.contains(&format!("reward_margin {expected:.4}")) && !said.contains("perplexity"),
        "{expected} {said}"
    );
    // Initial weights are their own reference.
    let said = case.train(&[&set[..], &["--evaluate", "--out", "other"]].concat());
    assert!(said.contains("evaluation loss 0.6931") && said.contains("initial values of an untrained model"), "{said}");
    assert!(!case.path("other").exists());
}

#[test]
fn contradictions_are_errors() {
    let case = Case::new();
    for (args, expected) in [
        (&["--evaluate", "--max-steps", "2"][..], "cannot be used with '--max-steps"),
        (&["--evaluate", "--verify", "2"], "cannot be used with '--verify"),
        (&["--evaluate", "--resume", "auto"], "run has no checkpoint to evaluate"),
        (&["--evaluate", "--set", "data.eval_fraction=0"], "the run has no evaluation data"),
    ] {
        let told = case.train_fails(2, args);
        assert!(told.contains(expected), "{args:?}: {told}");
    }
}
