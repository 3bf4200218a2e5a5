//! Several tensors of different dtypes cross stage boundaries, with and without gradients.

use candle_core::{DType, IndexOp, Result, Tensor};
use candle_nn::{Embedding, Linear, Module, VarBuilder, embedding, linear};
use zero_engine::comm::Communicator;
use zero_engine::{Activations, Batch, Engine, Layer, Layers, Pass, ops};

use super::{SCHEDULES, agreed, assert_same, engine_of, text};
use crate::world::{BF16, FP16, Trajectory, batch, trajectory, world};

/// Outputs hidden states in the working dtype, their token ids (u32), and a mask (f32) that scales changes.
struct Begin(Embedding);

impl Layer for Begin {
    fn run(&self, x: &Activations, _: &Pass) -> Result<Activations> {
        let ids = x.single()?;
        let mask = (ids.ge(20u32)?.to_dtype(DType::F32)? * 0.5)?;
        Ok(Activations::new(vec![self.0.forward(ids)?, ids.clone(), mask]))
    }
}

/// Uses all three tensors and passes them on. No gradient flows through the mask.
struct Middle(Linear, Embedding);

impl Layer for Middle {
    fn run(&self, x: &Activations, _: &Pass) -> Result<Activations> {
        let [hidden, ids, mask] = x.tensors() else { candle_core::bail!("{} tensors", x.tensors().len()) };
        let change = (self.0.forward(hidden)? + self.1.forward(ids)?)?.tanh()?;
        let weight = mask.detach().to_dtype(hidden.dtype())?.unsqueeze(2)?;
        let hidden = (hidden + change.broadcast_mul(&weight)?)?;
        Ok(Activations::new(vec![hidden, ids.clone(), (mask * 0.75)?]))
    }
}

/// Outputs logits and the token ids.
struct End(Linear);

impl Layer for End {
    fn run(&self, x: &Activations, _: &Pass) -> Result<Activations> {
        let [hidden, ids, _] = x.tensors() else { candle_core::bail!("{} tensors", x.tensors().len()) };
        Ok(Activations::new(vec![self.0.forward(hidden)?, ids.clone()]))
    }
}

fn three_tensors() -> Layers {
    Layers::new()
        .layer("begin", |vb: VarBuilder| Ok(Begin(embedding(61, 20, vb)?)))
        .layers("middle", 5, |_, vb: VarBuilder| {
            Ok(Middle(linear(20, 20, vb.pp("mix"))?, embedding(61, 20, vb.pp("ids"))?))
        })
        .layer("end", |vb: VarBuilder| Ok(End(linear(20, 61, vb)?)))
        .loss_of_all(|outputs, targets| ops::cross_entropy(&outputs.tensors()[0], targets))
}

/// Results on all ranks: the training trajectory, the losses of three evaluated micro-batches, and the logits of one
/// batch.
type Found = (Trajectory, Vec<u32>, Vec<u32>);

fn found(ranks: usize, steps: u64, text: &str) -> Found {
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    let all = world(ranks, |comm| {
        let mut engine = engine_of(three_tensors(), comm, text);
        let trained = trajectory(&mut engine, steps);
        let losses = engine.eval_with(3, |index| Ok(batch(index as u64, 2))).unwrap();
        let samples = batch(7, 3).inputs;
        let outputs = engine.forward(samples.clone()).unwrap();
        let [logits, ids] = outputs.tensors() else { panic!("{} outputs", outputs.tensors().len()) };
        let integers = |ids: &Tensor| ids.to_vec2::<u32>().unwrap();
        assert_eq!(integers(ids), integers(samples.single().unwrap()));
        let logits = logits.to_dtype(DType::F32).and_then(|t| t.flatten_all()).and_then(|t| t.to_vec1()).unwrap();
        (trained, bits(losses), bits(logits))
    });
    agreed(all, text)
}

#[test]
fn several_tensors_cross_every_stage_boundary() {
    for (zero_stage, data, more) in
        [(0, 1, ""), (1, 2, ""), (2, 1, ""), (3, 2, ""), (0, 2, BF16), (3, 1, BF16), (3, 1, FP16)]
    {
        // In f16 the first steps overflow.
        let steps = if more == FP16 { 5 } else { 3 };
        let of = |stages: usize, schedule: &str| {
            let pipeline = format!("stages: {stages}, schedule: {schedule}, partition_method: uniform");
            found(stages * data, steps, &text(zero_stage, 4, &pipeline, more))
        };
        let (expected, losses, logits) = of(1, "1f1b");
        assert!(expected.losses.first() != expected.losses.last());
        for stages in [2, 3] {
            for schedule in SCHEDULES {
                let what = format!("{schedule}, {stages} × {data}, ZeRO {zero_stage}, {more}");
                let (got, evaluated, forward) = of(stages, schedule);
                assert_same(&expected, &got, &what);
                assert_eq!(evaluated, losses, "{what}: evaluation");
                assert!(forward == logits, "{what}: outputs");
            }
        }
    }
}

/// Drops half of the positions of some samples.
struct Shorten;

impl Layer for Shorten {
    fn run(&self, x: &Activations, pass: &Pass) -> Result<Activations> {
        let x = x.single()?;
        Ok(if pass.sample >= 4 { x.i((.., ..8))?.contiguous()? } else { x.clone() }.into())
    }
}

fn shortens() -> Layers {
    Layers::new()
        .layer("embed", |vb: VarBuilder| embedding(61, 20, vb))
        .layer("mix", |vb: VarBuilder| linear(20, 20, vb))
        .layer("shorten", |_: VarBuilder| Ok(Shorten))
        .layer("more", |vb: VarBuilder| linear(20, 20, vb))
        .layer("end", |vb: VarBuilder| linear(20, 61, vb))
        // Averages over positions, so that the loss accepts both lengths.
        .loss(|logits, targets| ops::cross_entropy(&logits.mean(1)?, &targets.i((.., 0))?.contiguous()?))
}

/// Returns each rank's error of `act`. With a single stage, `act` must succeed.
fn errors(
    model: impl Fn() -> Layers + Sync,
    stages: usize,
    schedule: &str,
    act: impl Fn(&mut Engine) -> std::result::Result<(), zero_engine::Error> + Sync,
) -> Vec<String> {
    let text =
        |stages: usize| text(0, 4, &format!("stages: {stages}, schedule: {schedule}, partition_method: uniform"), "");
    let made = |stages: usize, comm: std::sync::Arc<dyn Communicator>| engine_of(model(), comm, &text(stages));
    world(1, |comm| act(&mut made(1, comm)).expect("one stage has no boundary"));
    world(stages, |comm| act(&mut made(stages, comm)).expect_err("shapes that differ").to_string())
}

#[test]
fn a_shape_that_differs_between_micro_batches_is_an_error_on_all_ranks() {
    for schedule in SCHEDULES {
        let train = |engine: &mut Engine| engine.train_batch(&batch(0, 8)).map(drop);
        // With two stages, layers 0 to 2 are on the first stage or in its chunks, so rank 0 sends the output of
        // `shorten`.
        let said = errors(shortens, 2, schedule, train);
        let is_own = |error: &String| error.contains("[2, 8, 20]") && !error.contains(" aborted: ");
        let sender = said.iter().position(is_own).expect("a rank that reports the shape");
        assert!(
            said[sender].contains("with pipeline parallelism, all micro-batches of a step must have the same shape")
        );
        assert!(said[1 - sender].contains(&format!("rank {sender}")), "{schedule}: {said:?}");
        // In this evaluation, the samples of the two micro-batches have different lengths.
        let evaluate = |engine: &mut Engine| {
            let load = |index: usize| {
                let all = batch(0, 2);
                let short = |t: &Tensor| t.narrow(1, 0, 16 - 4 * index)?.contiguous();
                Ok(Batch::new(short(all.inputs.single()?)?, short(all.only_target()?)?))
            };
            engine.eval_with(2, load).map(drop)
        };
        let said = errors(three_tensors, 3, schedule, evaluate);
        assert!(
            said[0].contains("[2, 12, 20]") && said[0].contains("must have the same shape"),
            "{schedule}: {said:?}"
        );
        assert!(said[1..].iter().all(|error| error.contains("rank 0")), "{schedule}: {said:?}");
    }
}
