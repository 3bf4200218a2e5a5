//! Runs that survive lost ranks: restarts, fewer ranks, signals to a single rank, the token file.
//!
//! `a_killed_rank_…_whenever_it_is_killed` kills `ZERO_TRAIN_KILLS` ranks (20 by default). `scripts/kills.sh` runs only
//! this test.

use crate::case;
use crate::launch::ranks;
use crate::recovery::kills;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Stdio};

use serde_json::Value;

use case::{Case, rank_process, signal, text, wait_for};

/// Starts a run of `steps` steps.
fn start(case: &Case, out: &str, steps: u64, args: &[&str]) -> Child {
    let steps = steps.to_string();
    let usual = ["--config", "ds.yaml", "--plain", "--out", out, "--max-steps", &steps];
    let mut command = case.command(&[&usual, args].concat());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits for a run. Returns its exit status, standard output and standard error.
fn end(child: Child) -> (Option<i32>, String, String) {
    let output = child.wait_with_output().unwrap();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn a_killed_rank_is_restarted_and_the_run_is_bit_identical_to_an_undisturbed_one() {
    let case = Case::new();
    let steps_in_all = 400;
    let saves = ["-n", "2", "--set", "training.save_every=10"];
    let (status, _, errors) = end(start(&case, "whole", steps_in_all, &saves));
    assert_eq!(status, Some(0), "{errors}");
    // The run folder contains an older run. It is moved aside once, and none of its checkpoints is used.
    case.train(&["--quiet", "-n", "2", "--out", "run", "--max-steps", "40", "--set", "training.seed=7"]);
    let run = start(&case, "run", steps_in_all, &[&saves[..], &["--max-restarts", "3"]].concat());
    // Kills a rank twice: when there may be no checkpoint yet, and later.
    wait_for(|| case.path("run.1").exists() && case.steps("run") >= 1);
    signal(rank_process(run.id(), 1), "KILL");
    wait_for(|| case.steps("run") >= 60 && case.steps("run") < 400);
    signal(rank_process(run.id(), 0), "KILL");
    let (status, out, errors) = end(run);
    assert_eq!(status, Some(0), "{out}\n{errors}");
    assert_eq!((case.losses("run"), case.shards("run", 400)), (case.losses("whole"), case.shards("whole", 400)));
    let restarts: Vec<&str> = errors.lines().filter(|line| line.starts_with("restart ")).collect();
    assert_eq!(restarts.len(), 2, "{errors}");
    assert!(restarts[0].starts_with("restart 1 of 3: rank 1 was killed by signal 9; 2 ranks from "), "{errors}");
    assert!(restarts[1].starts_with("restart 2 of 3: rank 0 was killed by signal 9; 2 ranks from step "), "{errors}");
    let report = case.report("run");
    let told = report["restarts"].as_array().unwrap();
    assert_eq!((told.len(), &told[1]["reason"]), (2, &Value::from("rank 0 was killed by signal 9")));
    assert!(told[1]["step"].as_u64().unwrap() >= 50 && told[1]["ranks"] == 2, "{report}");
    assert!(
        case.path("run.1").exists() && !case.path("run.2").exists(),
        "the older run is not moved aside exactly once"
    );
    assert_eq!(case.metrics("run.1").len(), 40);
}

#[test]
fn a_resumed_run_restarts_from_the_same_checkpoint() {
    let case = Case::new();
    case.train(&["--quiet", "-n", "2", "--out", "whole", "--max-steps", "200"]);
    case.train(&["--quiet", "-n", "2", "--out", "first", "--max-steps", "20"]);
    // The run folder already contains a later step of another run.
    let other = ["--quiet", "-n", "2", "--out", "run", "--max-steps", "40", "--set", "training.seed=7"];
    case.train(&other);
    let from = ["-n", "2", "--max-restarts", "1", "--resume", "first/checkpoints/step-00000020"];
    let run = start(&case, "run", 200, &from);
    // Both ranks have started. Training may or may not have begun.
    wait_for(|| ranks::of(run.id()).len() == 2);
    signal(rank_process(run.id(), 1), "KILL");
    let (status, out, errors) = end(run);
    assert_eq!(status, Some(0), "{out}\n{errors}");
    assert!(errors.contains("restart 1 of 1: rank 1 was killed by signal 9"), "{errors}");
    assert!(out.contains("resumed from first/checkpoints/step-00000020 after step 20"), "{out}");
    assert_eq!(case.shards("run", 200), case.shards("whole", 200));
}

#[test]
fn restarts_are_limited_and_divergence_and_stops_are_not_restarted() {
    let case = Case::new();
    let run = start(&case, "run", 1_000_000, &["-n", "2", "--max-restarts", "1"]);
    for attempt in 0..2 {
        wait_for(|| ranks::of_attempt(run.id(), attempt).len() == 2 && case.steps("run") >= 3);
        signal(ranks::of_attempt(run.id(), attempt)[1], "KILL");
    }
    let (status, _, errors) = end(run);
    assert_eq!(status, Some(4), "{errors}");
    assert!(errors.contains("restart 1 of 1"), "{errors}");
    assert!(errors.contains("error: rank 1 was killed by signal 9; it failed first"), "{errors}");
    // Divergence and a request to stop cause no restart.
    let diverges = ["--set", "optimizer.params.lr=1e38", "--set", "gradient_clipping=0"];
    let run = start(&case, "diverges", 200, &[&diverges[..], &["-n", "2", "--max-restarts", "2"]].concat());
    let (status, _, errors) = end(run);
    assert_eq!((status, errors.contains("restart")), (Some(5), false), "{errors}");
    let run = start(&case, "stopped", 1_000_000, &["-n", "2", "--max-restarts", "2"]);
    case.wait_for_steps("stopped", 3);
    signal(run.id(), "TERM");
    let (status, _, errors) = end(run);
    assert_eq!((status, errors.contains("restart")), (Some(143), false), "{errors}");
}

#[test]
fn a_configuration_that_has_changed_prevents_a_restart() {
    let case = Case::new();
    let run = start(&case, "run", 1_000_000, &["-n", "2", "--max-restarts", "1"]);
    case.wait_for_steps("run", 3);
    fs::write(case.path("ds.yaml"), format!("{}\nsteps_per_print: 7\n", case::CONFIG)).unwrap();
    signal(rank_process(run.id(), 1), "KILL");
    let (status, _, errors) = end(run);
    assert_eq!(status, Some(4), "{errors}");
    assert!(errors.contains("error: cannot restart: ds.yaml has changed since the run began"), "{errors}");
}

/// Each step has the same samples on any number of ranks, and reduces them in the same order.
const REPRODUCIBLE: [&str; 4] = ["--set", "training.reproducible=true", "--set", "train_batch_size=8"];

/// The ranks that are left form one shard group, or two of half the size.
#[test]
fn fewer_ranks_continue_with_the_same_batches() {
    let case = Case::new();
    let args = [&REPRODUCIBLE[..], &["-n", "4", "--set", "training.save_every=10"]].concat();
    let (status, _, errors) = end(start(&case, "whole", 200, &args));
    assert_eq!(status, Some(0), "{errors}");
    let groups = &["--set", "mesh={data_parallel_replicate_degree: 2}"][..];
    for (name, mesh) in [("run", &[][..]), ("groups", groups)] {
        let more = ["--max-restarts", "2", "--min-ranks", "1"];
        let run = start(&case, name, 200, &[&args[..], &more, mesh].concat());
        case.wait_for_steps(name, 20);
        signal(rank_process(run.id(), 3), "KILL");
        let (status, out, errors) = end(run);
        assert_eq!(status, Some(0), "{out}\n{errors}");
        // Three ranks are left, but eight samples in micro-batches of two do not divide among them.
        assert!(errors.contains("restart 1 of 2: rank 3 was killed by signal 9; 2 ranks from step "), "{errors}");
        assert!(out.contains("batch: 8 samples = 2 per micro-batch × 2 micro-batches × 2 ranks"), "{out}");
        assert_eq!(out.contains(" in 2 shard groups of 1 rank"), name == "groups", "{out}");
        assert_eq!(case.losses(name), case.losses("whole"));
        let report = case.report(name);
        assert_eq!((&report["world_size"], &report["restarts"][0]["ranks"]), (&Value::from(2), &Value::from(2)));
    }
}

#[test]
fn fewer_ranks_than_min_ranks_are_an_error() {
    let case = Case::new();
    let args = ["-n", "2", "--max-restarts", "2", "--min-ranks", "2"];
    let run = start(&case, "run", 1_000_000, &args);
    case.wait_for_steps("run", 3);
    signal(rank_process(run.id(), 0), "KILL");
    let (status, _, errors) = end(run);
    assert_eq!(status, Some(4), "{errors}");
    assert!(
        errors.contains("error: cannot restart: 1 of 2 ranks remain, fewer than `launcher.min_ranks: 2`\n  help: lower `launcher.min_ranks`"),
        "{errors}"
    );
    assert!(errors.contains("rank 0 was killed by signal 9"), "{errors}");
}

#[test]
fn resuming_with_more_or_fewer_ranks_reads_the_same_data() {
    let case = Case::new();
    let train = |ranks: &str, out: &str, steps: &str, more: &[&str]| {
        let usual = ["--quiet", "-n", ranks, "--out", out, "--max-steps", steps];
        case.train(&[&REPRODUCIBLE[..], &usual, more].concat());
    };
    train("2", "whole", "30", &[]);
    train("2", "parts", "10", &[]);
    train("4", "parts", "20", &["--resume", "auto"]);
    train("1", "parts", "30", &["--resume", "auto"]);
    assert_eq!(case.losses("parts"), case.losses("whole"));
}

#[test]
fn usr1_saves_on_all_ranks_and_training_goes_on() {
    let case = Case::new();
    let run = start(&case, "run", 1_000_000, &["-n", "3", "--set", "training.keep_last=0"]);
    case.wait_for_steps("run", 3);
    for (asked, process) in [run.id(), rank_process(run.id(), 0), rank_process(run.id(), 2)].into_iter().enumerate() {
        signal(process, "USR1");
        wait_for(|| case.checkpoints("run").len() == asked + 1);
        let before = case.steps("run");
        wait_for(|| case.steps("run") > before + 2);
    }
    // Training continues until SIGINT.
    signal(run.id(), "INT");
    let (status, out, errors) = end(run);
    assert_eq!((status, case.checkpoints("run").len()), (Some(130), 4), "{errors}");
    assert_eq!(out.matches(": received SIGUSR1\n").count(), 3, "{out}");
    assert_eq!(out.matches("\nsaved run/checkpoints/step-").count(), 3, "{out}");
}

#[test]
fn usr1_before_training_does_not_kill_a_rank() {
    let case = Case::new();
    let run = start(&case, "run", 1_000_000, &["-n", "2", "--set", "training.keep_last=0"]);
    // The test sends the signal as soon as a rank exists. The launcher holds it back until the rank has a handler.
    wait_for(|| !ranks::of(run.id()).is_empty());
    signal(run.id(), "USR1");
    wait_for(|| case.checkpoints("run").len() == 1);
    signal(run.id(), "TERM");
    assert_eq!(end(run).0, Some(143));
}

/// A rank without a handler is killed by the signal. That is a stop, not a failure.
#[test]
fn a_stop_before_training_ends_with_the_status_of_the_signal() {
    let case = Case::new();
    for (name, status) in [("TERM", 143), ("INT", 130)] {
        let run = start(&case, name, 1_000_000, &["-n", "2", "--max-restarts", "1"]);
        wait_for(|| !ranks::of(run.id()).is_empty());
        signal(run.id(), name);
        assert_eq!(end(run).0, Some(status));
    }
}

#[test]
fn a_signal_to_one_rank_stops_all_ranks_with_a_checkpoint() {
    let case = Case::new();
    for (name, status) in [("TERM", 143), ("INT", 130)] {
        let run = start(&case, name, 1_000_000, &["-n", "3", "--max-restarts", "1"]);
        case.wait_for_steps(name, 3);
        signal(rank_process(run.id(), 1), name);
        let (ended, out, errors) = end(run);
        assert_eq!((ended, errors.as_str()), (Some(status), ""), "{out}");
        let last = case.steps(name);
        assert_eq!(case.checkpoints(name), [format!("step-{last:08}")]);
    }
}

#[test]
fn the_token_is_in_a_private_file_that_is_deleted_with_the_run() {
    let case = Case::new();
    for (name, folder) in [("TERM", "runtime"), ("KILL", "")] {
        let runtime = case.path(if folder.is_empty() { "temporary" } else { folder });
        fs::create_dir(&runtime).unwrap();
        let mut command = case.command(&["--config", "ds.yaml", "--quiet", "-n", "2", "--max-steps", "1000000"]);
        command.args(["--out", name]).stderr(Stdio::null());
        // If `XDG_RUNTIME_DIR` does not exist, the launcher uses the folder for temporary files.
        let elsewhere = if folder.is_empty() { case.path("nowhere") } else { runtime.clone() };
        command.env("XDG_RUNTIME_DIR", elsewhere).env("TMPDIR", &runtime).env("ZERO_TRAIN_TOKEN", "not for ranks");
        let mut run = command.spawn().unwrap();
        case.wait_for_steps(name, 3);
        let rank = rank_process(run.id(), 1);
        let environment = text(&fs::read(format!("/proc/{rank}/environ")).unwrap());
        let path = environment.split('\0').find_map(|entry| entry.strip_prefix("ZERO_TRAIN_TOKEN_FILE=")).unwrap();
        assert!(path.starts_with(runtime.to_str().unwrap()), "{path}");
        assert!(!environment.contains("ZERO_TRAIN_TOKEN=") && !environment.contains("not for ranks"));
        let file = fs::metadata(path).unwrap();
        let parent = fs::metadata(std::path::Path::new(path).parent().unwrap()).unwrap();
        assert_eq!((file.mode() & 0o777, parent.mode() & 0o777), (0o600, 0o700));
        // After a regular stop and after a lost rank, the file and its folder are deleted.
        signal(if name == "TERM" { run.id() } else { rank }, name);
        run.wait().unwrap();
        assert_eq!(fs::read_dir(&runtime).unwrap().count(), 0);
    }
}

#[test]
fn a_run_recovers_from_a_rank_killed_at_any_time() {
    let kills = std::env::var("ZERO_TRAIN_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(20);
    kills::sweep(kills);
}

/// Kills the run `ZERO_TRAIN_KILLS` times (6 by default).
#[test]
fn a_killed_run_continues_on_another_number_of_ranks_with_the_same_bits() {
    let kills = std::env::var("ZERO_TRAIN_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(6);
    kills::sweep_over_ranks(kills);
}
