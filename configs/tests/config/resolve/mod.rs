//! Resolution of defaults, `auto` and the batch equation.

mod sections;
mod sources;

use zero_config::*;

use crate::texts::{source, valid};

fn with(text: &str) -> Config {
    valid(&format!("train_micro_batch_size_per_gpu: 1\n{text}"))
}

#[test]
fn the_shortest_configuration_has_deepspeeds_defaults() {
    let config = with("");
    assert_eq!((config.train_batch_size, config.gradient_accumulation_steps, config.world_size), (1, 1, 1));
    assert_eq!((config.gradient_clipping, config.steps_per_print), (1.0, 10));
    assert_eq!((config.gradient_allreduce_op, config.log_level), (GradientReduceOp::Mean, LogLevel::Info));
    assert_eq!(config.communication_data_type, None);
    let adam = Optimizer::AdamW(AdamParams {
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
        ("train_batch_size: auto\ngradient_accumulation_steps: 4", (64, 8, 4)),
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
    assert_eq!(valid(text).train_batch_size, 6);
    let config = Config::with_world_size("ds.yaml", text, 5).expect("resolved for 5 ranks");
    assert_eq!((config.world_size, config.launcher.num_processes, config.train_batch_size), (5, 5, 10));
    assert_eq!(load(source(text), &[]).expect("the text must be parsed").num_processes(), Some(3));
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
        Optimizer::Sgd(SgdParams { lr: 1e-3, momentum: 0.0, dampening: 0.0, nesterov: false, weight_decay: 0.0 })
    );
    assert_eq!(
        with("optimizer: {type: lion, params: {lr: 1e-4}}").optimizer,
        Optimizer::Lion(LionParams {
            lr: 1e-4,
            betas: [0.9, 0.999],
            weight_decay: 0.0,
            optim_bits: 32,
            min_8bit_size: 4096
        })
    );
    assert_eq!(
        with("optimizer: {type: adagrad}").optimizer,
        Optimizer::Adagrad(AdagradParams { lr: 1e-2, eps: 1e-10, weight_decay: 0.0, fp32_optimizer_states: true })
    );
    // The defaults of these optimizers are PyTorch's.
    assert_eq!(
        with("optimizer: {type: RMSprop}").optimizer,
        Optimizer::RmsProp(RmsPropParams {
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
        Optimizer::NAdam(NAdamParams {
            lr: 2e-3,
            betas,
            eps,
            weight_decay,
            decoupled_weight_decay,
            momentum_decay: 4e-3
        })
    );
    assert_eq!(
        with("optimizer: {type: RAdam}").optimizer,
        Optimizer::RAdam(RAdamParams { lr: 1e-3, betas, eps, weight_decay, decoupled_weight_decay })
    );
    assert_eq!(
        with("optimizer: {type: Muon, params: {adam_lr: 0.002}}").optimizer,
        Optimizer::Muon(MuonParams {
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
        Optimizer::Lamb(LambParams {
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
        Optimizer::Adafactor(AdafactorParams { lr: 1e-2, beta2_decay: -0.8, eps, d: 1.0, weight_decay })
    );
    // `Adam` is AdamW by default. Both variants survive a round trip through YAML.
    for (text, decoupled) in [("type: Adam", true), ("type: Adam, params: {adam_w_mode: false}", false)] {
        let config = with(&format!("optimizer: {{{text}}}"));
        assert!(matches!(config.optimizer, Optimizer::AdamW(adam) if adam.adam_w_mode == decoupled), "{text}");
        assert_eq!(valid(&config.to_yaml()), config);
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
    assert_eq!(valid(&config.to_yaml()), config);
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
        assert_eq!(valid(&config.to_yaml()), config, "{text}");
        assert_eq!(config.scheduler.total_steps_mut().map(|total| *total), expected, "{text}");
    }
    let mut epochs = with("training: {epochs: 2}\nscheduler: {type: polynomial}");
    assert_eq!(valid(&epochs.to_yaml()), epochs);
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
