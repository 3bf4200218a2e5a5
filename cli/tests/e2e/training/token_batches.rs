//! `data.max_tokens`: the samples of a step are grouped by length into micro-batches.

use crate::case;

use case::{Case, sets};

const GPT2: &str = "model={type: gpt2, vocab_size: 64, n_positions: 48, n_embd: 16, n_layer: 2, n_head: 2}";

/// Trains 12 steps of 16 conversations. Returns the loss, the number of tokens and the number of micro-batches of each
/// step.
fn run(case: &Case, out: &str, ranks: usize, data: &str, more: &[&str]) -> Vec<(f64, u64, Option<u64>)> {
    let mut settings = vec!["train_batch_size=16", "train_micro_batch_size_per_gpu=2", GPT2, data];
    settings.extend(more);
    let ranks = ranks.to_string();
    let said = case.train(&[&["-n", &ranks, "--out", out, "--max-steps", "12"], &sets(&settings)[..]].concat());
    let grouped = said.contains("micro-batches: samples grouped by length, at most ");
    assert_eq!(grouped, data.contains("max_tokens"), "{said}");
    let number = |line: &serde_json::Value, key: &str| line[key].as_u64();
    let of = |line: &serde_json::Value| {
        (line["loss"].as_f64().unwrap(), number(line, "tokens").unwrap(), number(line, "micro_batches"))
    };
    case.metrics(out).iter().map(of).collect()
}

#[test]
fn losses_match_those_of_padded_samples() {
    let case = Case::new();
    let data = |more: &str| case.conversations(48, more);
    let padded = run(&case, "padded", 2, &data(""), &[]);
    assert!(padded.iter().all(|(_, tokens, count)| *tokens == 16 * 48 && count.is_none()));
    let fewer = |grouped: &[(f64, u64, Option<u64>)], out: &str| {
        for ((loss, ..), (expected, ..)) in grouped.iter().zip(&padded) {
            assert!((loss - expected).abs() < 1e-5 * expected, "{out}: {loss} {expected}");
        }
        let (tokens, most) = grouped.iter().fold((0, 0), |(tokens, most), it| (tokens + it.1, most.max(it.2.unwrap())));
        assert!(tokens < 12 * 16 * 48 / 2, "{out}: {tokens} tokens");
        most
    };
    for (out, ranks, more) in [
        ("stage0", 1, &["zero_optimization.stage=0"][..]),
        ("stage2", 2, &["zero_optimization.stage=2"]),
        ("stage3", 2, &[]),
        ("recomputed", 2, &["activation_checkpointing={}"]),
        ("offloaded", 2, &["zero_optimization.offload_optimizer.device=cpu"]),
        ("prefetched", 4, &["training.dataloader_num_workers=2"]),
        ("heads", 2, &["sequence_parallel_size=2"]),
        ("ring", 4, &["mesh={context_parallel_degree: 2, context_parallel_rotate_method: alltoall}"]),
        ("columns", 2, &["tensor_parallel={autotp_size: 2}"]),
    ] {
        let most = fewer(&run(&case, out, ranks, &data("max_tokens: 96"), more), out);
        assert!(most < 8 || ranks == 4, "{out}: {most} micro-batches");
    }
    // If a micro-batch holds only one sample of the maximum length, a step may have more micro-batches than without
    // `max_tokens`.
    fewer(&run(&case, "narrow", 2, &data("max_tokens: 48"), &[]), "narrow");
}

#[test]
fn reproducible_runs_are_bit_identical_on_any_number_of_ranks_and_resumed() {
    let case = Case::new();
    let data = case.conversations(48, "max_tokens: 96");
    let same = ["training.reproducible=true"];
    let one = run(&case, "one", 1, &data, &same);
    assert!(one.iter().all(|it| it.2 == Some(8)));
    for (out, ranks, stage) in [("two", 2, "2"), ("four", 4, "3"), ("eight", 8, "1")] {
        let stage = format!("zero_optimization.stage={stage}");
        assert_eq!(run(&case, out, ranks, &data, &[same[0], &stage]), one, "{ranks} ranks");
    }
    run(&case, "half", 2, &data, &[same[0], "training.save_every=5", "training.keep_last=9"]);
    let settings = sets(&[GPT2, &data, same[0], "train_batch_size=16", "train_micro_batch_size_per_gpu=2"]);
    let resume = ["--quiet", "-n", "4", "--max-steps", "12", "--resume", "half/checkpoints/step-00000005"];
    case.train(&[&resume[..], &["--out", "again"], &settings].concat());
    let again: Vec<f64> = case.metrics("again").iter().map(|line| line["loss"].as_f64().unwrap()).collect();
    assert_eq!(again, one[5..].iter().map(|it| it.0).collect::<Vec<_>>());
    let verify = ["-n", "2", "--out", "verified", "--verify", "4"];
    let said = case.train(&[&verify, &settings[..]].concat());
    assert_eq!(said.matches("same bits").count(), 4, "{said}");
}

#[test]
fn settings_that_exclude_max_tokens_are_errors() {
    let case = Case::new();
    let chat = |max_tokens: usize| case.conversations(48, &format!("max_tokens: {max_tokens}"));
    for (data, more, expected) in [
        (chat(47), "train_batch_size=2", "a micro-batch of at most 47 positions cannot hold a sample of 48 tokens"),
        (chat(97), "train_batch_size=2", "which is for 2 samples × 48 tokens = 96 positions"),
        (chat(96), "data.sample_packing=true", "cannot group packed samples, which all have the same length"),
        (chat(96), "pipeline.stages=2", "a pipeline needs micro-batches of the same shape"),
        (chat(96), "wall_clock_breakdown=true", "measurements need identical steps"),
        (chat(50), "training.reproducible=true", "fixes the number of micro-batches per step"),
        (
            "data={train: corpus.txt}".into(),
            "data.max_tokens=96",
            "`data.max_tokens` has no effect on `data.format: auto`",
        ),
    ] {
        let said = case.train_fails(2, &sets(&[GPT2, &data, more]));
        assert!(said.contains(expected) && said.contains("help: "), "{said}");
    }
}
