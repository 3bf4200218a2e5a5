//! `wandb`: runs against a server that speaks the protocol of Weights & Biases, and a comparison with W&B's own Python
//! client, which logs the same values to the same server.

mod server;

use crate::case;
use crate::python;

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use serde_json::{Map, Value, json};

use case::{Case, fail, signal, succeed, text, wait_for};
use python::python;
use server::{KEY, Run, Server};

/// Reads a line as Python does: NaN and infinities become texts.
fn parsed(line: &str) -> Map<String, Value> {
    let words = ["NaN", "Infinity", "-Infinity"];
    let text =
        words.iter().fold(line.to_string(), |text, word| text.replace(&format!(": {word}"), &format!(": \"{word}\"")));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {line}"))
}

fn steps(run: &Run) -> Vec<u64> {
    run.history.iter().map(|line| parsed(line)["_step"].as_u64().unwrap()).collect()
}

/// Returns a command that trains with the variables `WANDB_…` of the server and no other ones.
fn command(case: &Case, server: &Server, args: &[&str]) -> Command {
    let mut command = case.command(&[&["--config", "ds.yaml", "-n", "2"], args].concat());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("WANDB_") {
            command.env_remove(name);
        }
    }
    command.env_remove("NETRC").env("HOME", case.path(""));
    command.env("WANDB_BASE_URL", server.url()).env("WANDB_API_KEY", KEY);
    command
}

/// Runs a command to its end, with success and without warnings. Returns standard output.
fn quiet(mut command: Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn a_resumed_run_continues_the_run_of_the_server() {
    let (case, server) = (Case::new(), Server::start());
    let set = "wandb={enabled: true, group: some, project: of a test}";
    let common = ["--plain", "--set", "training.save_every=3", "--set", "csv_monitor.enabled=true", "--set", set];
    let mut first = command(&case, &server, &[&common[..], &["--max-steps", "5"]].concat());
    first.env("WANDB_NAME", "first").env("WANDB_RUN_GROUP", "another");
    let said = quiet(first);
    let (id, run) = server.run();
    let page = format!("wandb: {}/the%20user/of%20a%20test/runs/{id}\n", server.url());
    assert_eq!(said.matches(&page).count(), 1, "{said}");
    assert_eq!((run.group, run.name), (json!("some"), json!("first")));
    assert_eq!(run.config["zero_optimization"]["value"]["stage"], 3, "{}", run.config);
    assert_eq!(run.config["train_batch_size"], json!({ "desc": null, "value": 4 }));
    assert_eq!(run.end.unwrap(), json!({ "complete": true, "exitcode": 0, "dropped": 0, "uploaded": [] }));
    assert_eq!(run.history.len(), 5);
    let began = parsed(&run.history[0])["_runtime"].as_f64().unwrap();
    // The steps after the checkpoint run again. The server already has their lines.
    let resume = ["--max-steps", "8", "--resume", "run/checkpoints/step-00000003"];
    quiet(command(&case, &server, &[&common[..], &resume].concat()));
    let (same, resumed) = server.run();
    assert_eq!((&same, &resumed.history[..5]), (&id, &run.history[..]));
    assert_eq!(steps(&resumed), (1..=8).map(|step| 4 * step).collect::<Vec<u64>>());
    assert_eq!(parsed(&resumed.summary)["_step"], 32);
    let times: Vec<f64> = resumed.history.iter().map(|line| parsed(line)["_runtime"].as_f64().unwrap()).collect();
    assert!(began >= 0.0 && times.is_sorted(), "{times:?}");
    for name in ["train_loss", "lr", "grad_norm"] {
        let path = case.path(&format!("run/csv_monitor/DeepSpeedJobName/Train_Samples_{name}.csv"));
        let file = fs::read_to_string(path).unwrap();
        let written: Vec<f64> =
            file.lines().skip(1).map(|line| line.split_once(',').unwrap().1.parse().unwrap()).collect();
        let key = format!("Train/Samples/{name}");
        let logged: Vec<f64> = resumed.history.iter().map(|line| parsed(line)[&key].as_f64().unwrap()).collect();
        assert_eq!(logged, written, "{name}");
    }
    // A run that was deleted on the server is created again with another ID. `WANDB_RUN_ID` sets the ID of a run.
    server.state().runs.clear();
    quiet(command(&case, &server, &[&common[..], &["--max-steps", "9", "--resume", "auto"]].concat()));
    let (other, run) = server.run();
    assert_ne!(other, id);
    assert_eq!(steps(&run), [36]);
    // The server misses steps that a process did not send.
    let args = |steps, enabled| [&common[..], &["--max-steps", steps, "--resume", "auto", "--set", enabled]].concat();
    quiet(command(&case, &server, &args("11", "wandb.enabled=false")));
    let output = command(&case, &server, &args("12", "wandb.enabled=true")).output().unwrap();
    let warning = "warning: the monitor `wandb` is missing the steps after 36 up to 44 samples: an earlier process did \
                   not send them\n";
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), warning.into()));
    assert_eq!(steps(&server.run().1), [36, 48]);
    let mut named = command(&case, &server, &[&common[..], &["--max-steps", "2", "--out", "named"]].concat());
    named.env("WANDB_RUN_ID", "named").env("WANDB_ENTITY", "team");
    let said = quiet(named);
    assert!(said.contains("/team/of%20a%20test/runs/named\n"), "{said}");
    assert_eq!(steps(&server.state().runs["named"]), [4, 8]);
}

/// The server stores the lines of one post and closes the connection without an answer.
#[test]
fn resent_metrics_appear_once() {
    let (case, server) = (Case::new(), Server::start());
    server.state().lost = 1;
    let args = ["--quiet", "--max-steps", "300", "--set", "wandb.enabled=true", "--out", "short"];
    let output = command(&case, &server, &args).output().unwrap();
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    let end = "\nwarning: the monitor `wandb` is writable again; no step is missing\n";
    assert!(said.ends_with(end) && said.lines().count() == 2, "{said}");
    assert_eq!(steps(&server.run().1), (1..=300).map(|step| 4 * step).collect::<Vec<u64>>());
    // In a long run, the backlog of the monitor fills up before the server answers again.
    let server = Server::start();
    server.state().lost = 1;
    let args =
        ["--quiet", "--max-steps", "1000000", "--set", "training.save_last=false", "--set", "wandb.enabled=true"];
    let stderr = case.path("stderr");
    let mut child = command(&case, &server, &args).stderr(fs::File::create(&stderr).unwrap()).spawn().unwrap();
    let said = || fs::read_to_string(&stderr).unwrap();
    wait_for(|| said().contains("the monitor `wandb` is writable again"));
    let stored = server.state().stored;
    assert_eq!(stored, 2, "the first post and its repetition");
    signal(child.id(), "TERM");
    assert_eq!(child.wait().unwrap().code(), Some(143));
    let said = said();
    let start = format!("warning: cannot write to the monitor `wandb`: {}: file_stream: ", server.url());
    let end = "; training continues; check WANDB_BASE_URL, WANDB_API_KEY and the `wandb` section";
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].starts_with(&start) && lines[0].ends_with(end), "{said}");
    let (_, run) = server.run();
    let steps = steps(&run);
    assert!(steps.len() > 2 && steps.is_sorted_by(|one, next| one < next), "{steps:?}");
    assert_eq!(run.end.unwrap()["exitcode"], 255);
}

#[test]
fn a_wrong_key_and_an_unreachable_server_do_not_end_training() {
    let (case, server) = (Case::new(), Server::start());
    let args = ["--quiet", "--set", "wandb.enabled=true", "--out"];
    quiet(command(&case, &server, &["--quiet", "--out", "well"]));
    let failing = |out: &str, key: &str, url: &str| {
        let mut command = command(&case, &server, &[&args[..], &[out]].concat());
        let output = command.env("WANDB_API_KEY", key).env("WANDB_BASE_URL", url).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!((case.losses(out), case.shards(out, 20)), (case.losses("well"), case.shards("well", 20)));
        text(&output.stderr)
    };
    let end = "; training continues; check WANDB_BASE_URL, WANDB_API_KEY and the `wandb` section\n\
               warning: the monitor `wandb` is missing 20 steps\n";
    let url = server.url();
    let expected = "viewer: 401 Unauthorized user is not logged in";
    let said = failing("wrong", "b", &url);
    assert_eq!(said, format!("warning: cannot write to the monitor `wandb`: {url}: {expected}{end}"));
    let url = format!("http://127.0.0.1:{}", case::port());
    let said = failing("gone", KEY, &url);
    assert!(said.contains("onnection refused") && said.ends_with(end), "{said}");
    assert!(server.state().runs.is_empty());
}

#[test]
fn wandb_variables_are_checked_before_the_run_starts() {
    let (case, server) = (Case::new(), Server::start());
    let train = |variables: &[(&str, &str)]| {
        let args = ["--quiet", "--max-steps", "1", "--set", "wandb.enabled=true"];
        let mut command = command(&case, &server, &args);
        command.env_remove("WANDB_API_KEY").envs(variables.iter().copied());
        command
    };
    for (variables, expected) in [
        (&[][..], "error: the API key for 127.0.0.1 is missing\n  in: wandb\n  help: "),
        (&[("WANDB_MODE", "offline")], "error: WANDB_MODE=offline is not supported\n  in: wandb\n  help: "),
    ] {
        let errors = fail(2, &mut train(variables));
        assert!(errors.starts_with(expected), "{errors}");
        assert!(!case.path("run").exists(), "a run folder was written");
    }
    succeed(&mut train(&[("WANDB_MODE", "disabled")]));
    assert!(server.state().runs.is_empty());
    // The same entry that `wandb login` writes.
    fs::write(case.path(".netrc"), format!("machine 127.0.0.1\n  login user\n  password {KEY}\n")).unwrap();
    quiet(train(&[]));
    assert_eq!(steps(&server.run().1), [4]);
}

/// Logs the metrics in a folder of CSV files with W&B's client, as DeepSpeed does.
const CLIENT: &str = "
import csv, json, math, os, pathlib, sys, wandb
folder, config, status = ARGUMENTS
settings = wandb.Settings(_disable_stats=True, _disable_meta=True, disable_code=True, disable_git=True, console='off', silent=True)
wandb.init(project='of a test', group='some', entity='team', name='first', id='client', config=json.loads(config), settings=settings)
events = {}
for path in sorted(pathlib.Path(folder).glob('*.csv')):
    rows = list(csv.reader(open(path)))
    tag = 'Train/Samples/' + rows[0][1]
    for samples, value in rows[1:]:
        events.setdefault(int(samples), []).append((tag, float(value)))
for samples in sorted(events):
    for tag, value in events[samples]:
        wandb.log({tag: value}, step=samples)
wandb.finish(exit_code=status)
";

/// The run fails with a loss of NaN, which JSON cannot represent.
#[test]
fn the_official_client_sends_the_same_data() {
    let (case, server) = (Case::new(), Server::start());
    let set = "wandb={enabled: true, group: some, team: team, project: of a test}";
    let args = ["--quiet", "--max-steps", "200", "--set", set, "--set", "csv_monitor.enabled=true"];
    let fails = ["--set", "optimizer.params.lr=1e38", "--set", "gradient_clipping=0"];
    let mut ours = command(&case, &server, &[&args[..], &fails].concat());
    fail(5, ours.env("WANDB_RUN_ID", "ours").env("WANDB_NAME", "first"));
    let ours = server.state().runs["ours"].clone();
    assert!(ours.history.iter().any(|line| line.contains(": NaN")), "{:?}", ours.history);
    let config: Map<String, Value> = ours.config.as_object().unwrap().clone();
    let config: Map<String, Value> = config.into_iter().map(|(key, value)| (key, value["value"].clone())).collect();
    let folder = case.path("run/csv_monitor/DeepSpeedJobName").display().to_string();
    let arguments = format!("({folder:?}, {:?}, 1)", Value::Object(config).to_string());
    // The client writes its own files below the folder that WANDB_DIR names.
    let variables = json!({
        "WANDB_BASE_URL": server.url(), "WANDB_API_KEY": KEY, "WANDB_DIR": case.path(""), "HOME": case.path(""),
    });
    let script = CLIENT.replace("ARGUMENTS", &arguments);
    let Some(_) = python(&["wandb"], &format!("import os\nos.environ.update({variables})\n{script}")) else { return };
    let client = server.state().runs["client"].clone();
    let without_times = |line: &str| -> BTreeMap<String, Value> {
        let known = parsed(line).into_iter();
        known.filter(|(key, _)| !["_timestamp", "_runtime", "_wandb"].contains(&key.as_str())).collect()
    };
    let [one, other] =
        [&ours, &client].map(|run| run.history.iter().map(|line| without_times(line)).collect::<Vec<_>>());
    assert_eq!(one, other);
    let [one, other] = [&ours, &client].map(|run| parsed(&run.history[0]).keys().cloned().collect::<Vec<_>>());
    assert!(one.iter().all(|key| other.contains(key)) && one.len() == other.len(), "{one:?} {other:?}");
    assert_eq!(without_times(&ours.summary), without_times(&client.summary));
    assert!(
        parsed(&ours.summary)["_wandb"]["runtime"].is_u64() && parsed(&client.summary)["_wandb"]["runtime"].is_u64()
    );
    let mut config = client.config.clone();
    config.as_object_mut().unwrap().remove("_wandb");
    assert_eq!(ours.config, config);
    assert_eq!((ours.group, ours.name, ours.end), (client.group, client.name, client.end));
}
