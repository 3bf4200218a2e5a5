//! Trains on pairs of answers on ranks that are threads, and compares 100 steps with TRL.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{Device, safetensors};
use serde_json::{Value, json};

use crate::data::{CHATML, Folder};
use crate::python::python;
use crate::train::Resume;
use crate::train::trained::run;

const IM: [&str; 2] = ["<|endoftext|>", "<|im_end|>"];

/// Returns pairs with several layouts and lengths. The first two pairs share a prompt of two turns.
fn records(pairs: usize) -> Vec<Value> {
    let user = |text: String| json!({"role": "user", "content": text});
    let assistant = |text: String| json!({"role": "assistant", "content": text});
    let record = |i: usize| {
        let [long, short] = ["is it so, yes", "no"].map(|text| format!("{text}{}", "!".repeat(i % 5)));
        let (chosen, rejected) = if i.is_multiple_of(3) { (short, long) } else { (long, short) };
        let question = user(format!("question {}", i * 7 % 11));
        let prompt = match i % 4 {
            0 => json!([user("hi".into()), assistant("hi".into()), question]),
            _ => json!([question]),
        };
        json!({"prompt": prompt, "chosen": [assistant(chosen)], "rejected": [assistant(rejected)]})
    };
    (0..pairs).map(record).collect()
}

fn folder(pairs: usize) -> Folder {
    let folder = Folder::new(CHATML, IM);
    let lines: Vec<String> = records(pairs).iter().map(Value::to_string).collect();
    folder.write("data.jsonl", &lines.join("\n"));
    folder
}

fn text(folder: &Path, micro_batch: usize, model: &str, keys: &str, training: &str) -> String {
    format!(
        "train_batch_size: 4\ntrain_micro_batch_size_per_gpu: {micro_batch}\ngradient_clipping: 0.5\n\
         optimizer: {{type: AdamW, params: {{lr: 1.0e-3, eps: 1.0e-6, weight_decay: 0.0}}}}\nmodel: {model}\n\
         data: {{train: {:?}, format: chat, tokenizer: {:?}, sequence_length: 96, shuffle: false, eval: {0:?}}}\n\
         {keys}\ntraining: {{output_dir: {:?}, {training}}}\n",
        folder.join("data.jsonl"),
        folder.join("tokenizer.json"),
        folder.join("run"),
    )
}

/// Each case is a model, its configuration keys, and the call of `trl.py` that trains it.
const CASES: [(&str, &str, &str); 7] = [
    ("GPT-2", "preference: {}", "dpo(model, FOLDER, beta=0.1)"),
    ("Llama", "preference: {type: dpo, beta: 0.5}\nadapter: {r: 4, lora_alpha: 8}", "dpo(model, FOLDER, beta=0.5)"),
    ("GPT-2", "preference: {loss_type: hinge, beta: 0.3}", "dpo(model, FOLDER, loss_type='hinge', beta=0.3)"),
    ("Llama", "preference: {loss_type: ipo, beta: 0.2}", "dpo(model, FOLDER, loss_type='ipo', beta=0.2)"),
    (
        "GPT-2",
        "preference: {loss_type: robust, label_smoothing: 0.1}",
        "dpo(model, FOLDER, loss_type='robust', label_smoothing=0.1)",
    ),
    ("Llama", "preference: {type: orpo, beta: 0.4}", "by_hand(model, FOLDER, orpo, beta=0.4)"),
    (
        "GPT-2",
        "preference: {type: simpo, beta: 1.0, simpo_gamma: 0.8}",
        "by_hand(model, FOLDER, simpo, beta=1.0, gamma=0.8)",
    ),
];

#[test]
fn one_hundred_steps_agree_with_trl() {
    // 20 pairs fill whole batches. With another number, TRL would end an epoch with a smaller batch.
    let folder = folder(20);
    let cases: Vec<Value> =
        CASES.iter().map(|(model, keys, call)| json!([model, keys.contains("adapter"), call])).collect();
    let script = format!(
        "FOLDER, CASES = {:?}, {:?}\n{}",
        folder.path(),
        Value::from(cases).to_string(),
        include_str!("trl.py")
    );
    let Some(theirs) = python(&["torch", "transformers", "peft", "trl", "datasets"], &script) else { return };
    let theirs: Vec<Vec<f32>> = theirs
        .lines()
        .filter_map(|line| line.strip_prefix("losses "))
        .map(|losses| serde_json::from_str(losses).unwrap())
        .collect();
    assert_eq!(theirs.len(), CASES.len());
    for (index, ((model, keys, _), theirs)) in CASES.iter().zip(theirs).enumerate() {
        let path = |name: &str| folder.path().join(format!("{name}-{index}"));
        let keys = keys.replace("adapter: {", &format!("adapter: {{pretrained: {:?}, ", path("initial")));
        let pretrained = format!("{{pretrained: {:?}}}", path("base"));
        let text = text(folder.path(), 2, &pretrained, &keys, "max_steps: 100, save_last: false");
        let (outcome, ours) = run(&text, 2, None);
        outcome.unwrap_or_else(|error| panic!("{text}\n{error}"));
        assert_eq!((ours.len(), theirs.len()), (100, 100));
        let largest = theirs.iter().fold(0.0f32, |largest, loss| largest.max(loss.abs()));
        let difference = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / largest;
        println!("{model}, {keys}: losses differ by {difference:.1e} of the largest at most");
        assert!(difference <= 1e-4, "{model}, {keys}: {difference:e}\n{ours:?}\n{theirs:?}");
        assert!(theirs[99] < 0.9 * theirs[0], "{theirs:?}");
    }
}

const GPT2: &str = "{type: gpt2, vocab_size: 276, n_positions: 96, n_embd: 16, n_layer: 2, n_head: 2, \
                    resid_pdrop: 0.1, embd_pdrop: 0.1, attn_pdrop: 0.1}";
const LLAMA: &str = "{type: llama, vocab_size: 276, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, \
                     num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 96, attention_dropout: 0.1}";
/// Keys for a run that evaluates, and whose results are bit-identical on any number of ranks.
const REPRODUCIBLE: &str = "max_steps: 6, eval_every: 3, eval_batches: 2, reproducible: true";

/// Returns the losses and the reference log-probabilities of a run.
fn outcome(folder: &Folder, text: &str, ranks: usize) -> (Vec<f32>, Vec<u8>) {
    let (summary, losses) = run(text, ranks, None);
    let evaluation = summary.unwrap_or_else(|error| panic!("{text}\n{error}")).evaluation.unwrap();
    let metric = |name| evaluation.metric(name).unwrap();
    assert!((0.0..=1.0).contains(&metric("reward_accuracy")) && metric("reward_margin") != 0.0, "{evaluation:?}");
    let reference = std::fs::read(folder.path().join("run/reference_log_probs.safetensors")).unwrap_or_default();
    (losses, reference)
}

#[test]
fn every_layout_is_bit_identical() {
    // The number of pairs is not a multiple of the number that the ranks evaluate at a time.
    let folder = folder(19);
    for (model, keys) in [
        (GPT2, "preference: {beta: 0.5}"),
        (LLAMA, "preference: {beta: 0.5}\nadapter: {r: 4, lora_dropout: 0.1}"),
        (LLAMA, "preference: {type: orpo}"),
        (LLAMA, "preference: {beta: 0.5}\nadapter: {r: 4}\nquantization_config: {load_in_4bit: true}"),
        (GPT2, "preference: {type: simpo}\nbf16: {enabled: true}"),
    ] {
        let of = |ranks: usize, more: &str| {
            let keys = format!("{keys}\n{more}");
            outcome(&folder, &text(folder.path(), 1, model, &keys, REPRODUCIBLE), ranks)
        };
        let expected = of(1, "");
        assert_eq!(expected.1.is_empty(), !keys.contains("beta"));
        std::fs::remove_dir_all(folder.path().join("run")).unwrap();
        assert!(expected.0.windows(2).all(|pair| pair[0] != pair[1]), "{:?}", expected.0);
        for (ranks, more) in [
            (2, "zero_optimization: {stage: 1}"),
            (2, "zero_optimization: {stage: 2}\nactivation_checkpointing: {enabled: true}"),
            (4, "zero_optimization: {stage: 3, stage3_param_persistence_threshold: 40}"),
            (2, "pipeline: {stages: 2}"),
            (4, "pipeline: {stages: 2}\nzero_optimization: {stage: 3, offload_optimizer: {device: cpu}}"),
        ] {
            assert!(of(ranks, more) == expected, "{keys}, {ranks} ranks, {more}");
            std::fs::remove_dir_all(folder.path().join("run")).unwrap();
        }
    }
}

/// Ranks that share layers or sequences add sums in another order than one rank.
#[test]
fn ranks_that_share_layers_or_sequences_agree_with_one_rank() {
    let folder = folder(19);
    // One vocabulary does not divide evenly.
    let gpt2 = GPT2.replace("276", "277").replace("pdrop: 0.1", "pdrop: 0.0");
    let llama =
        LLAMA.replace("num_key_value_heads: 1", "num_key_value_heads: 2").replace("dropout: 0.1", "dropout: 0.0");
    for (model, keys) in [
        (&gpt2, "preference: {beta: 0.5}"),
        (&llama, "preference: {type: dpo, loss_type: ipo}\nadapter: {r: 4}"),
        (&llama, "preference: {type: orpo}"),
    ] {
        let of = |ranks: usize, replicas: usize, more: &str| {
            let keys = format!("{keys}\n{more}");
            let training = format!("max_steps: 6, eval_every: 3, eval_batches: {}", 8 / replicas);
            let (summary, losses) = run(&text(folder.path(), 1, model, &keys, &training), ranks, None);
            let evaluation = summary.unwrap_or_else(|error| panic!("{keys}\n{error}")).evaluation.unwrap();
            let mut numbers = losses;
            numbers.extend(evaluation.metrics.iter().map(|(_, value)| *value as f32).chain([evaluation.loss]));
            let path = folder.path().join("run/reference_log_probs.safetensors");
            for tensor in BTreeMap::from_iter(safetensors::load(path, &Device::Cpu).unwrap_or_default()).values() {
                numbers.extend(tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap());
            }
            std::fs::remove_dir_all(folder.path().join("run")).unwrap();
            (numbers, evaluation.samples)
        };
        let (expected, samples) = of(1, 1, "");
        assert!(expected[..6].windows(2).all(|pair| pair[0] != pair[1]), "{expected:?}");
        let stage_3 = "zero_optimization: {stage: 3, stage3_param_persistence_threshold: 40}";
        let pipeline = "pipeline: {stages: 2}\nactivation_checkpointing: {enabled: true}";
        let [tensor, heads, queries] =
            ["tensor_parallel: {autotp_size: 2}", "sequence_parallel_size: 2", "mesh: {context_parallel_degree: 2}"];
        for (ranks, replicas, more) in [
            (2, 1, tensor.to_string()),
            (4, 2, format!("{tensor}\n{stage_3}")),
            (4, 1, format!("{tensor}\n{pipeline}")),
            (2, 1, heads.to_string()),
            (4, 2, format!("{queries}\n{stage_3}")),
            (4, 1, format!("{heads}\n{pipeline}")),
            (4, 1, format!("{heads}\n{queries}")),
            (4, 1, format!("{tensor}\n{queries}")),
        ] {
            let (found, of_samples) = of(ranks, replicas, &more);
            assert_eq!((found.len(), of_samples), (expected.len(), samples), "{keys}, {ranks} ranks, {more}");
            for (found, expected) in found.iter().zip(&expected) {
                let difference = (found - expected).abs();
                assert!(
                    difference <= 2e-5 * expected.abs().max(1.0),
                    "{keys}, {ranks} ranks, {more}: {found} {expected}"
                );
            }
        }
    }
}

#[test]
fn a_resumed_run_needs_its_reference_log_probabilities() {
    let folder = folder(12);
    let of = |training: &str| text(folder.path(), 2, GPT2, "preference: {}", training);
    let (summary, all) = run(&of("max_steps: 6"), 1, None);
    summary.unwrap();
    std::fs::remove_dir_all(folder.path().join("run")).unwrap();
    let (summary, first) = run(&of("max_steps: 3"), 1, None);
    summary.unwrap();
    let (summary, rest) = run(&of("max_steps: 6, save_last: false"), 2, Some(Resume::Auto));
    summary.unwrap();
    assert_eq!([first, rest].concat(), all);

    let lines = records(12).iter().map(|record| record.to_string().replace("yes", "maybe")).collect::<Vec<_>>();
    folder.write("data.jsonl", &lines.join("\n"));
    let error = run(&of("max_steps: 7"), 1, Some(Resume::Auto)).0.unwrap_err().to_string();
    assert!(error.contains("was computed from different pairs than those in `data.train` and `data.eval`"), "{error}");
    // The name of the tensor still identifies these pairs, but its size is wrong.
    let path = folder.path().join("run/reference_log_probs.safetensors");
    folder.write("data.jsonl", &records(12).iter().map(Value::to_string).collect::<Vec<_>>().join("\n"));
    let tensors = BTreeMap::from_iter(safetensors::load(&path, &Device::Cpu).unwrap());
    let cut = tensors.into_iter().map(|(name, tensor)| (name, tensor.narrow(0, 0, 11).unwrap()));
    safetensors::save(&cut.collect(), &path).unwrap();
    let error = run(&of("max_steps: 7"), 1, Some(Resume::Auto)).0.unwrap_err().to_string();
    assert!(error.contains("has [11, 2] log-probabilities for 12 pairs"), "{error}");
    std::fs::remove_file(path).unwrap();
    let error = run(&of("max_steps: 7"), 1, Some(Resume::Auto)).0.unwrap_err().to_string();
    assert!(error.contains("has no reference_log_probs.safetensors, which a resumed run needs"), "{error}");
}
