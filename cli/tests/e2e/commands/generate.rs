//! `zero-train generate`: from runs, exports and adapters, on the terminal and from file to file, and its errors.

use std::fs;
use std::io::Write;
use std::process::Stdio;

use serde_json::{Value, json};

use crate::case::{Case, text};

/// Returns exit status, standard output and standard error.
fn generate(case: &Case, args: &[&str]) -> (i32, String, String) {
    let output = case.command(&[&["generate"], args].concat()).output().unwrap();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

fn generated(case: &Case, args: &[&str]) -> String {
    case.succeed(&[&["generate"], args].concat())
}

/// Returns a case whose run `run` has trained a byte-level model.
fn trained() -> Case {
    let case = Case::new();
    case.train(&["--quiet", "-n", "2"]);
    case
}

#[test]
fn a_run_a_checkpoint_and_an_export_give_the_same_text() {
    let case = trained();
    let args = ["--prompt", "line", "-n", "8", "--temperature", "0.9", "--seed", "3"];
    let of = |folder: &str, more: &[&str]| generated(&case, &[&[folder], &args[..], more].concat());
    let run = of("run", &[]);
    assert!(run.ends_with('\n') && run.len() > 2, "{run:?}");
    assert_eq!(of("run/checkpoints/step-00000020", &[]), run);
    assert_eq!(of("run", &["--threads", "1"]), run);
    case.export("run", "exported");
    let input = json!({"prompt": "line", "id": 7}).to_string() + "\n" + &json!({"prompt": "of a"}).to_string() + "\n";
    fs::write(case.path("prompts.jsonl"), input).unwrap();
    let rest = &args[2..];
    generated(&case, &[&["run", "--input", "prompts.jsonl", "--output", "out.jsonl"], rest].concat());
    let lines = fs::read_to_string(case.path("out.jsonl")).unwrap();
    let records: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(records.len() == 2 && !case.path("out.jsonl.partial").exists());
    assert_eq!((records[0]["id"].as_u64(), records[0]["prompt_tokens"].as_u64()), (Some(7), Some(4)));
    assert_eq!(format!("{}\n", records[0]["text"].as_str().unwrap()), run, "the other prompt changes nothing");
    assert_eq!(records[0]["finish_reason"], "length");
    assert_eq!(records[0]["tokens"].as_array().unwrap().len(), 8);
    let out = generated(&case, &[&["run", "--input", "prompts.jsonl"], rest].concat());
    assert_eq!(out, lines);
    assert_eq!(generated(&case, &[&["run", "--input", "prompts.jsonl", "--output", "-"], rest].concat()), lines);
    assert!(!case.path("-").exists());
    let (_, out, error) = generate(&case, &["run", "--prompt", "line", "--output", "missing/out.jsonl"]);
    assert!(out.is_empty() && error.contains("in: --output"), "{error}");

    // The export of a byte-level model has no tokenizer.
    let (status, _, error) = generate(&case, &["exported", "--prompt", "line"]);
    assert!(status == 2 && error.contains("the model has no tokenizer"), "{error}");
    assert!(error.contains("help: give the path of the model's tokenizer.json"), "{error}");
}

#[test]
fn prompts_come_from_standard_input_and_files() {
    let case = trained();
    let expected = generated(&case, &["run", "--prompt", "line 1", "-n", "6"]);
    fs::write(case.path("prompt.txt"), "line 1\n").unwrap();
    assert_eq!(generated(&case, &["run", "-f", "prompt.txt", "-n", "6"]), expected);
    let mut child = case
        .command(&["generate", "run", "-n", "6"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"line 1\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(text(&output.stdout), expected);
    assert!(text(&output.stderr).contains("generated 6 tokens from 6 prompt tokens in "), "{}", text(&output.stderr));
    let (_, several, silent) = generate(&case, &["run", "--prompt", "line 1", "-p", "of", "-n", "6", "--quiet"]);
    assert!(several.starts_with(&format!("[1] line 1\n{expected}\n[2] of\n")), "{several}");
    assert_eq!(silent, "");
}

#[test]
fn generation_supports_chat_prompts_and_adapters() {
    let case = Case::new();
    let data = case.conversations(40, "");
    let model = "model={type: llama, vocab_size: 64, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, \
                 num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 48}";
    fs::copy(case.path("template.jinja"), case.path("chat_template.jinja")).unwrap();
    case.train(&["--quiet", "-n", "1", "--max-steps", "4", "--out", "base", "--set", &data, "--set", model]);
    let chat = ["--chat", "-p", "w2 w3", "-n", "5", "--quiet"];
    let answer = generated(&case, &[&["base"], &chat[..]].concat());
    // `--chat` gives the same tokens as the text that the template renders.
    let rendered = generated(&case, &["base", "-p", "user w2 w3 . assistant ", "-n", "5", "--quiet"]);
    assert_eq!(answer, rendered);
    let system = generated(&case, &[&["base", "--system", "w1"], &chat[..]].concat());
    let rendered = "system w1 . user w2 w3 . assistant ";
    assert_eq!(system, generated(&case, &["base", "-p", rendered, "-n", "5", "--quiet"]));

    case.export("base", "exported");
    assert_eq!(generated(&case, &[&["exported"], &chat[..]].concat()), answer);
    // An adapter that is trained on the export gives the same text from its checkpoint and from its own export on top
    // of the base model.
    let adapter = "adapter={type: lora, r: 2, init_lora_weights: false}";
    let pretrained = "model={pretrained: exported}";
    let set = ["--set", &data, "--set", pretrained, "--set", adapter];
    case.train(&[&["--quiet", "-n", "1", "--max-steps", "12", "--out", "tuned"], &set[..]].concat());
    case.export("tuned", "adapter");
    let tuned = generated(&case, &[&["tuned"], &chat[..]].concat());
    for base in ["exported", "base"] {
        assert_eq!(generated(&case, &[&[base, "--adapter", "adapter"], &chat[..]].concat()), tuned, "{base}");
    }
    let (status, _, error) = generate(&case, &["adapter", "-p", "w1"]);
    assert!(status == 2 && error.contains("is an adapter without its base model"), "{error}");
    let (status, _, error) = generate(&case, &["tuned", "--adapter", "adapter", "-p", "w1"]);
    assert!(status == 2 && error.contains("already has a trained adapter"), "{error}");
    fs::remove_file(case.path("chat_template.jinja")).unwrap();
    let (status, _, error) = generate(&case, &[&["base"], &chat[..]].concat());
    assert!(status != 0 && error.contains("no chat template in"), "{error}");
    assert_eq!(generated(&case, &[&["base", "--chat-template", "template.jinja"], &chat[..]].concat()), answer);
}

#[test]
fn mistakes_are_one_clear_error() {
    let case = trained();
    let fails = |args: &[&str], status: i32, parts: &[&str]| {
        let (got, out, error) = generate(&case, args);
        assert_eq!(got, status, "{args:?}: {out}{error}");
        assert_eq!(error.matches("error:").count(), 1, "{args:?}: {error}");
        parts.iter().for_each(|part| assert!(error.contains(part), "{args:?}: {part} is not in\n{error}"));
    };
    fails(&["missing", "-p", "x"], 3, &["no such folder", "in: <DIR>", "help:"]);
    fs::create_dir(case.path("empty")).unwrap();
    fails(&["empty", "-p", "x"], 3, &["contains no checkpoint", "help: give a checkpoint, a run, or a folder"]);
    let long = "x".repeat(17);
    fails(&["run", "-p", &long], 2, &["the prompt has 17 tokens, more than the model's 16 positions"]);
    fails(&["run", "-p", ""], 2, &["the prompt has no tokens"]);
    fails(&["run", "-p", "x", "--top-p", "0.9"], 2, &["no effect at temperature 0", "in: --top-p"]);
    fails(&["run", "-p", "x", "--temperature=-1"], 2, &["temperature"]);
    fails(&["run", "-p", "x", "--temperature", "nan"], 2, &["temperature"]);
    fails(&["run", "-p", "x", "--stop", ""], 2, &["--stop"]);
    fails(&["run", "-p", "x", "-n", "0"], 2, &["--max-new-tokens"]);
    fails(&["run", "-p", "x", "--chat"], 3, &["byte tokenizer"]);
    fails(&["run", "-p", "x", "--adapter", "empty"], 2, &["adapter_config.json: no such file"]);
    fails(&["run", "-p", "x", "--tokenizer", "none.json"], 3, &["none.json", "in: --tokenizer"]);
    fails(&["run", "-p", "x", "--input", "y"], 2, &["cannot be used with"]);
    fails(&["run", "--input", "none.jsonl"], 3, &["none.jsonl", "in: --input"]);
    fs::write(case.path("bad.jsonl"), "{\"prompt\": \"a\"}\n{\"text\": \"b\"}\n").unwrap();
    fails(&["run", "--input", "bad.jsonl"], 3, &["bad.jsonl, line 2", "`prompt`", "`messages`", "text"]);
    fs::write(case.path("bad.jsonl"), "{\"prompt\": \"a\"}\n{\"prompt\": \"\"}\n").unwrap();
    fails(&["run", "--input", "bad.jsonl"], 2, &["line 2: the prompt has no tokens", "in: bad.jsonl"]);
    fs::write(case.path("bad.jsonl"), "{\"prompt\": \n").unwrap();
    fails(&["run", "--input", "bad.jsonl"], 3, &["bad.jsonl, line 1"]);
}
