//! Runs every example with one rank and with two. The examples assert their own results.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::port::free_port;

/// Runs the program as `ranks` ranks in a folder, with the environment variables that torchrun sets. Returns the
/// standard output of rank 0.
fn run(program: &str, ranks: usize) -> String {
    run_in(tempfile::tempdir().expect("a temporary folder").path(), program, &[], ranks)
}

/// Runs the program with arguments as `ranks` ranks in `folder`. Returns the standard output of rank 0.
fn run_in(folder: &Path, program: &str, arguments: &[&str], ranks: usize) -> String {
    run_with(folder, program, arguments, ranks, &[])
}

/// Runs as [`run_in`] does, with additional environment variables.
fn run_with(folder: &Path, program: &str, arguments: &[&str], ranks: usize, more: &[(&str, &str)]) -> String {
    let port = free_port().to_string();
    let start = |rank: usize| {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(folder).stdout(Stdio::piped()).stderr(Stdio::piped());
        // candle's threads wait for each other in busy loops, which is slow with more threads than cores.
        command.env("CANDLE_NUM_THREADS", "1");
        for name in ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
            command.env_remove(name);
        }
        if ranks > 1 {
            let [rank, ranks] = [rank, ranks].map(|number| number.to_string());
            command.env("RANK", &rank).env("LOCAL_RANK", &rank).env("WORLD_SIZE", &ranks);
            command.env("LOCAL_WORLD_SIZE", &ranks).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        }
        command.envs(more.iter().copied()).spawn().expect("the example starts")
    };
    let started: Vec<_> = (0..ranks).map(start).collect();
    let ended = started.into_iter().map(|rank| rank.wait_with_output().expect("the example ends"));
    let outputs: Vec<_> = ended.collect();
    for (rank, output) in outputs.iter().enumerate() {
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "rank {rank} of {ranks}: {}\n{errors}", output.status);
        assert!(rank == 0 || output.stdout.is_empty(), "rank {rank} prints");
    }
    String::from_utf8_lossy(&outputs[0].stdout).into_owned()
}

/// Each example must fit on one screen. The examples' models and data are modules next to `bin/`.
#[test]
fn examples_are_shorter_than_60_lines() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/bin");
    let files = fs::read_dir(folder).expect("the examples").map(|entry| entry.expect("an example").path());
    let lines = files.map(|path| (fs::read_to_string(&path).expect("an example").lines().count(), path));
    let longest = lines.max().expect("examples");
    assert!(longest.0 < 60, "{} has {} lines", longest.1.display(), longest.0);
}

/// Checks that the program reports a folder without a model. `trainer/src/generate/tests.rs` checks generated texts.
#[test]
fn generate() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let arguments = [folder.path().as_os_str(), "Once".as_ref()];
    let output = Command::new(env!("CARGO_BIN_EXE_generate")).args(arguments).output().expect("the example starts");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && error.contains(&folder.path().display().to_string()), "{error}");
}

#[test]
fn gpt() {
    let alone = run(env!("CARGO_BIN_EXE_gpt"), 1);
    assert!(alone.contains("## "), "{alone}");
    run(env!("CARGO_BIN_EXE_gpt"), 2);
}

#[test]
fn lora() {
    let outputs = [1, 2].map(|ranks| run(env!("CARGO_BIN_EXE_lora"), ranks));
    assert!(outputs.iter().all(|output| output.contains("only adapters were trained")), "{outputs:?}");
}

#[test]
fn mlp() {
    let outputs = [1, 2].map(|ranks| run(env!("CARGO_BIN_EXE_mlp"), ranks));
    assert!(outputs.iter().all(|output| output.contains("classified right")), "{outputs:?}");
}

/// Checks that the losses of the optimizers that the program defines are the same on one rank and on two.
#[test]
fn optimizer() {
    for name in ["adamax", "shampoo"] {
        let runs = [1, 2].map(|ranks| {
            let folder = tempfile::tempdir().expect("a temporary folder");
            let same = [name, "--set", "train_micro_batch_size_per_gpu=4"];
            run_in(folder.path(), env!("CARGO_BIN_EXE_optimizer"), &same, ranks);
            values(&folder.path().join("runs/optimizer"), "loss")
        });
        assert_eq!(runs[0], runs[1]);
    }
}

/// Checks that the losses and the evaluations with running statistics are the same on one rank and on two if the
/// micro-batches are the same.
#[test]
fn resnet() {
    let same = ["--set", "train_micro_batch_size_per_gpu=8", "--set", "training.reproducible=true"];
    let runs = [1, 2].map(|ranks| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        run_in(folder.path(), env!("CARGO_BIN_EXE_resnet"), &same, ranks);
        ["loss", "eval_loss", "eval_accuracy"].map(|key| values(&folder.path().join("runs/resnet"), key))
    });
    assert_eq!(runs[0], runs[1]);
}

#[test]
fn resume() {
    let outputs = [1, 2].map(|ranks| run(env!("CARGO_BIN_EXE_resume"), ranks));
    assert!(outputs.iter().all(|output| output.contains("every bit the same")), "{outputs:?}");
}

/// Checks that the losses and the metric of two tasks are the same on one rank, on two ranks, and on two pipeline
/// stages.
#[test]
fn tasks() {
    let layouts = [(1, &[][..]), (2, &[]), (2, &["--set", "pipeline.stages=2"])];
    let runs = layouts.map(|(ranks, arguments)| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        run_in(folder.path(), env!("CARGO_BIN_EXE_tasks"), arguments, ranks);
        ["loss", "eval_loss", "eval_accuracy"].map(|key| values(&folder.path().join("runs/tasks"), key))
    });
    assert!(runs[0] == runs[1] && runs[0] == runs[2], "{runs:?}");
    let accuracy = runs[0][2].last().map(|value| value.parse::<f64>().expect("a number"));
    assert!(accuracy.is_some_and(|accuracy| accuracy > 0.9), "{runs:?}");
}

/// Returns the values of a key in the metrics of a run's folder.
fn values(run: &Path, key: &str) -> Vec<String> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).expect("the run's metrics");
    let value = |line: &str| {
        let (_, value) = line.split_once(&format!("\"{key}\":"))?;
        Some(value[..value.find([',', '}']).expect("its end")].to_string())
    };
    let values: Vec<String> = text.lines().filter_map(value).collect();
    assert!(!values.is_empty(), "no {key} in {text}");
    values
}

/// Checks that the losses and the metric are the same with and without a stop in between, on one rank and on two.
#[test]
fn trainer() {
    let program = env!("CARGO_BIN_EXE_trainer");
    let runs = [1, 2].map(|ranks| {
        let [whole, stopped] = [(); 2].map(|()| tempfile::tempdir().expect("a temporary folder"));
        let printed = run_in(whole.path(), program, &[], ranks);
        assert!(printed.contains("evaluation loss") && printed.contains("accuracy"), "{printed}");
        run_in(stopped.path(), program, &["--max-steps", "60", "--quiet"], ranks);
        let printed = run_in(stopped.path(), program, &["--resume", "auto"], ranks);
        assert!(printed.contains("resumed from runs/trainer/checkpoints/step-00000060"), "{printed}");
        let values = |folder: &Path, key: &str| values(&folder.join("runs/trainer"), key);
        for key in ["loss", "eval_loss", "eval_accuracy"] {
            // Step 60 was the last step of the stopped run. A run always evaluates after its last step, so both runs
            // evaluated after step 60.
            assert_eq!(values(whole.path(), key), values(stopped.path(), key), "{key} on {ranks} ranks");
        }
        let csv = "runs/trainer/csv_monitor/DeepSpeedJobName/Train_Samples_eval_accuracy.csv";
        let csv = fs::read_to_string(whole.path().join(csv)).expect("the monitor's file");
        assert_eq!(csv.lines().count(), 1 + 6, "{csv}");
        let accuracies = values(whole.path(), "eval_accuracy");
        assert!(accuracies[119].parse::<f64>().is_ok_and(|accuracy| accuracy > 0.9), "{accuracies:?}");
        (values(whole.path(), "loss"), accuracies)
    });
    assert_eq!(runs[0], runs[1]);
}

#[test]
fn vit() {
    let losses = [1, 2].map(|ranks| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let printed = run_in(folder.path(), env!("CARGO_BIN_EXE_vit"), &[], ranks);
        assert!(printed.contains("accuracy"), "{printed}");
        values(&folder.path().join("runs/vit"), "loss")
    });
    assert_eq!(losses[0].len(), losses[1].len());
}

#[test]
fn a_program_starts_its_ranks() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for arguments in [&["-n", "2"][..], &["--set", "launcher.num_processes=2"]] {
        let printed = run_in(folder.path(), env!("CARGO_BIN_EXE_trainer"), arguments, 1);
        assert!(printed.contains("2 ranks") && printed.contains("step    120  evaluation loss"), "{printed}");
    }
    let threads = ["-n", "2", "--set", "launcher.transport=threads"];
    let refused = Command::new(env!("CARGO_BIN_EXE_trainer")).args(threads).output().expect("the example starts");
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && error.contains("launcher.transport"), "{error}");
}

#[test]
fn a_program_restarts_its_ranks() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut command = Command::new(env!("CARGO_BIN_EXE_trainer"));
    command.args(["-n", "2", "--set", "launcher.max_restarts=1", "--max-steps", "4000", "--quiet"]);
    let launcher = command.current_dir(folder.path()).stderr(Stdio::piped()).spawn().expect("the example starts");
    while !folder.path().join("runs/trainer/checkpoints/step-00000060").is_dir() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", launcher.id())).expect("a process");
    let rank = children.split_whitespace().last().expect("a rank");
    assert!(Command::new("kill").args(["-9", rank]).status().is_ok_and(|status| status.success()));
    let output = launcher.wait_with_output().expect("the example ends");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && errors.contains("restart 1 of 1: rank 1 was killed by signal 9"), "{errors}");
    assert_eq!(values(&folder.path().join("runs/trainer"), "loss").len(), 4000);
}

/// A restarting launcher passes on only the fact that it restarts and the name of the job. The run must find its own
/// checkpoints.
#[test]
fn a_restarted_trainer_resumes_its_own_run() {
    let (program, folder) = (env!("CARGO_BIN_EXE_trainer"), tempfile::tempdir().expect("a temporary folder"));
    let restarted = "{\"restarts\":[{\"reason\":\"rank 1 was killed by signal 9\",\"ranks\":2,\"step\":0}],\"from\":[],\"keeps_folder\":false}";
    let attempt = |job: &str, steps: &str, restarted: &[(&str, &str)]| {
        let variables = [&[("ZERO_TRAIN_LAUNCHED", "1"), ("ZERO_TRAIN_JOB", job)], restarted].concat();
        run_with(folder.path(), program, &["--max-steps", steps], 2, &variables)
    };
    attempt("a", "30", &[]);
    let restarted = [("ZERO_TRAIN_RESTARTED", restarted)];
    let printed = attempt("a", "40", &restarted);
    assert!(printed.contains("resumed from runs/trainer/checkpoints/step-00000030"), "{printed}");
    let report = fs::read_to_string(folder.path().join("runs/trainer/report.json")).expect("the run's report");
    assert!(report.contains("rank 1 was killed by signal 9") && report.contains("\"step\": 30"), "{report}");
    // The launcher does not know from which step its first restart resumed. The run's folder records this step.
    let restart = "{\"reason\":\"rank 1 was killed by signal 9\",\"ranks\":2,\"step\":0}";
    let twice = format!("{{\"restarts\":[{restart},{restart}],\"from\":[],\"keeps_folder\":false}}");
    attempt("a", "50", &[("ZERO_TRAIN_RESTARTED", &twice)]);
    let report = fs::read_to_string(folder.path().join("runs/trainer/report.json")).expect("the run's report");
    assert!(report.contains("\"step\": 30") && report.contains("\"step\": 40"), "{report}");
    // Job `b` died before it created a run folder, so the folder still belongs to job `a`. Job `b` must not resume from
    // it.
    let printed = attempt("b", "10", &restarted);
    assert!(printed.contains("moved an earlier run to") && !printed.contains("resumed"), "{printed}");
}
