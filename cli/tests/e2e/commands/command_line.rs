//! Runs the binary as a user would: real processes, real files.

use crate::case;

use std::fs;
use std::io::Write;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::Value;

use case::{CONFIG, Case, rank_process, signal, text, wait_for};

#[test]
fn every_transport_and_stage_is_bit_identical() {
    let case = Case::new();
    for ranks in ["1", "2", "3", "4"] {
        let mut expected: Option<(Vec<String>, Value)> = None;
        for transport in ["threads", "shared_memory", "tcp"] {
            for stage in ["0", "1", "2", "3"] {
                let out = format!("{ranks}-{transport}-{stage}");
                case.train(&[
                    "--quiet",
                    "-n",
                    ranks,
                    "--out",
                    &out,
                    "--set",
                    &format!("launcher.transport={transport}"),
                    "--set",
                    &format!("zero_optimization.stage={stage}"),
                ]);
                let got = (case.losses(&out), case.shards(&out, 20));
                assert_eq!(got.0.len(), 20);
                match &expected {
                    None => expected = Some(got),
                    Some(expected) => assert!(*expected == got, "{out} differs: {expected:?} {got:?}"),
                }
            }
        }
    }
}

#[test]
fn a_stopped_run_resumes_bit_for_bit() {
    let case = Case::new();
    case.train(&["--quiet", "-n", "2", "--out", "whole"]);
    // Slow enough to be stopped during training on any machine.
    let mut child = case
        .command(&["--config", "ds.yaml", "--plain", "-n", "2", "--out", "parts", "--set", "training.save_every=5"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let metrics = case.path("parts/metrics.jsonl");
    wait_for(|| fs::read_to_string(&metrics).is_ok_and(|text| text.lines().count() >= 3));
    signal(child.id(), "TERM");
    let status = child.wait().unwrap();
    // On a very fast machine, training may end before the signal arrives; a clean exit is correct then, too.
    assert!(matches!(status.code(), Some(143 | 0)), "{status:?}");
    case.train(&["--quiet", "-n", "2", "--out", "parts", "--resume", "auto"]);
    assert_eq!(case.losses("whole"), case.losses("parts"));
    assert_eq!(case.shards("whole", 20), case.shards("parts", 20));
    let again = case.train(&["--plain", "-n", "2", "--out", "parts", "--resume", "auto"]);
    assert!(again.contains("\ntrained no step: the run was already complete\n"), "{again}");
}

#[test]
fn save_last_off_skips_the_last_checkpoint_unless_a_signal_ends_the_run() {
    let case = Case::new();
    let checkpoints = |out: &str| -> Vec<String> {
        let entries = fs::read_dir(case.path(out).join("checkpoints")).into_iter().flatten();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).filter(|n| n != "latest").collect();
        names.sort();
        names
    };
    let args = ["--plain", "-n", "2", "--set", "training.save_last=false", "--out"];
    let out = case.train(&[&args[..], &["none"]].concat());
    assert!(checkpoints("none").is_empty() && !out.contains("checkpoint  "), "{out}");
    case.train(&[&args[..], &["some", "--max-steps", "6", "--set", "training.save_every=3"]].concat());
    assert_eq!(checkpoints("some"), ["step-00000003", "step-00000006"]);
    let mut child = case
        .command(&[&["--config", "ds.yaml", "--max-steps", "1000000"], &args[..], &["stopped"]].concat())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let metrics = case.path("stopped/metrics.jsonl");
    wait_for(|| fs::read_to_string(&metrics).is_ok_and(|text| text.lines().count() >= 3));
    signal(child.id(), "TERM");
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert_eq!(checkpoints("stopped").len(), 1);
}

#[test]
fn resume_works_with_another_layout() {
    let case = Case::new();
    case.train(&["--quiet", "-n", "2", "--out", "a", "--max-steps", "10"]);
    let out = case.train(&[
        "--plain",
        "-n",
        "1",
        "--out",
        "b",
        "--resume",
        "a/checkpoints/step-00000010",
        "--set",
        "train_micro_batch_size_per_gpu=4",
        "--set",
        "zero_optimization.stage=1",
    ]);
    assert!(out.contains("resumed from a/checkpoints/step-00000010 after step 10"), "{out}");
    assert_eq!(case.metrics("b").len(), 10);
    // A run folder stands for its newest checkpoint.
    fs::create_dir(case.path("a/checkpoints/step-00000011")).unwrap();
    for (from, out) in [("a", "c"), ("a/checkpoints", "d")] {
        let out = case.train(&["--plain", "-n", "2", "--max-steps", "11", "--out", out, "--resume", from]);
        assert!(out.contains("resumed from a/checkpoints/step-00000010 after step 10"), "{out}");
    }
}

#[test]
fn a_killed_rank_ends_the_others_within_a_second_and_is_named() {
    let case = Case::new();
    for transport in ["shared_memory", "tcp"] {
        let out = format!("run-{transport}");
        let mut child = case
            .command(&[
                "--config",
                "ds.yaml",
                "--plain",
                "-n",
                "3",
                "--max-steps",
                "1000000",
                "--out",
                &out,
                "--set",
                &format!("launcher.transport={transport}"),
            ])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let metrics = case.path(&out).join("metrics.jsonl");
        wait_for(|| fs::read_to_string(&metrics).is_ok_and(|text| text.lines().count() >= 3));
        let victim = rank_process(child.id(), 2);
        signal(victim, "KILL");
        let killed = Instant::now();
        wait_for(|| child.try_wait().unwrap().is_some());
        // The documented limit is one second. A loaded machine may schedule the test later, so this limit only
        // catches hangs.
        assert!(killed.elapsed() < Duration::from_secs(10));
        let output = child.wait_with_output().unwrap();
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(4), "{errors}");
        assert!(errors.contains("rank 2 was killed by signal 9; it failed first"), "{errors}");
        assert!(errors.contains("rank 0") && errors.contains('#'), "rank 0 names itself and the operation: {errors}");
    }
}

#[test]
fn verify_agrees() {
    let case = Case::new();
    let out = case.train(&["--plain", "-n", "3", "--verify", "3"]);
    assert!(out.contains("verified: largest relative difference"), "{out}");
    let out = case.train(&[
        "--plain",
        "-n",
        "2",
        "--verify",
        "3",
        "--set",
        "training.reproducible=true",
        "--set",
        "gradient_accumulation_steps=2",
    ]);
    assert_eq!(out.matches("same bits").count(), 3, "{out}");
    assert!(!case.path("run").exists(), "nothing is written");
}

#[test]
fn a_run_writes_its_folder() {
    let case = Case::new();
    case.train(&[
        "--quiet",
        "-n",
        "2",
        "--set",
        "csv_monitor.enabled=true",
        "--set",
        "tensorboard.enabled=true",
        "--set",
        "training.trace=true",
        "--set",
        "training.eval_every=10",
        "--set",
        "training.save_every=10",
        "--set",
        "training.sample={prompt: line, tokens: 5}",
    ]);
    let metrics = case.metrics("run");
    assert_eq!(metrics.len(), 20);
    let keys = [
        "step",
        "loss",
        "lr",
        "grad_norm",
        "loss_scale",
        "skipped",
        "samples",
        "tokens",
        "step_ms",
        "data_wait_ms",
        "tokens_per_s",
        "sent_bytes",
        "peak_bytes",
        "eval_loss",
    ];
    assert_eq!(metrics[9].as_object().unwrap().keys().collect::<Vec<_>>(), keys);
    assert!(metrics[9]["eval_loss"].is_number() && metrics[8]["eval_loss"].is_null());
    assert_eq!((&metrics[0]["samples"], &metrics[0]["tokens"]), (&Value::from(4), &Value::from(64)));
    let loss = |line: &Value| line["loss"].as_f64().unwrap();
    assert!(loss(&metrics[19]) < loss(&metrics[0]) - 0.5);
    let report = case.report("run");
    assert_eq!((report["world_size"].as_u64(), report["zero_stage"].as_u64()), (Some(2), Some(3)));
    assert_eq!(report["optimizer_steps"], 20);
    for rank in report["memory"]["ranks"].as_array().unwrap() {
        for kind in ["parameters", "gradients", "optimizer_state"] {
            assert_eq!(rank["measured_peak_bytes"][kind], rank["expected_state_bytes"][kind], "{kind}");
        }
        // The gradient norm and the loss are communicated as well: a few hundred bytes per step.
        let expected = rank["expected_sent_bytes_per_step"].as_u64().unwrap();
        assert!(expected > 0);
    }
    let expected: u64 = report["memory"]["ranks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|rank| rank["expected_sent_bytes_per_step"].as_u64().unwrap())
        .sum();
    let sent = metrics[5]["sent_bytes"].as_u64().unwrap();
    assert!(sent >= expected && sent < expected + 4096, "{sent} sent, {expected} expected");
    let csv = fs::read_to_string(case.path("run/csv_monitor/DeepSpeedJobName/Train_Samples_train_loss.csv")).unwrap();
    assert!(csv.starts_with("step,train_loss\n4,") && csv.lines().count() == 21, "{csv}");
    let events = fs::read_dir(case.path("run/tensorboard/DeepSpeedJobName")).unwrap().next().unwrap().unwrap().path();
    assert!(fs::metadata(events).unwrap().len() > 20 * 3 * 40);
    let trace: Value = serde_json::from_str(&fs::read_to_string(case.path("run/trace.json")).unwrap()).unwrap();
    assert!(trace["traceEvents"].as_array().unwrap().len() > 100);
    // The resolved configuration can be used again and gives the same result.
    let again = case.command(&["--config", "run/resolved.yaml", "--quiet", "--out", "again"]).output().unwrap();
    assert!(again.status.success(), "{}", text(&again.stderr));
    assert_eq!(case.losses("run"), case.losses("again"));
}

#[test]
fn a_second_run_moves_the_first_aside() {
    let case = Case::new();
    case.train(&["--quiet", "--max-steps", "2"]);
    let first = case.losses("run");
    let out = case.train(&["--plain", "--max-steps", "3"]);
    assert!(out.contains("moved an earlier run to run.1"), "{out}");
    assert_eq!((case.losses("run.1"), case.losses("run").len()), (first, 3));
}

#[test]
fn early_stopping() {
    let case = Case::new();
    let out = case.train(&[
        "--plain",
        "--max-steps",
        "500",
        "--set",
        "training.eval_every=1",
        "--set",
        "training.early_stopping={patience: 2, min_delta: 100}",
    ]);
    assert!(out.contains("stopping after step 3: no evaluation loss below"), "{out}");
    assert_eq!(case.metrics("run").len(), 3);
}

#[test]
fn diverging_ends_with_status_5() {
    let case = Case::new();
    let output = case.run(&[
        "--plain",
        "--max-steps",
        "200",
        "--set",
        "optimizer.params.lr=1e38",
        "--set",
        "gradient_clipping=0",
    ]);
    assert_eq!(output.status.code(), Some(5), "{} {}", text(&output.stdout), text(&output.stderr));
    let said = text(&output.stderr);
    assert!(
        said.contains("error: training diverged: ") && said.contains("the last of 20 such steps in a row"),
        "{said}"
    );
    assert_eq!(said.lines().filter(|line| line.contains(", gradient norm NaN, so the update was skipped")).count(), 20);
}

#[test]
fn configuration_from_standard_input() {
    let case = Case::new();
    for ranks in ["1", "2"] {
        let mut child = case
            .command(&["--config", "-", "--quiet", "-n", ranks, "--max-steps", "2", "--out", &format!("stdin-{ranks}")])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(CONFIG.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(case.metrics(&format!("stdin-{ranks}")).len(), 2);
    }
}

#[test]
fn check_prints_every_value_with_its_origin_or_every_error() {
    let case = Case::new();
    let output = case.command(&["check", "--config", "ds.yaml", "--set", "steps_per_print=3"]).output().unwrap();
    let shown = text(&output.stdout);
    assert!(output.status.success());
    for part in ["stage: 3", "# line 6", "# default", "# --set", "# auto"] {
        assert!(shown.contains(part), "{part} is not in\n{shown}");
    }
    fs::write(case.path("bad.yaml"), "train_batch_size: -1\nzero_optimisation: {stage: 3}\ndata_parallel_size: 1\n")
        .unwrap();
    let output = case.command(&["check", "--config", "bad.yaml"]).output().unwrap();
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    for part in ["train_batch_size", "did you mean `zero_optimization`", "data_parallel_size", "bad.yaml:2:1"] {
        assert!(errors.contains(part), "{part} is not in\n{errors}");
    }
}

#[test]
fn every_kind_of_data_model_and_optimizer_trains() {
    let case = Case::new();
    let lines: Vec<String> = (0..60).map(|i| format!("{{\"body\": \"document {i} of many\"}}")).collect();
    fs::write(case.path("docs.jsonl"), lines.join("\n")).unwrap();
    let tokens: Vec<u8> = (0..3000u16).flat_map(|i| (i % 97).to_le_bytes()).collect();
    fs::write(case.path("tokens.bin"), tokens).unwrap();
    let rows: Vec<String> = (0..90).map(|i| format!("{},{},{}", i % 7, (i * i) % 5, usize::from(i % 7 > 3))).collect();
    fs::write(case.path("table.csv"), rows.join("\n")).unwrap();
    let llama = "model={type: llama, vocab_size: auto, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, \
                 num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 16}";
    let cases: [(&str, &[&str]); 18] = [
        ("jsonl", &["data={train: docs.jsonl, text_key: body}"]),
        ("tokens", &["data={train: tokens.bin}", "optimizer={type: Lion, params: {lr: 0.001}}"]),
        // The default byte tokenizer does not apply to a token file, so a vocabulary below 256 tokens is valid.
        ("few tokens", &["data={train: tokens.bin}", "model.vocab_size=97"]),
        ("mlp", &["data={train: table.csv}", "model={type: mlp, input_size: 2, hidden_sizes: [8], output_size: 2}"]),
        ("llama", &[llama, "optimizer={type: SGD, params: {lr: 0.5, momentum: 0.9}}"]),
        ("adagrad", &["optimizer={type: Adagrad, params: {lr: 0.05}}", "dataloader_drop_last=true"]),
        ("rmsprop", &["optimizer={type: RMSprop, params: {lr: 0.003}}"]),
        ("nadam", &["optimizer={type: NAdam, params: {lr: 0.01}}"]),
        ("radam", &["optimizer={type: RAdam, params: {lr: 0.01}}"]),
        ("adafactor", &["optimizer={type: Adafactor}"]),
        ("lamb", &["optimizer={type: Lamb, params: {lr: 0.01}}"]),
        ("mup", &["optimizer={type: MuAdamW, params: {lr: 0.01}}", "mup={base: {n_embd: 8}}"]),
        ("schedule-free", &["optimizer={type: AdamWScheduleFree, params: {lr: 0.01}}"]),
        ("bf16", &["bf16={enabled: true}", "train_batch_size=8"]),
        ("epochs", &["training.max_steps=", "training.epochs=0.1"]),
        ("schedule", &["scheduler={type: WarmupDecayLR, params: {total_num_steps: auto, warmup_num_steps: 3}}"]),
        (
            "one cycle",
            &[
                "scheduler={type: OneCycle, params: {cycle_min_lr: 0.001, cycle_max_lr: 0.02, cycle_first_step_size: 5}}",
            ],
        ),
        // The decay is at the end of the epochs.
        (
            "stages",
            &[
                "training.max_steps=",
                "training.epochs=0.1",
                "scheduler={type: warmup_stable_decay, params: {num_warmup_steps: 3, num_decay_steps: 5}}",
            ],
        ),
    ];
    for (name, sets) in cases {
        let mut args = vec!["--quiet", "-n", "2", "--out", name];
        sets.iter().for_each(|set| args.extend(["--set", set]));
        case.train(&args);
        let losses: Vec<f64> = case.metrics(name).iter().map(|line| line["loss"].as_f64().unwrap()).collect();
        let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
        let (early, late) = (mean(&losses[..3]), mean(&losses[losses.len() - 3..]));
        assert!(late < early, "{name}: {losses:?}");
    }
    assert_eq!(case.metrics("epochs").len(), 23); // a tenth of 892 samples, 4 a step
    let rates: Vec<f64> = case.metrics("stages").iter().map(|line| line["lr"].as_f64().unwrap()).collect();
    let whole = rates[3];
    assert!(rates.len() == 23 && rates[0] == 0.0 && rates[3..=18].iter().all(|rate| *rate == whole), "{rates:?}");
    assert!(rates[18..].windows(2).all(|pair| pair[1] < pair[0]) && rates[22] > 0.0, "{rates:?}");
}

#[test]
fn an_impossible_sample_is_a_warning_and_does_not_end_the_run() {
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
    let output = case.run(&[&words[..], &["--set", sample]].concat());
    let errors = text(&output.stderr);
    assert!(output.status.code() == Some(2) && errors.contains("in: training.sample.prompt"), "{errors}");
    assert!(!case.path("words").exists());
}

#[test]
fn the_communication_log() {
    let case = Case::new();
    let out = case.train(&[
        "--plain",
        "-n",
        "2",
        "--max-steps",
        "2",
        "--set",
        "comms_logger={enabled: true, verbose: true, prof_all: false, prof_ops: [all_gather]}",
    ]);
    assert!(out.matches("comm op: all_gather | count: ").count() >= 2, "a line a size in each of two steps: {out}");
    assert_eq!(out.matches("\nall_gather\n").count(), 1, "and the summary: {out}");
    assert!(!out.contains("reduce_scatter"), "{out}");
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
            "`auto` takes the vocabulary size from the tokenizer, but the data has none\n  in: model.vocab_size",
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
            let output = case.run(&[args, ranks].concat());
            let errors = text(&output.stderr);
            assert_eq!(output.status.code(), Some(*status), "{args:?} {ranks:?}: {errors}");
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
    let output = case.run(&["--quiet", "-n", "2", "--resume", "auto"]);
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("shard-00001-of-00002.safetensors is damaged"), "{}", text(&output.stderr));
    assert_eq!(fs::read(case.path("run/metrics.jsonl")).unwrap(), metrics);
}

#[test]
fn missing_cores_are_named_with_their_list() {
    let case = Case::new();
    let first = |list: &str| {
        let told = case.train(&["--plain", "--max-steps", "1", "--set", &format!("launcher.bind_core_list={list}")]);
        told.lines().next().unwrap().to_string()
    };
    assert!(first("0-999").contains(" (this process may not use the others of 0-999): 1 rank"), "{}", first("0-999"));
    let all = first("0-999").split([' ', '(']).nth(1).unwrap().to_string();
    assert!(!first(&all).contains("the others of"), "{}", first(&all));
}
