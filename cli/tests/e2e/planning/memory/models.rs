//! Compares planned and counted memory for models, dtypes, adapters, data and recomputation.

use super::{ABOVE, BLOCKS, GPT2, LLAMA, PARAMETERS, STATE, UNTIED, WIDE, holds, holds_in, holds_within};
use crate::case::Case;

/// A table of the rotary angles of all positions would take 50 MB.
const GEMMA: &str = "model={type: llama, vocab_size: 256, hidden_size: 192, intermediate_size: 512, num_hidden_layers: 4, \
                     num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 131072, qk_norm: true, \
                     sliding_window: 32, layer_types: [sliding_attention, full_attention, sliding_attention, full_attention], \
                     query_pre_attn_scalar: 40.0, rope_local_base_freq: 100.0, norm_unit_offset: true, post_norms: true, \
                     scale_embeddings: true, hidden_act: gelu_pytorch_tanh, tie_word_embeddings: true}";
const PHI: &str = "model={type: llama, vocab_size: 256, hidden_size: 192, intermediate_size: 512, num_hidden_layers: 4, \
                   num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 131072, \
                   fused_projections: true, partial_rotary_factor: 0.75}";

#[test]
fn models_and_dtypes() {
    for model in [UNTIED, WIDE, LLAMA] {
        holds(1, "stage: 0", &[model]);
        holds(2, "stage: 3", &[model, "train_micro_batch_size_per_gpu=4"]);
    }
    for stage in 0..=3 {
        holds(2, &format!("stage: {stage}"), &["bf16.enabled=true"]);
    }
    holds(1, "stage: 2", &[LLAMA, "bf16.enabled=true"]);
    // Steps that overflow need no more memory than others.
    for (stage, power) in [(0, 10), (1, 10), (2, 40), (3, 10)] {
        holds(2, &format!("stage: {stage}"), &[&format!("fp16={{enabled: true, initial_scale_power: {power}}}")]);
    }
    holds(1, "stage: 2", &[LLAMA, "fp16.enabled=true"]);
}

#[test]
fn gemma_and_phi_with_long_sequences() {
    for model in [GEMMA, PHI] {
        let settings = [model, "data.sequence_length=128", "train_micro_batch_size_per_gpu=4"];
        for (ranks, zero) in [(1, "stage: 0"), (2, "stage: 3")] {
            holds(ranks, zero, &settings);
        }
        let more = |more| [&settings[..], &[more]].concat();
        holds(2, "stage: 2", &more("bf16.enabled=true"));
        holds(2, "stage: 3", &more("adapter={r: 8}"));
        holds(2, "stage: 1", &more("pipeline.stages=2"));
        // The rotary angles of 1,024 positions take 0.4 MB in the first model and 0.1 MB in the second.
        holds(1, "stage: 0", &[model, "data.sequence_length=1024", "train_micro_batch_size_per_gpu=1"]);
    }
}

#[test]
fn frozen_parameters() {
    for selection in ["trainable=['*.h.3.*']", "frozen=['*wte*', '*wpe*']", "trainable=['*.bias']"] {
        let selection = format!("training.{selection}");
        for (ranks, zero) in [(1, "stage: 0"), (2, "stage: 1"), (2, "stage: 2"), (2, "stage: 3")] {
            holds(ranks, zero, &[&selection, "train_micro_batch_size_per_gpu=4"]);
        }
        holds(2, "stage: 3", &[&selection, "bf16.enabled=true"]);
        holds(2, &format!("stage: 3, {STATE}, {PARAMETERS}"), &[&selection, BLOCKS]);
        // A stage without a backward runs ahead of the next one. The plan counts all of its messages as in flight.
        holds_within(10.0, 2, "stage: 1", &[&selection, "pipeline.stages=2", "gradient_accumulation_steps=4"]);
        holds(2, "stage: 2", &[&selection, "activation_checkpointing={}", "train_micro_batch_size_per_gpu=8"]);
    }
}

#[test]
fn adapters() {
    let all = "adapter={r: 8, lora_dropout: 0.1}";
    let some = "adapter={r: 16, target_modules: [c_attn], modules_to_save: [ln_f], bias: all}";
    let dora = "adapter={r: 8, use_dora: true, bias: lora_only}";
    for adapter in [all, some, dora] {
        for (ranks, zero) in [(1, "stage: 0"), (2, "stage: 1"), (2, "stage: 3")] {
            holds(ranks, zero, &[adapter, "train_micro_batch_size_per_gpu=4"]);
        }
        holds(2, "stage: 3", &[adapter, "bf16.enabled=true", "train_micro_batch_size_per_gpu=4"]);
        holds(2, &format!("stage: 3, {PARAMETERS}"), &[adapter, BLOCKS]);
        holds(2, "stage: 2", &[adapter, "activation_checkpointing={}", "train_micro_batch_size_per_gpu=8"]);
    }
    holds(2, "stage: 3", &[LLAMA, all, "train_micro_batch_size_per_gpu=4"]);
}

#[test]
fn quantized_weights() {
    let four = "quantization_config={load_in_4bit: true, bnb_4bit_quant_type: nf4, bnb_4bit_use_double_quant: true}";
    let eight = "quantization_config={load_in_8bit: true}";
    let adapter = "adapter={r: 8}";
    for model in [GPT2, LLAMA] {
        for (quantization, ranks, zero) in [(four, 1, "stage: 0"), (four, 2, "stage: 3"), (eight, 2, "stage: 3")] {
            holds(ranks, zero, &[model, quantization, adapter, "train_micro_batch_size_per_gpu=4"]);
        }
        holds(2, "stage: 3", &[model, four, adapter, "bf16.enabled=true", "activation_checkpointing={}"]);
        holds(2, "stage: 3", &[model, four, "adapter={r: 8, use_dora: true}", "train_micro_batch_size_per_gpu=4"]);
        for ranks in [1, 2] {
            let blocks = "aio={block_size: 16384}";
            holds(ranks, &format!("stage: 3, {PARAMETERS}"), &[model, eight, adapter, blocks]);
        }
    }
    let training = "training={max_steps: 3, output_dir: run, save_last: false, save_async: true, save_every: 1}";
    holds(2, "stage: 3", &[LLAMA, four, adapter, training]);
}

#[test]
fn packed_conversations() {
    let case = Case::new();
    let data = case.conversations(128, "sample_packing: true");
    for model in [GPT2, LLAMA] {
        for zero in ["stage: 0", "stage: 3"] {
            holds_in(&case, ABOVE, 2, zero, &[model, &data, "train_micro_batch_size_per_gpu=4"]);
        }
        let shared = "sequence_parallel_size=2";
        holds_in(&case, ABOVE, 2, "stage: 2", &[model, &data, shared, "train_micro_batch_size_per_gpu=4"]);
    }
}

#[test]
fn preference_pairs() {
    let case = Case::new();
    let data = case.pairs(64, "shuffle: true");
    for (model, preference) in [(GPT2, "preference={}"), (LLAMA, "preference={type: orpo}")] {
        for (ranks, zero) in [(1, "stage: 0"), (2, "stage: 3")] {
            holds_in(&case, ABOVE, ranks, zero, &[model, &data, preference, "train_micro_batch_size_per_gpu=4"]);
        }
    }
    let adapter = "adapter={r: 8}";
    holds_in(&case, ABOVE, 2, "stage: 3", &[GPT2, &data, "preference={}", adapter, "bf16.enabled=true"]);
    let shared = "sequence_parallel_size=2";
    holds_in(&case, ABOVE, 2, "stage: 2", &[GPT2, &data, "preference={}", shared, "train_micro_batch_size_per_gpu=4"]);
}

#[test]
fn activation_checkpointing() {
    for (ranks, stage) in [(1, 0), (2, 2), (2, 3)] {
        for section in ["{}", "{interval: 2}", "{layers: ['h\\.[01]$']}", "{device: nvme, nvme_path: .}"] {
            let section = format!("activation_checkpointing={section}");
            holds(ranks, &format!("stage: {stage}"), &[&section, "train_micro_batch_size_per_gpu=8"]);
        }
    }
    holds(2, "stage: 3", &["activation_checkpointing={}", "bf16.enabled=true", "train_micro_batch_size_per_gpu=8"]);
}

#[test]
fn tiled_mlp() {
    let (rows, inner, layers) = (1024, 256, 4);
    let gpt2 = "model={type: gpt2, vocab_size: 256, n_positions: 1024, n_embd: 64, n_layer: 4, n_head: 2}";
    let llama = "model={type: llama, vocab_size: 256, hidden_size: 64, intermediate_size: 256, num_hidden_layers: 4, \
                 num_attention_heads: 2, max_position_embeddings: 1024}";
    let tiles = "model.tiled_mlp_rows=128";
    // A block keeps two inner activations per row, or three if the MLP is gated.
    for (model, kept) in [(gpt2, 2), (llama, 3)] {
        for (dtype, bytes) in [("bf16.enabled=false", 4), ("bf16.enabled=true", 2)] {
            let settings = [model, dtype, "train_micro_batch_size_per_gpu=1", "gradient_accumulation_steps=2"];
            let whole = holds(1, "stage: 0", &settings);
            let tiled = holds(1, "stage: 0", &[&settings[..], &[tiles]].concat());
            let spared = (layers - 1) * rows * inner * kept * bytes;
            assert!(
                tiled + spared < whole,
                "{model}, {dtype}: untiled {whole}, tiled {tiled}, expected saving {spared}"
            );
        }
        holds(2, "stage: 3", &[model, tiles]);
        holds(2, "stage: 3", &[model, tiles, "activation_checkpointing={}", "bf16.enabled=true"]);
    }
    holds(2, "stage: 1", &[LLAMA, "model.tiled_mlp_rows=64", "train_micro_batch_size_per_gpu=4"]);
    let untied =
        [UNTIED, "train_micro_batch_size_per_gpu=1", "gradient_accumulation_steps=3", "data.sequence_length=64"];
    let pipeline = ["pipeline={stages: 2, schedule: zb_h1}", "model.tiled_mlp_rows=64"];
    holds(2, "stage: 0", &[&untied[..], &pipeline].concat());
}
