//! Runs the binary in a temporary folder with a corpus and a configuration. Shared by the tests of the binary.

#[path = "../../../comm/tests/port/mod.rs"]
mod free_port;

use std::fs;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

pub(crate) use free_port::free_port as port;

/// A temporary folder with a corpus and the configuration of a tiny model.
pub(crate) struct Case {
    folder: TempDir,
}

/// The model of [`CONFIG`].
pub(crate) const MODEL: &str = "{type: gpt2, vocab_size: 256, n_positions: 16, n_embd: 16, n_layer: 2, n_head: 2}";

pub(crate) const CONFIG: &str = "
train_micro_batch_size_per_gpu: 2
model: {type: gpt2, vocab_size: 256, n_positions: 16, n_embd: 16, n_layer: 2, n_head: 2}
data: {train: corpus.txt, eval_fraction: 0.1}
optimizer: {type: AdamW, params: {lr: 0.01, weight_decay: 0.1}}
zero_optimization: {stage: 3, stage3_param_persistence_threshold: 0, stage3_max_reuse_distance: 0}
training: {max_steps: 20, output_dir: run}
launcher: {timeout_seconds: 20}
";

impl Case {
    pub(crate) fn new() -> Self {
        let case = Self { folder: tempfile::tempdir().unwrap() };
        let text: String = (0..400).map(|i| format!("line {i} of a corpus that repeats itself\n")).collect();
        fs::write(case.path("corpus.txt"), text).unwrap();
        fs::write(case.path("ds.yaml"), CONFIG).unwrap();
        case
    }

    /// Replaces the model in the configuration.
    pub(crate) fn configure_model(&self, model: &str) {
        let config = CONFIG.replace(MODEL, model);
        assert_ne!(config, CONFIG, "the configuration does not contain the model");
        fs::write(self.path("ds.yaml"), config).unwrap();
    }

    /// Writes conversations of 4 to 34 tokens with their tokenizer and template. Returns the setting `data` for them.
    pub(crate) fn conversations(&self, sequence_length: usize, more: &str) -> String {
        let words: Vec<String> = (0..60).map(|i| format!("w{i}")).collect();
        let special = serde_json::json!({"id": 0, "content": "</s>", "single_word": false, "lstrip": false,
                                         "rstrip": false, "normalized": false, "special": true});
        let names = ["</s>", "user", "assistant", "."].into_iter().chain(words.iter().map(String::as_str));
        let vocabulary: serde_json::Map<String, Value> =
            names.enumerate().map(|(id, name)| (name.into(), id.into())).collect();
        let tokenizer = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
            "decoder": null, "pre_tokenizer": {"type": "WhitespaceSplit"}, "added_tokens": [special],
            "model": {"type": "WordLevel", "unk_token": ".", "vocab": vocabulary},
        });
        let said = |i: usize, role: &str, length: usize| {
            let words: Vec<&str> = (0..length).map(|at| &*words[(i * 7 + at * at) % 60]).collect();
            serde_json::json!({"role": role, "content": words.join(" ")})
        };
        let chat = |i: usize| {
            let messages = [said(i, "user", 1 + i % 4), said(i + 3, "assistant", 1 + i * i % 27)];
            serde_json::json!({"messages": messages}).to_string()
        };
        let template = "{% for m in messages %}{{ m.role + ' ' + m.content + ' . ' }}{% endfor %}\
                        {% if add_generation_prompt %}assistant {% endif %}";
        for (name, content) in [
            ("tokenizer.json", tokenizer.to_string()),
            ("tokenizer_config.json", r#"{"eos_token": "</s>"}"#.into()),
            ("template.jinja", template.into()),
            ("chats.jsonl", (0..80).map(chat).collect::<Vec<_>>().join("\n")),
        ] {
            fs::write(self.path(name), content).unwrap();
        }
        format!(
            "data={{train: chats.jsonl, format: chat, tokenizer: tokenizer.json, sequence_length: {sequence_length}, \
             chat: {{chat_template: template.jinja}}, {more}}}"
        )
    }

    /// Writes pairs of answers beside [`Case::conversations`]. Returns the setting `data` for them.
    pub(crate) fn pairs(&self, sequence_length: usize, more: &str) -> String {
        let data = self.conversations(sequence_length, more);
        let words =
            |from: usize, count: usize| (from..from + count).map(|i| format!("w{} ", i % 60)).collect::<String>();
        let pair = |i: usize| {
            let prompt = serde_json::json!([{"role": "user", "content": words(i * 7, 1 + i % 5)}]);
            let answer = |text: String| serde_json::json!([{"role": "assistant", "content": text}]);
            let [chosen, rejected] = [words(i, 2 + i % 9), words(i * 3 + 30, 1 + i % 13)].map(answer);
            serde_json::json!({"prompt": prompt, "chosen": chosen, "rejected": rejected}).to_string()
        };
        fs::write(self.path("pairs.jsonl"), (0..40).map(pair).collect::<Vec<_>>().join("\n")).unwrap();
        data.replace("chats.jsonl", "pairs.jsonl")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        self.command_of(Path::new(env!("CARGO_BIN_EXE_zero-train")), args)
    }

    pub(crate) fn command_of(&self, program: &Path, args: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.args(args).current_dir(self.folder.path()).stdin(Stdio::null());
        let of_launcher =
            ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ZERO_TRAIN_TOKEN"];
        // CI sets the number of threads for the tests. The binary must choose it.
        for name in of_launcher.into_iter().chain(["RAYON_NUM_THREADS"]) {
            command.env_remove(name);
        }
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Output {
        self.command(&[&["--config", "ds.yaml"], args].concat()).output().unwrap()
    }

    /// Runs the binary, asserts success, and returns standard output.
    pub(crate) fn succeed(&self, args: &[&str]) -> String {
        succeed(&mut self.command(args))
    }

    /// Runs the binary, asserts that it fails with this exit status, and returns standard error.
    pub(crate) fn fail(&self, status: i32, args: &[&str]) -> String {
        fail(status, &mut self.command(args))
    }

    /// Runs the binary, asserts success, and parses standard output as JSON.
    pub(crate) fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.succeed(args)).unwrap()
    }

    /// Trains, asserts success, and returns standard output.
    pub(crate) fn train(&self, args: &[&str]) -> String {
        self.succeed(&[&["--config", "ds.yaml"], args].concat())
    }

    /// Trains in a way that must fail with this exit status. Returns standard error.
    pub(crate) fn train_fails(&self, status: i32, args: &[&str]) -> String {
        self.fail(status, &[&["--config", "ds.yaml"], args].concat())
    }

    /// Exports a run or a checkpoint, and returns standard output.
    pub(crate) fn export(&self, folder: &str, out: &str) -> String {
        self.succeed(&["checkpoint", "export", folder, "--out", out])
    }

    pub(crate) fn metrics(&self, out: &str) -> Vec<Value> {
        let lines = fs::read_to_string(self.path(out).join("metrics.jsonl")).unwrap();
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Returns the number of steps in the metrics, or 0 if the run has not begun.
    pub(crate) fn steps(&self, out: &str) -> usize {
        fs::read_to_string(self.path(out).join("metrics.jsonl")).map_or(0, |text| text.lines().count())
    }

    /// Waits until a run has trained `count` steps.
    pub(crate) fn wait_for_steps(&self, out: &str, count: usize) {
        wait_for(|| self.steps(out) >= count);
    }

    pub(crate) fn losses(&self, out: &str) -> Vec<String> {
        self.metrics(out).iter().map(|line| line["loss"].to_string()).collect()
    }

    pub(crate) fn report(&self, out: &str) -> Value {
        serde_json::from_str(&fs::read_to_string(self.path(out).join("report.json")).unwrap()).unwrap()
    }

    /// Returns the names of the checkpoints of a run.
    pub(crate) fn checkpoints(&self, out: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(out).join("checkpoints")).into_iter().flatten();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.filter(|name| name.starts_with("step-")).collect();
        names.sort();
        names
    }

    /// Returns the `shards` of a checkpoint's manifest. Their checksums cover every bit of the parameters and the
    /// optimizer state.
    pub(crate) fn shards(&self, out: &str, step: u64) -> Value {
        let manifest = self.path(out).join(format!("checkpoints/step-{step:08}/manifest.json"));
        let manifest: Value = serde_json::from_str(&fs::read_to_string(manifest).unwrap()).unwrap();
        manifest["shards"].clone()
    }
}

/// Sets the environment variables that a launcher passes to a rank. `rank` and `local` are `[index, count]`, `master`
/// is the address and port where the ranks connect.
pub(crate) fn place(command: &mut Command, rank: [usize; 2], local: [usize; 2], master: (&str, u16)) {
    for (name, [index, of]) in [(["RANK", "WORLD_SIZE"], rank), (["LOCAL_RANK", "LOCAL_WORLD_SIZE"], local)] {
        command.env(name[0], index.to_string()).env(name[1], of.to_string());
    }
    command.env("MASTER_ADDR", master.0).env("MASTER_PORT", master.1.to_string());
}

/// A process that the test has started without `zero-train`'s launcher, usually a rank. Dropping it kills the process.
pub(crate) struct Alone(Child);

impl Alone {
    pub(crate) fn start(mut command: Command) -> Self {
        Self(command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap())
    }

    /// Starts one of `ranks` ranks on this host.
    pub(crate) fn rank(mut command: Command, rank: usize, ranks: usize, port: u16) -> Self {
        place(&mut command, [rank, ranks], [rank, ranks], ("127.0.0.1", port));
        Self::start(command)
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some()
    }

    /// Waits for the process. Returns its exit status and its standard error.
    pub(crate) fn end(mut self) -> (Option<i32>, String) {
        let mut errors = Vec::new();
        self.0.stderr.take().unwrap().read_to_end(&mut errors).unwrap();
        (self.0.wait().unwrap().code(), text(&errors))
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a command, asserts success, and returns standard output.
pub(crate) fn succeed(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Runs a command, asserts that it fails with this exit status, and returns standard error.
pub(crate) fn fail(status: i32, command: &mut Command) -> String {
    let output = command.output().unwrap();
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{command:?}: {errors}");
    errors
}

/// Returns the arguments that override these settings.
pub(crate) fn sets<'a>(settings: &[&'a str]) -> Vec<&'a str> {
    settings.iter().flat_map(|setting| ["--set", *setting]).collect()
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub(crate) fn wait_for(mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < Duration::from_secs(60), "the condition was not met within a minute");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) fn signal(process: u32, name: &str) {
    let status = Command::new("kill").arg(format!("-{name}")).arg(process.to_string()).status().unwrap();
    assert!(status.success() && status.signal().is_none());
}

/// Returns the process ID of the rank with local rank `rank` among the children of `launcher`.
pub(crate) fn rank_process(launcher: u32, rank: usize) -> u32 {
    let children = fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).unwrap();
    let wanted = format!("LOCAL_RANK={rank}");
    let is_rank = |process: &str| {
        let environment = fs::read(Path::new("/proc").join(process).join("environ")).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|entry| entry == wanted.as_bytes())
    };
    children.split_whitespace().find(|process| is_rank(process)).expect("the rank's process").parse().unwrap()
}
