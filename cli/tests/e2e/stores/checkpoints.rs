//! Checkpoints of a run in an S3 store, which moto simulates. The run copies them while it trains, another machine
//! resumes from them, and they are not mixed with the checkpoints of other runs.

use std::path::PathBuf;
use std::process::Command;

use super::services::{Service, installed, python, serve};
use crate::case::{Alone, Case, signal, succeed, text};

/// A case with an S3 server that has the bucket `runs`.
struct Stored {
    case: Case,
    _server: Service,
    endpoint: String,
    folder: PathBuf,
}

impl Stored {
    fn new() -> Option<Self> {
        let folder = installed()?;
        let mut command = Command::new(folder.join("bin/moto_server"));
        command.args(["-H", "127.0.0.1", "-p"]);
        let (server, port) = serve(command);
        let endpoint = format!("http://127.0.0.1:{port}");
        let stored = Self { case: Case::new(), _server: server, endpoint, folder };
        stored.client("s3.create_bucket(Bucket='runs')");
        Some(stored)
    }

    /// Runs a line of Python with a client of the server. Returns what it prints.
    fn client(&self, line: &str) -> String {
        let script = format!(
            "import boto3, sys, urllib.request\n\
             s3 = boto3.client('s3', endpoint_url=sys.argv[1], region_name='us-east-1', aws_access_key_id='a', aws_secret_access_key='b')\n\
             {line}\n"
        );
        python(&self.folder.join("bin/python"), &script, &[&self.endpoint])
    }

    /// Returns the names of the checkpoints below `prefix`. Asserts that each of them has a manifest.
    fn folders(&self, prefix: &str) -> Vec<String> {
        let line = format!(
            "names = sorted(o['Key'] for o in s3.list_objects_v2(Bucket='runs', Prefix='{prefix}/').get('Contents', []))\n\
             print('\\n'.join(names))"
        );
        let names = self.client(&line);
        let names = names.lines().filter_map(|name| name.strip_prefix(prefix)?.strip_prefix('/')?.rsplit_once('/'));
        let manifests = names.clone().filter(|(_, file)| *file == "manifest.json").map(|(folder, _)| folder);
        let complete: Vec<String> = manifests.map(String::from).collect();
        for (folder, _) in names {
            assert!(complete.iter().any(|name| name == folder), "{folder} has no manifest");
        }
        complete
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.case.command(args);
        command.env("AWS_ENDPOINT_URL", &self.endpoint).env("HOME", self.case.path("home"));
        command.envs([("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"), ("AWS_REGION", "us-east-1")]);
        command.env("ZERO_TRAIN_CACHE", self.case.path("downloads"));
        command
    }

    fn run(&self, out: &str, steps: u64, more: &[&str]) -> Command {
        let steps = steps.to_string();
        let args = ["--config", "ds.yaml", "--out", out, "--max-steps", &steps, "--set", "train_batch_size=4"];
        self.command(&[&args, more].concat())
    }

    fn trained(&self, out: &str, steps: u64, more: &[&str]) -> String {
        succeed(&mut self.run(out, steps, more))
    }
}

const STORE: [&str; 2] =
    ["--set", "training={checkpoint_store: s3://runs/a, save_every: 2, keep_last: 2, keep_every: 6}"];

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&STORE[..], more].concat()
}

#[test]
fn another_machine_resumes_from_the_store() {
    let Some(stored) = Stored::new() else { return };
    let case = &stored.case;
    stored.trained("whole", 14, &[]);
    let said = stored.trained("first", 9, &with(&["-n", "2", "--set", "training.save_async=true"]));
    assert!(said.contains("copied s3://runs/a/step-00000009 in "), "{said}");
    // The store keeps the same checkpoints as the disk: the last two and every sixth step.
    assert_eq!(stored.folders("a"), ["step-00000006", "step-00000008", "step-00000009"]);
    let leftovers = std::fs::read_dir(case.path("first/checkpoints")).unwrap();
    let leftovers: Vec<_> = leftovers
        .map(|entry| entry.unwrap().file_name())
        .filter(|name| name.to_string_lossy().starts_with('.'))
        .collect();
    assert!(leftovers.is_empty(), "{leftovers:?}");

    // Another machine lacks the folder of the run and uses a different number of ranks.
    let said = stored.trained("elsewhere", 14, &with(&["--resume", "auto"]));
    assert!(said.contains("step-00000009"), "{said}");
    assert_eq!(case.losses("elsewhere"), case.losses("whole")[9..]);
    assert_eq!(stored.folders("a"), ["step-00000006", "step-00000010", "step-00000012", "step-00000014"]);

    // A new run does not mix its checkpoints with those of the earlier run.
    let output = stored.run("other", 4, &STORE).output().unwrap();
    let error = text(&output.stderr);
    assert!(!output.status.success() && error.contains("s3://runs/a/step-00000014 already exists"), "{error}");
    assert!(error.contains("--resume s3://runs/a"), "{error}");

    // A run that resumes from an earlier checkpoint renames the later ones.
    let from = ["--resume", "s3://runs/a/step-00000006"];
    let said = stored.trained("back", 8, &with(&from));
    assert!(said.contains("moved a checkpoint of a later step to s3://runs/a/superseded-step-00000014"), "{said}");
    assert_eq!(case.losses("back"), case.losses("whole")[6..8]);
    let aside = [10, 12, 14].map(|step| format!("superseded-step-{step:08}"));
    assert_eq!(stored.folders("a"), [&["step-00000006".into(), "step-00000008".into()][..], &aside].concat());

    // The commands that read checkpoints accept addresses of stores.
    for command in [&["inspect"][..], &["verify"], &["export", "--out", "model"]] {
        let args = [&["checkpoint", command[0], "s3://runs/a"], &command[1..]].concat();
        let said = succeed(&mut stored.command(&args));
        assert!(said.contains("step-00000008"), "{said}");
    }
    // `verify` checks every checkpoint and names the objects of the store.
    let said = succeed(&mut stored.command(&["checkpoint", "verify", "s3://runs/a"]));
    assert_eq!(said, "s3://runs/a/step-00000006: intact\ns3://runs/a/step-00000008: intact\n");
    stored.client(
        "key = 'a/step-00000008/shard-00000-of-00001.safetensors'\n\
         body = bytearray(s3.get_object(Bucket='runs', Key=key)['Body'].read())\n\
         body[-1] ^= 1\n\
         s3.put_object(Bucket='runs', Key=key, Body=bytes(body))",
    );
    for (address, help) in [
        ("s3://runs/a", "resume from the newest intact checkpoint: --resume s3://runs/a/step-00000006"),
        (
            "s3://runs/a/step-00000008",
            "verify the other checkpoints next to it: zero-train checkpoint verify s3://runs/a",
        ),
    ] {
        let output = stored.command(&["checkpoint", "verify", address]).output().unwrap();
        let said = text(&output.stdout);
        assert_eq!(output.status.code(), Some(1), "{said}");
        let damaged = "damaged: s3://runs/a/step-00000008/shard-00000-of-00001.safetensors: `";
        assert!(said.contains(damaged) && said.contains(help), "{said}");
    }
    let output = stored.command(&["checkpoint", "verify", "s3://runs/none"]).output().unwrap();
    assert!(text(&output.stderr).contains("there is no checkpoint at s3://runs/none"), "{}", text(&output.stderr));
}

#[test]
fn a_store_that_fails_does_not_end_the_training() {
    let Some(stored) = Stored::new() else { return };
    let case = &stored.case;
    let none = |address: &str| {
        let set = format!("training.checkpoint_store={address}");
        text(&stored.run("none", 4, &["--set", &set]).output().unwrap().stderr)
    };
    let missing = none("s3://missing/a");
    assert!(missing.contains("training.checkpoint_store") && missing.contains("s3://missing/a"), "{missing}");
    assert!(!case.path("none/metrics.jsonl").exists() || case.metrics("none").is_empty(), "it has trained");
    for (address, problem) in
        [("https://host/a", "files can be uploaded only to"), ("s3:///a", "there is nothing between")]
    {
        let error = none(address);
        assert!(error.contains(problem) && error.contains("training.checkpoint_store"), "{error}");
    }

    // The bucket disappears while the run trains.
    let args = with(&["--config", "ds.yaml", "--out", "run", "--max-steps", "100000"]);
    let mut run = Alone::start(stored.command(&args));
    case.wait_for_steps("run", 4);
    stored.client("urllib.request.urlopen(urllib.request.Request(sys.argv[1] + '/moto-api/reset', method='POST'))");
    case.wait_for_steps("run", case.steps("run") + 21);
    assert!(!run.has_ended());
    signal(run.id(), "TERM");
    let (status, errors) = run.end();
    assert_eq!(status, Some(3), "{errors}");
    assert!(errors.contains("warning: cannot copy step ") && errors.contains("training continues"), "{errors}");
    assert!(
        errors.contains("error: the last checkpoint in run/checkpoints was not copied: s3://runs/a/step-"),
        "{errors}"
    );

    // The last checkpoint is on disk. The resumed run uploads it.
    let steps = case.metrics("run").len() as u64;
    stored.client("s3.create_bucket(Bucket='runs')");
    let said = stored.trained("run", steps, &with(&["--resume", "auto"]));
    assert!(said.contains(&format!("copied s3://runs/a/step-{steps:08}")), "{said}");
    assert_eq!(stored.folders("a"), [format!("step-{steps:08}")]);
}
