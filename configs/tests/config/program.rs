//! Configurations that a program writes with a builder, or changes after they are resolved.

use serde_json::json;
use zero_config::*;

use crate::texts::{source, valid};

#[test]
fn a_builder_and_a_file_give_equal_configurations() {
    let built = Config::builder()
        .zero_stage(2)
        .micro_batch(4)
        .gradient_accumulation(3)
        .gradient_clipping(0.5)
        .bf16(true)
        .pipeline_stages(2)
        .adamw(3e-4)
        .max_steps(20)
        .seed(7)
        .eval_every(5)
        .save_every(10)
        .output_dir("runs/x")
        .set("optimizer.params.betas", [0.9, 0.95])
        .set("zero_optimization.overlap_comm", true)
        .set("training.nonfinite", Nonfinite::Stop)
        .set("training.memory_limit", "6GiB")
        .set("bfloat16.check_grad_overflow", false)
        .set("model", json!({"type": "mlp", "input_size": 2, "output_size": 3}))
        .set("data.train", "a.csv")
        .set("data.eval", vec!["b.csv"])
        .build()
        .unwrap_or_else(|errors| panic!("{errors}"));
    let written = valid(
        "train_micro_batch_size_per_gpu: 4\ngradient_accumulation_steps: 3\ngradient_clipping: 0.5\n\
         bf16: {enabled: true, check_grad_overflow: false}\npipeline: {stages: 2}\n\
         optimizer: {type: AdamW, params: {lr: 3e-4, betas: [0.9, 0.95]}}\n\
         zero_optimization: {stage: 2, overlap_comm: true}\n\
         model: {type: mlp, input_size: 2, output_size: 3}\ndata: {train: a.csv, eval: [b.csv]}\n\
         training: {max_steps: 20, seed: 7, eval_every: 5, save_every: 10, output_dir: runs/x, nonfinite: stop,\n  \
         memory_limit: 6GiB}\n",
    );
    assert_eq!(built.leaves(), written.leaves());
    assert_eq!(built, written);
    assert_eq!(built.for_world_size(4).expect("valid"), written.for_world_size(4).expect("valid"));
    assert_eq!(valid(&built.to_yaml()), built);
    assert_eq!(built.origins.get("training.seed"), Origin::Program);
    assert!(built.origins.is_written("training.seed") && !built.origins.is_written("training.device"));
    let epochs = Config::builder().train_batch(8).epochs(1.5).build().expect("valid");
    assert_eq!(epochs, valid("train_batch_size: 8\ntraining: {epochs: 1.5, output_dir: runs/program}"));
}

#[test]
fn builder_errors_match_file_errors_and_name_the_program() {
    let cases: [(Builder, &[&str]); 7] = [
        (Config::builder().micro_batch(0), &["expected an integer of at least 1, or `auto`, found `0`"]),
        (Config::builder().micro_batch(1).zero_stage(4), &["`zero_optimization.stage`: expected an integer"]),
        (
            Config::builder().micro_batch(1).set("training.epochs", 1).max_steps(3),
            &["both set how long to train", "training.max_steps (set by the program)"],
        ),
        (Config::builder().micro_batch(1).adamw(f64::NAN), &["`optimizer.params.lr`", "NaN or an infinite number"]),
        (Config::builder().micro_batch(1).set("training..seed", 1), &["`training..seed` is not the path of a key"]),
        (Config::builder().micro_batch(1).set("data_parallel_size", 1), &["is not implemented yet", "remove it"]),
        (Config::builder().zero_stage(1), &["`train_micro_batch_size_per_gpu` or `train_batch_size` is missing"]),
    ];
    for (builder, parts) in cases {
        let error = builder.build().expect_err(parts[0]).to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        assert!(error.contains("(set by the program)") || parts[0].ends_with("missing"), "{error}");
    }
    assert_eq!(Config::builder().micro_batch(1).micro_batch(2).build().expect("valid").train_batch_size, 2);
}

#[test]
fn changed_fields_are_resolved_for_any_number_of_ranks() {
    let mut config = valid("train_batch_size: 8\nzero_optimization: {stage: 1}\ntraining: {epochs: 2}\n");
    config.zero.stage = ZeroStage::Three;
    config.gradient_clipping = 0.25;
    config.training.max_steps = Some(5);
    config.training.epochs = None;
    config.optimizer = Optimizer::Lion(LionParams {
        lr: 0.1,
        betas: [0.9, 0.99],
        weight_decay: 0.0,
        optim_bits: 32,
        min_8bit_size: 4096,
    });
    config.activation_checkpointing = Some(ActivationCheckpointing {
        spacing: CheckpointSpacing::Number(2),
        layers: None,
        device: OffloadDevice::None,
        nvme_path: None,
    });
    config.model =
        Some(Model::Mlp(Mlp { input_size: 1, hidden_sizes: vec![2], output_size: 3, activation: Activation::Silu }));
    let written = "train_batch_size: 8\ngradient_clipping: 0.25\nzero_optimization: {stage: 3}\n\
                   training: {max_steps: 5}\noptimizer: {type: Lion, params: {lr: 0.1, betas: [0.9, 0.99]}}\n\
                   activation_checkpointing: {number_checkpoints: 2}\n\
                   model: {type: mlp, input_size: 1, hidden_sizes: [2], output_size: 3, activation: silu}\n";
    for ranks in [1, 2, 4] {
        let resolved = config.for_world_size(ranks).unwrap_or_else(|errors| panic!("{errors}"));
        assert_eq!(resolved, Config::with_world_size("ds.yaml", written, ranks).expect("valid"));
        assert_eq!(resolved.origins.get("gradient_clipping"), Origin::Program);
        assert_eq!(resolved.origins.get("train_batch_size"), Origin::Line(1));
        assert_eq!(resolved.for_world_size(1).expect("valid"), config.for_world_size(1).expect("valid"));
    }
}

#[test]
fn a_change_inside_a_section_keeps_the_rest_of_it() {
    let mut config = valid("train_batch_size: 4\nautotuning: {repeats: 3, space: {zero_optimization.stage: [1, 2]}}\n");
    let Optimizer::AdamW(adam) = &mut config.optimizer else { panic!("the default is AdamW") };
    adam.lr = 0.5;
    config.autotuning.space[0].values.push("3".to_string());
    let resolved = config.for_world_size(2).unwrap_or_else(|errors| panic!("{errors}"));
    assert_eq!(resolved.optimizer, config.optimizer);
    assert_eq!(resolved.autotuning, config.autotuning);
}

#[test]
fn a_changed_field_that_contradicts_another_key_is_an_error() {
    let config = valid("train_batch_size: 8\ntrain_micro_batch_size_per_gpu: 4\nbf16: {enabled: true}\n");
    let changed = |change: fn(&mut Config), ranks: usize| {
        let mut config = config.clone();
        change(&mut config);
        config.for_world_size(ranks).expect_err("a contradiction").to_string()
    };
    let error = changed(|config| config.fp16.enabled = true, 1);
    assert!(error.contains("both enabled") && error.contains("fp16.enabled (set by the program)"), "{error}");
    let error = changed(|config| config.train_batch_size = 6, 2);
    assert!(error.contains("train_batch_size (set by the program)") && error.contains("ds.yaml:2:33"), "{error}");
    let error = changed(|config| config.gradient_clipping = f64::INFINITY, 1);
    assert!(error.contains("`gradient_clipping` is set to a number that is not finite"), "{error}");
    let typed = load(source("train_batch_size: 4\nstray: 1\n"), &[]);
    let mut ignoring = typed.expect("parsed").ignore_unknown_keys().resolve(None).expect("valid");
    ignoring.training.seed = 3;
    let resolved = ignoring.for_world_size(2).expect("the unknown key is still ignored");
    assert_eq!((resolved.training.seed, resolved.warnings), (3, ignoring.warnings));
}
