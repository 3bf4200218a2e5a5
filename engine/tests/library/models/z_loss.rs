//! `training.z_loss`: losses and parameters match PyTorch, evaluations leave the z-loss out, and layouts are
//! bit-identical.

use crate::models::ignored_targets::chats;
use crate::python::python;
use crate::world;

use std::sync::Arc;

use candle_core::{DType, Tensor};
use world::{BF16, FP16, Trajectory, agreed, assert_same, config, engine_of, gpt2, trajectory_of, world};
use zero_engine::comm::Communicator;
use zero_engine::{Engine, Layers, ops, zoo};

const NAMES: [&str; 2] = ["table.weight", "head.weight"];

pub(crate) fn table_and_head() -> Layers {
    Layers::new()
        .layer("table", |vb| candle_nn::embedding(61, 32, vb))
        .head("head", |vb| zoo::LanguageHead::new(32, 61, 0.3, vb))
}

fn text(accumulation: usize, zero_stage: u8, training: &str) -> String {
    format!(
        "train_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: {accumulation}\n\
         optimizer: {{type: SGD, params: {{lr: 1.0}}}}\ntraining: {{{training}}}\n\
         zero_optimization: {{stage: {zero_stage}}}"
    )
}

/// The numbers that PyTorch printed for each step, and the parameters after the last step.
pub(crate) type Theirs = (Vec<Vec<f64>>, Vec<Vec<f64>>);

/// Trains [`table_and_head`] in PyTorch on [`chats`], starting from the engine's weights. Some targets are ignored.
/// `step` is the code of one step. It can use `logits`, `targets`, the cross-entropy `ce`, `parameters` and
/// `optimizer`.
pub(crate) fn pytorch(steps: u64, optimizer: &str, step: &str) -> Option<Theirs> {
    let weights = world(1, |comm: Arc<dyn Communicator>| {
        let mut engine = engine_of(table_and_head(), comm, &text(4, 0, ""));
        NAMES.map(|name| engine.full_parameter(name).unwrap())
    });
    let list = |t: &Tensor| t.to_dtype(DType::I64).unwrap().to_vec2::<i64>().unwrap();
    let batches = (0..steps)
        .map(chats)
        .map(|chats| [list(chats.inputs.single().unwrap()), list(chats.targets.as_ref().unwrap())]);
    let file = tempfile::NamedTempFile::new().unwrap();
    let given = serde_json::json!({"weights": weights[0], "batches": batches.collect::<Vec<_>>()});
    std::fs::write(file.path(), given.to_string()).unwrap();
    let script = format!(
        "import json, torch\n\
         given = json.load(open('{}'))\n\
         table, head = parameters = [torch.tensor(w).reshape(61, 32).requires_grad_() for w in given['weights']]\n\
         optimizer = {optimizer}\n\
         for inputs, targets in given['batches']:\n  \
           logits, targets = (table[torch.tensor(inputs)] @ head.T).flatten(0, 1), torch.tensor(targets).flatten()\n  \
           ce = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100)\n  \
           optimizer.zero_grad(); {step}\n\
         print(json.dumps([p.flatten().tolist() for p in parameters]))\n",
        file.path().display()
    );
    let output = python(&["torch"], &script)?;
    let (steps, parameters) = output.trim_end().rsplit_once('\n').unwrap();
    let numbers = |line: &str| line.split(' ').map(|x| x.parse().unwrap()).collect();
    Some((steps.lines().map(numbers).collect(), serde_json::from_str(parameters).unwrap()))
}

/// Checks the parameters after a run against those of [`pytorch`].
pub(crate) fn assert_parameters(engine: &mut Engine, theirs: &[Vec<f64>], tolerance: f64) {
    for (name, want) in NAMES.iter().zip(theirs) {
        let got = engine.full_parameter(name).unwrap();
        let off = got.iter().zip(want).map(|(got, want)| (f64::from(*got) - want).abs()).fold(0.0, f64::max);
        println!("{name} is off by {off:e}");
        assert!(off < tolerance, "{name} is off by {off:e}");
    }
}

#[test]
fn losses_and_parameters_agree_with_pytorch() {
    let step = "z = 0.02 * logits.logsumexp(-1)[targets != -100].square().mean(); (ce + z).backward(); \
                torch.nn.utils.clip_grad_norm_(parameters, 0.5); optimizer.step(); print((ce + z).item(), z.item())";
    let Some((losses, parameters)) = pytorch(10, "torch.optim.SGD(parameters, lr=1.0)", step) else { return };
    assert!(losses.len() == 10 && losses[9][1] < 0.9 * losses[0][1], "the z-loss does not fall: {losses:?}");
    for (ranks, accumulation, zero_stage) in [(1, 4, 0), (2, 2, 3), (4, 1, 2)] {
        world(ranks, |comm| {
            let mut engine = engine_of(table_and_head(), comm, &text(accumulation, zero_stage, "z_loss: 0.02"));
            for (step, want) in losses.iter().enumerate() {
                let taken = engine.train_batch(&chats(step as u64)).unwrap();
                let got = [f64::from(taken.loss), f64::from(taken.z_loss.expect("a z-loss"))];
                println!("step {}: {got:.7?}, PyTorch {want:.7?}", step + 1);
                for (got, want) in got.iter().zip(want) {
                    // PyTorch adds f32 values in a different order.
                    assert!((got - want).abs() < 1e-5 * want, "step {}: {got}, PyTorch {want}", step + 1);
                }
            }
            assert_parameters(&mut engine, &parameters, 1e-5);
        });
    }
}

/// Returns the trajectory of six steps. The z-losses are appended to the losses.
fn run(ranks: usize, text: &str) -> Trajectory {
    let all = world(ranks, |comm| {
        let mut engine = engine_of(gpt2(), comm, text);
        let mut z_losses = vec![];
        let mut trajectory = trajectory_of(&mut engine, 6, |engine, step| {
            let taken = engine.train_batch(&world::batch(step, 4)).unwrap_or_else(|e| panic!("{e}"));
            z_losses.extend(taken.z_loss.map(f32::to_bits));
            taken
        });
        trajectory.losses.extend(z_losses);
        trajectory
    });
    agreed(all, text)
}

fn reproducible(zero_stage: u8, data: usize, z_loss: &str, more: &str) -> String {
    format!(
        "train_micro_batch_size_per_gpu: 1\ngradient_accumulation_steps: {}\n{more}\n\
         training: {{reproducible: true{z_loss}}}\n\
         zero_optimization: {{stage: {zero_stage}, stage3_param_persistence_threshold: 40}}",
        4 / data
    )
}

#[test]
fn layouts_are_bit_identical() {
    const Z: &str = ", z_loss: 0.001";
    for dtype in ["", BF16, FP16] {
        let expected = run(1, &reproducible(0, 1, Z, dtype));
        assert_eq!(expected.losses.len(), 12);
        for (zero_stage, data, stages, more) in [
            (1, 2, 1, ""),
            (2, 4, 1, ""),
            (3, 4, 1, ""),
            (0, 1, 2, ""),
            (1, 2, 2, ""),
            (3, 2, 3, ""),
            (3, 1, 1, "activation_checkpointing: {number_checkpoints: 2}"),
        ] {
            let more = format!("{dtype}\npipeline: {{stages: {stages}}}\n{more}");
            let got = run(data * stages, &reproducible(zero_stage, data, Z, &more));
            assert_same(&expected, &got, &format!("ZeRO {zero_stage}, {data} × {stages}, {more}"));
        }
        let without = run(1, &reproducible(0, 1, "", dtype));
        let off = run(1, &reproducible(0, 1, ", z_loss: 0", dtype));
        assert_same(&without, &off, "a coefficient of 0");
        assert!(without.losses.len() == 6 && without.parameters != expected.parameters);
    }
}

#[test]
fn evaluations_exclude_the_z_loss() {
    let losses = ["", "z_loss: 0.5"].map(|training| {
        world(2, |comm| {
            let mut engine = engine_of(table_and_head(), comm, &text(2, 3, training));
            let evaluated = engine.eval_batch(&chats(1)).unwrap();
            let step = engine.train_batch(&chats(1)).unwrap();
            (evaluated.to_bits(), step.loss, step.z_loss)
        })[0]
    });
    let [(plain, loss, none), (evaluated, with_z, Some(z))] = losses else { panic!("{losses:?}") };
    assert!(evaluated == plain && none.is_none());
    assert!(z > 0.5 && (with_z - (loss + z)).abs() < 1e-5 * with_z, "{with_z} is not {loss} + {z}");
}

#[test]
fn a_loss_without_z_loss_support_is_an_error() {
    let of_logits = || zoo::gpt2(&world::gpt2_config()).loss(ops::cross_entropy);
    let mlp = || {
        let (hidden_sizes, hidden_act) = (vec![5], zoo::Activation::Relu);
        zoo::mlp(&zoo::MlpConfig { input_size: 4, hidden_sizes, num_labels: 3, hidden_act, base: None })
    };
    for layers in [of_logits(), mlp()] {
        let config = config(1, &text(1, 0, "z_loss: 1.0e-4"));
        let comm = zero_engine::comm::threads(1, &zero_engine::comm::Options::default()).remove(0);
        let error = Engine::with_communicator(config, layers, comm).err().expect("an error").to_string();
        for part in ["training.z_loss", "no z-loss", "cross_entropy_with_z_loss"] {
            assert!(error.contains(part), "{error}");
        }
    }
}
