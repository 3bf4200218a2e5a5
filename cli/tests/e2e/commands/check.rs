//! `check` reports the same errors as a run, before the run opens data or devices. DeepSpeed configurations that
//! `check` accepts can be trained.

use crate::case;

use std::fs;

use case::{Case, text};

#[test]
fn check_reports_the_same_errors_as_a_run() {
    let case = Case::new();
    let refused = [
        ("data.train=ftp://bucket/a.txt", "`ftp` is not a supported scheme", "data.train"),
        ("data={train: corpus.txt, eval: gs:///a.txt}", "gs:///a.txt is not a valid URL", "data.eval"),
        (
            "data.tokenizer=https://host/tokenizer.json?x",
            "https://host/tokenizer.json?x is not a valid URL",
            "data.tokenizer",
        ),
        (
            "training.initial_weights=hf://../a.safetensors",
            "hf://../a.safetensors is not a valid URL",
            "initial_weights",
        ),
        ("training.output_dir=s3://bucket/run", "s3://bucket/run is a remote URL", "training.output_dir"),
        (
            "mlflow={enabled: true, tracking_uri: https://}",
            "https: is not the URL of a tracking server",
            "mlflow.tracking_uri",
        ),
        ("data.format=csv", "a language model trains on text or tokens, not on a table", "data.format"),
        ("model.vocab_size=61", "61 is smaller than the data's vocabulary of 256 tokens", "model.vocab_size"),
        ("model.n_layer=1", "cannot be split into 7 parts", "pipeline"),
        (
            "training.param_groups=[{kinds: norm, optimizer: {type: Custom}}]",
            "a custom optimizer updates all parameters, not only those of a group",
            "training.param_groups.0.optimizer.type",
        ),
        (
            "training.param_groups=[{kinds: norm, optimizer: {type: Muon}}]",
            "no trainable matrix that Muon can orthogonalize",
            "training.param_groups.0.optimizer.params.matrices",
        ),
    ];
    for (set, message, key) in refused {
        let stages = if key == "pipeline" { "pipeline.stages=7" } else { "pipeline.stages=1" };
        let ranks = if key == "pipeline" { "7" } else { "1" };
        let args = ["--config", "ds.yaml", "-n", ranks, "--set", set, "--set", stages];
        let check = case.command(&[&["check"], &args[..]].concat()).output().unwrap();
        let run = case.command(&[&args[..], &["--plain"]].concat()).output().unwrap();
        let (checked, ran) = (text(&check.stderr), text(&run.stderr));
        assert!(checked.contains(message) && checked.contains(key), "{set}: {checked}");
        assert_eq!((check.status.code(), check.stdout.len()), (run.status.code(), 0), "{set}: {ran}");
        assert_eq!(checked, ran, "{set}");
    }
    if cfg!(not(feature = "cuda")) {
        let errors = case.fail(2, &["check", "--config", "ds.yaml", "--set", "training.device=cuda"]);
        assert!(errors.contains("built without GPU support"), "{errors}");
    }
    assert!(!case.path("run").exists() && !case.path("s3:").exists(), "nothing is written");
    // A configuration for a user's own program may lack `model` and `data`. Its other sections are still checked.
    fs::write(case.path("own.json"), "{\"train_batch_size\": 8}").unwrap();
    let check = |set: &str| case.command(&["check", "--config", "own.json", "--set", set]).output().unwrap();
    assert!(check("steps_per_print=1").status.success());
    assert!(text(&check("data_types.grad_accum_dtype=bf16").stderr).contains("gradients can be kept in bf16 only if"));
}

#[test]
fn binary_files_are_trained_on_only_as_format_bytes() {
    let case = Case::new();
    let bytes: Vec<u8> = b"BZh9".iter().copied().chain((0..2000_u32).map(|i| (i * 7) as u8)).collect();
    fs::write(case.path("corpus.txt.bz2"), bytes).unwrap();
    let told = case.train_fails(3, &["--plain", "--max-steps", "2", "--set", "data.train=corpus.txt.bz2"]);
    for part in ["corpus.txt.bz2: a bzip2 archive, not text", "in: data.train", "unpack it", "`data.format: bytes`"] {
        assert!(told.contains(part), "{part}: {told}");
    }
    case.train(&["--plain", "--max-steps", "2", "--set", "data.train=corpus.txt.bz2", "--set", "data.format=bytes"]);
    fs::write(case.path("tokenizer.json"), "{}").unwrap();
    let args = ["check", "--config", "ds.yaml", "--set", "data={train: a, format: bytes, tokenizer: tokenizer.json}"];
    let told = text(&case.command(&args).output().unwrap().stderr);
    assert!(told.contains("`data.format: bytes` needs the byte tokenizer"), "{told}");
}

/// Axolotl's configuration for stage 3, with top-level keys that DeepSpeed ignores.
const PUBLISHED: &str = "{\"comms_config\": {\"verbose\": false}, \"monitor_config\": {\"enabled\": true},
  \"zero_optimization\": {\"stage\": 3, \"overlap_comm\": true, \"sub_group_size\": 0, \"reduce_bucket_size\": 0,
    \"stage3_prefetch_bucket_size\": 0, \"max_live_parameters\": 0, \"max_reuse_distance\": 0, \"cpu_offload\": true,
    \"param_persistence_threshold\": 0, \"gather_16bit_weights_on_model_save\": true},
  \"bf16\": {\"enabled\": \"auto\"}, \"train_micro_batch_size_per_gpu\": 2}";

#[test]
fn a_file_with_unknown_keys_runs_with_ignore_unknown_keys() {
    let case = Case::new();
    fs::write(case.path("published.json"), PUBLISHED).unwrap();
    let run = "model: {type: gpt2, vocab_size: 256, n_positions: 16, n_embd: 16, n_layer: 2, n_head: 2}\n\
               data: {train: corpus.txt}\ntraining: {max_steps: 6}";
    fs::write(case.path("run.yaml"), run).unwrap();
    let files = ["--config", "published.json", "--config", "run.yaml", "-n", "2", "--plain"];
    let told = case.fail(2, &files);
    assert_eq!(told.matches("`--ignore-unknown-keys` turns it into a warning").count(), 2, "{told}");

    let args = [&files[..], &["--ignore-unknown-keys", "--out", "a"]].concat();
    let output = case.command(&args).output().unwrap();
    let told = text(&output.stderr);
    assert!(output.status.success(), "{told}");
    assert_eq!(
        told.matches("warning: unknown keys are ignored: `comms_config`, `monitor_config`\n").count(),
        1,
        "{told}"
    );
    // Keys without their prefix, sizes of 0 and the old form give results that are bit-identical to the standard
    // form.
    let plain = "train_micro_batch_size_per_gpu: 2\nzero_optimization: {stage: 3}\n";
    fs::write(case.path("plain.yaml"), format!("{plain}{run}")).unwrap();
    case.succeed(&["--config", "plain.yaml", "-n", "2", "--quiet", "--out", "b"]);
    assert_eq!((case.losses("a"), case.shards("a", 6)), (case.losses("b"), case.shards("b", 6)));
}
