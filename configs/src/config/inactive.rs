//! DeepSpeed's sections that are not implemented. The schema lists them, so a configuration that switches them off is
//! accepted unchanged, and any other use is an error that names the key.

use crate::config::Bf16;
use crate::path::last;
use crate::schema::*;

const ENABLED: Switch = Switch::Key(last(Bf16::enabled), &["false"]);

#[rustfmt::skip]
pub(crate) static CHECKPOINT: Section = Section { switch: Switch::Keys, keys: &[
    ignored("tag_validation", Kind::Choice { names: &["WARN", "IGNORE", "FAIL", "Warn", "Ignore", "Fail", "warn", "ignore", "fail"], later: &[] }, "WARN", "all ranks always save under the same tag"),
    ignored("load_universal", Kind::Bool, "false", "every checkpoint loads into any layout"),
    later("use_node_local_storage", "false", "Each node writes its own copy"),
    section("parallel_write", &PARALLEL_WRITE, "Writers"),
    rejected("checkpoint_serialization", "true", "checkpoints are not written with torch.save"),
    rejected_section("writer", &WRITER, "checkpoints are not written with torch.save").instead("`training.save_async` writes checkpoints in the background"),
    Key { status: Status::Rejected { off: &["false"] }, ..rejected("datastates_ckpt", "null", "DataStates is another checkpoint engine") },
] };

#[rustfmt::skip]
static WRITER: Section = Section { switch: Switch::Presence, keys: &[
    rejected("type", "FAST", "checkpoints are not written with torch.save"),
    later("decoupled", "false", "Write in the background"),
    rejected("io_buffer_size", "67108864", "checkpoints are not written with torch.save"),
    rejected("io_buffer_double", "true", "checkpoints are not written with torch.save"),
    rejected("io_multiplier", "1", "checkpoints are not written with torch.save"),
    rejected("show_statistics", "false", "checkpoints are not written with torch.save"),
    rejected("data_parallel", "null", "checkpoints are not written with torch.save"),
] };

#[rustfmt::skip]
static PARALLEL_WRITE: Section = Section { switch: Switch::Keys, keys: &[
    later("pipeline_stage", "false", "Each pipeline stage writes its own layers").instead("each rank writes its own shard anyway"),
] };

#[rustfmt::skip]
pub(crate) static TIMERS: Section = Section { switch: Switch::Keys, keys: &[
    section("throughput", &THROUGHPUT, "Samples per second"),
] };

#[rustfmt::skip]
static THROUGHPUT: Section = Section { switch: Switch::Keys, keys: &[
    ignored("enabled", Kind::Bool, "true", "throughput is always measured"),
    ignored("synchronized", Kind::Bool, "true", "a step ends only when all of its work is done"),
] };

#[rustfmt::skip]
pub(crate) static DYNAMIC_BATCHING: Section = Section { switch: ENABLED, keys: &[
    later("enabled", "false", "Enable dynamic batching"),
    later("metrics_path", "null", "File with the sample lengths"),
    later("lr_scaling_method", "linear", "linear, sqrt or none"),
    later("min_batch_size", "1", "Smallest batch"),
    later("max_batch_size", "null", "Largest batch"),
    later("sequence_picking_order", "dataloader", "dataloader, random or seqlen"),
    later("max_tokens", "null", "Tokens per batch"),
    later("verbose", "false", "Print each batch"),
] };

#[rustfmt::skip]
pub(crate) static DATA_ROUTING: Section = Section { switch: ENABLED, keys: &[
    rejected("enabled", "false", "zero-train has no random layer-token drop"),
    rejected("random_ltd", "null", "zero-train has no random layer-token drop"),
] };

#[rustfmt::skip]
pub(crate) static TP: Section = Section { switch: Switch::Keys, keys: &[
    later("tp_size", "1", "Number of tensor-parallel ranks").instead("`tensor_parallel.autotp_size` sets the size for training"),
    later("tp_grain_size", "1", "Widths are split in multiples of this number"),
    rejected("mpu", "null", "the value is a Python object"),
    rejected("tp_group", "null", "the value is a Python object"),
] };

#[rustfmt::skip]
pub(crate) static COMET: Section = Section { switch: ENABLED, keys: &all_rejected("Comet has no client for Rust", [
    ("enabled", "false"), ("samples_log_interval", "100"), ("project", "null"), ("workspace", "null"),
    ("api_key", "null"), ("experiment_name", "null"), ("experiment_key", "null"), ("online", "null"), ("mode", "null"),
]) };

#[rustfmt::skip]
pub(crate) static TORCH_AUTOCAST: Section = Section { switch: ENABLED, keys: &all_rejected("candle has no autocast; use `bf16`", [
    ("enabled", "false"), ("dtype", "null"), ("lower_precision_safe_modules", "null"),
]) };

#[rustfmt::skip]
pub(crate) static HYBRID_ENGINE: Section = Section { switch: ENABLED, keys: &all_rejected("zero-train has no inference engine to switch to", [
    ("enabled", "false"), ("max_out_tokens", "512"), ("inference_tp_size", "1"), ("release_inference_cache", "false"),
    ("pin_parameters", "true"), ("tp_gather_partition_size", "8"), ("enable_cuda_graph", "false"),
]) };

const NOT_COMPILED: &str = "zero-train compiles no graph; every operation has its own kernel";
const COMPILER: &str = "zero-train does not use torch.compile";

#[rustfmt::skip]
pub(crate) static COMPILE: Section = Section { switch: Switch::Keys, keys: &[
    ignored("deepcompile", Kind::Bool, "false", NOT_COMPILED),
    ignored("enabled", Kind::Bool, "false", NOT_COMPILED),
    ignored("disable", Kind::Bool, "= unset", NOT_COMPILED),
    ignored("backend", Kind::Text, "= unset", NOT_COMPILED),
    rejected("autoep_non_moe", "false", COMPILER),
    rejected("free_activation", "false", COMPILER),
    rejected("free_activation_threshold", "10485760", COMPILER),
    rejected("offload_activation", "false", COMPILER),
    rejected("offload_activation_pin_memory", "true", COMPILER),
    rejected("offload_opt_states", "false", COMPILER),
    rejected("double_buffer", "true", COMPILER),
    rejected("symmetric_memory", "false", COMPILER),
    rejected("debug_log", "false", COMPILER),
    rejected("offload_parameters", "false", COMPILER),
    rejected("sync_before_reduce", "false", COMPILER),
    rejected("sync_after_reduce", "false", COMPILER),
    rejected("sync_before_allgather", "false", COMPILER),
    rejected("sync_after_allgather", "false", COMPILER),
    rejected("keep_int_input_tensors", "true", COMPILER),
    rejected("keep_all_input_tensors", "false", COMPILER),
    rejected("passes", "null", COMPILER),
] };

#[rustfmt::skip]
pub(crate) static EXPERT_PARALLEL: Section = Section { switch: ENABLED, keys: &all_rejected("AutoEP rewrites the Python classes of Hugging Face models", [
    ("enabled", "false"), ("autoep_size", "1"), ("expert_tensor_parallel_size", "null"),
    ("validate_folding_routing", "null"), ("async_split_plan", "null"), ("preset_model", "null"),
    ("moe_layer_pattern", "null"), ("expert_pattern", "null"), ("router_pattern", "null"), ("use_grouped_mm", "null"),
    ("disable_triton_grouped_mm", "null"), ("route_norm", "null"), ("route_scale", "null"), ("score_apply", "null"),
    ("combine_impl", "null"), ("row_weighting_impl", "null"), ("gate_up_impl", "null"), ("comm_backend", "null"),
    ("comm_num_sm", "null"), ("comm_qp_margin", "null"), ("comm_max_tokens_per_rank", "null"),
    ("num_expert_groups", "null"), ("num_limited_groups", "null"), ("score_func", "null"), ("top_k", "null"),
    ("load_balance_coeff", "null"), ("routed_scaling_factor", "null"), ("expert_w1", "null"), ("expert_w2", "null"),
    ("expert_w3", "null"), ("num_experts_attr", "null"), ("top_k_attr", "null"), ("has_shared_experts", "null"),
    ("shared_experts_pattern", "null"), ("shared_experts_gate_pattern", "null"), ("expert_activation", "null"),
]) };

/// Declares keys that are rejected for the same reason, from their names and defaults.
const fn all_rejected<const N: usize>(meaning: &'static str, keys: [(&'static str, &'static str); N]) -> [Key; N] {
    let mut all = [const { rejected("", "", "") }; N];
    let mut index = 0;
    while index < N {
        all[index] = rejected(keys[index].0, keys[index].1, meaning);
        index += 1;
    }
    all
}
