//! Runs that a signal, a lost rank, early stopping or divergence ends, and runs that are resumed.

use crate::case;

use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};

use case::{Alone, Case, rank_process, sets, signal, wait_for};

#[test]
fn a_stopped_run_resumes_bit_for_bit() {
    let case = Case::new();
    case.train(&["--quiet", "-n", "2", "--out", "whole"]);
    // Stops this run after its third step.
    let mut child = case
        .command(&["--config", "ds.yaml", "--plain", "-n", "2", "--out", "parts", "--set", "training.save_every=5"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    case.wait_for_steps("parts", 3);
    signal(child.id(), "TERM");
    let status = child.wait().unwrap();
    // On a very fast machine, training may end before the signal arrives. The exit status is then 0.
    assert!(matches!(status.code(), Some(143 | 0)), "{status:?}");
    case.train(&["--quiet", "-n", "2", "--out", "parts", "--resume", "auto"]);
    assert_eq!(case.losses("whole"), case.losses("parts"));
    assert_eq!(case.shards("whole", 20), case.shards("parts", 20));
    let report = fs::read(case.path("parts/report.json")).unwrap();
    let again = case.train(&["--plain", "-n", "2", "--out", "parts", "--resume", "auto"]);
    assert_eq!(fs::read(case.path("parts/report.json")).unwrap(), report, "the report of the training stays");
    assert!(again.contains("\ntrained no step: the run was already complete\n"), "{again}");
}

#[test]
fn save_last_off_skips_the_last_checkpoint_unless_a_signal_ends_the_run() {
    let case = Case::new();
    let args = ["--plain", "-n", "2", "--set", "training.save_last=false", "--out"];
    let out = case.train(&[&args[..], &["none"]].concat());
    assert!(case.checkpoints("none").is_empty() && !out.contains("checkpoint  "), "{out}");
    case.train(&[&args[..], &["some", "--max-steps", "6", "--set", "training.save_every=3"]].concat());
    assert_eq!(case.checkpoints("some"), ["step-00000003", "step-00000006"]);
    let mut child = case
        .command(&[&["--config", "ds.yaml", "--max-steps", "1000000"], &args[..], &["stopped"]].concat())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    case.wait_for_steps("stopped", 3);
    signal(child.id(), "TERM");
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert_eq!(case.checkpoints("stopped").len(), 1);
}

#[test]
fn resume_works_with_another_layout() {
    let case = Case::new();
    case.train(&["--quiet", "-n", "2", "--out", "a", "--max-steps", "10"]);
    let layout = sets(&["train_micro_batch_size_per_gpu=4", "zero_optimization.stage=1"]);
    let resume = ["--plain", "-n", "1", "--out", "b", "--resume", "a/checkpoints/step-00000010"];
    let out = case.train(&[&resume, &layout[..]].concat());
    assert!(out.contains("resumed from a/checkpoints/step-00000010 after step 10"), "{out}");
    assert_eq!(case.metrics("b").len(), 10);
    // `--resume` with a run folder uses the newest checkpoint in it.
    fs::create_dir(case.path("a/checkpoints/step-00000011")).unwrap();
    for (from, out) in [("a", "c"), ("a/checkpoints", "d")] {
        let out = case.train(&["--plain", "-n", "2", "--max-steps", "11", "--out", out, "--resume", from]);
        assert!(out.contains("resumed from a/checkpoints/step-00000010 after step 10"), "{out}");
    }
}

#[test]
fn a_killed_rank_ends_the_others_within_a_second_and_is_named() {
    let case = Case::new();
    for transport in ["shared_memory", "tcp"] {
        let out = format!("run-{transport}");
        let transport = format!("launcher.transport={transport}");
        let args = ["--config", "ds.yaml", "--plain", "-n", "3", "--max-steps", "1000000", "--out", &out];
        let mut run = Alone::start(case.command(&[&args, &sets(&[&transport])[..]].concat()));
        case.wait_for_steps(&out, 3);
        let victim = rank_process(run.id(), 2);
        signal(victim, "KILL");
        let killed = Instant::now();
        wait_for(|| run.has_ended());
        // The documented limit is one second. A loaded machine may schedule the test later, so this limit only
        // catches hangs.
        assert!(killed.elapsed() < Duration::from_secs(10));
        let (status, errors) = run.end();
        assert_eq!(status, Some(4), "{errors}");
        assert!(errors.contains("rank 2 was killed by signal 9; it failed first"), "{errors}");
        assert!(errors.contains("rank 0") && errors.contains('#'), "rank 0 names itself and the operation: {errors}");
    }
}

#[test]
fn early_stopping() {
    let case = Case::new();
    let settings = sets(&["training.eval_every=1", "training.early_stopping={patience: 2, min_delta: 100}"]);
    let out = case.train(&[&["--plain", "--max-steps", "500"], &settings[..]].concat());
    assert!(out.contains("stopping after step 3: no evaluation loss below"), "{out}");
    assert_eq!(case.metrics("run").len(), 3);
}

#[test]
fn diverging_ends_with_status_5() {
    let case = Case::new();
    let settings = sets(&["optimizer.params.lr=1e38", "gradient_clipping=0"]);
    let said = case.train_fails(5, &[&["--plain", "--max-steps", "200"], &settings[..]].concat());
    assert!(
        said.contains("error: training diverged: ") && said.contains("20 consecutive steps were skipped or not finite"),
        "{said}"
    );
    assert_eq!(said.lines().filter(|line| line.contains(", gradient norm NaN, so the update was skipped")).count(), 20);
}
