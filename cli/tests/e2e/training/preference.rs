//! Preference training on pairs of answers: output, evaluation, resumption, generation, export, and mistakes.

use std::fs;

use crate::case::{Case, sets, text};

const GPT2: &str = "model={type: gpt2, vocab_size: 64, n_positions: 64, n_embd: 16, n_layer: 2, n_head: 2}";

#[test]
fn pairs_are_trained_evaluated_and_resumed() {
    let case = Case::new();
    let data = case.pairs(40, "eval_fraction: 0.2");
    let run = |args: &[&str]| {
        let set = sets(&[&data, GPT2, "preference={beta: 0.5}", "training.eval_every=5"]);
        case.train(&[args, &set].concat())
    };
    let said = run(&["-n", "2", "--max-steps", "20"]);
    for expected in [
        "training data: 40 pairs, ",
        "reference log-probabilities of 40 pairs computed in ",
        "reward_accuracy ",
        "reward_margin ",
    ] {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    let metrics = case.metrics("run");
    let loss = |step: usize| metrics[step].get("loss").and_then(|loss| loss.as_f64()).unwrap();
    assert!((loss(0) - 2f64.ln()).abs() < 1e-6 && loss(19) < 0.5, "{} {}", loss(0), loss(19));
    assert!(metrics[19]["eval_reward_accuracy"].as_f64().is_some(), "{}", metrics[19]);
    let said = run(&["-n", "1", "--max-steps", "24", "--resume", "auto"]);
    assert!(said.contains("24/24") && !said.contains("reference log-probabilities"), "{said}");

    case.succeed(&["generate", "run", "-p", "user w1 . assistant", "-n", "3", "--quiet"]);
    case.export("run", "exported");
    assert!(case.path("exported/config.json").is_file());

    let shown = ["data", "show", "--config", "ds.yaml", "--set", &data, "--set", GPT2, "--set", "preference={}"];
    let shown = case.succeed(&shown);
    assert!(shown.contains("chosen:\nuser w0 . assistant") && shown.contains("\n\nrejected:\nuser w0 ."), "{shown}");
}

/// The reference model of an adapter is the base model with its quantized weights.
#[test]
fn adapters_of_quantized_weights_learn_from_pairs() {
    let case = Case::new();
    let data = case.pairs(40, "");
    let settings = [
        &data,
        GPT2,
        "preference={beta: 0.5}",
        "adapter={r: 4}",
        "quantization_config={load_in_4bit: true, bnb_4bit_quant_type: nf4}",
    ];
    case.train(&[&["-n", "2", "--max-steps", "20"], &sets(&settings)[..]].concat());
    let metrics = case.metrics("run");
    let loss = |step: usize| metrics[step].get("loss").and_then(|loss| loss.as_f64()).unwrap();
    assert!((loss(0) - 2f64.ln()).abs() < 1e-6 && loss(19) < 0.99 * loss(0), "{} {}", loss(0), loss(19));
}

#[test]
fn contradictions_are_errors() {
    let case = Case::new();
    let data = case.pairs(40, "");
    let refused = |settings: &[&str]| {
        let output = case.run(&[&["--set", GPT2, "--max-steps", "1"], &sets(settings)[..]].concat());
        assert!(!output.status.success(), "{settings:?}");
        text(&output.stderr)
    };
    let packed = data.replace(", }", ", sample_packing: true}");
    let messages = data.replace("chat: {", "chat: {type: messages, ");
    let trained = data.replace("chat: {", "chat: {train_on_inputs: true, ");
    for (settings, expected) in [
        (&["preference={}"][..], "`data.format: auto` has no pairs of answers"),
        (&["preference={}", &packed], "`preference` does not support `sample_packing`: each sample is one pair"),
        (
            &["preference={}", &messages],
            "records of `data.chat.type: messages` have one answer, but `preference` compares two",
        ),
        (&["preference={}", &trained], "`train_on_inputs` has no effect with `preference`"),
        (&[&data], "the record is a preference pair with the answers `chosen` and `rejected`"),
        (
            &[&data.replace("chat: {", "chat: {type: preference, ")],
            "`data.chat.type: preference` needs the `preference` section",
        ),
        (&["preference={type: orpo, loss_type: ipo}", &data], "`loss_type` has no effect with `preference.type: orpo`"),
        (&["preference={label_smoothing: 0.1}", &data], "`label_smoothing` has no effect"),
        (&["preference={simpo_gamma: 0.1}", &data], "`simpo_gamma` has no effect with `preference.type: dpo`"),
        (&["preference={type: rlhf}", &data], "rlhf"),
        (
            &["preference={}", &data, "adapter={init_lora_weights: false}"],
            "`init_lora_weights: false` would give the reference model a random adapter",
        ),
        (&["preference={}", &data, "training.device=cuda"], "training"),
    ] {
        let said = refused(settings);
        assert!(said.contains(expected), "{settings:?}: {said}");
    }
    fs::write(case.path("pairs.jsonl"), r#"{"prompt": "w1", "chosen": "w2"}"#).unwrap();
    let said = refused(&["preference={}", &data]);
    assert!(said.contains("pairs.jsonl, line 1: the record has no field `rejected`"), "{said}");
}
