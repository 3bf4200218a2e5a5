//! Resolution of defaults, `auto`, the batch equation and overrides.

use zero_config::*;

fn parse(text: &str) -> Config {
    Config::parse("configs/ds.yaml", text).unwrap_or_else(|errors| panic!("{errors}"))
}

fn with(text: &str) -> Config {
    parse(&format!("train_micro_batch_size_per_gpu: 1\n{text}"))
}

fn set(text: &str, sets: &[&str]) -> Config {
    let source = Source { name: "ds.yaml".to_string(), text: text.to_string() };
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_string()).collect();
    load(source, &sets).and_then(|typed| typed.resolve(None)).unwrap_or_else(|errors| panic!("{errors}"))
}

#[test]
fn the_shortest_configuration_has_deepspeeds_defaults() {
    let config = with("");
    assert_eq!((config.train_batch_size, config.gradient_accumulation_steps, config.world_size), (1, 1, 1));
    assert_eq!((config.gradient_clipping, config.steps_per_print), (1.0, 10));
    assert_eq!((config.gradient_allreduce_op, config.log_level), (ReduceOp::Mean, LogLevel::Info));
    assert_eq!(config.communication_data_type, None);
    let adam = Optimizer::AdamW(Adam {
        lr: 1e-3,
        betas: [0.9, 0.999],
        eps: 1e-8,
        weight_decay: 0.0,
        bias_correction: true,
        adam_w_mode: true,
        fp32_optimizer_states: true,
        optim_bits: 32,
        min_8bit_size: 4096,
    });
    assert_eq!(config.optimizer, adam);
    assert_eq!(config.scheduler, Scheduler::Constant);
    assert_eq!(config.zero.stage, ZeroStage::Zero);
    assert!(
        config.zero.overlap_comm == Some(false) && config.zero.reduce_scatter && !config.zero.ignore_unused_parameters
    );
    assert_eq!(config.zero.stage3_prefetch_bucket_size, 50_000_000);
    assert_eq!(config.zero.stage3_param_persistence_threshold, 100_000);
    assert_eq!(config.zero.stage3_model_persistence_threshold, usize::MAX);
    assert_eq!(config.zero.stage3_max_live_parameters, 1_000_000_000);
    assert_eq!(config.zero.stage3_max_reuse_distance, 1_000_000_000);
    assert_eq!((config.model, config.data), (None, None));
    assert_eq!((config.training.max_steps, config.training.epochs), (Some(100), None));
    assert_eq!((config.training.seed, config.training.keep_last, config.training.save_last), (1234, 2, true));
    assert_eq!(config.training.output_dir, "runs/ds");
    assert_eq!((config.launcher.transport, config.launcher.timeout_seconds), (Transport::Auto, 30.0));
    assert_eq!(config.launcher.threads_per_rank, None);
}

#[test]
fn any_two_batch_sizes_determine_the_third() {
    let cases = [
        ("train_batch_size: 24\ntrain_micro_batch_size_per_gpu: 3", (24, 3, 4)),
        ("train_batch_size: 24\ngradient_accumulation_steps: 4", (24, 3, 4)),
        ("train_micro_batch_size_per_gpu: 3\ngradient_accumulation_steps: 4", (24, 3, 4)),
        ("train_batch_size: 24\ntrain_micro_batch_size_per_gpu: 3\ngradient_accumulation_steps: 4", (24, 3, 4)),
        ("train_batch_size: 24", (24, 12, 1)),
        ("train_micro_batch_size_per_gpu: 3", (6, 3, 1)),
        ("train_batch_size: auto\ntrain_micro_batch_size_per_gpu: 3\ngradient_accumulation_steps: auto", (6, 3, 1)),
        ("train_batch_size: 24\ntrain_micro_batch_size_per_gpu: auto\ngradient_accumulation_steps: 4", (24, 3, 4)),
    ];
    for (text, expected) in cases {
        let config = Config::with_world_size("ds.yaml", text, 2).unwrap_or_else(|errors| panic!("{errors}"));
        let found =
            (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps);
        assert_eq!(found, expected, "{text}");
    }
}

#[test]
fn the_world_size_comes_from_the_launch_or_the_file_or_is_one() {
    let text = "train_micro_batch_size_per_gpu: 2\nlauncher: {num_processes: 3}";
    assert_eq!(parse(text).train_batch_size, 6);
    let config = Config::with_world_size("ds.yaml", text, 5).expect("resolved for 5 ranks");
    assert_eq!((config.world_size, config.launcher.num_processes, config.train_batch_size), (5, 5, 10));
    let source = Source { name: "ds.yaml".to_string(), text: text.to_string() };
    assert_eq!(load(source, &[]).expect("the text must be parsed").num_processes(), Some(3));
}

#[test]
fn sizes_may_be_written_as_floats() {
    let config = with("zero_optimization: {stage: 3.0, reduce_bucket_size: 5e8, allgather_bucket_size: 500000000.0}");
    assert_eq!(config.zero.stage, ZeroStage::Three);
    assert_eq!(config.zero.reduce_bucket_size, Some(500_000_000));
    assert_eq!(config.zero.allgather_bucket_size, Some(500_000_000));
    assert!(config.zero.overlap_comm == Some(true));
}

#[test]
fn optimizers_have_deepspeeds_names_and_defaults() {
    assert_eq!(
        with("optimizer: {type: SGD}").optimizer,
        Optimizer::Sgd(Sgd { lr: 1e-3, momentum: 0.0, dampening: 0.0, nesterov: false, weight_decay: 0.0 })
    );
    assert_eq!(
        with("optimizer: {type: lion, params: {lr: 1e-4}}").optimizer,
        Optimizer::Lion(Lion { lr: 1e-4, betas: [0.9, 0.999], weight_decay: 0.0, optim_bits: 32, min_8bit_size: 4096 })
    );
    assert_eq!(
        with("optimizer: {type: adagrad}").optimizer,
        Optimizer::Adagrad(Adagrad { lr: 1e-2, eps: 1e-10, weight_decay: 0.0, fp32_optimizer_states: true })
    );
    // PyTorch's.
    assert_eq!(
        with("optimizer: {type: RMSprop}").optimizer,
        Optimizer::RmsProp(RmsProp {
            lr: 1e-2,
            alpha: 0.99,
            eps: 1e-8,
            weight_decay: 0.0,
            momentum: 0.0,
            centered: false
        })
    );
    let (betas, eps, weight_decay, decoupled_weight_decay) = ([0.9, 0.999], 1e-8, 0.0, false);
    assert_eq!(
        with("optimizer: {type: nadam}").optimizer,
        Optimizer::NAdam(NAdam { lr: 2e-3, betas, eps, weight_decay, decoupled_weight_decay, momentum_decay: 4e-3 })
    );
    assert_eq!(
        with("optimizer: {type: RAdam}").optimizer,
        Optimizer::RAdam(RAdam { lr: 1e-3, betas, eps, weight_decay, decoupled_weight_decay })
    );
    assert_eq!(
        with("optimizer: {type: Muon, params: {adam_lr: 0.002}}").optimizer,
        Optimizer::Muon(Muon {
            lr: 1e-3,
            muon_lr: None,
            adam_lr: Some(2e-3),
            matrices: None,
            momentum: 0.95,
            nesterov: true,
            weight_decay: 0.0,
            ns_steps: 5,
            betas,
            eps,
        })
    );
    let (bias_correction, max_coeff, min_coeff, eps_inside_sqrt) = (true, 10.0, 0.01, false);
    assert_eq!(
        with("optimizer: {type: lamb}").optimizer,
        Optimizer::Lamb(Lamb {
            lr: 1e-3,
            betas,
            eps,
            weight_decay,
            bias_correction,
            max_coeff,
            min_coeff,
            eps_inside_sqrt
        })
    );
    let eps = [f64::from(f32::EPSILON), 1e-3];
    assert_eq!(
        with("optimizer: {type: adafactor}").optimizer,
        Optimizer::Adafactor(Adafactor { lr: 1e-2, beta2_decay: -0.8, eps, d: 1.0, weight_decay })
    );
    // `Adam` is AdamW by default. Both variants survive a round trip through YAML.
    for (text, decoupled) in [("type: Adam", true), ("type: Adam, params: {adam_w_mode: false}", false)] {
        let config = with(&format!("optimizer: {{{text}}}"));
        assert!(matches!(config.optimizer, Optimizer::AdamW(adam) if adam.adam_w_mode == decoupled), "{text}");
        assert_eq!(parse(&config.to_yaml()), config);
    }
}

#[test]
fn schedulers_have_deepspeeds_names_and_defaults() {
    let optimizer = "optimizer: {type: AdamW, params: {lr: 0.5}}\ntraining: {max_steps: 2000}\n";
    let scheduler = |text: &str| with(&format!("{optimizer}scheduler: {text}")).scheduler;
    assert_eq!(
        scheduler("{type: WarmupLR}"),
        Scheduler::WarmupLR(WarmupLr {
            warmup_min_lr: 0.0,
            warmup_max_lr: 0.5,
            warmup_num_steps: 1000,
            warmup_type: Warmup::Log
        })
    );
    assert_eq!(
        scheduler("{type: WarmupDecayLR, params: {total_num_steps: 3000}}"),
        Scheduler::WarmupDecayLR(WarmupDecayLr {
            total_num_steps: Some(3000),
            warmup_min_lr: 0.0,
            warmup_max_lr: 1e-3,
            warmup_num_steps: 1000,
            warmup_type: Warmup::Log
        })
    );
    assert_eq!(
        scheduler("{type: WarmupCosineLR, params: {total_num_steps: auto, warmup_type: linear}}"),
        Scheduler::WarmupCosineLR(WarmupCosineLr {
            total_num_steps: Some(2000),
            warmup_min_ratio: 0.0,
            warmup_num_steps: 1000,
            cos_min_ratio: 1e-4,
            warmup_type: Warmup::Linear
        })
    );
    // In a run counted in epochs, the number of steps depends on the data.
    let config = with("training: {epochs: 2}\nscheduler: {type: WarmupCosineLR, params: {total_num_steps: auto}}");
    assert!(matches!(config.scheduler, Scheduler::WarmupCosineLR(WarmupCosineLr { total_num_steps: None, .. })));
    assert_eq!((config.training.max_steps, config.training.epochs), (None, Some(2.0)));
    assert_eq!(parse(&config.to_yaml()), config);
}

#[test]
fn schedulers_of_transformers_take_their_steps_from_the_run() {
    let run = |text: &str| with(&format!("training: {{max_steps: 2000}}\nscheduler: {text}"));
    for (text, expected) in [
        ("{type: linear}", Some(Some(2000))),
        ("{type: cosine, params: {num_training_steps: auto}}", Some(Some(2000))),
        ("{type: Cosine_With_Restarts, params: {num_training_steps: 30}}", Some(Some(30))),
        ("{type: inverse_sqrt}", None),
    ] {
        let mut config = run(text);
        assert_eq!(parse(&config.to_yaml()), config, "{text}");
        assert_eq!(config.scheduler.total_steps_mut().map(|total| *total), expected, "{text}");
    }
    let mut epochs = with("training: {epochs: 2}\nscheduler: {type: polynomial}");
    assert_eq!(parse(&epochs.to_yaml()), epochs);
    assert_eq!(epochs.scheduler.total_steps_mut(), Some(&mut None));
    let timescale =
        |warmup: usize| match run(&format!("{{type: inverse_sqrt, params: {{num_warmup_steps: {warmup}}}}}")).scheduler
        {
            Scheduler::InverseSqrt(schedule) => schedule.timescale,
            other => panic!("{other:?}"),
        };
    assert_eq!((timescale(0), timescale(40)), (10_000, 40));
}

#[test]
fn models_have_hugging_faces_names_and_defaults() {
    let Some(Model::Gpt2(gpt2)) = with("model: {type: gpt2, n_embd: 64, n_head: 4}").model else { panic!("no gpt2") };
    assert_eq!((gpt2.vocab_size, gpt2.n_positions, gpt2.n_layer, gpt2.n_inner), (Some(50257), 1024, 12, 256));
    assert!(gpt2.tie_word_embeddings);
    let text = "model: {type: llama, vocab_size: auto, hidden_size: 96, num_attention_heads: 6}";
    let Some(Model::Llama(llama)) = with(text).model else { panic!("no llama") };
    assert_eq!((llama.vocab_size, llama.num_key_value_heads, llama.head_dim), (None, 6, 16));
    assert_eq!((llama.rope_theta, llama.rms_norm_eps, llama.intermediate_size), (1e4, 1e-6, 11008));
    let Some(Model::Mlp(mlp)) = with("model: {type: mlp, input_size: 2, output_size: 3}").model else {
        panic!("no mlp")
    };
    assert_eq!((mlp.input_size, mlp.hidden_sizes, mlp.output_size), (2, vec![], 3));
}

#[test]
fn alternative_spellings_of_types_are_read_and_never_written() {
    let config = with("communication_data_type: bfp16\ndata_types: {grad_accum_dtype: float32}\nlog_level: warn");
    assert_eq!(config.communication_data_type, Some(Dtype::Bf16));
    assert_eq!(config.data_types.grad_accum_dtype, Some(Dtype::F32));
    let yaml = config.to_yaml();
    assert!(yaml.contains("communication_data_type: bf16") && yaml.contains("grad_accum_dtype: fp32"), "{yaml}");
    assert!(yaml.contains("log_level: warning"), "{yaml}");
}

#[test]
fn the_enabled_section_determines_the_dtype() {
    for (text, dtype) in [
        ("", Dtype::F32),
        ("bf16: {enabled: true}", Dtype::Bf16),
        ("fp16: {enabled: true}\nbf16: {enabled: false}", Dtype::F16),
        // As written by Hugging Face's integration.
        ("fp16: {enabled: auto, loss_scale: 0, initial_scale_power: 16, hysteresis: 2, min_loss_scale: 1}", Dtype::F32),
    ] {
        assert_eq!(with(text).working_dtype(), dtype, "{text}");
    }
    let fp16 = with("fp16: {enabled: true}").fp16;
    assert!(fp16.is_dynamic() && !with("fp16: {enabled: true, loss_scale: 0.5}").fp16.is_dynamic());
    assert_eq!(
        (fp16.initial_scale_power, fp16.loss_scale_window, fp16.hysteresis, fp16.min_loss_scale),
        (16, 1000, 2, 1)
    );
    // A static scale does not use the keys of dynamic loss scaling.
    assert!(with("fp16: {enabled: true, loss_scale: 8, initial_scale_power: 1, min_loss_scale: 9}").fp16.enabled);
}

#[test]
fn null_counts_as_missing() {
    let text =
        "gradient_clipping: null\noptimizer: null\nzero_optimization:\n  overlap_comm: null\n  stage: ~\nmodel:\n";
    assert_eq!(with(text), with(""));
}

#[test]
fn overrides_win_over_the_file_and_later_ones_over_earlier_ones() {
    let text = "train_micro_batch_size_per_gpu: 1\nzero_optimization: {stage: 1, overlap_comm: true}\n";
    let config = set(
        text,
        &[
            "zero_optimization.stage=2",
            "zero_optimization.stage=3",
            "optimizer.type=SGD",
            "optimizer.params={lr: 0.1, momentum: 0.9}",
            "data.train=[a, b]",
            "training.output_dir=a=b",
            "zero_optimization.overlap_comm=",
        ],
    );
    assert_eq!(config.zero.stage, ZeroStage::Three);
    assert_eq!(config.optimizer.lr(), 0.1);
    assert_eq!(config.data.as_ref().and_then(|data| data.train.as_deref()).expect("data"), ["a", "b"]);
    assert_eq!(config.training.output_dir, "a=b");
    assert_eq!(config.origins.get("zero_optimization.stage"), Origin::Set);
    assert_eq!(config.origins.get("zero_optimization.overlap_comm"), Origin::Default);
    let config = set("", &["train_batch_size=4", "data.train=**/*.rs"]);
    assert_eq!((config.train_batch_size, config.data.expect("data").train), (4, Some(vec!["**/*.rs".to_string()])));
}

#[test]
fn each_value_knows_where_it_comes_from() {
    let source = Source {
        name: "ds.yaml".to_string(),
        text: "# first\ntrain_micro_batch_size_per_gpu: 1\ngradient_clipping: auto\noptimizer:\n  type: AdamW\n  params:\n    lr: 0.1\n"
            .to_string(),
    };
    let sets = ["zero_optimization.stage=1".to_string()];
    let mut config = load(source, &sets).and_then(|typed| typed.resolve(Some(2))).expect("valid");
    let cases = [
        ("train_micro_batch_size_per_gpu", Origin::Line(2)),
        ("train_batch_size", Origin::Auto),
        ("gradient_clipping", Origin::Auto),
        ("optimizer.type", Origin::Line(5)),
        ("optimizer.params.lr", Origin::Line(7)),
        ("optimizer.params.eps", Origin::Default),
        ("zero_optimization.stage", Origin::Set),
        ("launcher.num_processes", Origin::Launch),
        ("training.seed", Origin::Default),
    ];
    for (path, origin) in cases {
        assert_eq!(config.origins.get(path), origin, "{path}");
    }
    config.training.seed = 7;
    let yaml = config.to_yaml_with_origins();
    let comment = |key: &str| {
        let line = yaml.lines().find(|line| line.trim_start().starts_with(key)).expect("the key is written");
        line.split_once("# ").expect("a comment").1.to_string()
    };
    assert_eq!(comment("lr:"), "line 7");
    assert_eq!(comment("stage:"), "--set");
    assert_eq!(comment("num_processes:"), "ranks started");
    assert_eq!(comment("seed:"), "program");
    assert_eq!(comment("eps:"), "default");
}

#[test]
fn aliases_repeat_the_value_of_their_anchor() {
    let config = with("csv_monitor: &monitor {enabled: true, job_name: a}\ntensorboard: *monitor");
    assert_eq!(config.csv_monitor, config.tensorboard);
    assert!(config.tensorboard.enabled);
}

#[test]
fn hostile_strings_survive_a_round_trip() {
    let mut config = with("model: {type: gpt2}\ntraining: {sample: {prompt: x}}");
    for prompt in [
        "",
        "- a: [b",
        "null",
        "\"quoted\" \\ back",
        "line\nbreak\ttab\r",
        "\u{0}\u{7}\u{85}\u{2028}\u{feff}",
        "émoji 🦀",
        "# no",
        " ",
    ] {
        config.training.sample.as_mut().expect("sample").prompt = prompt.to_string();
        config.training.output_dir = prompt.to_string();
        assert_eq!(parse(&config.to_yaml()), config, "{prompt:?}");
    }
}

#[test]
fn the_run_folder_is_named_after_the_file() {
    for (name, folder) in [("a/b.c.yaml", "runs/b.c"), ("<stdin>", "runs/stdin"), ("", "runs/run"), ("x", "runs/x")] {
        let config = Config::parse(name, "train_batch_size: 1").expect("valid");
        assert_eq!(config.training.output_dir, folder);
    }
}

#[test]
fn operations_to_log_must_be_known() {
    let config = with("comms_logger: {enabled: true, prof_all: false, prof_ops: [all_reduce, reduce_scatter_tensor]}");
    assert_eq!(config.comms_logger.prof_ops, ["all_reduce", "reduce_scatter"]);
    let text = "train_micro_batch_size_per_gpu: 1\ncomms_logger: {enabled: true, prof_ops: [all_reduse]}";
    let error = Config::parse("ds.yaml", text).unwrap_err().to_string();
    assert!(error.contains("there is no operation `all_reduse`") && error.contains("comms_logger.prof_ops"), "{error}");
}

#[test]
fn the_depth_of_a_profile_is_an_integer() {
    let depth = |depth: &str| {
        let text =
            format!("train_micro_batch_size_per_gpu: 1\nflops_profiler: {{enabled: true, module_depth: {depth}}}");
        Config::parse("ds.yaml", &text).map(|config| config.flops_profiler.module_depth).map_err(|e| e.to_string())
    };
    assert_eq!((depth("-1"), depth("0"), depth("3")), (Ok(None), Ok(Some(0)), Ok(Some(3))));
    for wrong in ["1.5", "-2", "-0.5", "deep"] {
        assert!(depth(wrong).is_err_and(|error| error.contains("flops_profiler.module_depth")), "{wrong}");
    }
}

#[test]
fn conversations_have_their_own_section() {
    let parse = |data: &str| Config::parse("ds.yaml", format!("train_batch_size: 1\ndata: {{train: a, {data}}}"));
    let data = |data: &str| parse(data).expect("valid").data.expect("data");
    assert_eq!(data("format: jsonl").chat, None);
    let chat = data("format: chat, tokenizer: t.json").chat.expect("the defaults");
    assert_eq!(
        (chat.roles_to_train, chat.excess_length_strategy),
        (vec!["assistant".to_string()], ExcessLength::Raise)
    );
    let chat =
        data("format: chat, tokenizer: t.json, chat: {type: alpaca, roles: {assistant: [bot]}}").chat.expect("chat");
    assert_eq!(
        (chat.kind, chat.roles.assistant, chat.roles.tool.len()),
        (ChatType::Alpaca, vec!["bot".to_string()], 1)
    );
    for (text, expected) in [
        ("format: chat", "`data.format: chat` needs a tokenizer with special tokens"),
        ("format: jsonl, chat: {type: auto}", "`data.chat` has no effect on `data.format: jsonl`"),
        (
            "format: chat, tokenizer: t, chat: {sample_packing: true}",
            "`data.chat.sample_packing: true` is not implemented yet",
        ),
        ("format: chat, tokenizer: t, chat: {train_on_eos: no}", "`turn`, `all` or `last`"),
    ] {
        let errors = parse(text).expect_err(text).to_string();
        assert!(errors.contains(expected), "{errors}");
    }
}

#[test]
fn values_in_bf16_need_what_they_replace() {
    let parse = |text: &str| Config::parse("ds.yaml", format!("train_batch_size: 1\n{text}"));
    let bf16 = |keys: &str| format!("bf16: {{enabled: true, {keys}}}");
    let all = bf16("bf16_master_weights_and_grads: true, bf16_optimizer_states: true, stochastic_rounding: true");
    assert!(parse(&all).unwrap().bf16.stochastic_rounding);
    let f32_states = |text: &str| parse(text).unwrap().optimizer.has_f32_states();
    let states = "optimizer: {type: Adam, params: {fp32_optimizer_states: false}}";
    assert!(!f32_states(states) && f32_states("optimizer: {type: Lion}"));
    for (text, expected) in [
        ("bf16: {bf16_master_weights_and_grads: true}".to_string(), "only if `bf16` is enabled"),
        (bf16("bf16_optimizer_states: true"), "need parameters without an f32 copy"),
        (bf16("stochastic_rounding: true"), "rounded to nearest, which loses nothing"),
        (format!("{}\ntraining: {{ema: {{}}}}", bf16("bf16_master_weights_and_grads: true")), "there would be none"),
        (
            format!("{}\noptimizer: {{type: Lamb}}", bf16("bf16_master_weights_and_grads: true")),
            "LAMB updates an f32 copy",
        ),
        (
            format!("{}\noptimizer: {{type: Muon}}", bf16("bf16_master_weights_and_grads: true")),
            "Muon updates an f32 copy",
        ),
        (format!("fp16: {{enabled: true}}\n{states}"), "whose range is too small"),
    ] {
        let errors = parse(&text).expect_err(&text);
        assert_eq!(errors.count(), 1, "{errors}");
        assert!(errors.to_string().contains(expected), "{errors}");
    }
}

#[test]
fn the_noise_scale_needs_several_equal_micro_batches() {
    let errors = |text: &str| Config::parse("ds.yaml", text).expect_err(text).to_string();
    let noise = "training: {gradient_noise_scale: {}}";
    assert!(errors(&format!("train_batch_size: 2\n{noise}")).contains("a step has one"));
    let text = format!("train_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: 2\n{noise}");
    assert_eq!(Config::parse("ds.yaml", text.as_str()).unwrap().training.gradient_noise_scale.unwrap().smoothing, 0.99);
    let chat = "data: {train: a, format: chat, tokenizer: t, sequence_length: 16, max_tokens: 32}";
    assert!(errors(&format!("{text}\n{chat}")).contains("the same number of samples"));
}

#[test]
fn clipping_by_value_replaces_clipping_by_norm() {
    let parse = |text: &str| Config::parse("ds.yaml", format!("train_batch_size: 1\n{text}"));
    for (text, expected) in [
        ("", (1.0, None)),
        ("gradient_clipping: auto", (1.0, None)),
        ("gradient_clipping_value: 0.5", (0.0, Some(0.5))),
        ("gradient_clipping: auto\ngradient_clipping_value: 0.5", (0.0, Some(0.5))),
        ("gradient_clipping: 0\ngradient_clipping_value: 0.5", (0.0, Some(0.5))),
    ] {
        let config = parse(text).unwrap_or_else(|e| panic!("{text}\n{e}"));
        assert_eq!((config.gradient_clipping, config.gradient_clipping_value), expected, "{text}");
    }
    let error = parse("gradient_clipping: 1.0\ngradient_clipping_value: 0.5").unwrap_err().to_string();
    assert!(error.contains("both clip the gradient") && error.contains("ds.yaml:2"), "{error}");
    let error = parse("gradient_clipping_value: 0").unwrap_err().to_string();
    assert!(error.contains("gradient_clipping_value"), "{error}");
}

/// DeepSpeed's keys for dividing gradients before the reduction, which always happens here.
#[test]
fn prescaled_gradients_are_a_warning() {
    for text in ["prescale_gradients: true", "gradient_predivide_factor: 4", "gradient_predivide_factor: 4.0"] {
        let config = Config::parse("ds.yaml", format!("train_batch_size: 1\n{text}")).unwrap_or_else(|e| panic!("{e}"));
        let warnings: Vec<String> = config.warnings.iter().map(ToString::to_string).collect();
        assert!(matches!(&warnings[..], [one] if one.contains("before the backward")), "{text}: {warnings:?}");
    }
    let off = "train_batch_size: 1\nprescale_gradients: false\ngradient_predivide_factor: 1.0";
    assert!(Config::parse("ds.yaml", off).unwrap_or_else(|e| panic!("{e}")).warnings.is_empty());
    assert!(Config::parse("ds.yaml", "train_batch_size: 1\ngradient_predivide_factor: 0").is_err());
}
