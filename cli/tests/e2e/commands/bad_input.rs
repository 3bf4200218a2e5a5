//! Configurations, data and checkpoints that the binary refuses or warns about.

use crate::case;

use std::fs;

use case::{Case, text};

#[test]
fn check_prints_every_value_with_its_origin_or_every_error() {
    let case = Case::new();
    let shown = case.succeed(&["check", "--config", "ds.yaml", "--set", "steps_per_print=3"]);
    for part in ["stage: 3", "# line 6", "# default", "# --set", "# auto"] {
        assert!(shown.contains(part), "{part} is not in\n{shown}");
    }
    fs::write(case.path("bad.yaml"), "train_batch_size: -1\nzero_optimisation: {stage: 3}\ndata_parallel_size: 1\n")
        .unwrap();
    let errors = case.fail(2, &["check", "--config", "bad.yaml"]);
    for part in ["train_batch_size", "did you mean `zero_optimization`", "data_parallel_size", "bad.yaml:2:1"] {
        assert!(errors.contains(part), "{part} is not in\n{errors}");
    }
}

#[test]
fn a_text_sample_without_a_decoder_is_a_warning() {
    let case = Case::new();
    let sample = "training.sample={prompt: line, tokens: 30}";
    // Most of the model's 4,096 tokens do not correspond to a byte.
    let told =
        case.train(&["--plain", "-n", "2", "--max-steps", "1", "--set", sample, "--set", "model.vocab_size=4096"]);
    let text_of = |told: &str| told.split("--- sample ---\n").nth(1).map(|text| text.starts_with("line"));
    assert_eq!(text_of(&told), Some(true), "{told}");
    assert_eq!(case.report("run")["optimizer_steps"], 1);
    assert!(told.contains("\ntrained 1 step in "), "{told}");
    fs::write(case.path("tokens.bin"), [7u8, 0].repeat(400)).unwrap();
    let numbers = ["--plain", "-n", "2", "--max-steps", "1", "--out", "numbers", "--set", "data.train=tokens.bin"];
    let output = case.run(&[&numbers[..], &["--set", sample]].concat());
    let errors = text(&output.stderr);
    assert!(output.status.success() && text_of(&text(&output.stdout)).is_none(), "{errors}");
    let warning = "warning: `training.sample` has no effect: no tokenizer can decode the tokens";
    assert_eq!(errors.matches(warning).count(), 1, "{errors}");
    // A tokenizer without an unknown token.
    let words = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "?"}}"#;
    fs::write(case.path("words.json"), words).unwrap();
    fs::write(case.path("words.txt"), "a b b ".repeat(200)).unwrap();
    let words = ["--out", "words", "--max-steps", "1", "--set", "data={train: words.txt, tokenizer: words.json}"];
    let errors = case.train_fails(2, &[&words[..], &["--set", sample]].concat());
    assert!(errors.contains("in: training.sample.prompt"), "{errors}");
    assert!(!case.path("words").exists());
}

/// (arguments, exit status, expected text on standard error)
#[test]
fn bad_input_is_one_clear_error_and_nothing_is_written() {
    let case = Case::new();
    fs::write(case.path("empty.txt"), "").unwrap();
    fs::write(case.path("short.txt"), "abc").unwrap();
    fs::write(case.path("odd.bin"), [1u8, 2, 3]).unwrap();
    fs::write(case.path("large.bin"), [255u8; 400]).unwrap();
    let table: &[(&[&str], i32, &str)] = &[
        (&["--set", "data.train=nowhere.txt"], 3, "nowhere.txt"),
        (&["--set", "data.train=none/*.txt"], 3, "none/*.txt"),
        (&["--set", "data.train=empty.txt"], 3, "empty"),
        (&["--set", "data.train=short.txt"], 3, "short"),
        (&["--set", "data.train=odd.bin"], 3, "odd.bin"),
        (&["--set", "data.train=large.bin"], 3, "65535"),
        (
            &["--set", "data.train=odd.bin", "--set", "model.vocab_size=auto"],
            2,
            "`auto` takes the vocabulary size from the tokenizer, but the data has no tokenizer\n  in: model.vocab_size",
        ),
        (&["--set", "data.sequence_length=17"], 2, "data.sequence_length"),
        (&["--set", "model.vocab_size=100"], 2, "model.vocab_size"),
        (&["--set", "train_batch_size=7"], 2, "train_batch_size"),
        (&["--set", "train_batch_size=8", "-n", "3"], 2, "train_batch_size"),
        (&["--set", "model.n_head=3"], 2, "n_head"),
        (&["--set", "nothing"], 2, "nothing"),
        (&["--resume", "nowhere"], 3, "nowhere: no such folder\n  in: --resume"),
        (&["--set", "training.reproducible=true", "-n", "3"], 2, "reproducible"),
        (&["--set", "zero_optimization.load_from_fp32_weights=false"], 2, "not implemented"),
        (&["--set", "pipeline={schedule: 2f2b}"], 2, "pipeline.schedule"),
        (&["--set", "pipeline={stages: 5}", "-n", "4"], 2, "pipeline.stages"),
        (&["--set", "pipeline={stages: 6}", "-n", "6"], 2, "pipeline.stages"),
        (
            &["--set", "pipeline={stages: 2, schedule: interleaved_1f1b, virtual_stages: 3}", "-n", "2"],
            2,
            "pipeline.virtual_stages",
        ),
        (&["--set", "pipeline={stages: 2, partition_method: 'type:nothing'}", "-n", "2"], 2, "no layer name matches"),
        (&["--set", "pipeline={stages: 2}", "--set", "training.reproducible=true", "-n", "6"], 2, "reproducible"),
        (&["--no-such-option"], 2, "no-such-option"),
        (&["--max-steps", "0"], 2, "--max-steps <N>"),
        (&["-n", "2", "--min-ranks", "3", "--max-restarts", "1"], 2, "the 2 ranks of this run\n  in: --min-ranks"),
        (&["-n", "2", "--set", "launcher.interface=eth99"], 2, "\n  in: launcher.interface"),
        (&["-n", "0"], 2, "0"),
    ];
    for (args, status, expected) in table {
        for ranks in [&[][..], &["-n", "2"][..]] {
            if args.contains(&"-n") && !ranks.is_empty() {
                continue;
            }
            let errors = case.train_fails(*status, &[args, ranks].concat());
            assert!(errors.contains(expected), "{args:?}: {errors}");
            assert_eq!(errors.matches("error:").count(), 1, "{args:?} {ranks:?}: {errors}");
            assert!(!errors.contains("panicked") && !errors.contains("backtrace"), "{errors}");
            assert!(!case.path("run").exists(), "{args:?} wrote something");
        }
    }
}

#[test]
fn a_damaged_checkpoint_is_refused_and_the_run_stays_as_it_is() {
    let case = Case::new();
    case.train(&["--quiet", "-n", "2", "--max-steps", "4"]);
    let shard = case.path("run/checkpoints/step-00000004/shard-00001-of-00002.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    fs::write(&shard, bytes).unwrap();
    let metrics = fs::read(case.path("run/metrics.jsonl")).unwrap();
    let errors = case.train_fails(3, &["--quiet", "-n", "2", "--resume", "auto"]);
    assert!(errors.contains("shard-00001-of-00002.safetensors is damaged"), "{errors}");
    assert_eq!(fs::read(case.path("run/metrics.jsonl")).unwrap(), metrics);
}
