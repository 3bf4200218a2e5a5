//! Messages for an invalid configuration: all errors together, each with its location.

use zero_config::{Config, ErrorKind, Errors, Source, Spot, load};

pub(crate) const HEAD: &str = "train_micro_batch_size_per_gpu: 1\n";

pub(crate) fn errors(text: &str) -> Errors {
    match Config::parse("ds.yaml", text) {
        Ok(config) => panic!("accepted:\n{text}\n{}", config.to_yaml()),
        Err(errors) => errors,
    }
}

/// Returns the only error of a text: kind; path, line and column of its first location; message and help.
fn only(text: &str) -> (ErrorKind, String, usize, usize, String, String) {
    let errors = errors(text);
    assert_eq!(errors.count(), 1, "{errors}");
    let error = errors.iter().next().expect("one error");
    let place = error.places.first().expect("the error has a location");
    let (line, column) = match place.spot {
        Spot::File { line, column, .. } => (line, column),
        _ => (0, 0),
    };
    (error.kind, place.path.clone(), line, column, error.message.clone(), error.help.clone().unwrap_or_default())
}

/// Returns the only error of a text after a valid first line: kind, path, and line counted from there.
fn after_head(text: &str) -> (ErrorKind, String, usize) {
    let (kind, path, line, ..) = only(&format!("{HEAD}{text}"));
    (kind, path, line - 1)
}

#[test]
fn an_unknown_key_is_shown_with_its_place_and_the_nearest_known_key() {
    let text = "train_batch_size: 8\n\nzero_optimization:\n  # a comment\n  stagee: 3\n";
    let expected = "\
error: unknown key `zero_optimization.stagee`
  in: zero_optimization.stagee (ds.yaml:5:3)
      5 |   stagee: 3
        |   ^^^^^^
  help: did you mean `stage`?";
    assert_eq!(errors(text).to_string(), expected);
}

#[test]
fn json_keeps_lines_and_columns() {
    let text = "{\n\t\"train_batch_size\": 8,\n\t\"zero_optimization\": {\"stage\": 3, \"overlap_com\": true}\n}";
    let (kind, path, line, column, _, help) = only(text);
    assert_eq!((kind, path.as_str(), line, column), (ErrorKind::UnknownKey, "zero_optimization.overlap_com", 3, 36));
    assert_eq!(help, "did you mean `overlap_comm`?");
    let minified =
        format!("{{\"train_batch_size\":8,\"data\":{{\"train\":[{}\"x\"],\"formt\":\"text\"}}}}", "\"a\",".repeat(500));
    let shown = errors(&minified).to_string();
    assert!(shown.lines().all(|line| line.chars().count() < 200), "{shown}");
    let lines: Vec<&str> = shown.lines().collect();
    let start = lines[3].find('^').expect("the location is marked");
    assert_eq!(&lines[2][start..start + 7], "\"formt\"", "{shown}");
}

#[test]
fn all_errors_are_reported_together_in_the_order_of_the_file() {
    let text = "\
train_batch_size: 7
train_micro_batch_size_per_gpu: 2
gradient_accumulation_steps: 3
gradient_clippin: 1
optimizer: {type: AdamW, params: {lr: -1, betas: [0.9, 1.5]}}
zero_optimization:
  stage: 4
  mics_shard_size: 8
  load_from_fp32_weights: false
fp16: {enabled: true, auto_cast: true}
model: {type: gpt2, n_embd: 100, n_head: 12}
data: {format: txt}
";
    let found: Vec<(ErrorKind, String)> =
        errors(text).iter().map(|error| (error.kind, error.places[0].path.clone())).collect();
    let expected = [
        (ErrorKind::Contradiction, "train_batch_size"),
        (ErrorKind::UnknownKey, "gradient_clippin"),
        (ErrorKind::Value, "optimizer.params.lr"),
        (ErrorKind::Value, "optimizer.params.betas"),
        (ErrorKind::Value, "zero_optimization.stage"),
        (ErrorKind::Rejected, "zero_optimization.mics_shard_size"),
        (ErrorKind::NotImplemented, "zero_optimization.load_from_fp32_weights"),
        (ErrorKind::NotImplemented, "fp16.auto_cast"),
        (ErrorKind::Contradiction, "model.n_head"),
        (ErrorKind::Missing, "data.train"),
        (ErrorKind::Value, "data.format"),
    ];
    assert_eq!(found, expected.map(|(kind, path)| (kind, path.to_string())));
}

#[test]
fn batch_sizes_that_contradict_each_other_are_one_error_with_the_equation() {
    let text = "train_batch_size: 7\ntrain_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: 3\n";
    let errors = errors(text);
    assert_eq!(errors.count(), 1);
    let error = errors.iter().next().expect("at least one error");
    assert_eq!(
        error.message,
        "train_batch_size 7 is not train_micro_batch_size_per_gpu × gradient_accumulation_steps × ranks = 2 × 3 × 1 = 6"
    );
    let paths: Vec<_> = error.places.iter().map(|place| place.path.as_str()).collect();
    assert_eq!(
        paths,
        ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "launcher.num_processes"]
    );
}

#[test]
fn a_world_size_that_does_not_divide_is_an_error() {
    let error = |text: &str, ranks| {
        let errors = Config::with_world_size("ds.yaml", text, ranks).expect_err("it does not divide");
        errors.iter().next().expect("at least one error").to_string()
    };
    let text = error("train_batch_size: 16", 3);
    assert!(text.contains("train_batch_size 16 is not a multiple of the number of ranks 3"), "{text}");
    assert!(text.contains("the next multiple is 18") && text.contains("3 ranks started"), "{text}");
    let text = error("train_batch_size: 16\ntrain_micro_batch_size_per_gpu: 3", 2);
    assert!(text.contains("train_micro_batch_size_per_gpu × ranks = 3 × 2 = 6"), "{text}");
    let text = error("train_batch_size: 16\ngradient_accumulation_steps: 5", 2);
    assert!(text.contains("gradient_accumulation_steps × ranks = 5 × 2 = 10"), "{text}");
    assert!(error("train_batch_size: 16", 0).contains("0 ranks"));
}

#[test]
fn no_batch_size_at_all_is_an_error() {
    for text in [
        "steps_per_print: 1",
        "gradient_accumulation_steps: 2",
        "{train_batch_size: auto, gradient_accumulation_steps: 2}",
    ] {
        let (kind, path, _, _, message, _) = only(text);
        assert_eq!((kind, path.as_str()), (ErrorKind::Missing, "train_micro_batch_size_per_gpu"));
        assert!(message.contains("`train_batch_size`"), "{message}");
    }
    // A mistyped key is not reported as missing, too.
    assert_eq!(only("train_micro_batch_size_per_gpuu: 2").0, ErrorKind::UnknownKey);
    assert_eq!(only("train_micro_batch_size_per_gpu: two").0, ErrorKind::Value);
}

#[test]
fn wrong_types_and_ranges_say_what_is_expected() {
    let cases = [
        ("gradient_clipping: .nan", "expected a number, at least 0, found NaN", ""),
        ("gradient_clipping: -.inf", "expected a number, at least 0, found an infinite number", ""),
        ("gradient_clipping: 1e999", "expected a number, at least 0, found an infinite number", ""),
        ("gradient_clipping: -1", "expected a number, at least 0, found `-1`", ""),
        ("gradient_clipping: [1]", "expected a number, at least 0, found a list", ""),
        ("steps_per_print: 1.5", "expected a whole number of at least 0, found `1.5`", ""),
        ("steps_per_print: -1", "expected a whole number of at least 0, found `-1`", ""),
        ("steps_per_print: 1_000", "expected a whole number of at least 0, found the text \"1_000\"", "write 1000"),
        ("dump_state: yes", "expected true or false, found the text \"yes\"", "write `true`"),
        ("dump_state: \"true\"", "expected true or false, found the text \"true\"", ""),
        ("dump_state: 1", "expected true or false, found `1`", ""),
        ("zero_optimization: {stage: 4}", "expected a whole number from 0 to 3, found `4`", ""),
        ("zero_optimization: {stage: auto}", "expected a whole number from 0 to 3, found the text \"auto\"", ""),
        ("zero_optimization: {reduce_bucket_size: -1}", "at least 0, or `auto`, found `-1`", ""),
        ("zero_optimization: 3", "expected a section of keys, found `3`", ""),
        ("optimizer: AdamW", "expected a section of keys, found the text \"AdamW\"", ""),
        ("optimizer: {type: AdamW, params: {betas: [0.9]}}", "expected a list of two numbers", ""),
        ("optimizer: {type: AdamW, params: {betas: [0.9, 1]}}", "at least 0 and less than 1, found a list", ""),
        ("gradient_allreduce_op: men", "expected `mean` or `sum`", "did you mean `mean`?"),
        ("data: {train: []}", "expected a path, a glob, or a list of them, found a list", ""),
        ("data: {train: x, text_key: 5}", "expected a text, found `5`", "write it in quotes if it is a text"),
        (
            "model: {type: mlp, input_size: 1, output_size: 1, hidden_sizes: [8, 0]}",
            "expected a list of whole numbers",
            "",
        ),
        ("training: {seed: 18446744073709551616}", "found `18446744073709551616`", ""),
        ("launcher: {timeout_seconds: 0}", "greater than 0 and at most 86400, found `0`", ""),
    ];
    for (text, message, help) in cases {
        let (kind, _, line, _, found, advice) = only(&format!("{HEAD}{text}"));
        assert_eq!((kind, line), (ErrorKind::Value, 2), "{text}");
        assert!(found.contains(message), "{text}: {found}");
        assert_eq!(advice, help, "{text}");
    }
}

#[test]
fn tiles_of_the_feed_forward_part_are_of_whole_blocks_of_rows() {
    for model in ["gpt2", "llama"] {
        let of = |rows: &str| format!("{HEAD}model: {{type: {model}, tiled_mlp_rows: {rows}}}");
        for (rows, help) in [
            ("100", "the next multiple is 128"),
            ("0", ""),
            ("-64", ""),
            ("true", ""),
            ("64.5", ""),
            ("1_024", "write 1024"),
        ] {
            let (kind, path, _, _, message, advice) = only(&of(rows));
            assert_eq!((kind, path.as_str()), (ErrorKind::Value, "model.tiled_mlp_rows"), "{rows}");
            assert!(message.contains("expected a multiple of 64, at most 1073741824, found"), "{message}");
            assert_eq!(advice, help, "{rows}");
        }
        for (rows, expected) in [("64", Some(64)), ("4096", Some(4096)), ("null", None)] {
            let config = Config::parse("ds.yaml", of(rows)).unwrap_or_else(|errors| panic!("{errors}"));
            assert_eq!(config.model.and_then(|model| model.tiled_mlp_rows()), expected);
        }
    }
    let (kind, path, ..) =
        only(&format!("{HEAD}model: {{type: mlp, input_size: 1, output_size: 1, tiled_mlp_rows: 64}}"));
    assert_eq!((kind, path.as_str()), (ErrorKind::UnknownKey, "model.tiled_mlp_rows"));
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
    assert_eq!((kind, help.as_str()), (ErrorKind::Rejected, "write `gradient_clipping` at the top level"));
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
        "tensor_parallel: {tp_overlap_comm: true}",
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
        "warning: `zero_allow_untested_optimizer` has no effect: every optimizer works at every stage\n  \
         in: zero_allow_untested_optimizer (ds.yaml:2:1)"
    );
    let config = Config::parse("ds.yaml", format!("{HEAD}zero_optimization: true")).expect("the old form");
    assert_eq!((config.zero.stage.number(), config.warnings.len()), (1, 1));
}

#[test]
fn a_misplaced_key_suggests_the_right_section() {
    for (text, place) in [
        ("stage: 3", "`zero_optimization.stage`"),
        ("max_steps: 4", "`training.max_steps` or `autotuning.sweep.max_steps`"),
    ] {
        let help = format!("it belongs at {place}; `--ignore-unknown-keys` turns it into a warning");
        assert_eq!(only(&format!("{HEAD}{text}")).5, help);
    }
    assert_eq!(only(&format!("{HEAD}zero_optimization: {{lr: 1}}")).5, "it belongs at `optimizer.params.lr`");
    let help = only(&format!("{HEAD}optimizer: {{type: SGD, params: {{betas: [0.9, 0.99]}}}}")).5;
    assert!(help.starts_with("it belongs to another `type`; keys of this one are `lr`, `momentum`"), "{help}");
    assert!(only(&format!("{HEAD}<<: {{a: 1}}")).5.contains("merge keys"));
}

#[test]
fn errors_in_overrides_name_the_override() {
    let source = || Source { name: "ds.yaml".to_string(), text: HEAD.to_string() };
    let sets = ["zero_optimization.stage=9", "nonsense", "=1", "a..b=1", "training.trace=[", "optimizer.tipe=AdamW"];
    let errors = load(source(), &sets.map(String::from))
        .and_then(|typed| typed.resolve(None))
        .expect_err("every override is invalid");
    let text = errors.to_string();
    assert!(text.contains("  in: zero_optimization.stage (--set zero_optimization.stage=9)"), "{text}");
    for set in &sets[1..] {
        assert!(text.contains(&format!("--set {set}")), "{set}: {text}");
    }
}

#[test]
fn common_slips_of_yaml_get_advice() {
    let cases = [
        ("data: {train: **/*.rs}", "put a glob in quotes"),
        ("data:\n  train: *.rs", "put a glob in quotes"),
        ("data:\n\ttrain: a", "indent with spaces"),
    ];
    for (text, advice) in cases {
        let (kind, _, line, _, _, help) = only(&format!("{HEAD}{text}"));
        assert!(kind == ErrorKind::Syntax && line > 1 && help.contains(advice), "{text}: {help}");
    }
}

#[test]
fn a_warm_up_longer_than_the_run_is_a_warning() {
    let text = format!("{HEAD}scheduler: {{type: WarmupCosineLR, params: {{total_num_steps: 300}}}}");
    let config = Config::parse("ds.yaml", text).expect("DeepSpeed accepts it too");
    assert_eq!(config.warnings.len(), 1);
    assert!(config.warnings[0].message.contains("1000 steps is longer than the schedule of 300"));
}

#[test]
fn a_schedule_that_contradicts_itself_or_the_run_is_an_error() {
    let cases = [
        ("OneCycle, params: {cycle_min_lr: 0.2, cycle_max_lr: 0.1}", "cycle_min_lr", "above the largest"),
        (
            "OneCycle, params: {cycle_min_lr: 0.1, cycle_max_lr: 0.2, cycle_min_mom: 0.95}",
            "cycle_min_mom",
            "above the largest",
        ),
        (
            "OneCycle, params: {cycle_min_lr: 0, cycle_max_lr: 1, cycle_first_step_size: 10, decay_step_size: 10, \
             decay_mom_rate: 0.02}",
            "decay_mom_rate",
            "reaches 1 before the end",
        ),
        ("cosine_with_min_lr", "min_lr", "needs a smallest learning rate"),
        ("cosine_with_min_lr, params: {min_lr: 1.0e-5, min_lr_rate: 0.1}", "min_lr", "both set"),
        ("cosine_warmup_with_min_lr, params: {min_lr: 0.5}", "min_lr", "not below the optimizer's 0.001"),
        ("polynomial, params: {lr_end: 0.001}", "lr_end", "not below the optimizer's 0.001"),
        (
            "warmup_stable_decay, params: {num_warmup_steps: 60, num_decay_steps: 50}",
            "num_decay_steps",
            "take 110 steps",
        ),
    ];
    for (text, key, expected) in cases {
        let text = format!("{HEAD}training: {{max_steps: 100}}\nscheduler: {{type: {text}}}");
        let (kind, path, _, _, message, _) = only(&text);
        assert_eq!((kind, path), (ErrorKind::Contradiction, format!("scheduler.params.{key}")), "{text}");
        assert!(message.contains(expected), "{message}");
    }
    for (text, path) in [
        ("{type: RMSprop, params: {centered: true, momentum: 0.9}}", "optimizer.params.centered"),
        (
            "{type: NAdam}\nscheduler: {type: OneCycle, params: {cycle_min_lr: 0.1, cycle_max_lr: 0.2}}",
            "scheduler.params.cycle_momentum",
        ),
        (
            "{type: AdamWScheduleFree}\nscheduler: {type: OneCycle, params: {cycle_min_lr: 0.1, cycle_max_lr: 0.2}}",
            "scheduler.params.cycle_momentum",
        ),
        (
            "{type: AdamWScheduleFree, params: {warmup_steps: 9}}\nscheduler: {type: linear, params: {num_training_steps: 9}}",
            "optimizer.params.warmup_steps",
        ),
        ("{type: AdamWScheduleFree}\ntraining: {ema: {decay: 0.9}}", "training.ema"),
        (
            "{type: AdamWScheduleFree}\nbf16: {enabled: true, bf16_master_weights_and_grads: true}",
            "bf16.bf16_master_weights_and_grads",
        ),
        ("{type: Lion, params: {optim_bits: 16}}", "optimizer.params.optim_bits"),
        ("{type: Lion, params: {min_8bit_size: 512}}", "optimizer.params.min_8bit_size"),
        (
            "{type: AdamW, params: {optim_bits: 8}}\nbf16: {enabled: true, bf16_master_weights_and_grads: true, bf16_optimizer_states: true}",
            "optimizer.params.optim_bits",
        ),
        ("{type: SGD}\ntraining: {param_groups: [{layers: [0], optim_bits: 32}]}", "training.param_groups.0"),
        (
            "{type: AdamW, params: {optim_bits: 8, fp32_optimizer_states: false}}\nbf16: {enabled: true}",
            "optimizer.params.optim_bits",
        ),
        ("{type: SGD}\ntraining: {param_groups: [{layers: [0], optim_bits: 8}]}", "training.param_groups.0.optim_bits"),
    ] {
        let (kind, found, ..) = only(&format!("{HEAD}optimizer: {text}"));
        assert_eq!((kind, found.as_str()), (ErrorKind::Contradiction, path), "{text}");
    }
    let missing = errors(&format!("{HEAD}scheduler: {{type: OneCycle}}")).to_string();
    assert!(missing.contains("cycle_min_lr") && missing.contains("cycle_max_lr"), "{missing}");
}

#[test]
fn a_schedule_that_differs_from_what_is_written_is_a_warning() {
    let cycle = "scheduler: {type: OneCycle, params: {cycle_min_lr: 0.1, cycle_max_lr: 0.2}}";
    for (text, path, expected) in [
        (format!("optimizer: {{type: SGD}}\n{cycle}"), "scheduler.params.cycle_momentum", "has no betas"),
        (
            format!("optimizer: {{type: AdamW, params: {{betas: [0.9, 0.95]}}}}\n{cycle}"),
            "optimizer.params.betas",
            "β₂ is 0.99",
        ),
        (
            "scheduler: {type: linear, params: {num_training_steps: 50}}".to_string(),
            "scheduler.params.num_training_steps",
            "ends after 50 steps, before the run's 100",
        ),
        (
            "scheduler: {type: linear, params: {num_warmup_steps: 101}}".to_string(),
            "scheduler.params.num_warmup_steps",
            "101 steps is longer than the schedule of 100",
        ),
    ] {
        let config = Config::parse("ds.yaml", format!("{HEAD}training: {{max_steps: 100}}\n{text}")).unwrap();
        let said: Vec<&str> = config.warnings.iter().map(|warning| warning.message.as_str()).collect();
        assert!(said.len() == 1 && said[0].contains(expected), "{text}: {said:?}");
        assert_eq!(config.warnings[0].place.path, path);
    }
    let fine = format!("{HEAD}training: {{max_steps: 100}}\n{cycle}");
    assert_eq!(Config::parse("ds.yaml", fine).unwrap().warnings, []);
}

#[test]
fn missing_model_and_data_are_errors_that_name_them() {
    let config = Config::parse("ds.yaml", HEAD).expect("valid");
    let errors = config.model_and_data().expect_err("neither is there");
    let found: Vec<_> = errors.iter().map(|error| (error.kind, error.places[0].path.as_str())).collect();
    assert_eq!(found, [(ErrorKind::Missing, "model"), (ErrorKind::Missing, "data")]);
    assert!(errors.to_string().contains("  in: model (not in ds.yaml)"), "{errors}");
    let config = Config::parse("ds.yaml", format!("{HEAD}model: {{type: gpt2}}\ndata: {{train: a}}")).expect("valid");
    assert!(config.model_and_data().is_ok());
}

#[test]
fn a_wrong_split_is_shown_with_its_place() {
    for (split, expected) in [
        ("train[5]", "`[5]` is no slice; write `[from:to]`"),
        ("tra in", "`tra in` is no split, as in `train`, `train[:90%]` or `train[1000:2000]`"),
        ("train[:200%]", "200 % is not between -100 % and 100 %"),
    ] {
        let text = format!("{HEAD}data:\n  datasets:\n  - {{path: a}}\n  - {{path: b, split: {split:?}}}\n");
        let (_, path, line, _, message, _) = only(&text);
        assert_eq!((path.as_str(), line, message.as_str()), ("data.datasets.1.split", 5, expected));
    }
}

#[test]
fn an_alias_of_a_section_is_the_section() {
    let config =
        Config::parse("ds.yaml", format!("{HEAD}bfloat16: {{enabled: true}}")).expect("DeepSpeed's other name");
    assert!(config.bf16.enabled);
    let errors = errors(&format!("{HEAD}bfloat16: {{enabled: true}}\nbf16: {{enabled: false}}"));
    assert_eq!(errors.iter().next().expect("at least one error").kind, ErrorKind::DuplicateKey);
}

#[test]
fn a_z_loss_of_pairs_is_a_contradiction() {
    let text = |z_loss: &str| {
        format!(
            "{HEAD}preference: {{}}\ntraining: {{z_loss: {z_loss}}}\ndata: {{train: a, format: chat, tokenizer: b}}\n\
             model: {{type: gpt2, n_layer: 1, n_head: 1, n_embd: 8}}\n"
        )
    };
    let error = Config::parse("ds.yaml", text("1.0e-4")).unwrap_err().to_string();
    assert!(error.contains("`z_loss` has no effect with `preference`"), "{error}");
    Config::parse("ds.yaml", text("0")).unwrap_or_else(|e| panic!("{e}"));
}
