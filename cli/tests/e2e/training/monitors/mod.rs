//! Monitors of a run: DeepSpeed's names, resumed runs, Prometheus, and destinations that cannot be written. The tests
//! read the output back with TensorBoard and prometheus_client if Python has them.

mod machine;
mod mlflow;

use crate::case;
use crate::python;

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Stdio;

use case::{Case, signal, text, wait_for};
use python::python;

const BOTH: [&str; 4] = ["--set", "csv_monitor.enabled=true", "--set", "tensorboard.enabled=true"];

/// Returns the rows of a tag's CSV file as pairs of sample count and value.
fn csv(case: &Case, out: &str, name: &str) -> Vec<(u64, f64)> {
    let path = case.path(out).join(format!("csv_monitor/DeepSpeedJobName/Train_Samples_{name}.csv"));
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let (header, lines) = text.split_once('\n').unwrap();
    assert_eq!(header, format!("step,{name}"));
    let pair = |line: &str| line.split_once(',').map(|(x, y)| (x.parse().unwrap(), y.parse().unwrap())).unwrap();
    lines.lines().map(pair).collect()
}

/// Returns all values that TensorBoard's reader finds, as `tag samples value`; `None` if TensorBoard is not installed.
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
fn monitors_log_deepspeeds_names_by_sample_count() {
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
    // The parts do not exceed the step, which also contains waits between instructions. `backward` has two parts.
    let part = |name: &str| csv(&case, "with", &format!("elapsed_time_ms_{name}"))[5].1;
    let sum: f64 = ["forward", "backward", "step", "data", "gather", "pipeline", "disk"].map(part).iter().sum();
    assert!(sum <= csv(&case, "with", "elapsed_time_ms")[5].1 + 0.001);
    assert!((part("backward") - part("backward_inner") - part("backward_allreduce")).abs() < 1e-6);
    let line = |line: &&str| line.starts_with("time (ms) | fwd: ") && line.contains(" | bwd_allreduce: ");
    assert_eq!(out.lines().filter(line).count(), 3, "{out}");
    if let Some(events) = events(&case.path("with/tensorboard/DeepSpeedJobName")) {
        assert_eq!(events.len(), 6 * 18, "{events:?}");
        let (_, loss) = events.iter().find_map(|line| line.split_once("Train/Samples/train_loss 24 ")).unwrap();
        assert_eq!(loss.parse::<f64>().unwrap() as f32, logged[5]["loss"].as_f64().unwrap() as f32);
        assert!(events.iter().any(|line| line.starts_with("Train/Samples/elapsed_time_ms_backward_allreduce 4 ")));
    }
}

#[test]
fn a_resumed_run_does_not_repeat_steps() {
    let case = Case::new();
    let common = [&["--quiet", "-n", "2", "--out", "run", "--set", "training.save_every=3"], &BOTH[..]].concat();
    case.train(&[&common[..], &["--max-steps", "5"]].concat());
    let first = csv(&case, "run", "train_loss");
    assert_eq!(first.len(), 5);
    // A killed run may leave an incomplete line.
    let path = case.path("run/csv_monitor/DeepSpeedJobName/Train_Samples_lr.csv");
    fs::write(&path, fs::read_to_string(&path).unwrap() + "24,0.0").unwrap();
    case.train(&[&common[..], &["--max-steps", "8", "--resume", "run/checkpoints/step-00000003"]].concat());
    let samples: Vec<u64> = (1..=8).map(|step| 4 * step).collect();
    for name in ["train_loss", "lr", "grad_norm"] {
        assert_eq!(csv(&case, "run", name).iter().map(|line| line.0).collect::<Vec<_>>(), samples, "{name}");
    }
    assert_eq!(csv(&case, "run", "train_loss")[..5], first, "the repeated steps are not bit-identical");
    if let Some(events) = events(&case.path("run/tensorboard/DeepSpeedJobName")) {
        let of = |line: &&String| line.starts_with("Train/Samples/train_loss ");
        assert_eq!(events.iter().filter(of).count(), 8, "{events:?}");
    }
}

/// Cases: the folder of a monitor is a file, or the disk is full.
#[test]
fn a_monitor_that_cannot_be_written_is_reported_once_and_training_continues() {
    let case = Case::new();
    fs::write(case.path("file"), "").unwrap();
    let full = case.path("full/csv_monitor/DeepSpeedJobName");
    fs::create_dir_all(&full).unwrap();
    std::os::unix::fs::symlink("/dev/full", full.join("Train_Samples_train_loss.csv")).unwrap();
    case.train(&["--quiet", "-n", "2", "--out", "well"]);
    for (out, set, expected) in [
        (
            "csv",
            "csv_monitor={enabled: true, output_path: file}",
            "cannot write to the monitor `csv_monitor`: file/DeepSpeedJobName: Not a directory (os error 20); training continues; \
             free some disk space, or set `csv_monitor.output_path` to another folder",
        ),
        (
            "tensorboard",
            "tensorboard={enabled: true, output_path: file}",
            "cannot write to the monitor `tensorboard`: file/DeepSpeedJobName: Not a directory (os error 20); training continues; \
             free some disk space, or set `tensorboard.output_path` to another folder",
        ),
        (
            "full",
            "csv_monitor={enabled: true, output_path: full/csv_monitor}",
            "cannot write to the monitor `csv_monitor`: full/csv_monitor/DeepSpeedJobName/Train_Samples_train_loss.csv: No space left \
             on device (os error 28); training continues; free some disk space, or set `csv_monitor.output_path` to another folder",
        ),
    ] {
        let output = case.run(&["--quiet", "-n", "2", "--out", out, "--set", set]);
        let errors = text(&output.stderr);
        assert!(output.status.success(), "{errors}");
        let lines: Vec<&str> = errors.lines().collect();
        assert_eq!(lines.iter().filter(|line| **line == format!("warning: {expected}")).count(), 1, "{errors}");
        assert_eq!(lines.len(), 2, "the second line must report the missing steps: {errors}");
        assert!(lines[1].ends_with("is missing 20 steps"), "{errors}");
        assert_eq!((case.losses(out), case.shards(out, 20)), (case.losses("well"), case.shards("well", 20)));
    }
}

/// Returns the body of `/metrics`; `None` if the server does not respond.
fn page(port: u16) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    Some(body.to_string())
}

#[test]
fn prometheus_reads_the_newest_values() {
    let case = Case::new();
    let port = case::port();
    let prometheus = format!("prometheus={{enabled: true, port: {port}}}");
    let args = ["--config", "ds.yaml", "--plain", "-n", "2", "--max-steps", "1000000", "--set", &prometheus];
    let args = [&args[..], &["--set", "wall_clock_breakdown=true", "--set", "training.save_last=false"]].concat();
    let mut child = case.command(&args).stdout(Stdio::piped()).spawn().unwrap();
    let mut seen = String::new();
    wait_for(|| {
        seen = page(port).unwrap_or_default();
        seen.contains("\nzero_train_loss ")
    });
    let steps = |page: &str| {
        let line = page.lines().find_map(|line| line.strip_prefix("zero_train_steps_total ")).unwrap();
        line.parse::<u64>().unwrap()
    };
    wait_for(|| page(port).is_some_and(|page| steps(&page) > steps(&seen)));
    // A client that sends nothing does not block other clients.
    let _silent = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let seen = page(port).unwrap();
    let script = format!(
        "from prometheus_client.parser import text_string_to_metric_families
for family in text_string_to_metric_families({seen:?}):
    assert family.documentation and family.name.startswith('zero_train_'), family
    for one in family.samples:
        print(family.type, one.name, sorted(one.labels.items()), one.value)"
    );
    if let Some(parsed) = python(&["prometheus_client"], &script) {
        for start in [
            "gauge zero_train_loss [] ",
            "counter zero_train_steps_total [] ",
            "counter zero_train_sent_bytes_total [] ",
            "gauge zero_train_rank_work_seconds [('rank', '1')] ",
            "gauge zero_train_phase_seconds [('phase', 'backward_allreduce')] ",
            "gauge zero_train_info [('config', 'ds.yaml'), ('dtype', 'fp32'), ('version', ",
        ] {
            assert_eq!(parsed.lines().filter(|line| line.starts_with(start)).count(), 1, "{start}: {parsed}");
        }
        let value = |name: &str| {
            let line = parsed.lines().find(|line| line.contains(&format!(" {name} []"))).unwrap();
            line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
        };
        assert_eq!(value("zero_train_samples_total"), 4.0 * value("zero_train_steps_total"), "{parsed}");
    }
    signal(child.id(), "TERM");
    let mut out = String::new();
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert!(out.contains(&format!("metrics: http://127.0.0.1:{port}/metrics\n")), "{out}");
    case.train(&["--quiet", "-n", "2", "--out", "without"]);
    let losses = case.losses("without");
    assert!(case.losses("run").iter().zip(&losses).all(|(one, other)| one == other), "not bit-identical");
    // A port that is in use is reported once.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let prometheus = format!("prometheus={{enabled: true, port: {}}}", address.port());
    let output = case.run(&["--quiet", "-n", "2", "--out", "taken", "--set", &prometheus]);
    let errors = text(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let expected = format!(
        "warning: cannot write to the monitor `prometheus`: {address}: Address already in use (os error 98); training continues; free \
         the port, or set `prometheus.port`\nwarning: the monitor `prometheus` is missing 20 steps\n"
    );
    assert_eq!(errors, expected);
    assert_eq!(case.losses("taken"), losses);
}
