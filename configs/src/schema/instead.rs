//! Replacements for DeepSpeed keys that are not implemented, as the second part of the errors' help.

/// Replacements by the path of the unsupported key.
static INSTEAD: &[(&str, &str)] = &[
    ("managed_gradient_accumulation", "`gradient_accumulation_steps` says when the optimizer steps"),
    ("prescale_gradients", OVERFLOW),
    ("gradient_predivide_factor", OVERFLOW),
    ("sequence_parallel_size", "`model.tiled_mlp_rows` and `activation_checkpointing` make room for long sequences"),
    ("seq_parallel_communication_data_type", "there is no sequence parallelism that would use it"),
    ("data_parallel_size", "it is the number of ranks over `pipeline.stages`"),
    ("use_data_before_expert_parallelism", "there are no experts to place"),
    ("data_types.param_dtype", "`bf16` and `fp16` say in what parameters are stored"),
    ("data_types.buffer_dtype", "`bf16` and `fp16` say in what values are stored"),
    ("data_types.keep_in_fp32_modules", "every parameter has an f32 master anyway"),
    ("bf16.bf16_master_weights_and_grads", STATE),
    ("bf16.bf16_optimizer_states", STATE),
    ("optimizer.params.fp32_optimizer_states", STATE),
    ("zero_optimization.load_from_fp32_weights", "checkpoints hold f32 weights only"),
    ("zero_optimization.stage3_allgather_sequential", "a smaller `stage3_prefetch_bucket_size` takes less memory"),
    ("zero_optimization.zero_hpz_partition_size", TRAFFIC),
    ("zero_optimization.zero_quantized_weights", TRAFFIC),
    ("zero_optimization.zero_quantized_gradients", TRAFFIC),
    ("zero_optimization.zenflow", "`offload_optimizer` on nvme updates one tile while it reads and writes others"),
    ("zero_optimization.leaf_module", "each layer of a model is gathered as a whole anyway"),
    (
        "comms_logger.debug",
        "no operation has a caller in a program of yours; `training.trace` shows where in the step each one is",
    ),
    ("checkpoint.writer", "`training.save_async` writes checkpoints in the background"),
    ("checkpoint.parallel_write.pipeline_stage", "each rank writes its own shard anyway"),
    ("data_efficiency.enabled", "`data.shuffle: false` takes samples in the order of the files"),
    ("tensor_parallel.autotp_size", SPLIT),
    ("tensor_parallel.tp.tp_size", SPLIT),
    ("autotuning.mp_size", "`autotuning.space` may try `pipeline.stages`"),
];

const OVERFLOW: &str = "`communication_data_type: fp32` sends 16-bit gradients as f32";
const STATE: &str = "`zero_optimization.offload_optimizer` puts this state on a disk";
const TRAFFIC: &str = "`pipeline.stages` sends less over a slow network";
const SPLIT: &str = "`pipeline.stages` cuts the model, ZeRO stage 3 its layers";

/// Returns a replacement for the key at `path`, if something similar exists.
pub(crate) fn instead(path: &str) -> Option<&'static str> {
    INSTEAD.iter().find(|(of, _)| *of == path).map(|(_, text)| *text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::{Status, TOP, walk};

    #[test]
    fn every_entry_is_a_key_that_is_not_implemented() {
        let mut refused = vec![];
        walk("", TOP.keys, &mut |path, key| {
            let plain = match (path.find('['), path.find(']')) {
                (Some(open), Some(close)) => format!("{}{}", &path[..open], &path[close + 1..]),
                _ => path.to_string(),
            };
            if matches!(key.status, Status::Later { .. } | Status::Rejected { .. }) {
                refused.push(plain);
            }
        });
        for (path, _) in INSTEAD {
            assert!(refused.iter().any(|refused| refused == path), "{path}");
        }
    }
}
