//! Training in f16: dynamic and static loss scales, with any layout and across checkpoints.

use crate::world;

use candle_core::{DType, Device, Tensor};
use world::{BF16, assert_same, batch, engine, gpt2, resume, save, train, trajectory, world};
use zero_engine::{Batch, Config, Engine, Layers, Step};
use zero_optim::{DynamicLossScale, LossScaler, LossScaling};

/// Four micro-batches of two samples, distributed over `data` replicas of `stages` stages.
fn settings(zero_stage: u8, data: usize, stages: usize, more: &str) -> String {
    format!(
        "train_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: {}\npipeline: {{stages: {stages}}}\n\
         training: {{reproducible: true}}\n\
         zero_optimization: {{stage: {zero_stage}, stage3_param_persistence_threshold: 0}}\n{more}",
        4 / data
    )
}

/// Returns the steps of rank 0. All ranks must agree.
fn steps_of(ranks: usize, steps: u64, text: &str) -> Vec<Step> {
    let mut all = world(ranks, |comm| train(&mut engine(comm, text), steps));
    let first = all.remove(0);
    let what = |step: &Step| (step.loss.to_bits(), step.grad_norm.to_bits(), step.loss_scale, step.skipped);
    for other in all {
        assert!(first.iter().map(what).eq(other.iter().map(what)), "ranks disagree");
    }
    first
}

/// Steps overflow until the scale is small enough. Later the scale doubles and a step overflows again. All layouts are
/// bit-identical.
#[test]
fn a_large_scale_decreases_as_in_deepspeed() {
    let fp16 = "fp16: {enabled: true, initial_scale_power: 32, hysteresis: 2, loss_scale_window: 1}";
    let steps = steps_of(1, 24, &settings(0, 1, 1, fp16));
    let options = DynamicLossScale { initial: 2f64.powi(32), window: 1, hysteresis: 2, consecutive: false, min: 1.0 };
    let mut scaler = LossScaler::new(LossScaling::Dynamic(options));
    for step in &steps {
        assert_eq!(step.loss_scale, Some(scaler.scale()), "step {}", step.step);
        assert_eq!(step.skipped, !step.grad_norm.is_finite());
        scaler.update(step.skipped).unwrap();
    }
    // Hysteresis: the first overflow does not lower the scale.
    assert!(steps[0].skipped && steps[1].skipped && steps[1].loss_scale == steps[0].loss_scale);
    assert_eq!(steps[2].loss_scale.map(f64::log2), Some(31.0));
    let taken = steps.iter().position(|step| !step.skipped).expect("a step that is not skipped");
    assert!(steps[taken..].iter().any(|step| step.skipped), "the scale never doubled into another overflow: {steps:?}");
    // Only steps with a gradient that is not finite are skipped, and training continues.
    assert!(steps.iter().all(|step| step.loss.is_finite()) && steps[23].loss < steps[0].loss - 0.1);
    let run = |zero_stage, data, stages| world::run(data * stages, 24, &settings(zero_stage, data, stages, fp16));
    let expected = run(0, 1, 1);
    for (zero_stage, data, stages) in [(1, 2, 1), (3, 2, 1), (0, 1, 2), (2, 4, 1), (3, 2, 2)] {
        let what = format!("ZeRO {zero_stage}, {stages} stages of {data} ranks");
        assert_same(&expected, &run(zero_stage, data, stages), &what);
    }
}

/// A skipped step makes no update and does not advance the schedule, as in DeepSpeed.
#[test]
fn the_learning_rate_waits_for_skipped_steps() {
    let more = "fp16: {enabled: true, initial_scale_power: 26, hysteresis: 1}\n\
                scheduler: {type: WarmupLR, params: {warmup_num_steps: 10, warmup_max_lr: 0.01, warmup_type: linear}}";
    let steps = steps_of(2, 12, &settings(1, 2, 1, more));
    let skipped = steps.iter().filter(|step| step.skipped).count();
    assert!((1..12).contains(&skipped), "{skipped} skipped");
    let plain = steps_of(1, 12, &settings(0, 1, 1, more.split_once('\n').unwrap().1));
    let mut taken = 0;
    for step in &steps {
        assert_eq!(step.lr, plain[taken].lr, "{step:?}");
        taken += usize::from(!step.skipped);
    }
    assert!(steps[11].lr > 0.0);
}

#[test]
fn losses_match_f32_up_to_rounding() {
    let f32s = steps_of(1, 30, &settings(0, 1, 1, ""));
    let far = |more: &str| {
        let steps = steps_of(1, 30, &settings(0, 1, 1, more));
        assert!(steps.iter().all(|step| !step.skipped), "{more}");
        let far = |(a, b): (&Step, &Step)| f64::from((a.loss - b.loss).abs() / b.loss);
        steps.iter().zip(&f32s).map(far).fold(0.0, f64::max)
    };
    let (bf16, fp16) = (far(BF16), far("fp16: {enabled: true, initial_scale_power: 12}"));
    // The unit in the last place is at most 2⁻¹⁰ of a value in f16 and 2⁻⁷ in bf16.
    assert!(fp16 > 0.0 && fp16 < 2e-3 && fp16 < bf16, "fp16 {fp16:.1e}, bf16 {bf16:.1e}");
}

/// SGD's update is proportional to the gradient, unlike AdamW's. The test would therefore detect a gradient that was
/// not divided by the scale, with and without clipping.
#[test]
fn norm_and_update_divide_by_the_scale() {
    let sgd = |clipping: f64, more: &str| {
        let text = format!(
            "train_batch_size: 4\ngradient_clipping: {clipping}\noptimizer: {{type: SGD, params: {{lr: 0.1}}}}\n{more}"
        );
        let comm = zero_engine::comm::threads(1, &zero_engine::comm::Options::default()).remove(0);
        let config = zero_engine::Config::with_world_size("test.yaml", text, 1).unwrap();
        train(&mut Engine::with_communicator(config, gpt2(), comm).unwrap(), 20)
    };
    for clipping in [0.0, 0.5] {
        let f32s = sgd(clipping, "");
        for scale in ["1024", "4096.5"] {
            let fp16 = sgd(clipping, &format!("fp16: {{enabled: true, loss_scale: {scale}}}"));
            for (a, b) in fp16.iter().zip(&f32s) {
                let far =
                    [f64::from((a.loss - b.loss).abs() / b.loss), (a.grad_norm - b.grad_norm).abs() / b.grad_norm];
                assert!(far[0] < 1e-3 && far[1] < 1e-2, "clipping {clipping}, scale {scale}: {a:?} {b:?}");
            }
        }
    }
}

#[test]
fn a_static_scale_ignores_overflows() {
    let steps = steps_of(2, 4, &settings(2, 2, 1, "fp16: {enabled: true, loss_scale: 1024}"));
    assert!(steps.iter().all(|step| step.loss_scale == Some(1024.0) && !step.skipped));
    let power = 2f64.powi(60);
    let steps = steps_of(2, 4, &settings(2, 2, 1, &format!("fp16: {{enabled: true, loss_scale: {power}}}")));
    assert!(steps.iter().all(|step| step.loss_scale == Some(power) && step.skipped));
}

#[test]
fn an_overflow_at_the_smallest_scale_is_divergence_on_all_ranks() {
    let fp16 = format!("fp16: {{enabled: true, initial_scale_power: 31, min_loss_scale: {}}}", 1u32 << 30);
    for (data, stages) in [(2, 1), (1, 2)] {
        let errors = world(2, |comm| {
            let text = settings(1, data, stages, &fp16);
            let mut engine = engine(comm, &text);
            // Hysteresis ignores the first overflow. The second one halves the scale.
            train(&mut engine, 2);
            let error = engine.train_batch(&batch(2, engine.config().train_batch_size)).unwrap_err();
            (error.exit_status(), error.to_string())
        });
        for (status, error) in errors {
            assert_eq!(status, 5);
            assert!(error.starts_with("training diverged: step 3: gradients overflow"), "{error}");
            assert!(
                error.contains("the loss scale is 1073741824") && error.contains("`fp16.min_loss_scale`"),
                "{error}"
            );
        }
    }
}

/// Saves during a series of overflows or within a loss-scale window, and resumes under another layout.
#[test]
fn a_checkpoint_keeps_the_scale() {
    let fp16 = "fp16: {enabled: true, initial_scale_power: 26, hysteresis: 3, loss_scale_window: 3}";
    let whole = world::run(1, 24, &settings(0, 1, 1, fp16));
    let skipped = |norm: &u64| !f64::from_bits(*norm).is_finite();
    let overflows: String = whole.norms.iter().map(|norm| if skipped(norm) { 'o' } else { '.' }).collect();
    assert!(overflows.starts_with("ooooo") && overflows[8..].contains(".ooo."), "{overflows}");
    for saved_after in [1, 2, 7, 11, 14, 15, 18] {
        let root = tempfile::tempdir().unwrap();
        save((2, saved_after), root.path(), |comm| engine(comm, &settings(3, 2, 1, fp16)));
        let left = 24 - saved_after;
        let rest = resume((2, left), root.path(), |comm| engine(comm, &settings(0, 1, 2, fp16)));
        assert_same(&whole.after(saved_after as usize), &rest, &format!("after step {saved_after}"));
    }
}

/// Checkpoints store the master parameters, so the loaded ones are bit-identical. The loss scale starts at its initial
/// value.
#[test]
fn a_checkpoint_of_one_dtype_loads_into_another() {
    let dtypes = ["", BF16, "fp16: {enabled: true, initial_scale_power: 11}"];
    for from in dtypes {
        let root = tempfile::tempdir().unwrap();
        let saved = world(2, |comm| {
            let mut engine = engine(comm, &settings(2, 2, 1, from));
            let saved = trajectory(&mut engine, 4).parameters;
            engine.save_checkpoint(root.path()).unwrap();
            saved
        });
        for into in dtypes {
            world(1, |comm| {
                let mut engine = engine(comm, &settings(0, 1, 1, into));
                engine.resume(root.path()).unwrap();
                let scale = engine.loss_scale();
                assert_eq!(scale, into.starts_with("fp16").then_some(2048.0), "{from} into {into}");
                for (name, values) in &saved[0] {
                    let loaded = engine.full_parameter(name).unwrap();
                    assert!(
                        loaded.iter().map(|v| v.to_bits()).eq(values.iter().copied()),
                        "{from} into {into}: {name}"
                    );
                }
                assert!(train(&mut engine, 2).iter().all(|step| step.loss.is_finite() && !step.skipped));
            });
        }
    }
}

/// Four ranks have gradients of 40,000. The sum of these would overflow in f16. The mean does not, because gradients
/// are divided before the reduction, as DeepSpeed does only with `prescale_gradients`. If `gradient_allreduce_op`
/// requests the sum, it overflows.
#[test]
fn gradients_are_divided_before_the_reduction() {
    let layers = || {
        Layers::new()
            .layer("map", |vb| candle_nn::linear_no_bias(1, 1, vb))
            .loss(|outputs, targets| (outputs.to_dtype(DType::F32)? * targets.to_dtype(DType::F32)?)?.mean_all())
    };
    let text = |more: &str, zero_stage: u8| {
        format!(
            "train_batch_size: 4\ngradient_clipping: 0\noptimizer: {{type: SGD, params: {{lr: 1.0e-5}}}}\n\
             fp16: {{enabled: true, loss_scale: 1}}\nzero_optimization: {{stage: {zero_stage}}}\n{more}"
        )
    };
    let step = |more: &str, zero_stage: u8| {
        let text = text(more, zero_stage);
        let all = world(4, |comm| {
            let config = Config::with_world_size("test.yaml", &text, 4).unwrap_or_else(|e| panic!("{e}"));
            let mut engine = Engine::with_communicator(config, layers(), comm).unwrap();
            let inputs = Tensor::ones((4, 1), DType::F16, &Device::Cpu).unwrap();
            let targets = Tensor::full(40_000f32, (4, 1), &Device::Cpu).unwrap();
            let before = engine.full_parameter("map.weight").unwrap();
            let step = engine.train_batch(&Batch::new(inputs, targets)).unwrap();
            let after = engine.full_parameter("map.weight").unwrap();
            (step.grad_norm, step.skipped, before[0] - after[0])
        });
        all[0]
    };
    for zero_stage in 0..=3 {
        for more in ["", "prescale_gradients: true", "gradient_predivide_factor: 4"] {
            let (norm, skipped, moved) = step(more, zero_stage);
            assert!(norm == 40_000.0 && !skipped, "ZeRO {zero_stage}, {more}: {norm}");
            assert!((moved - 0.4).abs() < 1e-6, "ZeRO {zero_stage}, {more}: {moved}");
        }
        let (norm, skipped, _) = step("gradient_allreduce_op: sum", zero_stage);
        assert!(norm.is_infinite() && skipped, "ZeRO {zero_stage}: {norm}");
        let (norm, skipped, _) = step("gradient_allreduce_op: sum\ncommunication_data_type: fp32", zero_stage);
        assert!(norm == 160_000.0 && !skipped, "ZeRO {zero_stage}: {norm}");
    }
}
