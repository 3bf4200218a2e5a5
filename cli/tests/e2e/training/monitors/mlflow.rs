//! The monitor of MLflow: runs that its client reads back, and servers that are missing, silent or broken.

use crate::case;
use crate::python;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use case::{Case, fail, sets, text};
use python::python;

/// An MLflow tracking server. Dropping it kills the server and its child processes.
struct Server {
    child: Child,
    port: u16,
}

impl Server {
    /// Starts the server. Prints the reason and returns `None` if Python has no MLflow.
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
    // The server misses steps that a process did not send.
    let args = |steps: &'static str, more: &[&'static str]| {
        [&common[..], &["--max-steps", steps, "--out", "run", "--resume", "auto"], more].concat()
    };
    case.train(&args("10", &[]));
    let output = case.run(&[&args("12", &[])[..], &["--set", &mlflow]].concat());
    let warning = "warning: the monitor `mlflow` is missing the steps 9 to 10: an earlier process did not send them\n";
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), warning.into()));
    assert_eq!(server.runs()[0].split("=").count(), 10 + 1);
    // A resumed run creates a new run in place of a deleted one.
    let delete = format!(
        "import json
from mlflow import MlflowClient
MlflowClient({:?}).delete_run(json.load(open({:?}))['run_id'])",
        server.uri(),
        case.path("run/mlflow.json")
    );
    python(&["mlflow"], &delete).unwrap();
    case.train(&[&args("13", &[])[..], &["--set", &mlflow]].concat());
    assert_eq!(server.runs().len(), runs);
    assert!(server.runs()[0].contains(" 13=") && !server.runs()[0].contains(" 12="), "{:?}", server.runs());
    // The address comes from the environment. The run fails with a NaN loss, which JSON cannot represent.
    let set = sets(&[
        "mlflow={enabled: true, experiment_name: of a test, run_name: second}",
        "optimizer.params.lr=1e38",
        "gradient_clipping=0",
        "zero_optimization.stage=1",
    ]);
    let args = ["--config", "ds.yaml", "--quiet", "--out", "diverged", "--max-steps", "200"];
    let mut command = case.command(&[&args, &set[..]].concat());
    fail(5, command.env("MLFLOW_TRACKING_URI", server.uri()));
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
        format!("warning: cannot write to the monitor `mlflow`: http://127.0.0.1:{port}: experiments/get-by-name: ");
    let end = "; training continues; check that the tracking server is running, or set `mlflow.tracking_uri`\n\
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
        ("mlflow={enabled: true, tracking_uri: databricks}", "databricks is not the URL of a tracking server"),
        ("mlflow={enabled: true}", "the URL of the tracking server is missing"),
    ] {
        let mut command = case.command(&["--config", "ds.yaml", "--quiet", "-n", "2", "--set", set]);
        let errors = fail(2, command.env_remove("MLFLOW_TRACKING_URI"));
        assert!(errors.starts_with("error: ") && errors.contains(expected), "{errors}");
        assert!(errors.contains("\n  in: mlflow.tracking_uri\n  help: "), "{errors}");
        assert!(!case.path("run").exists(), "a run folder was written");
    }
}
