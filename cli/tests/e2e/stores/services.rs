//! Tests with simulated services: moto for S3, Azurite for Azure, and `scripts/hub-server.py` for the Hugging Face Hub.
//! `ZERO_TRAIN_STORES` names the folder in which `scripts/install-stores.sh` has installed moto and Azurite.

use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::{corpus, data, local_losses};
use crate::case::{Case, port, succeed, text};

/// A server process. Dropping it kills the process.
pub(super) struct Service(Child);

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(super) fn installed() -> Option<PathBuf> {
    let folder = std::env::var_os("ZERO_TRAIN_STORES");
    if folder.is_none() {
        println!("skipped: ZERO_TRAIN_STORES names no folder of scripts/install-stores.sh");
    }
    folder.map(PathBuf::from)
}

/// Starts a server with its port as the last argument, and waits until it answers.
pub(super) fn serve(mut command: Command) -> (Service, u16) {
    let port = port();
    let child = command.arg(port.to_string()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let mut service = Service(child);
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(service.0.try_wait().unwrap().is_none(), "{command:?} ended");
        std::thread::sleep(Duration::from_millis(50));
    }
    (service, port)
}

pub(super) fn python(program: &Path, script: &str, arguments: &[&str]) -> String {
    succeed(Command::new(program).args(["-c", script]).args(arguments))
}

/// Returns a case with the corpus, and the losses of training on it.
fn case() -> (Case, Vec<String>) {
    let case = Case::new();
    let losses = local_losses(&case);
    (case, losses)
}

fn train(case: &Case, out: &str, sources: &str, environment: &[(&str, &str)]) -> Result<Vec<String>, String> {
    let cache = case.path("cache").display().to_string();
    let mut command = case.command(&["--config", "ds.yaml", "--quiet", "--max-steps", "4", "--out", out]);
    command.args(["--set", &data(sources, &cache)]).env("HOME", case.path("home"));
    let output = command.envs(environment.iter().copied()).output().unwrap();
    if output.status.success() { Ok(case.losses(out)) } else { Err(text(&output.stderr)) }
}

#[test]
fn s3() {
    let Some(folder) = installed() else { return };
    let (case, losses) = case();
    let mut command = Command::new(folder.join("bin/moto_server"));
    command.args(["-H", "127.0.0.1", "-p"]);
    let (_server, port) = serve(command);
    let endpoint = format!("http://127.0.0.1:{port}");
    let script = "import boto3, sys\n\
        s3 = boto3.client('s3', endpoint_url=sys.argv[1], region_name='us-east-1', aws_access_key_id='a', aws_secret_access_key='b')\n\
        s3.create_bucket(Bucket='books')\n\
        s3.upload_file('a.txt', 'books', 'deep/er/a.txt')\n\
        s3.put_object(Bucket='books', Key='deep/er/b.txt', Body=open('b.txt', 'rb'))\n\
        s3.put_object(Bucket='books', Key='deep/other.md', Body=b'x')\n";
    let program = folder.join("bin/python");
    succeed(Command::new(&program).args(["-c", script, &endpoint]).current_dir(case.path("")));
    let keys = [("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"), ("AWS_REGION", "us-east-1")];
    let variables = [&keys[..], &[("AWS_ENDPOINT_URL", endpoint.as_str())]].concat();
    for (out, sources) in
        [("glob", "\"s3://books/deep/**/*.txt\""), ("two", "[s3://books/deep/er/a.txt, s3://books/deep/er/b.txt]")]
    {
        assert_eq!(train(&case, out, sources, &variables), Ok(losses.clone()), "{sources}");
    }
    // The keys, the region and the endpoint come from a profile.
    std::fs::create_dir_all(case.path("home/.aws")).unwrap();
    std::fs::write(case.path("home/.aws/credentials"), "[p]\naws_access_key_id = a\naws_secret_access_key = b\n")
        .unwrap();
    let config = format!("[profile p]\nregion = us-east-1\nendpoint_url = {endpoint}\n");
    std::fs::write(case.path("home/.aws/config"), config).unwrap();
    let profile = [("AWS_PROFILE", "p")];
    assert_eq!(train(&case, "profile", "\"s3://books/deep/**/*.txt\"", &profile), Ok(losses));
    // A model is exported to the store and read from there.
    let export = |out: &str| {
        let mut command = case.command(&["checkpoint", "export", "local", "--out", out]);
        let output = command.envs(variables.iter().copied()).output().unwrap();
        (output.status.success(), text(&output.stdout) + &text(&output.stderr))
    };
    let (is_done, said) = export("s3://books/model");
    assert!(is_done && said.contains("-> s3://books/model\n"), "{said}");
    assert!(export("copy").0);
    let (is_done, said) = export("s3://books/model");
    assert!(!is_done && said.contains("already exists"), "{said}");
    let losses_from = |pretrained: &str, out: &str| {
        let set = format!("model={{pretrained: {pretrained:?}}}");
        let mut command = case.command(&["--config", "ds.yaml", "--max-steps", "3", "--out", out, "--set", &set]);
        succeed(command.envs(variables.iter().copied()).env("ZERO_TRAIN_CACHE", case.path("models")));
        case.losses(out)
    };
    assert_eq!(losses_from("s3://books/model", "from-store"), losses_from("copy", "from-copy"));
    let missing = train(&case, "none", "s3://books/none.txt", &variables).unwrap_err();
    assert!(missing.contains("error: s3://books/none.txt does not exist"), "{missing}");
    let folder = train(&case, "none", "s3://books/deep", &variables).unwrap_err();
    assert!(folder.contains("error: s3://books/deep is a folder of 3 objects, not an object"), "{folder}");
}

#[test]
fn azure() {
    let Some(folder) = installed() else { return };
    let (case, losses) = case();
    let mut command = Command::new(folder.join("node_modules/.bin/azurite-blob"));
    command.args(["--silent", "--skipApiVersionCheck", "--inMemoryPersistence", "--blobPort"]);
    let (_server, port) = serve(command);
    let key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";
    let endpoint = format!("http://127.0.0.1:{port}/devstoreaccount1");
    let script = "import sys\nfrom azure.storage.blob import BlobServiceClient\n\
        service = BlobServiceClient(sys.argv[1], credential=sys.argv[2])\n\
        books = service.create_container('books')\n\
        [books.upload_blob('deep/' + name, open(sys.argv[3] + '/' + name, 'rb')) for name in ('a.txt', 'b.txt')]\n";
    python(&folder.join("bin/python"), script, &[&endpoint, key, &case.path("").display().to_string()]);
    let variables = [
        ("AZURE_STORAGE_ACCOUNT_NAME", "devstoreaccount1"),
        ("AZURE_STORAGE_ACCOUNT_KEY", key),
        ("AZURE_STORAGE_ENDPOINT", endpoint.as_str()),
    ];
    assert_eq!(train(&case, "run", "\"az://books/deep/*.txt\"", &variables), Ok(losses));
    // A run writes its checkpoints to the store. Another run resumes from the second of them.
    let stored = |out: &str, more: &[&str]| {
        let mut command = case.command(&["--config", "ds.yaml", "--max-steps", "3", "--out", out]);
        command.args(["--set", "training={checkpoint_store: az://books/run, save_every: 1, keep_last: 0}"]).args(more);
        let said = succeed(command.env("ZERO_TRAIN_CACHE", case.path("copies")).envs(variables));
        (said, case.losses(out))
    };
    let (said, all) = stored("here", &[]);
    assert!(said.contains("copied az://books/run/step-00000003 in "), "{said}");
    let (said, rest) = stored("there", &["--resume", "az://books/run/step-00000002"]);
    assert!(said.contains("moved a checkpoint of a later step to az://books/run/superseded-step-00000003"), "{said}");
    assert_eq!(rest, all[2..]);
    let wrong = [variables[0], ("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmc="), variables[2]];
    let refused = train(&case, "none", "az://books/deep/c.txt", &wrong).unwrap_err();
    assert!(refused.contains("az://books/deep/c.txt: access was refused"), "{refused}");
}

/// The Hub's server needs only Python, so most of this test runs without `ZERO_TRAIN_STORES`.
#[test]
fn hugging_face_hub() {
    let program = Path::new("python3");
    if !Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success()) {
        println!("skipped: python3 does not start");
        return;
    }
    let (case, losses) = case();
    let repository = case.path("hub/datasets/who/books/deep");
    std::fs::create_dir_all(&repository).unwrap();
    for (name, content) in corpus() {
        std::fs::write(repository.join(name), content).unwrap();
    }
    std::fs::write(repository.join("small.md"), "below the size of LFS").unwrap();
    let split = case.path("hub/datasets/who/split/data");
    std::fs::create_dir_all(&split).unwrap();
    for (index, (_, content)) in corpus().into_iter().enumerate() {
        std::fs::write(split.join(format!("train-0000{index}-of-00002.txt")), content).unwrap();
    }
    std::fs::write(split.join("test-00000-of-00001.txt"), "not wanted").unwrap();
    std::fs::write(split.join("../README.md"), "# A data set").unwrap();
    // The Hub also serves a model that `checkpoint export` has written.
    case.export("local", "hub/models/who/gpt");
    std::fs::write(case.path("hub/models/who/gpt/pytorch_model.bin"), "not wanted").unwrap();

    let (_server, endpoint) = hub(&case, &["secret"]);
    let endpoint = endpoint.as_str();
    let cache = case.path("models").display().to_string();
    let variables = [("HF_ENDPOINT", endpoint), ("HF_TOKEN", "secret"), ("ZERO_TRAIN_CACHE", cache.as_str())];
    for (out, sources) in [
        ("glob", "\"hf://datasets/who/books/deep/*.txt\""),
        ("split", "null, datasets: [{path: \"hf://datasets/who/split\", split: train}]"),
        ("files", "[hf://datasets/who/books@main/deep/a.txt, hf://datasets/who/books/deep/b.txt]"),
    ] {
        assert_eq!(train(&case, out, sources, &variables), Ok(losses.clone()), "{sources}");
    }
    let refused = train(&case, "none", "hf://datasets/who/books/deep/a.txt", &[variables[0]]).unwrap_err();
    assert!(refused.contains("access was refused at byte 0: Invalid credentials"), "{refused}");

    // Two ranks, each a process, load a model by its name. The result is the same as from the local folder.
    let model = |pretrained: &str, out: &str| {
        let set = format!("model={{pretrained: {pretrained}}}");
        let mut command =
            case.command(&["--config", "ds.yaml", "--max-steps", "3", "-n", "2", "--out", out, "--set", &set]);
        succeed(command.args(["--set", "launcher.transport=shared_memory"]).envs(variables));
        case.losses(out)
    };
    assert_eq!(model("hf://who/gpt", "from-hub"), model("hub/models/who/gpt", "from-folder"));
    let downloaded = Command::new("find").arg(case.path("models")).args(["-name", "*.bin"]).output().unwrap();
    assert_eq!(text(&downloaded.stdout), "");

    encrypted(&case, &losses);

    // Hugging Face's own client can download from the same server.
    let Some(installed) = installed() else { return };
    let script = "import sys, huggingface_hub as hub\n\
        print(hub.snapshot_download('who/books', repo_type='dataset', local_dir=sys.argv[1], token='secret'))\n";
    let mut command = Command::new(installed.join("bin/python"));
    command.args(["-c", script]).arg(case.path("copy"));
    succeed(command.env("HF_ENDPOINT", endpoint).env("HF_HOME", case.path("hf-home")));
    // Runs read the client's cache when the server is not available.
    let script = "import huggingface_hub as hub\n\
        hub.snapshot_download('who/books', repo_type='dataset', token='secret')\n\
        hub.snapshot_download('who/gpt', token='secret')\n";
    let home = case.path("hf-home").display().to_string();
    let mut command = Command::new(installed.join("bin/python"));
    succeed(command.args(["-c", script]).envs([("HF_ENDPOINT", endpoint), ("HF_HOME", &home)]));
    let variables = [("HF_ENDPOINT", "http://127.0.0.1:9"), ("HF_HUB_OFFLINE", "1"), ("HF_HOME", home.as_str())];
    assert_eq!(train(&case, "offline", "\"hf://datasets/who/books/deep/*.txt\"", &variables), Ok(losses));
    let mut command = case.command(&["--config", "ds.yaml", "--max-steps", "3", "--out", "offline-model"]);
    command.args(["--set", "model={pretrained: hf://who/gpt}", "--set", "train_batch_size=4"]);
    succeed(command.envs(variables).env("ZERO_TRAIN_CACHE", case.path("models-2")));
    assert_eq!(case.losses("offline-model"), case.losses("from-hub"));
    for (name, content) in corpus() {
        assert!(std::fs::read_to_string(case.path("copy/deep").join(name)).unwrap() == content);
    }
}

/// Reads a cache that the test writes in the layout that Hugging Face documents.
#[test]
fn hugging_face_hub_cache() {
    let (case, losses) = case();
    let repository = case.path("hf/hub/datasets--who--books");
    let snapshot = repository.join("snapshots/0123abcd/deep");
    for folder in [&snapshot, &repository.join("refs"), &repository.join("blobs")] {
        std::fs::create_dir_all(folder).unwrap();
    }
    std::fs::write(repository.join("refs/main"), "0123abcd").unwrap();
    for (name, content) in corpus() {
        std::fs::write(repository.join("blobs").join(format!("b-{name}")), content).unwrap();
        std::os::unix::fs::symlink(format!("../../../blobs/b-{name}"), snapshot.join(name)).unwrap();
    }
    let home = case.path("hf").display().to_string();
    let variables = [("HF_HUB_OFFLINE", "1"), ("HF_HOME", home.as_str()), ("HF_ENDPOINT", "http://127.0.0.1:9")];
    for (out, sources) in [
        ("glob", "\"hf://datasets/who/books/deep/*.txt\""),
        ("commit", "\"hf://datasets/who/books@0123abcd/**/*.txt\""),
    ] {
        assert_eq!(train(&case, out, sources, &variables), Ok(losses.clone()), "{sources}");
    }
    for (sources, problem) in [
        ("hf://datasets/who/books@v2/deep/a.txt", "does not have the revision `v2`"),
        ("hf://datasets/who/none/a.txt", "does not have the revision `main`"),
        ("hf://datasets/who/books/deep/c.txt", "hf://datasets/who/books/deep/c.txt does not exist"),
    ] {
        let error = train(&case, "none", sources, &variables).unwrap_err();
        assert!(error.contains(problem), "{error}");
    }
}

/// Starts the Hub's server on the folder `hub` of a case. Returns the server and its address.
fn hub(case: &Case, arguments: &[&str]) -> (Service, String) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/hub-server.py");
    let mut command = Command::new("python3");
    let mut child = command.arg(script).arg(case.path("hub")).args(arguments).stdout(Stdio::piped()).spawn().unwrap();
    let mut endpoint = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut endpoint).unwrap();
    (Service(child), endpoint.trim().into())
}

/// Trains over TLS with a new certificate. This succeeds if `SSL_CERT_FILE` names the certificate, and fails otherwise.
fn encrypted(case: &Case, losses: &[String]) {
    let (certificate, key) = (case.path("certificate.pem"), case.path("key.pem"));
    let mut command = Command::new("openssl");
    command.args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]);
    command.args(["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]);
    match command.arg("-keyout").arg(&key).arg("-out").arg(&certificate).output() {
        Ok(output) if output.status.success() => {}
        _ => return println!("skipped: openssl makes no certificate"),
    }
    let (certificate, key) = (certificate.display().to_string(), key.display().to_string());
    let (_server, endpoint) = hub(case, &["secret", &certificate, &key]);
    let variables = [("HF_ENDPOINT", endpoint.as_str()), ("HF_TOKEN", "secret"), ("SSL_CERT_FILE", &certificate)];
    let cache = case.path("cache-of-tls").display().to_string();
    let set = data("\"hf://datasets/who/books/deep/*.txt\"", &cache);
    let train = |out: &str, variables: &[(&str, &str)]| {
        let mut command = case.command(&["--config", "ds.yaml", "--quiet", "--max-steps", "4", "--out", out]);
        command.args(["--set", &set]).envs(variables.iter().copied()).output().unwrap()
    };
    let output = train("tls", &variables);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(case.losses("tls"), losses);
    let output = train("untrusted", &variables[..2]);
    let errors = text(&output.stderr);
    assert!(!output.status.success() && errors.contains("certificate"), "{errors}");
}
