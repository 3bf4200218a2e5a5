//! LoRA over a pretrained folder: training on two ranks, the export in PEFT's format, the merged model, and a run that
//! starts from the exported adapter.

use crate::case;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use case::{Case, sets};
use serde_json::{Value, json};

const LORA: &str = "adapter: {r: 4, lora_alpha: 8, target_modules: [c_attn, mlp.c_proj]}";

/// Writes a configuration that trains the model of `folder`.
fn configure(case: &Case, folder: &str, adapter: &str) {
    case.configure_model(&format!("{{pretrained: {folder}}}\n{adapter}"));
}

/// Returns the shapes of the tensors in a safetensors file.
fn shapes(file: &Path) -> BTreeMap<String, Value> {
    let bytes = fs::read(file).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: BTreeMap<String, Value> = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    header.into_iter().filter(|(name, _)| name != "__metadata__").map(|(name, t)| (name, t["shape"].clone())).collect()
}

#[test]
fn an_exported_adapter_is_the_merged_model() {
    let case = Case::new();
    case.train(&["--quiet", "-n", "1", "--max-steps", "3", "--out", "base"]);
    case.export("base", "hf");
    configure(&case, "hf", LORA);
    let said = case.train(&["-n", "2", "--max-steps", "10", "--out", "lora"]);
    assert!(said.contains(" trainable)"), "{said}");

    let said = case.export("lora", "adapter");
    assert!(said.contains("8 tensors, ") && said.contains("adapter_config.json"), "{said}");
    let mut expected = BTreeMap::new();
    for layer in 0..2 {
        for (map, inputs, outputs) in [("attn.c_attn", 16, 48), ("mlp.c_proj", 64, 16)] {
            let name = |side| format!("base_model.model.transformer.h.{layer}.{map}.{side}.weight");
            expected.insert(name("lora_A"), json!([4, inputs]));
            expected.insert(name("lora_B"), json!([outputs, 4]));
        }
    }
    assert_eq!(shapes(&case.path("adapter/adapter_model.safetensors")), expected);
    let saved = fs::read_to_string(case.path("adapter/adapter_config.json")).unwrap();
    let saved: Value = serde_json::from_str(&saved).unwrap();
    assert_eq!((&saved["peft_type"], &saved["base_model_name_or_path"]), (&json!("LORA"), &json!("hf")));
    assert_eq!((&saved["r"], &saved["lora_alpha"], &saved["fan_in_fan_out"]), (&json!(4), &json!(8.0), &json!(true)));
    assert_eq!(saved["target_modules"], json!(["c_attn", "mlp.c_proj"]));

    case.succeed(&["checkpoint", "merge", "lora", "--out", "merged"]);
    assert_eq!(shapes(&case.path("merged/model.safetensors")), shapes(&case.path("hf/model.safetensors")));
    let first = |out: &str| {
        let said = case.train(&["-n", "2", "--max-steps", "1", "--out", out]);
        (case.metrics(out)[0]["loss"].as_f64().unwrap(), said)
    };
    configure(&case, "merged", "");
    let (merged, _) = first("from-merged");
    configure(&case, "hf", LORA);
    let (base, _) = first("from-base");
    configure(&case, "hf", &LORA.replace("{r", "{pretrained: adapter, r"));
    let (adapted, said) = first("from-adapter");
    assert!(said.contains("pretrained: adapter of adapter\n"), "{said}");
    assert!((merged - adapted).abs() < 1e-5 && (base - adapted).abs() > 1e-3, "{merged} {adapted} {base}");

    // A scale that differs from the one in the folder is an error, and so are adapters of other modules.
    configure(&case, "hf", &LORA.replace("{r: 4, lora_alpha: 8", "{pretrained: adapter, r: 4, lora_alpha: 9"));
    let said = case.train_fails(2, &["--max-steps", "1"]);
    assert!(said.contains("in: adapter.lora_alpha") && said.contains("set it to 8"), "{said}");
    configure(&case, "hf", "adapter: {pretrained: adapter, r: 4, lora_alpha: 8}");
    let said = case.train_fails(2, &["--max-steps", "1"]);
    assert!(said.contains("adapter is incompatible: `transformer.h.0.attn.c_proj.lora_A.weight` is missing"), "{said}");
}

/// PEFT gives the bias of a linear layer that has an adapter the name `base_layer.bias`.
#[test]
fn trained_biases_have_the_names_of_peft() {
    let case = Case::new();
    case.train(&["--quiet", "-n", "1", "--max-steps", "3", "--out", "base"]);
    case.export("base", "hf");
    let lora = "{r: 2, target_modules: [c_attn], bias: lora_only, modules_to_save: [ln_f]}";
    configure(&case, "hf", &format!("adapter: {lora}"));
    case.train(&["--quiet", "-n", "2", "--max-steps", "4", "--out", "lora"]);
    case.export("lora", "adapter");
    let names: Vec<String> = shapes(&case.path("adapter/adapter_model.safetensors")).into_keys().collect();
    let of = |name: &str| format!("base_model.model.transformer.{name}");
    let expected = ["h.0.attn.c_attn.base_layer.bias", "h.1.attn.c_attn.base_layer.bias", "ln_f.bias", "ln_f.weight"];
    assert!(names.len() == 8 && expected.iter().all(|name| names.contains(&of(name))), "{names:?}");
    case.succeed(&["checkpoint", "merge", "lora", "--out", "merged"]);
    configure(&case, "hf", &format!("adapter: {}", lora.replace("{r", "{pretrained: adapter, r")));
    case.train(&["--quiet", "--max-steps", "1", "--out", "from-adapter"]);
    configure(&case, "merged", "");
    case.train(&["--quiet", "--max-steps", "1", "--out", "from-merged"]);
    let [adapted, merged] = ["from-adapter", "from-merged"].map(|out| case.metrics(out)[0]["loss"].as_f64().unwrap());
    assert!((adapted - merged).abs() < 1e-5, "{adapted} {merged}");
}

/// Trains on packed conversations with two ranks, and evaluates.
#[test]
fn packed_conversations_are_trained() {
    let case = Case::new();
    let data = |more: &str| case.conversations(48, &format!("eval_fraction: 0.2, {more}"));
    let run = |data: &str, model: &str, out: &str| {
        let set = sets(&["training.eval_every=6", "zero_optimization.stage=2", data, model]);
        let said = case.train(&[&["-n", "2", "--max-steps", "12", "--out", out], &set[..]].concat());
        let last = case.metrics(out).last().unwrap().clone();
        (said, last["loss"].as_f64().unwrap())
    };
    let gpt2 = "model={type: gpt2, vocab_size: 64, n_positions: 64, n_embd: 16, n_layer: 2, n_head: 2}";
    let llama = "model={type: llama, vocab_size: 64, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, \
                 num_attention_heads: 2, max_position_embeddings: 64}";
    for (model, out) in [(gpt2, "gpt2"), (llama, "llama")] {
        let (said, loss) = run(&data("sample_packing: true"), model, out);
        assert!(said.contains("80 conversations in 31 samples, ") && said.contains("evaluation loss"), "{said}");
        assert!(loss < 4.1, "{loss}");
    }
    let packed = data("sample_packing: true");
    let shown = case.succeed(&["data", "show", "--config", "ds.yaml", "--set", &packed, "--set", gpt2]);
    assert!(shown.contains("sample 0 of 31: ") && shown.contains(" conversations, "), "{shown}");
    let said = case.train_fails(2, &["--set", "data.sample_packing=true"]);
    assert!(said.contains("`data.sample_packing` has no effect on `data.format: auto`"), "{said}");
}

/// The checkpoint keeps the quantized weights. A command that needs the original weights fails with one clear error.
#[test]
fn a_run_with_quantized_weights_is_inspected_exported_and_generates() {
    let case = Case::new();
    case.train(&["--quiet", "-n", "1", "--max-steps", "1", "--out", "base"]);
    case.export("base", "hf");
    configure(&case, "hf", &format!("{LORA}\nquantization_config: {{load_in_4bit: true, bnb_4bit_quant_type: nf4}}"));
    case.train(&["--quiet", "-n", "2", "--max-steps", "2", "--out", "qlora"]);
    let said = case.succeed(&["checkpoint", "inspect", "qlora"]);
    assert!(said.contains("F32 and nf4: "), "{said}");
    let row = said.lines().find(|line| line.starts_with("transformer.h.0.attn.c_attn.weight ")).unwrap();
    // 12 blocks of 64 elements, each with a scale in f32.
    assert!(row.contains("[16, 48]") && row.contains("432 B"), "{row}");
    assert!(case.succeed(&["checkpoint", "verify", "qlora"]).contains("intact"));
    let said = case.export("qlora", "adapter");
    assert!(said.contains("8 tensors, "), "{said}");
    case.succeed(&["generate", "qlora", "-p", "line", "-n", "4"]);
    let said = case.fail(3, &["checkpoint", "merge", "qlora", "--out", "merged"]);
    assert_eq!(said.matches("error:").count(), 1, "{said}");
    assert!(said.contains("is quantized") && said.contains("help: export an adapter"), "{said}");
}
