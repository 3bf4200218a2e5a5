//! The binary with pretrained weights: training from them, resuming without their folder, and converting them to a
//! checkpoint.

use crate::case;

use std::fs;

use super::checkpoint::checkpoint;
use case::{Case, text};
use serde_json::{Value, json};

/// Creates a case with a Hugging Face folder `hf` of a byte-level model, and a configuration that starts from it.
fn case() -> Case {
    let case = Case::new();
    case.train(&["--quiet", "-n", "1", "--max-steps", "3", "--out", "first"]);
    case.export("first", "hf");
    case.configure_model("{pretrained: hf}");
    case
}

#[test]
fn a_run_starts_from_the_folder_and_resumes_without_it() {
    let case = case();
    let said = case.train(&["-n", "2", "--max-steps", "6", "--out", "whole"]);
    assert!(said.contains("pretrained: weights of hf\n"), "{said}");
    // The folder's weights come from the run `first`, so training starts with a lower loss than that run did.
    let loss = |out: &str, step: usize| case.losses(out)[step].parse::<f32>().unwrap();
    assert!(loss("whole", 0) < loss("first", 0), "{} {}", loss("whole", 0), loss("first", 0));

    case.train(&["--quiet", "-n", "2", "--max-steps", "3", "--out", "run"]);
    fs::remove_dir_all(case.path("hf")).unwrap();
    let resolved = case.path("run/resolved.yaml").display().to_string();
    let output = case.command(&["--config", &resolved, "--resume", "auto", "--max-steps", "6"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(
        text(&output.stderr).contains("hf/config.json does not exist: the model is built from the configuration alone")
    );
    assert!(!text(&output.stdout).contains("pretrained:"), "{}", text(&output.stdout));
    assert_eq!(case.losses("run"), case.losses("whole"));
    assert_eq!(case.shards("run", 6), case.shards("whole", 6));

    // A new run needs the folder. Without it, no rank is started.
    let said = case.fail(3, &["--config", &resolved]);
    assert!(said.contains("error: hf: No such file"), "{said}");
    assert_eq!(said.matches("error:").count(), 1, "{said}");
    let said = case.train_fails(2, &[]);
    assert!(said.contains("hf/config.json does not exist") && said.contains("resolved.yaml"), "{said}");
    assert!(!said.contains("Hub"), "{said}");
    let said = case.train_fails(2, &["--set", "model.pretrained=owner/name"]);
    assert!(said.contains("for a model on the Hugging Face Hub, use hf://owner/name; otherwise"), "{said}");
}

#[test]
fn a_pretrained_model_passes_verify_on_two_ranks() {
    let case = case();
    let said = case.train(&["-n", "2", "--verify", "2"]);
    assert!(said.contains("verified"), "{said}");
}

#[test]
fn an_imported_model_is_a_valid_checkpoint() {
    let case = case();
    let out = case.succeed(&["checkpoint", "import", "hf", "--out", "imported"]);
    assert!(out.contains("hf -> imported/step-00000000\n28 parameters, "), "{out}");
    let value = case.json(&["checkpoint", "inspect", "imported", "--json"]);
    assert_eq!((value["step"].as_u64(), value["states"].as_array().unwrap().len()), (Some(0), 0));
    let out = case.succeed(&["checkpoint", "verify", "imported"]);
    assert!(out.contains("step-00000000: intact"), "{out}");
    case.export("imported", "again");
    for file in ["model.safetensors", "config.json"] {
        let read = |folder: &str| fs::read(case.path(folder).join(file)).unwrap();
        assert!(read("hf") == read("again"), "{file}");
    }
    assert_eq!(fs::read_to_string(case.path("imported/latest")).unwrap(), "step-00000000\n");

    // The same run starts once from the folder and once from the import, when the folder no longer exists.
    case.train(&["--quiet", "-n", "2", "--max-steps", "4", "--out", "a"]);
    let first = fs::read_to_string(case.path("a/resolved.yaml")).unwrap();
    fs::write(case.path("ds.yaml"), first.replace("pretrained: hf", "pretrained: null")).unwrap();
    fs::remove_dir_all(case.path("hf")).unwrap();
    case.train(&["--quiet", "-n", "2", "--out", "b", "--max-steps", "4", "--resume", "imported/step-00000000"]);
    assert_eq!(case.losses("a"), case.losses("b"));
    assert_eq!(case.shards("a", 4), case.shards("b", 4));
    // The import can also be trained with another optimizer, which has different states.
    let other = ["--max-steps", "1", "--set", "optimizer={type: Lion}"];
    case.train(&[&["--quiet", "--out", "c", "--resume", "imported/step-00000000"], &other[..]].concat());
    assert_eq!(case.losses("c")[0], case.losses("a")[0]);
}

#[test]
fn a_failed_import_leaves_no_files() {
    let case = case();
    let refused = |folder: &str, out: &str, status: i32, said: &str| {
        let (got, told) = checkpoint(&case, &["import", folder, "--out", out]);
        assert!(got == status && told.starts_with("error: ") && told.contains(said), "{got}: {told}");
    };
    refused("nowhere", "new", 2, "nowhere/config.json does not exist\n  in: <DIR>\n  help: ");
    fs::remove_file(case.path("hf/model.safetensors")).unwrap();
    refused("hf", "new", 3, "contains neither model.safetensors nor");
    fs::copy(case.path("first/resolved.yaml"), case.path("hf/model.safetensors")).unwrap();
    refused("hf", "new", 3, "the header claims");
    assert!(!case.path("new").exists());
    case.export("first", "second");
    refused("second", "first/checkpoints", 3, "the folder already contains checkpoints");
    // A truncated file is detected before anything is written.
    let path = case.path("second/model.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 50]).unwrap();
    refused("second", "new", 3, "bytes, but its header describes");
    assert!(!case.path("new").exists());
    // A head that differs from its embedding is detected while tensors are copied.
    let (length, data) = bytes.split_at(8);
    let (header, data) = data.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
    let mut header: Value = serde_json::from_slice(header).unwrap();
    let mut head = header["transformer.wte.weight"].clone();
    let size = head["data_offsets"][1].as_u64().unwrap() - head["data_offsets"][0].as_u64().unwrap();
    head["data_offsets"] = json!([data.len(), data.len() as u64 + size]);
    header["lm_head.weight"] = head;
    let header = header.to_string();
    let length = (header.len() as u64).to_le_bytes();
    fs::write(&path, [&length[..], header.as_bytes(), data, &vec![0; size as usize]].concat()).unwrap();
    refused("second", "new", 3, "`lm_head.weight` differs from `transformer.wte.weight`");
    assert_eq!(fs::read_dir(case.path("new")).unwrap().count(), 0);
}

#[test]
fn the_tokenizer_must_match_the_model() {
    let case = Case::new();
    case.train(&["--quiet", "--max-steps", "1", "--out", "first", "--set", "model.vocab_size=300"]);
    case.export("first", "hf");
    case.configure_model("{pretrained: hf}");
    let refused = |args: &[&str], said: &str| {
        let told = case.train_fails(2, &[&["--max-steps", "1"], args].concat());
        assert!(told.contains(said), "{told}");
    };
    refused(
        &[],
        "does not match the model in hf, which has 300 tokens; the folder has no tokenizer.json\n  in: data.tokenizer",
    );
    case.train(&["--quiet", "--max-steps", "1", "--set", "data.tokenizer=byte"]);
    let words: Vec<String> = (0..301).map(|token| format!("\"w{token}\": {token}")).collect();
    let tokenizer = |words: &[String]| {
        let json = format!(
            r#"{{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
                "pre_tokenizer": {{"type": "Whitespace"}}, "post_processor": null, "decoder": null,
                "model": {{"type": "WordLevel", "vocab": {{{}}}, "unk_token": "w0"}}}}"#,
            words.join(", ")
        );
        fs::write(case.path("hf/tokenizer.json"), json).unwrap();
    };
    tokenizer(&words);
    refused(&[], "the tokenizer has 301 tokens, but the pretrained model has 300\n  in: data.tokenizer");
    tokenizer(&words[..300]);
    let said = case.train(&["--max-steps", "1"]);
    assert!(said.contains("pretrained: weights and tokenizer of hf\n"), "{said}");
    // An import records the location of the tokenizer, so that an export can copy it.
    case.succeed(&["checkpoint", "import", "hf", "--out", "imported"]);
    let out = case.export("imported", "out");
    assert!(out.contains("tokenizer.json"), "{out}");
}
