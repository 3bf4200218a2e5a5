//! Compares the planned peak memory with the allocator's count. On every rank, the plan is never below the count and at
//! most slightly above it.
//!
//! Each rank is a process of its own, so the count contains nothing else. The models take tens of megabytes, because in
//! smaller models a single message in flight would be one percent of the total.

mod models;
mod optimizers;

use crate::case;

use case::{Case, sets};

/// Maximum excess of the plan over the count, in percent.
const ABOVE: f64 = 2.0;

const GPT2: &str = "model={type: gpt2, vocab_size: 256, n_positions: 128, n_embd: 192, n_layer: 4, n_head: 4}";
const UNTIED: &str = "model={type: gpt2, vocab_size: 2000, n_positions: 128, n_embd: 192, n_layer: 3, n_head: 4, tie_word_embeddings: false}";
const WIDE: &str = "model={type: gpt2, vocab_size: 8000, n_positions: 128, n_embd: 128, n_layer: 2, n_head: 4}";
const LLAMA: &str = "model={type: llama, vocab_size: 256, hidden_size: 192, intermediate_size: 512, num_hidden_layers: 4, \
                     num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 128}";

/// Keys of `zero_optimization` that offload the optimizer state or the parameters to a disk.
const STATE: &str = "offload_optimizer: {device: nvme, nvme_path: .}";
const PARAMETERS: &str = "offload_param: {device: nvme, nvme_path: .}";
/// A block size so small that the layers of these models are large enough to be offloaded.
const BLOCKS: &str = "aio={block_size: 65536}";

/// Trains two steps and evaluates on `ranks` ranks, and compares plan and count. Returns the largest count of a rank,
/// in bytes.
fn holds(ranks: usize, zero: &str, settings: &[&str]) -> u64 {
    holds_within(ABOVE, ranks, zero, settings)
}

fn holds_within(most: f64, ranks: usize, zero: &str, settings: &[&str]) -> u64 {
    holds_in(&Case::new(), most, ranks, zero, settings)
}

fn holds_in(case: &Case, most: f64, ranks: usize, zero: &str, settings: &[&str]) -> u64 {
    let (count, zero) =
        (ranks.to_string(), format!("zero_optimization={{stage3_param_persistence_threshold: 100, {zero}}}"));
    let base = [
        GPT2,
        "train_micro_batch_size_per_gpu=2",
        "training={max_steps: 2, output_dir: run, save_last: false}",
        "launcher={timeout_seconds: 60, threads_per_rank: 1}",
        &zero,
    ];
    case.train(&[&["-n", &count, "--quiet"], &sets(&base)[..], &sets(settings)].concat());
    let mut largest = 0;
    for rank in case.report("run")["memory"]["ranks"].as_array().unwrap() {
        let of = |key: &str| rank[key].as_u64().unwrap_or_else(|| panic!("no {key}: {rank}"));
        let (planned, measured) = (of("planned_peak_total_bytes"), of("measured_peak_total_bytes"));
        largest = measured.max(largest);
        let above = (planned as f64 / measured as f64 - 1.0) * 100.0;
        let what =
            format!("{ranks} ranks, {zero}, {settings:?}: planned {planned}, measured {measured}, {above:+.2} %");
        // At the peak, a background save may have allocated a few kilobytes that the plan does not count.
        let least = if settings.iter().any(|setting| setting.contains("save_async: true")) { -0.1 } else { 0.0 };
        assert!((least..=most).contains(&above), "{what}\n{rank:#}");
        // The layout determines the resident parameters and optimizer state to the byte.
        for category in ["parameters", "optimizer_state"] {
            assert_eq!(
                rank["planned_peak_bytes"][category], rank["measured_peak_bytes"][category],
                "{category}: {what}"
            );
        }
    }
    largest
}

#[test]
fn every_zero_stage_over_ranks_and_micro_batches() {
    for stage in 0..=3 {
        let zero = format!("stage: {stage}");
        for ranks in [1, 2] {
            holds(ranks, &zero, &[]);
            holds(ranks, &zero, &["gradient_accumulation_steps=3", "train_micro_batch_size_per_gpu=4"]);
        }
    }
    holds(3, "stage: 3, stage3_max_reuse_distance: 0", &[]);
    holds(2, "stage: 2, overlap_comm: false, reduce_bucket_size: 100000", &[]);
    holds(2, "stage: 2, reduce_scatter: false", &[]);
    holds(2, "stage: 2", &["training.reproducible=true", "gradient_accumulation_steps=4"]);
    holds(2, "stage: 1", &["communication_data_type=bf16"]);
    holds(2, "stage: 2", &["communication_data_type=fp16"]);
    holds(2, "stage: 3", &["launcher.transport=tcp"]);
    holds(3, "stage: 2", &["launcher.transport=tcp"]);
}

#[test]
fn sequence_and_context_parallelism() {
    for (ranks, size) in [
        (2, "sequence_parallel_size=2"),
        (4, "sequence_parallel_size=2"),
        (4, "sequence_parallel_size=4"),
        (2, "mesh.context_parallel_degree=2"),
        (4, "mesh.context_parallel_degree=4"),
        (2, "mesh={context_parallel_degree: 2, context_parallel_rotate_method: alltoall}"),
        (4, "mesh={context_parallel_degree: 4, context_parallel_rotate_method: alltoall}"),
    ] {
        for stage in [0, 2, 3] {
            holds(ranks, &format!("stage: {stage}"), &[size]);
        }
        let recomputes = "activation_checkpointing={enabled: true}";
        for more in [LLAMA, "bf16={enabled: true}", recomputes, "gradient_accumulation_steps=2"] {
            holds(ranks, "stage: 2", &[size, more, "train_micro_batch_size_per_gpu=1"]);
        }
    }
    let pipeline = ["sequence_parallel_size=2", "pipeline={stages: 2}", UNTIED, "gradient_accumulation_steps=3"];
    holds(4, "stage: 0", &pipeline);
    let keys = ["sequence_parallel_size=2", "mesh.context_parallel_degree=2"];
    for key in keys {
        holds(2, "stage: 2", &[key, "launcher.transport=tcp"]);
    }
    holds(4, "stage: 2", &keys);
    let ring = "mesh={context_parallel_degree: 2, context_parallel_rotate_method: alltoall}";
    holds(4, "stage: 2", &[keys[0], ring]);
    holds(4, "stage: 3", &[keys[0], keys[1], LLAMA, "launcher.transport=tcp"]);
}

#[test]
fn tensor_parallel_layers() {
    for (ranks, tensor) in [(2, 2), (4, 2), (4, 4)] {
        let size = format!("tensor_parallel={{autotp_size: {tensor}}}");
        for stage in [0, 2, 3] {
            holds(ranks, &format!("stage: {stage}"), &[&size]);
        }
        let recomputes = "activation_checkpointing={enabled: true}";
        for more in ["bf16={enabled: true}", recomputes, "gradient_accumulation_steps=2"] {
            holds(ranks, "stage: 2", &[&size, more, "train_micro_batch_size_per_gpu=1"]);
        }
    }
    let quantized = ["quantization_config={load_in_4bit: true}", "quantization_config={load_in_8bit: true}"];
    let (size, wide) = ("tensor_parallel={autotp_size: 2}", "model.n_embd=256");
    for stage in [0, 3] {
        for (adapter, quantized) in [
            ("adapter={r: 8}", quantized[0]),
            ("adapter={r: 8, use_dora: true}", quantized[0]),
            ("adapter={r: 8}", quantized[1]),
        ] {
            holds(2, &format!("stage: {stage}"), &[size, wide, adapter, quantized]);
        }
    }
    let overlapping = "tensor_parallel={autotp_size: 2, tp_overlap_comm: true}";
    for more in [LLAMA, "bf16={enabled: true}", "train_micro_batch_size_per_gpu=2"] {
        holds(2, "stage: 2", &[overlapping, more]);
    }
    holds(2, "stage: 2", &[size, LLAMA]);
    holds(4, "stage: 2", &[size, "wall_clock_breakdown=true"]);
    for schedule in ["1f1b", "zb_h1"] {
        let pipeline = format!("pipeline={{stages: 2, schedule: {schedule}}}");
        holds(4, "stage: 0", &[size, &pipeline, UNTIED, "gradient_accumulation_steps=3"]);
    }
    let ring = "mesh={context_parallel_degree: 2, context_parallel_rotate_method: alltoall}";
    for key in ["sequence_parallel_size=2", "mesh.context_parallel_degree=2", ring] {
        holds(4, "stage: 2", &[size, key]);
    }
    holds(2, &format!("stage: 3, {STATE}, {PARAMETERS}"), &[size, BLOCKS]);
    holds(2, "stage: 2", &[size, "launcher.transport=tcp"]);
}

#[test]
fn shard_groups() {
    for stage in 1..=3 {
        holds(
            4,
            &format!("stage: {stage}"),
            &["mesh.data_parallel_replicate_degree=2", "gradient_accumulation_steps=2"],
        );
    }
    holds(2, "stage: 2", &["mesh.data_parallel_replicate_degree=2", "bf16.enabled=true"]);
    holds(4, "stage: 3", &["mesh.data_parallel_shard_degree=2", "bf16.enabled=true", "launcher.transport=tcp"]);
    let summed_first = ["mesh.data_parallel_replicate_degree=2", "gradient_accumulation_steps=3", "bf16.enabled=true"];
    holds(4, "stage: 2", &summed_first);
    let in_bf16 = "data_types={grad_accum_dtype: bf16}";
    holds(4, "stage: 3", &[&summed_first[..], &[in_bf16]].concat());
}

#[test]
fn local_steps() {
    let replicates = ["mesh.data_parallel_replicate_degree=2", "training.max_steps=3"];
    let local = [replicates[0], replicates[1], "training.local_steps={steps: 2}"];
    for stage in 0..=3 {
        holds(4, &format!("stage: {stage}"), &[&local[..], &["gradient_accumulation_steps=2"]].concat());
    }
    holds(2, "stage: 2", &[&local[..], &["bf16.enabled=true", "launcher.transport=tcp"]].concat());
    holds(4, "stage: 3", &[&local[..], &["bf16.enabled=true", "launcher.transport=tcp"]].concat());
    let evaluated = ["training.eval_every=2", "launcher.transport=tcp"];
    holds(4, "stage: 3", &[&local[..], &evaluated].concat());
    holds(4, "stage: 1", &[&local[..], &["pipeline.stages=2"]].concat());
    let plain = "training.local_steps={steps: 2, outer_momentum: 0}";
    holds(2, "stage: 1", &[&replicates[..], &[plain]].concat());
}

#[test]
fn secondary_shards() {
    let zero = "stage: 3, zero_hpz_partition_size: 2, stage3_max_reuse_distance: 0";
    holds(4, zero, &["gradient_accumulation_steps=2"]);
    holds(4, zero, &["bf16.enabled=true", "launcher.transport=tcp"]);
}

/// The communication buffers contain codes instead of values.
#[test]
fn collectives_in_8_bits() {
    let codes = "zero_quantized_weights: true, zero_quantized_gradients: true";
    holds(2, &format!("stage: 3, {codes}"), &["gradient_accumulation_steps=2"]);
    holds(3, &format!("stage: 3, stage3_max_reuse_distance: 0, {codes}"), &["bf16.enabled=true"]);
    holds(2, "stage: 2, zero_quantized_gradients: true", &["gradient_accumulation_steps=2", "bf16.enabled=true"]);
    holds(4, &format!("stage: 3, {codes}"), &["mesh.data_parallel_replicate_degree=2", "bf16.enabled=true"]);
    holds(2, &format!("stage: 3, {PARAMETERS}, zero_quantized_weights: true"), &[BLOCKS]);
    let near = format!("stage: 3, stage3_max_reuse_distance: 0, zero_hpz_partition_size: 2, {codes}");
    holds(4, &near, &["bf16.enabled=true"]);
    holds(2, "stage: 3, zero_quantized_nontrainable_weights: true", &[GPT2, "adapter={r: 8}"]);
}

/// A background save holds a copy of the state and the buffers for writing it.
#[test]
fn background_saves() {
    let training = "training={max_steps: 3, output_dir: run, save_last: false, save_async: true, save_every: 1}";
    for stage in 0..=3 {
        holds(2, &format!("stage: {stage}"), &[training]);
    }
    holds(1, "stage: 2", &[training, "bf16.enabled=true"]);
}

#[test]
fn offload_to_disk() {
    holds(1, &format!("stage: 1, {STATE}"), &[BLOCKS]);
    holds(2, &format!("stage: 1, {STATE}"), &[BLOCKS, "gradient_accumulation_steps=2"]);
    holds(2, &format!("stage: 2, {STATE}"), &[BLOCKS]);
    holds(2, &format!("stage: 3, {STATE}"), &[BLOCKS, "bf16.enabled=true"]);
    holds(2, &format!("stage: 3, {STATE}, {PARAMETERS}"), &[BLOCKS, "fp16={enabled: true, initial_scale_power: 4}"]);
    holds(2, &format!("stage: 3, {PARAMETERS}"), &[BLOCKS]);
    holds(2, &format!("stage: 3, stage3_max_reuse_distance: 0, {STATE}, {PARAMETERS}"), &[BLOCKS]);
    let tiles = format!("stage: 3, sub_group_size: 65536, {STATE}, {PARAMETERS}");
    holds(1, &tiles, &[BLOCKS, "gradient_accumulation_steps=2", "activation_checkpointing={}"]);
    let plain =
        "offload_optimizer: {device: nvme, nvme_path: ., buffer_count: 1, pipeline_read: false, pipeline_write: false}";
    holds(2, &format!("stage: 2, sub_group_size: 65536, {plain}"), &[BLOCKS]);
    // SGD without momentum has no state, so only gradients are offloaded.
    holds(2, &format!("stage: 2, {STATE}"), &[BLOCKS, "optimizer={type: SGD, params: {lr: 0.1}}"]);
    // A checkpoint reads all offloaded state, and frees its buffers afterwards.
    let saving = "training={max_steps: 3, output_dir: run, save_every: 1}";
    holds(2, &format!("stage: 3, {STATE}, {PARAMETERS}"), &[BLOCKS, saving]);
}

#[test]
fn pipelines() {
    // The number of messages in flight depends on which stage is faster. The plan assumes the maximum, so this model
    // has small messages.
    let untied = "model={type: gpt2, vocab_size: 256, n_positions: 64, n_embd: 256, n_layer: 6, n_head: 4, tie_word_embeddings: false}";
    let (one, short) = ("train_micro_batch_size_per_gpu=1", "data.sequence_length=64");
    let pipeline = |schedule: &str| format!("pipeline={{stages: 2, schedule: {schedule}}}");
    for schedule in ["1f1b", "gpipe", "zb_h1"] {
        holds(2, "stage: 0", &[untied, one, short, &pipeline(schedule), "gradient_accumulation_steps=3"]);
    }
    for (stage, section) in [(2, "{enabled: false}"), (3, "{}")] {
        let section = format!("activation_checkpointing={section}");
        holds(
            4,
            &format!("stage: {stage}"),
            &[untied, one, short, &pipeline("1f1b"), "gradient_accumulation_steps=3", &section],
        );
    }
}

/// The gradient of the tied embedding may or may not be in flight at the peak. The plan assumes the larger case, so the
/// tolerance is larger.
#[test]
fn tied_parameters_over_pipelines() {
    const GRADIENTS: f64 = 25.0;
    for (ranks, stage, schedule) in [(2, 0, "1f1b"), (2, 0, "gpipe"), (2, 0, "zb_h1"), (4, 1, "1f1b"), (4, 3, "1f1b")] {
        let pipeline = format!("pipeline={{stages: 2, schedule: {schedule}}}");
        let settings = [WIDE, &pipeline, "gradient_accumulation_steps=4"];
        holds_within(GRADIENTS, ranks, &format!("stage: {stage}"), &settings);
    }
}

#[test]
fn many_sub_groups_with_a_timeline() {
    let tiles = format!("stage: 2, sub_group_size: 4096, {STATE}");
    holds(1, &tiles, &[BLOCKS]);
    holds(2, &tiles, &[BLOCKS, "wall_clock_breakdown=true"]);
}
