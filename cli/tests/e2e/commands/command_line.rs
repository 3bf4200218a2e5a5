//! Runs the binary as a user would: real processes, real files.

use crate::case;

use std::fs;
use std::io::Write;
use std::process::Stdio;

use serde_json::Value;

use case::{CONFIG, Case, sets, text};

#[test]
fn every_transport_and_stage_is_bit_identical() {
    let case = Case::new();
    for ranks in ["1", "2", "3", "4"] {
        let mut expected: Option<(Vec<String>, Value)> = None;
        for transport in ["threads", "shared_memory", "tcp"] {
            for stage in ["0", "1", "2", "3"] {
                let out = format!("{ranks}-{transport}-{stage}");
                let transport = format!("launcher.transport={transport}");
                let stage = format!("zero_optimization.stage={stage}");
                case.train(&[&["--quiet", "-n", ranks, "--out", &out], &sets(&[&transport, &stage])[..]].concat());
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
fn verify_passes_on_several_ranks() {
    let case = Case::new();
    let out = case.train(&["--plain", "-n", "3", "--verify", "3"]);
    assert!(out.contains("verified: largest relative difference"), "{out}");
    let reproducible = sets(&["training.reproducible=true", "gradient_accumulation_steps=2"]);
    let out = case.train(&[&["--plain", "-n", "2", "--verify", "3"], &reproducible[..]].concat());
    assert_eq!(out.matches("same bits").count(), 3, "{out}");
    assert!(!case.path("run").exists(), "nothing is written");
}

#[test]
fn a_run_writes_its_folder() {
    let case = Case::new();
    let settings = sets(&[
        "csv_monitor.enabled=true",
        "tensorboard.enabled=true",
        "training.trace=true",
        "training.eval_every=10",
        "training.save_every=10",
        "training.sample={prompt: line, tokens: 5}",
    ]);
    case.train(&[&["--quiet", "-n", "2"], &settings[..]].concat());
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
    let mut expected = 0;
    for rank in report["memory"]["ranks"].as_array().unwrap() {
        for kind in ["parameters", "gradients", "optimizer_state"] {
            assert_eq!(rank["measured_peak_bytes"][kind], rank["expected_state_bytes"][kind], "{kind}");
        }
        let of_rank = rank["expected_sent_bytes_per_step"].as_u64().unwrap();
        assert!(of_rank > 0);
        expected += of_rank;
    }
    // The tolerance covers the gradient norm and the loss: a few hundred bytes per step.
    let sent = metrics[5]["sent_bytes"].as_u64().unwrap();
    assert!(sent >= expected && sent < expected + 4096, "{sent} sent, {expected} expected");
    let csv = fs::read_to_string(case.path("run/csv_monitor/DeepSpeedJobName/Train_Samples_train_loss.csv")).unwrap();
    assert!(csv.starts_with("step,train_loss\n4,") && csv.lines().count() == 21, "{csv}");
    let events = fs::read_dir(case.path("run/tensorboard/DeepSpeedJobName")).unwrap().next().unwrap().unwrap().path();
    assert!(fs::metadata(events).unwrap().len() > 20 * 3 * 40);
    let trace: Value = serde_json::from_str(&fs::read_to_string(case.path("run/trace.json")).unwrap()).unwrap();
    assert!(trace["traceEvents"].as_array().unwrap().len() > 100);
    // The resolved configuration can be used again and gives the same result.
    case.succeed(&["--config", "run/resolved.yaml", "--quiet", "--out", "again"]);
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

/// Every write to `/dev/full` fails, like writes to a log on a full disk.
#[test]
fn a_run_whose_output_cannot_be_written_trains_and_keeps_its_exit_status() {
    let case = Case::new();
    let status = |args: &[&str]| {
        let full = || fs::File::options().write(true).open("/dev/full").unwrap();
        let mut command = case.command(&[&["--config", "ds.yaml", "--plain", "--max-steps", "4"], args].concat());
        command.stdout(full()).stderr(full()).status().unwrap().code()
    };
    for ranks in ["1", "2"] {
        // The monitor prints a warning.
        let warned = "csv_monitor={enabled: true, output_path: /dev/full}";
        assert_eq!(status(&["-n", ranks, "--out", ranks, "--set", warned]), Some(0));
        assert_eq!(case.metrics(ranks).len(), 4);
        assert_eq!(status(&["-n", ranks, "--set", "training.max_step=4"]), Some(2));
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
        // The learning rate decays over the last 5 steps of the run, whose length `training.epochs` determines.
        (
            "stages",
            &[
                "training.max_steps=",
                "training.epochs=0.1",
                "scheduler={type: warmup_stable_decay, params: {num_warmup_steps: 3, num_decay_steps: 5}}",
            ],
        ),
    ];
    for (name, settings) in cases {
        case.train(&[&["--quiet", "-n", "2", "--out", name], &sets(settings)[..]].concat());
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
fn the_comms_logger_prints_the_selected_operations() {
    let case = Case::new();
    let logger = "comms_logger={enabled: true, verbose: true, prof_all: false, prof_ops: [all_gather]}";
    let out = case.train(&["--plain", "-n", "2", "--max-steps", "2", "--set", logger]);
    assert!(out.matches("comm op: all_gather | count: ").count() >= 2, "a line a size in each of two steps: {out}");
    assert_eq!(out.matches("\nall_gather\n").count(), 1, "and the summary: {out}");
    assert!(!out.contains("reduce_scatter"), "{out}");
}

#[test]
fn missing_cores_are_named_with_their_list() {
    let case = Case::new();
    let first = |list: &str| {
        let told = case.train(&["--plain", "--max-steps", "1", "--set", &format!("launcher.bind_core_list={list}")]);
        told.lines().next().unwrap().to_string()
    };
    assert!(
        first("0-999").contains(" (this process may not use the other cores of 0-999): 1 rank"),
        "{}",
        first("0-999")
    );
    let all = first("0-999").split([' ', '(']).nth(1).unwrap().to_string();
    assert!(!first(&all).contains("the other cores of"), "{}", first(&all));
}
