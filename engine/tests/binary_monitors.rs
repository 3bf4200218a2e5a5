//! Monitors of the binary: DeepSpeed's names, runs that go on, and places that cannot be written to. What was written is read back by the
//! programs that it is for, where Python has them.

mod case;
mod python;

use std::fs;
use std::path::Path;

use case::{Case, text};
use python::python;

const BOTH: [&str; 4] = ["--set", "csv_monitor.enabled=true", "--set", "tensorboard.enabled=true"];

/// The lines of a tag's file behind its header: samples and value.
fn csv(case: &Case, out: &str, name: &str) -> Vec<(u64, f64)> {
    let path = case.path(out).join(format!("csv_monitor/DeepSpeedJobName/Train_Samples_{name}.csv"));
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let (header, lines) = text.split_once('\n').unwrap();
    assert_eq!(header, format!("step,{name}"));
    let pair = |line: &str| line.split_once(',').map(|(x, y)| (x.parse().unwrap(), y.parse().unwrap())).unwrap();
    lines.lines().map(pair).collect()
}

/// The same of all tags as TensorBoard's reader sees them: `tag samples value`, or nothing where there is none.
fn events(folder: &Path) -> Option<Vec<String>> {
    let script = format!(
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator({:?}, size_guidance={{'scalars': 0}})
events.Reload()
for tag in sorted(events.Tags()['scalars']):
    for one in events.Scalars(tag):
        print(tag, one.step, one.value)",
        folder.display().to_string()
    );
    Some(python(&["tensorboard"], &script)?.lines().map(str::to_string).collect())
}

#[test]
fn deepspeeds_names_over_samples() {
    let case = Case::new();
    let common = ["--plain", "-n", "2", "--max-steps", "6"];
    case.train(&[&common[..], &["--out", "without"]].concat());
    let breakdown = ["--out", "with", "--set", "wall_clock_breakdown=true", "--set", "steps_per_print=3"];
    let out = case.train(&[&common[..], &BOTH, &breakdown].concat());
    assert_eq!((case.losses("with"), case.shards("with", 6)), (case.losses("without"), case.shards("without", 6)));
    let samples: Vec<u64> = (1..=6).map(|step| 4 * step).collect();
    let names = ["train_loss", "lr", "grad_norm", "elapsed_time_ms", "tokens_per_second", "peak_bytes"];
    let parts = ["forward", "backward", "backward_inner", "backward_allreduce", "step", "data", "gather"];
    let parts = parts.map(|part| format!("elapsed_time_ms_{part}"));
    for name in names.into_iter().chain(parts.iter().map(String::as_str)) {
        let lines = csv(&case, "with", name);
        assert_eq!(lines.iter().map(|line| line.0).collect::<Vec<_>>(), samples, "{name}");
        assert!(lines.iter().all(|line| line.1 > 0.0), "{name}: {lines:?}");
    }
    let logged = case.metrics("with");
    let bits: Vec<u32> = logged.iter().map(|line| (line["loss"].as_f64().unwrap() as f32).to_bits()).collect();
    let written: Vec<u32> = csv(&case, "with", "train_loss").iter().map(|line| (line.1 as f32).to_bits()).collect();
    assert_eq!(written, bits);
    // All of a step but what it waits between instructions; `backward` is in two parts.
    let part = |name: &str| csv(&case, "with", &format!("elapsed_time_ms_{name}"))[5].1;
    let sum: f64 = ["forward", "backward", "step", "data", "gather", "pipeline", "disk"].map(part).iter().sum();
    assert!(sum <= csv(&case, "with", "elapsed_time_ms")[5].1 + 0.001);
    assert!((part("backward") - part("backward_inner") - part("backward_allreduce")).abs() < 1e-6);
    let line = |line: &&str| line.starts_with("time (ms) | fwd: ") && line.contains(" | bwd_allreduce: ");
    assert_eq!(out.lines().filter(line).count(), 3, "{out}");
    if let Some(events) = events(&case.path("with/tensorboard/DeepSpeedJobName")) {
        assert_eq!(events.len(), 6 * 15, "{events:?}");
        let (_, loss) = events.iter().find_map(|line| line.split_once("Train/Samples/train_loss 24 ")).unwrap();
        assert_eq!(loss.parse::<f64>().unwrap() as f32, logged[5]["loss"].as_f64().unwrap() as f32);
        assert!(events.iter().any(|line| line.starts_with("Train/Samples/elapsed_time_ms_backward_allreduce 4 ")));
    }
}

#[test]
fn steps_that_are_done_again_are_not_repeated() {
    let case = Case::new();
    let common = [&["--quiet", "-n", "2", "--out", "run", "--set", "training.save_every=3"], &BOTH[..]].concat();
    case.train(&[&common[..], &["--max-steps", "5"]].concat());
    let first = csv(&case, "run", "train_loss");
    assert_eq!(first.len(), 5);
    // As a run that was killed has left it.
    let path = case.path("run/csv_monitor/DeepSpeedJobName/Train_Samples_lr.csv");
    fs::write(&path, fs::read_to_string(&path).unwrap() + "24,0.0").unwrap();
    case.train(&[&common[..], &["--max-steps", "8", "--resume", "run/checkpoints/step-00000003"]].concat());
    let samples: Vec<u64> = (1..=8).map(|step| 4 * step).collect();
    for name in ["train_loss", "lr", "grad_norm"] {
        assert_eq!(csv(&case, "run", name).iter().map(|line| line.0).collect::<Vec<_>>(), samples, "{name}");
    }
    assert_eq!(csv(&case, "run", "train_loss")[..5], first, "the same bits again");
    if let Some(events) = events(&case.path("run/tensorboard/DeepSpeedJobName")) {
        let of = |line: &&String| line.starts_with("Train/Samples/train_loss ");
        assert_eq!(events.iter().filter(of).count(), 8, "{events:?}");
    }
}

/// A folder that is a file, and a disk that is full.
#[test]
fn what_cannot_be_written_is_said_once_and_training_goes_on() {
    let case = Case::new();
    fs::write(case.path("file"), "").unwrap();
    let full = case.path("full/csv_monitor/DeepSpeedJobName");
    fs::create_dir_all(&full).unwrap();
    std::os::unix::fs::symlink("/dev/full", full.join("Train_Samples_train_loss.csv")).unwrap();
    case.train(&["--quiet", "-n", "2", "--out", "well"]);
    let cases: [(&str, &[&str], &str); 3] = [
        (
            "csv",
            &["csv_monitor={enabled: true, output_path: file}"],
            "the monitor `csv_monitor` is not written: file/DeepSpeedJobName: Not a directory (os error 20); training goes on; \
             make room there, or set `csv_monitor.output_path`",
        ),
        (
            "tensorboard",
            &["tensorboard={enabled: true, output_path: file}"],
            "the monitor `tensorboard` is not written: file/DeepSpeedJobName: Not a directory (os error 20); training goes on; \
             make room there, or set `tensorboard.output_path`",
        ),
        (
            "full",
            &["csv_monitor={enabled: true, output_path: full/csv_monitor}"],
            "the monitor `csv_monitor` is not written: full/csv_monitor/DeepSpeedJobName/Train_Samples_train_loss.csv: No space left \
             on device (os error 28); training goes on; make room there, or set `csv_monitor.output_path`",
        ),
    ];
    for (out, sets, expected) in cases {
        let mut args = vec!["--quiet", "-n", "2", "--out", out];
        sets.iter().for_each(|set| args.extend(["--set", set]));
        let output = case.run(&args);
        let errors = text(&output.stderr);
        assert!(output.status.success(), "{errors}");
        let lines: Vec<&str> = errors.lines().collect();
        assert_eq!(lines.iter().filter(|line| **line == format!("warning: {expected}")).count(), 1, "{errors}");
        assert_eq!(lines.len(), 2, "and that it is incomplete: {errors}");
        assert!(lines[1].ends_with("lacks 20 steps"), "{errors}");
        assert_eq!((case.losses(out), case.shards(out, 20)), (case.losses("well"), case.shards("well", 20)));
    }
}
