//! Ignored targets (−100): the loss of a global batch is the mean over the targets that are not ignored, however these
//! are distributed over micro-batches, ranks and pipeline stages.

use crate::python::python;
use crate::world;

use std::sync::Arc;

use candle_core::{D, DType, Device, Tensor};
use world::{
    BF16, FP16, Trajectory, agreed, assert_same, batch, engine_of, gpt2, gpt2_config, train, trajectory_on, world,
};
use zero_engine::comm::Communicator;
use zero_engine::{Batch, Config, Engine, Layers, ops, zoo};

const ROW: usize = 16;

/// Returns a batch in which the first `ignored(step, i)` targets of sample i are ignored.
fn masked(step: u64, samples: usize, ignored: impl Fn(u64, usize) -> usize) -> Batch {
    let plain = batch(step, samples);
    let targets: Vec<u32> = plain.targets.as_ref().unwrap().flatten_all().unwrap().to_vec1().unwrap();
    let some = targets
        .iter()
        .enumerate()
        .map(|(i, &target)| if i % ROW < ignored(step, i / ROW) { ops::IGNORE_INDEX } else { i64::from(target) });
    let some = Tensor::from_vec(some.collect::<Vec<_>>(), (samples, ROW), &Device::Cpu).unwrap();
    Batch::new(plain.inputs, some)
}

/// Chats of very different lengths. In even steps, samples 2 and 3 have no target.
fn uneven(step: u64, sample: usize) -> usize {
    match (step % 2, sample) {
        (0, 2 | 3) => ROW,
        _ => (sample * 5 + step as usize * 3) % ROW,
    }
}

pub(crate) fn text(zero_stage: u8, micro_batch: usize, accumulation: usize, more: &str) -> String {
    format!(
        "train_micro_batch_size_per_gpu: {micro_batch}\ngradient_accumulation_steps: {accumulation}\n{more}\n\
         zero_optimization: {{stage: {zero_stage}, stage3_param_persistence_threshold: 20}}"
    )
}

/// Trains on batches of 8 samples. All ranks must agree.
pub(crate) fn run(
    layers: impl Fn() -> Layers + Sync,
    ranks: usize,
    text: &str,
    of: impl Fn(u64) -> Batch + Sync,
) -> Trajectory {
    agreed(world(ranks, |comm| trajectory_on(&mut engine_of(layers(), comm, text), 4, &of)), text)
}

pub(crate) fn chats(step: u64) -> Batch {
    masked(step, 8, uneven)
}

pub(crate) fn plain() -> Layers {
    zoo::gpt2(&gpt2_config())
}

/// The model of `plain`, but with a loss function that takes all logits.
fn of_logits() -> Layers {
    plain().loss(ops::cross_entropy).loss_weight(ops::count_targets)
}

/// Checks that two runs agree within rounding.
pub(crate) fn assert_near(a: &Trajectory, b: &Trajectory, what: &str) {
    let pairs = a.losses.iter().zip(&b.losses).map(|(a, b)| (f32::from_bits(*a), f32::from_bits(*b)));
    for (step, (a, b)) in pairs.enumerate() {
        // The tolerance covers a few hundred rounding errors of 2⁻²⁴ from sums in a different order, and AdamW's
        // division by small gradients.
        assert!((a - b).abs() <= 2e-5 * b, "{what}, step {}: {a} and {b}", step + 1);
    }
    let norms = a.norms.iter().zip(&b.norms).map(|(a, b)| (f64::from_bits(*a), f64::from_bits(*b)));
    norms.for_each(|(a, b)| assert!((a - b).abs() <= 1e-4 * b, "{what}: norms {a} and {b}"));
}

/// Mean of −ln softmax over the targets that are not ignored, in f64.
fn plain_loss(logits: &Tensor, targets: &Tensor) -> f64 {
    let logits = logits.to_dtype(DType::F64).unwrap().flatten_to(logits.rank() - 2).unwrap();
    let log_p = candle_nn::ops::log_softmax(&logits, D::Minus1).unwrap().to_vec2::<f64>().unwrap();
    let targets: Vec<i64> = targets.flatten_all().unwrap().to_vec1().unwrap();
    let rows = log_p.iter().zip(targets).filter_map(|(row, target)| usize::try_from(target).ok().map(|t| -row[t]));
    let losses: Vec<f64> = rows.collect();
    losses.iter().sum::<f64>() / losses.len() as f64
}

#[test]
fn the_loss_is_the_mean_over_the_targets_of_the_global_batch() {
    for layers in [plain, of_logits] {
        world(2, |comm| {
            let mut engine = engine_of(layers(), comm, &text(1, 2, 2, ""));
            for step in 0..3 {
                let whole = chats(step);
                let logits = engine.forward(whole.inputs.clone()).unwrap().tensors()[0].clone();
                let want = plain_loss(&logits, whole.targets.as_ref().unwrap());
                let got = engine.train_batch(&whole).unwrap().loss;
                assert!((f64::from(got) - want).abs() < 1e-5 * want, "step {step}: {got} for {want}");
                // The mean of the micro-batches' means differs from the mean over all targets.
                let mean = |m: usize| {
                    let of = |t: &Tensor| t.narrow(0, 2 * m, 2).unwrap();
                    plain_loss(&of(&logits), &of(whole.targets.as_ref().unwrap()))
                };
                let of_means: f64 = (0..4).map(mean).filter(|mean| mean.is_finite()).sum::<f64>() / 4.0;
                assert!((of_means - want).abs() > 1e-3 * want, "{of_means} and {want}");
            }
        });
    }
}

#[test]
fn accumulation_and_ranks_agree_with_one_micro_batch() {
    for layers in [plain, of_logits] {
        let expected = run(layers, 1, &text(0, 8, 1, ""), chats);
        for (ranks, micro_batch, accumulation) in [(1, 2, 4), (1, 1, 8), (2, 2, 2), (4, 2, 1), (2, 4, 1)] {
            for zero_stage in [0, 2, 3] {
                let what = format!("stage {zero_stage}, {ranks} ranks × {accumulation} × {micro_batch}");
                let got = run(layers, ranks, &text(zero_stage, micro_batch, accumulation, ""), chats);
                assert_near(&got, &expected, &what);
            }
        }
    }
}

#[test]
fn reproducible_layouts_are_bit_identical() {
    for more in ["", BF16, FP16] {
        let more = format!("training: {{reproducible: true}}\n{more}");
        let expected = run(gpt2, 1, &text(0, 2, 4, &more), chats);
        for ranks in [1, 2, 4] {
            for zero_stage in 0..=3 {
                let got = run(gpt2, ranks, &text(zero_stage, 2, 4 / ranks, &more), chats);
                assert_same(&expected, &got, &format!("{more}, stage {zero_stage} on {ranks} ranks"));
            }
        }
        for (data, zero_stage) in [(1, 0), (1, 1), (2, 1), (2, 2), (2, 3)] {
            for schedule in ["1f1b", "gpipe"] {
                let more = format!("{more}\npipeline: {{stages: 2, schedule: {schedule}}}");
                let got = run(gpt2, 2 * data, &text(zero_stage, 2, 4 / data, &more), chats);
                assert_same(&expected, &got, &format!("{more}, stage {zero_stage}"));
            }
        }
    }
}

#[test]
fn i64_targets_without_ignored_ones_keep_their_bits() {
    for (ranks, more) in [(1, ""), (2, ""), (4, "pipeline: {stages: 2}"), (2, FP16)] {
        let replicas = if more.contains("stages") { ranks / 2 } else { ranks };
        let text = text(2, 1, 8 / replicas, more);
        let expected = run(gpt2, ranks, &text, |step| batch(step, 8));
        let got = run(gpt2, ranks, &text, |step| masked(step, 8, |_, _| 0));
        assert_same(&expected, &got, more);
    }
}

/// A micro-batch without a target adds nothing, whichever rank it is on.
#[test]
fn a_micro_batch_without_a_target_adds_nothing() {
    let half = |step: u64, sample: usize| if sample < 4 { ROW } else { uneven(step, sample) };
    for zero_stage in 0..=3 {
        // Micro-batch 0 of two has no target.
        let got = run(plain, 2, &text(zero_stage, 4, 1, ""), |step| masked(step, 8, half));
        let alone = run(plain, 1, &text(zero_stage, 4, 1, ""), |step| masked(step, 8, half).narrow(4, 4).unwrap());
        assert_same(&alone, &got, &format!("stage {zero_stage}"));
    }
}

#[test]
fn a_step_without_any_target_is_an_error_on_all_ranks() {
    for (ranks, more) in [(1, ""), (2, ""), (4, "pipeline: {stages: 2}")] {
        let text = text(1, 1, 2, more);
        let errors = world(ranks, |comm| {
            let mut engine = engine_of(plain(), comm, &text);
            let samples = engine.config().train_batch_size;
            train(&mut engine, 1);
            engine.train_batch(&masked(1, samples, |_, _| ROW)).unwrap_err().to_string()
        });
        for error in errors {
            assert!(error.contains("all targets of the step are ignored (-100)"), "{error}");
        }
    }
}

#[test]
fn loss_weights_in_only_some_micro_batches_are_an_error() {
    world(1, |comm| {
        let mut engine = engine_of(plain(), comm, &text(0, 1, 2, ""));
        for first in [0, 1] {
            let load = |index: usize| {
                let batch = if index == first { chats(1) } else { batch(1, 8) };
                batch.narrow(index, 1)
            };
            let error = engine.train_with(load).unwrap_err().to_string();
            assert!(error.contains("all micro-batches of a step must have targets that can be ignored"), "{error}");
        }
    });
    // The operation still reports an invalid target.
    world(1, |comm| {
        let mut engine = engine_of(plain(), comm, &text(0, 2, 1, ""));
        let wrong = Tensor::full(-1i64, (2, ROW), &Device::Cpu).unwrap();
        let error = engine.train_batch(&Batch::new(batch(0, 2).inputs, wrong)).unwrap_err().to_string();
        assert!(error.contains("index -1 at position 0 is not below 61"), "{error}");
    });
}

#[test]
fn evaluations_return_the_weights_of_their_losses() {
    for (ranks, pipeline) in [(1, ""), (2, ""), (2, "pipeline: {stages: 2}"), (4, "pipeline: {stages: 2}")] {
        let all = world(ranks, |comm| {
            let mut engine = engine_of(plain(), comm, &text(1, 2, 1, pipeline));
            let (replica, replicas) = (engine.replica(), engine.replicas());
            let whole = chats(0);
            // Micro-batch 1 of 4 has no target.
            let load = |index: usize| whole.narrow(2 * (index * replicas + replica), 2);
            let means = engine.eval_weighted(4 / replicas, load).unwrap();
            let logits = engine.forward(whole.inputs.clone()).unwrap().tensors()[0].clone();
            let want = plain_loss(&logits, whole.targets.as_ref().unwrap());
            let weight: u64 = means.iter().map(|mean| mean.weight.unwrap()).sum();
            assert_eq!(weight, ops::count_targets(whole.targets.as_ref().unwrap()).unwrap());
            let total: f64 = means.iter().map(|mean| f64::from(mean.loss) * mean.weight.unwrap() as f64).sum();
            assert!((total / weight as f64 - want).abs() < 1e-5 * want, "{total} {weight} {want}");
            if replicas == 1 {
                assert_eq!((means[1].loss, means[1].weight), (0.0, Some(0)));
            }
            // Losses with u32 targets have no weights.
            let plain = batch(0, 8);
            let means = engine.eval_weighted(1, |_| plain.narrow(2 * replica, 2)).unwrap();
            assert!(means[0].weight.is_none() && means[0].loss > 1.0);
            total.to_bits()
        });
        assert!(all.iter().all(|total| *total == all[0]));
    }
}

/// Compares the losses of three steps of SGD from the same weights on the same chats. PyTorch computes one mean over
/// the batch.
#[test]
fn losses_agree_with_pytorch() {
    let layers = || {
        Layers::new()
            .layer("table", |vb| candle_nn::embedding(61, 32, vb))
            .head("head", |vb| zoo::LanguageHead::new(32, 61, 0.3, vb))
    };
    let names = ["table.weight", "head.weight"];
    let of = |accumulation: usize, zero_stage: u8| {
        format!(
            "train_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: {accumulation}\n\
             optimizer: {{type: SGD, params: {{lr: 2.0}}}}\nzero_optimization: {{stage: {zero_stage}}}"
        )
    };
    let engine = |comm: Arc<dyn Communicator>, text: &str| {
        let config = Config::with_world_size("test.yaml", text, comm.size()).unwrap_or_else(|e| panic!("{e}"));
        Engine::with_communicator(config, layers(), comm).unwrap()
    };
    let weights = world(1, |comm: Arc<dyn Communicator>| {
        let mut engine = engine(comm, &of(4, 0));
        names.map(|name| engine.full_parameter(name).unwrap())
    });
    let list = |t: &Tensor| t.to_dtype(DType::I64).unwrap().to_vec2::<i64>().unwrap();
    let batches =
        (0..3).map(chats).map(|chats| [list(chats.inputs.single().unwrap()), list(chats.targets.as_ref().unwrap())]);
    let input = serde_json::json!({"weights": weights[0], "batches": batches.collect::<Vec<_>>()});
    let script = format!(
        "import json, torch\n\
         given = json.loads('{input}')\n\
         table, head = (torch.tensor(values).reshape(61, 32).requires_grad_() for values in given['weights'])\n\
         sgd = torch.optim.SGD([table, head], lr=2.0)\n\
         for inputs, targets in given['batches']:\n  \
           logits = (table[torch.tensor(inputs)] @ head.T).flatten(0, 1)\n  \
           loss = torch.nn.functional.cross_entropy(logits, torch.tensor(targets).flatten(), ignore_index=-100)\n  \
           sgd.zero_grad(); loss.backward(); sgd.step(); print(loss.item())\n"
    );
    let Some(theirs) = python(&["torch"], &script) else { return };
    let theirs: Vec<f64> = theirs.lines().map(|line| line.parse().unwrap()).collect();
    assert!(theirs.len() == 3 && theirs[1] < 0.9 * theirs[0], "{theirs:?}");
    for (ranks, accumulation, zero_stage) in [(1, 4, 0), (2, 2, 3), (4, 1, 2)] {
        world(ranks, |comm| {
            let mut engine = engine(comm, &of(accumulation, zero_stage));
            for (step, want) in theirs.iter().enumerate() {
                let got = f64::from(engine.train_batch(&chats(step as u64)).unwrap().loss);
                println!("step {}: {got:.7}, PyTorch {want:.7}", step + 1);
                assert!((got - want).abs() < 2e-6 * want, "step {}: {got}, PyTorch {want}", step + 1);
            }
        });
    }
}
