//! Monitors of a run: DeepSpeed's names, resumed runs, and destinations that cannot be written. The tests read the
//! output back with TensorBoard, prometheus_client and MLflow if Python has them.

use crate::case;
use crate::python;
use crate::training::nvml;

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

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
fn monitors_use_the_names_of_deepspeed_over_samples() {
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
    // The incomplete line of a killed run.
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

/// The folder of a monitor is a file, or the disk is full.
#[test]
fn a_monitor_that_cannot_be_written_is_reported_once_and_training_continues() {
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
            "cannot write the monitor `csv_monitor`: file/DeepSpeedJobName: Not a directory (os error 20); training continues; \
             free some space there, or set `csv_monitor.output_path`",
        ),
        (
            "tensorboard",
            &["tensorboard={enabled: true, output_path: file}"],
            "cannot write the monitor `tensorboard`: file/DeepSpeedJobName: Not a directory (os error 20); training continues; \
             free some space there, or set `tensorboard.output_path`",
        ),
        (
            "full",
            &["csv_monitor={enabled: true, output_path: full/csv_monitor}"],
            "cannot write the monitor `csv_monitor`: full/csv_monitor/DeepSpeedJobName/Train_Samples_train_loss.csv: No space left \
             on device (os error 28); training continues; free some space there, or set `csv_monitor.output_path`",
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
        "warning: cannot write the monitor `prometheus`: {address}: Address already in use (os error 98); training continues; free \
         the port, or set `prometheus.port`\nwarning: the monitor `prometheus` is missing 20 steps\n"
    );
    assert_eq!(errors, expected);
    assert_eq!(case.losses("taken"), losses);
}

/// An MLflow tracking server. Dropping it kills the server and its child processes.
struct Server {
    child: Child,
    port: u16,
}

impl Server {
    /// Starts the server; `None` if Python has no MLflow, which is printed.
    fn start(case: &Case) -> Option<Self> {
        python(&["mlflow"], "")?;
        let port = case::port();
        let program = std::env::var_os("ZERO_TRAIN_PYTHON").unwrap_or_else(|| "python3".into());
        let store = format!("sqlite:///{}", case.path("mlflow.db").display());
        let child = Command::new(program)
            .args(["-W", "ignore", "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1"])
            .args(["--port", &port.to_string(), "--backend-store-uri", &store])
            .args(["--default-artifact-root", &case.path("artifacts").display().to_string()])
            .current_dir(case.path(""))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .unwrap();
        let mut server = Self { child, port };
        // The start takes a while, especially on a busy machine.
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(server.child.try_wait().unwrap().is_none(), "the server has ended");
            std::thread::sleep(Duration::from_millis(100));
        }
        Some(server)
    }

    fn uri(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Returns the runs of the experiment that MLflow's client finds, newest first: name, status, a parameter, the
    /// version and the losses by step.
    fn runs(&self) -> Vec<String> {
        let script = format!(
            "from mlflow import MlflowClient
client = MlflowClient({:?})
experiment = client.get_experiment_by_name('of a test')
for run in client.search_runs([experiment.experiment_id]):
    history = client.get_metric_history(run.info.run_id, 'Train/Samples/train_loss')
    losses = ' '.join(f'{{one.step}}={{one.value!r}}' for one in sorted(history, key=lambda one: one.step))
    print(run.info.run_name, run.info.status, run.data.params.get('zero_optimization.stage'), run.data.tags['zero_train.version'], losses)",
            self.uri()
        );
        python(&["mlflow"], &script).unwrap().lines().map(str::to_string).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = Command::new("kill").args(["-KILL", "--", &format!("-{}", self.child.id())]).status();
        let _ = self.child.wait();
    }
}

/// Returns the steps and losses in the metrics, in the format of [`Server::runs`].
fn logged(case: &Case, out: &str) -> String {
    let lines = case.metrics(out);
    let one =
        |line: &serde_json::Value| format!("{}={:?}", line["step"], f64::from(line["loss"].as_f64().unwrap() as f32));
    lines.iter().map(one).collect::<Vec<_>>().join(" ")
}

#[test]
fn the_client_of_mlflow_reads_the_run_back() {
    let case = Case::new();
    let Some(server) = Server::start(&case) else { return };
    let mlflow = format!(
        "mlflow={{enabled: true, tracking_uri: \"{}/\", experiment_name: of a test, run_name: first}}",
        server.uri()
    );
    let common = ["--quiet", "-n", "2", "--set", "training.save_every=3"];
    // A server that is still starting may miss values, so the run is repeated until it reports no error.
    let mut attempts = 0;
    loop {
        let output = case.run(&[&common[..], &["--max-steps", "5", "--out", "run", "--set", &mlflow]].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        if output.stderr.is_empty() {
            break;
        }
        attempts += 1;
        assert!(attempts < 20, "{}", text(&output.stderr));
        std::thread::sleep(Duration::from_secs(1));
    }
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(server.runs()[0], format!("first FINISHED 3 {version} {}", logged(&case, "run")));
    // A resumed run continues the same MLflow run without repeating steps.
    let runs = server.runs().len();
    let resume = ["--max-steps", "8", "--out", "run", "--resume", "run/checkpoints/step-00000003", "--set", &mlflow];
    case.train(&[&common[..], &resume].concat());
    assert_eq!(server.runs().len(), runs);
    assert_eq!(server.runs()[0], format!("first FINISHED 3 {version} {}", logged(&case, "run")));
    assert_eq!(logged(&case, "run").split(' ').count(), 8);
    // The address comes from the environment. The run fails with a NaN loss, which JSON cannot represent.
    let mut command = case.command(&[
        "--config",
        "ds.yaml",
        "--quiet",
        "--out",
        "diverged",
        "--max-steps",
        "200",
        "--set",
        "mlflow={enabled: true, experiment_name: of a test, run_name: second}",
        "--set",
        "optimizer.params.lr=1e38",
        "--set",
        "gradient_clipping=0",
        "--set",
        "zero_optimization.stage=1",
    ]);
    let output = command.env("MLFLOW_TRACKING_URI", server.uri()).output().unwrap();
    assert_eq!(output.status.code(), Some(5), "{}", text(&output.stderr));
    let newest = &server.runs()[0];
    assert!(newest.starts_with(&format!("second FAILED 1 {version} 1=")), "{newest}");
    assert!(newest.contains("=nan"), "{newest}");
}

#[test]
fn a_missing_silent_or_broken_server_neither_ends_nor_changes_training() {
    let case = Case::new();
    let common = ["--quiet", "-n", "2", "--max-steps", "20"];
    case.train(&[&common[..], &["--out", "well"]].concat());
    let run = |out: &str, port: u16| {
        let mlflow = format!("mlflow={{enabled: true, tracking_uri: \"http://127.0.0.1:{port}\"}}");
        let output = case.run(&[&common[..], &["--out", out, "--set", &mlflow]].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!((case.losses(out), case.shards(out, 20)), (case.losses("well"), case.shards("well", 20)));
        text(&output.stderr)
    };
    let port = case::port();
    let errors = run("gone", port);
    let start =
        format!("warning: cannot write the monitor `mlflow`: http://127.0.0.1:{port}: experiments/get-by-name: ");
    let end = "; training continues; check that the tracking server runs, or set `mlflow.tracking_uri`\n\
               warning: the monitor `mlflow` is missing 20 steps\n";
    assert!(errors.starts_with(&start) && errors.contains("onnection refused") && errors.ends_with(end), "{errors}");
    // A server that accepts connections but never responds.
    let mute = TcpListener::bind("127.0.0.1:0").unwrap();
    let errors = run("mute", mute.local_addr().unwrap().port());
    assert!(errors.contains("the monitor `mlflow` did not finish in time") || errors.contains("timeout"), "{errors}");
    let broken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = broken.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in broken.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream
                .write_all(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\nConnection: close\r\n\r\noops");
        }
    });
    let errors = run("broken", port);
    assert!(errors.contains("experiments/get-by-name: 500 Internal Server Error; training continues"), "{errors}");
}

#[test]
fn an_unsupported_address_is_rejected_before_anything_starts() {
    let case = Case::new();
    for (set, expected) in [
        ("mlflow={enabled: true, tracking_uri: databricks}", "databricks is not the address of a tracking server"),
        ("mlflow={enabled: true}", "the address of the tracking server is missing"),
    ] {
        let mut command = case.command(&["--config", "ds.yaml", "--quiet", "-n", "2", "--set", set]);
        let output = command.env_remove("MLFLOW_TRACKING_URI").output().unwrap();
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(errors.starts_with("error: ") && errors.contains(expected), "{errors}");
        assert!(errors.contains("\n  in: mlflow.tracking_uri\n  help: "), "{errors}");
        assert!(!case.path("run").exists(), "a run folder was written");
    }
}

/// Returns the values that the machine monitor has written under a name so far, without an incomplete last line.
fn machine(case: &Case, out: &str, name: &str) -> Vec<f64> {
    let path = case.path(&format!("{out}/csv_monitor/DeepSpeedJobName/Machine_{name}.csv"));
    let text = fs::read_to_string(path).unwrap_or_default();
    let lines = text.rsplit_once('\n').map_or("", |(lines, _)| lines);
    lines.lines().skip(1).map(|line| line.split_once(',').unwrap().1.parse().unwrap()).collect()
}

/// Runs training with the machine monitor until `until` holds. Returns standard output and standard error.
fn watched(
    case: &Case,
    out: &str,
    more: &[&str],
    variables: &[(&str, &str)],
    mut until: impl FnMut() -> bool,
) -> [String; 2] {
    let set = ["--set", "machine_monitor={enabled: true, interval_seconds: 0.02}", "--set", "csv_monitor.enabled=true"];
    let args = ["--config", "ds.yaml", "--plain", "-n", "2", "--max-steps", "1000000", "--out", out];
    let mut command = case.command(&[&args[..], &set, &["--set", "training.save_last=false"], more].concat());
    command.env_remove("CUDA_VISIBLE_DEVICES").envs(variables.iter().copied());
    let files = ["stdout", "stderr"].map(|name| case.path(&format!("{out}.{name}")));
    let [stdout, stderr] = files.clone().map(|path| fs::File::create(path).unwrap());
    let mut child = command.stdout(stdout).stderr(stderr).spawn().unwrap();
    wait_for(|| until() || child.try_wait().unwrap().is_some());
    signal(child.id(), "TERM");
    let status = child.wait().unwrap();
    let said = files.map(|path| fs::read_to_string(path).unwrap());
    assert_eq!(status.code(), Some(143), "{said:?}");
    said
}

#[test]
fn the_machine_is_monitored() {
    let case = Case::new();
    let last = |name: &str| machine(&case, "run", name).last().copied();
    watched(&case, "run", &[], &[], || last("process_cpu_percent").is_some_and(|percent| percent > 0.0));
    assert!(last("cpu_percent").unwrap() > 0.0 && last("cpu_percent").unwrap() <= 100.0);
    assert!(last("process_resident_bytes").unwrap() > 1e6 && last("memory_available_bytes").unwrap() > 1e6);
    case.train(&["--quiet", "-n", "2", "--out", "without"]);
    let (with, without) = (case.losses("run"), case.losses("without"));
    assert!(with.len() > 1 && with.iter().zip(&without).all(|(one, other)| one == other), "not bit-identical");
}

#[test]
fn gpus_are_monitored_through_nvml() {
    let case = Case::new();
    if !nvml::mock(&case.path("")) {
        return;
    }
    let here = case.path("").display().to_string();
    // First all three GPUs, then the two in CUDA_VISIBLE_DEVICES, one of them given by a prefix of its UUID.
    let port = case::port();
    let prometheus = format!("prometheus={{enabled: true, port: {port}}}");
    let more = ["--set", &prometheus, "--set", "tensorboard.enabled=true"];
    let mut seen = String::new();
    let [out, errors] = watched(&case, "all", &more, &[("LD_LIBRARY_PATH", &here)], || {
        seen = page(port).unwrap_or_default();
        seen.contains("zero_train_machine_gpu_temperature_celsius")
    });
    assert!(errors.is_empty() && !out.contains("machine_monitor"), "{out}{errors}");
    for line in [
        "zero_train_machine_gpu_utilization_ratio{gpu=\"1\"} 0.51",
        "zero_train_machine_gpu_memory_used_bytes{gpu=\"2\"} 3221225472",
        "zero_train_machine_gpu_power_watts{gpu=\"0\"} 300.5",
        "zero_train_machine_gpu_temperature_celsius{gpu=\"2\"} 62",
        "# TYPE zero_train_machine_gpu_power_watts gauge",
    ] {
        assert_eq!(seen.lines().filter(|known| *known == line).count(), 1, "{line}: {seen}");
    }
    let of_gpus = |out: &str, gpu: usize| {
        let names = ["utilization_percent", "memory_used_bytes", "power_watts", "temperature_celsius"];
        names.map(|name| machine(&case, out, &format!("gpu_{gpu}_{name}")).last().copied())
    };
    let of = |gpu: usize| {
        let x = gpu as f64;
        [50.0 + x, (x + 1.0) * f64::from(1 << 30), 300.5 + x, 60.0 + x].map(Some)
    };
    assert_eq!([0, 1, 2].map(|gpu| of_gpus("all", gpu)), [of(0), of(1), of(2)]);
    if let Some(events) = events(&case.path("all/tensorboard/DeepSpeedJobName")) {
        let temperature =
            |line: &String| line.starts_with("Machine/gpu_1_temperature_celsius ") && line.ends_with(" 61.0");
        assert!(events.iter().any(temperature), "{events:?}");
    }
    let variables = [("LD_LIBRARY_PATH", here.as_str()), ("CUDA_VISIBLE_DEVICES", "2,GPU-10000000")];
    watched(&case, "two", &[], &variables, || of_gpus("two", 2)[3].is_some());
    assert_eq!([0, 1, 2].map(|gpu| of_gpus("two", gpu)), [of(0), [None; 4], of(2)]);
    case.train(&["--quiet", "-n", "2", "--out", "without"]);
    let without = case.losses("without");
    for out in ["all", "two"] {
        let with = case.losses(out);
        assert!(with.len() > 1 && with.iter().zip(&without).all(|(one, other)| one == other), "{out} is not identical");
    }
}

#[test]
fn missing_gpu_metrics_are_reported_once() {
    let case = Case::new();
    if !nvml::mock(&case.path("")) {
        return;
    }
    let here = case.path("").display().to_string();
    let samples = |out: &str, name: &str| machine(&case, out, name).len();
    // GPU 0 never reports its power, and GPU 1 is lost after a while. The other metrics are still written.
    let variables = [("LD_LIBRARY_PATH", here.as_str()), ("MOCK_NVML_FAILS", "power:0,lost:1")];
    let [out, errors] =
        watched(&case, "failing", &[], &variables, || samples("failing", "gpu_0_temperature_celsius") > 30);
    let lines: Vec<&str> = errors.lines().collect();
    let start = |gpu: usize| format!("warning: `machine_monitor` cannot read all metrics of GPU {gpu}: ");
    assert_eq!(lines.len(), 2, "{errors}{out}");
    assert_eq!(lines[0], start(0) + "power: the requested operation is not available on the target device");
    assert!(lines[1].starts_with(&(start(1) + "device fell off the bus")), "{errors}");
    assert_eq!(samples("failing", "gpu_0_power_watts"), 0);
    assert!((1..=11).contains(&samples("failing", "gpu_1_power_watts")));
    assert!(samples("failing", "gpu_2_power_watts") > 20);
    // A broken or missing library, no driver, no GPU and no visible GPU print a line. A driver that fails is a warning.
    let broken = case.path("broken");
    fs::create_dir(&broken).unwrap();
    fs::write(broken.join("libnvidia-ml.so.1"), "").unwrap();
    let broken = broken.display().to_string();
    let path = ("LD_LIBRARY_PATH", here.as_str());
    let no_gpu = |why: &str| format!("`machine_monitor` found no GPU: {why}\n");
    let mut cases = vec![
        (vec![("LD_LIBRARY_PATH", broken.as_str())], no_gpu(&format!("{broken}/libnvidia-ml.so.1: file too short")), false),
        (vec![path, ("MOCK_NVML_INIT", "9")], no_gpu("NVIDIA driver is not loaded"), false),
        (vec![path, ("MOCK_NVML_GPUS", "0")], no_gpu("the driver lists none"), false),
        (vec![path, ("CUDA_VISIBLE_DEVICES", "")], no_gpu("CUDA_VISIBLE_DEVICES=\"\" hides all 3"), false),
        (
            vec![path, ("MOCK_NVML_INIT", "18")],
            "warning: `machine_monitor` cannot monitor GPUs: NVML: RM detects a driver/library version mismatch; training continues\n".into(),
            true,
        ),
    ];
    if Path::new("/proc/driver/nvidia").exists() {
        println!("skipped: a machine without NVIDIA's library");
    } else {
        let why = "libnvidia-ml.so.1: cannot open shared object file: No such file or directory";
        cases.push((vec![], no_gpu(why), false));
    }
    for (index, (variables, expected, is_warning)) in cases.iter().enumerate() {
        let out = format!("none{index}");
        let said = watched(&case, &out, &[], variables, || samples(&out, "cpu_percent") > 3);
        let [said, nothing] = if *is_warning { [&said[1], ""] } else { [&said[0], said[1].as_str()] };
        assert_eq!(said.matches(expected.as_str()).count(), 1, "{expected}: {said}");
        assert_eq!(said.matches("machine_monitor").count(), 1, "{said}");
        assert_eq!(nothing, "", "{expected}");
        assert_eq!(samples(&out, "gpu_0_temperature_celsius"), 0);
    }
}
