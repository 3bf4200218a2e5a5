//! Errors and warnings about keys of DeepSpeed that are rejected, not implemented or without effect.

use zero_config::{Config, ErrorKind};

use super::{HEAD, only};

/// Returns the only error of a text after a valid first line: kind, path, and line counted from that first line.
fn after_head(text: &str) -> (ErrorKind, String, usize) {
    let (kind, path, line, ..) = only(&format!("{HEAD}{text}"));
    (kind, path, line - 1)
}

#[test]
fn keys_that_deepspeed_dropped_are_rejected_by_name() {
    let top = [
        "nebula",
        "compression_training",
        "amp",
        "quantize_training",
        "eigenvalue",
        "sparse_gradients",
        "sparse_attention",
        "elasticity",
        "graph_harvesting",
        "curriculum_learning",
        "progressive_layer_drop",
    ];
    for name in top {
        assert_eq!(after_head(&format!("{name}: {{enabled: true}}")), (ErrorKind::Rejected, name.to_string(), 1));
    }
    for name in ["legacy_stage1", "mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"] {
        let expected = (ErrorKind::Rejected, format!("zero_optimization.{name}"), 2);
        assert_eq!(after_head(&format!("zero_optimization:\n  {name}: true")), expected);
    }
    for name in ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"] {
        let (kind, path, _) = after_head(&format!("optimizer: {{type: {name}, params: {{freeze_step: 10}}}}"));
        assert_eq!((kind, path.as_str()), (ErrorKind::Rejected, "optimizer.type"));
    }
    let (kind, _, _, _, _, help) = only(&format!("{HEAD}optimizer: {{type: Adam, params: {{max_grad_norm: 1}}}}"));
    assert_eq!((kind, help.as_str()), (ErrorKind::Rejected, "set `gradient_clipping` at the top level"));
}

#[test]
fn unimplemented_features_are_errors_unless_they_are_off() {
    let on = [
        "fp16: {enabled: true, auto_cast: true}",
        "autotuning: {mp_size: 2}",
        "data_efficiency: {enabled: true, data_sampling: {enabled: true, dynamic_batching: {enabled: true}}}",
        "managed_gradient_accumulation: false",
        "zero_optimization: {zenflow: {topk_ratio: 0.1}}",
        "checkpoint: {use_node_local_storage: true}",
        "model: {type: gpt2, activation_function: relu}",
    ];
    for text in on {
        assert_eq!(after_head(text).0, ErrorKind::NotImplemented, "{text}");
    }
    let rejected = [
        "torch_autocast: {enabled: true}",
        "fp16: {enabled: true, fp16_master_weights_and_grads: true}",
        "comet: {enabled: true}",
        "compile: {offload_parameters: true}",
        "hybrid_engine: {enabled: true}",
        "expert_parallel: {enabled: true}",
        "weight_quantization: {post_init_quant: {}}",
        "checkpoint: {writer: {type: FAST}}",
        "aio: {use_gds: true}",
        "autotuning: {arg_mappings: {a: b}}",
        "pipeline: {activation_checkpoint_interval: 1}",
        "zero_optimization: {stage: 3, offload_optimizer: {device: cpu, super_offload: true}}",
        "optimizer: {type: Adam, params: {amsgrad: true}}",
        "optimizer: {type: Lamb, params: {amsgrad: true}}",
        "optimizer: {type: Adafactor, params: {relative_step: true}}",
        "optimizer: {type: Adafactor, params: {scale_parameter: false}}",
        "optimizer: {type: Adafactor, params: {warmup_init: true}}",
        "optimizer: {type: Adafactor, params: {beta1: 0.9}}",
        "optimizer: {type: Adafactor, params: {clip_threshold: 1}}",
        "optimizer: {type: Adafactor, params: {decay_rate: -0.8}}",
        "optimizer: {type: Lamb, params: {max_grad_norm: 1}}",
        "optimizer: {type: AdamW, legacy_fusion: true}",
    ];
    for text in rejected {
        assert_eq!(after_head(text).0, ErrorKind::Rejected, "{text}");
    }
    let off = "\
train_micro_batch_size_per_gpu: 1
fp16: {enabled: false, loss_scale: 0, initial_scale_power: 32}
wandb: {enabled: false, project: x}
comet: {enabled: false, workspace: x}
autotuning: {enabled: false, mp_size: 1, arg_mappings: null, model_info: {profile: false}}
flops_profiler: {enabled: false, detailed: false}
data_efficiency: {enabled: false, data_sampling: {num_epochs: 3}}
pipeline: {stages: auto, activation_checkpoint_interval: 0}
activation_checkpointing: {enabled: false, partition_activations: true, cpu_checkpointing: false}
prescale_gradients: false
gradient_predivide_factor: 1
zero_optimization:
  offload_optimizer: {device: none, pin_memory: true, ratio: 0.3}
  offload_param: null
  zero_hpz_partition_size: 1
  zenflow: null
torch_autocast: {enabled: false, dtype: bfloat16}
hybrid_engine: {enabled: false}
compile: {}
tensor_parallel: {autotp_size: 0, tp: {tp_size: 1}}
weight_quantization: {}
checkpoint: {datastates_ckpt: false}
optimizer: {type: AdamW, params: {amsgrad: false}}
";
    let config = Config::parse("ds.yaml", off).unwrap_or_else(|errors| panic!("{errors}"));
    assert_eq!(config.warnings, []);
    // A mistyped key is an error even if the section is off.
    assert_eq!(after_head("autotuning: {enabeld: true}").0, ErrorKind::UnknownKey);
    assert_eq!(after_head("autotuning: {model_info: {num_layer: 1}}").0, ErrorKind::UnknownKey);
}

#[test]
fn each_key_without_effect_is_one_warning() {
    let text = "\
train_micro_batch_size_per_gpu: 1
zero_allow_untested_optimizer: true
zero_force_ds_cpu_optimizer: true
vocabulary_size: 50304
activation_checkpointing: {profile: true, contiguous_memory_optimization: false}
zero_optimization: {contiguous_gradients: false, allgather_partitions: true}
autotuning: {exps_dir: here, model_info: {profile: true, num_params: null}}
";
    let config = Config::parse("ds.yaml", text).unwrap_or_else(|errors| panic!("{errors}"));
    let paths: Vec<_> = config.warnings.iter().map(|warning| warning.place.path.as_str()).collect();
    assert_eq!(
        paths,
        [
            "zero_allow_untested_optimizer",
            "vocabulary_size",
            "activation_checkpointing.profile",
            "zero_optimization.contiguous_gradients",
            "autotuning.exps_dir",
            "autotuning.model_info.profile"
        ]
    );
    assert_eq!(
        config.warnings[0].to_string(),
        "warning: `zero_allow_untested_optimizer` has no effect: every optimizer works at every ZeRO stage\n  \
         in: zero_allow_untested_optimizer (ds.yaml:2:1)"
    );
    let config = Config::parse("ds.yaml", format!("{HEAD}zero_optimization: true")).expect("the deprecated form");
    assert_eq!((config.zero.stage.number(), config.warnings.len()), (1, 1));
}
