//! Carries out a program: one exhaustive `match`.

use std::collections::HashMap;
use std::time::Instant;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use zero_model::{Activations, Model, Pass, backward_from, sink};
use zero_partition::{Norm, Zero};
use zero_pipeline::{Instruction, LayerId, Program};

use crate::error::Error;
use crate::timing::Timing;

/// What the instructions of one step are told.
pub(crate) struct Context<'a> {
    pub(crate) zero: &'a mut Zero,
    pub(crate) timing: &'a mut Timing,
    /// Inputs and targets of a local micro-batch, and the index of its first sample in the run.
    pub(crate) load: &'a mut Load<'a>,
    pub(crate) training: bool,
    pub(crate) seed: u64,
    pub(crate) step: u64,
    /// Gradient of the global batch's loss with respect to a micro-batch's.
    pub(crate) loss_gradient: f32,
    pub(crate) lr: f64,
    /// Whether a gradient that is not finite is thrown away, and not taken into the parameters.
    pub(crate) skips_overflow: bool,
}

pub(crate) type Load<'a> = dyn FnMut(usize) -> Result<(Activations, Option<Tensor>, u64), Error> + 'a;

/// What a step leaves behind.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// The loss of each local micro-batch.
    pub(crate) losses: Vec<f32>,
    /// The last layer's outputs of each local micro-batch that came without targets.
    pub(crate) outputs: Vec<Activations>,
    pub(crate) norm: Option<Norm>,
}

/// A layer's forward, kept until its backward.
struct Saved {
    /// The cut-off inputs: leaves, where they are float and a gradient is wanted.
    inputs: Vec<Option<Tensor>>,
    outputs: Vec<Tensor>,
}

#[derive(Default)]
struct MicroBatch {
    targets: Option<Tensor>,
    sample: u64,
    /// Output of the last layer that ran, cut off from its graph; what the next one takes.
    flow: Option<Activations>,
    saved: HashMap<LayerId, Saved>,
    /// Gradients of the outputs of the layer whose backward is next.
    upstream: Vec<Option<Tensor>>,
}

impl MicroBatch {
    fn incoming(&mut self) -> Result<Activations, Error> {
        self.flow.take().ok_or_else(|| Error::Batch("a layer has no input".into()))
    }
}

impl Context<'_> {
    fn pass(&self, layer: LayerId, state: &MicroBatch) -> Pass {
        let (training, seed, step, sample) = (self.training, self.seed, self.step, state.sample);
        Pass { training, seed, step, sample, layer: layer as u32 }
    }
}

/// Runs a whole program.
pub(crate) fn run(program: &Program, context: &mut Context<'_>) -> Result<Outcome, Error> {
    let model = context.zero.model().clone();
    let mut outcome = Outcome::default();
    let mut micro_batches: Vec<MicroBatch> = (0..program.micro_batches).map(|_| MicroBatch::default()).collect();
    for instruction in &program.instructions {
        let started = Instant::now();
        match instruction {
            Instruction::Load { micro_batch } => {
                let (inputs, targets, sample) = (context.load)(*micro_batch)?;
                let state = &mut micro_batches[*micro_batch];
                (state.flow, state.targets, state.sample) = (Some(inputs), targets, sample);
            }
            Instruction::Gather { segment } => context.zero.gather(*segment)?,
            Instruction::AwaitGather { segment } => context.zero.await_gather(*segment)?,
            Instruction::Release { segment } => context.zero.release(*segment)?,
            Instruction::Forward { layer, micro_batch } => {
                forward(&model, *layer, &mut micro_batches[*micro_batch], context, &mut outcome)?;
            }
            Instruction::Backward { layer, micro_batch } => {
                backward(&model, *layer, &mut micro_batches[*micro_batch], context, &mut outcome)?;
            }
            Instruction::Accumulate { segment, .. } => context.zero.accumulate(*segment)?,
            Instruction::Reduce { segments, micro_batch } => context.zero.reduce(segments, *micro_batch)?,
            Instruction::AwaitReduce { segments, micro_batch } => context.zero.await_reduce(segments, *micro_batch)?,
            Instruction::GradientNorm => outcome.norm = Some(context.zero.gradient_norm()?),
            Instruction::Update { segment } => match outcome.norm {
                Some(norm) if norm.is_finite() || !context.skips_overflow => {
                    context.zero.update(*segment, context.lr)?;
                }
                _ => context.zero.discard(*segment)?,
            },
            Instruction::Refresh { segments } => context.zero.refresh(segments)?,
            Instruction::AwaitRefresh { segments } => context.zero.await_refresh(segments)?,
        }
        context.timing.record(instruction, started);
    }
    if outcome.norm.is_some_and(|norm| norm.is_finite() || !context.skips_overflow) {
        context.zero.finish_step();
    }
    Ok(outcome)
}

fn forward(
    model: &Model,
    layer: LayerId,
    state: &mut MicroBatch,
    context: &Context<'_>,
    outcome: &mut Outcome,
) -> Result<(), Error> {
    let last = layer + 1 == model.layers().len();
    if context.training && last {
        // Its forward is part of its backward: a head makes its gradients along with the loss, and there they have a
        // place.
        return Ok(());
    }
    let incoming = state.incoming()?;
    let pass = context.pass(layer, state);
    let built = &model.layers()[layer];
    if !context.training {
        match &state.targets {
            Some(targets) if last => outcome.losses.push(scalar(&model.loss(&incoming, targets, &pass, 0.0)?)?),
            None if last => outcome.outputs.push(detached(&built.run(&incoming, &pass)?)),
            _ => state.flow = Some(detached(&built.run(&incoming, &pass)?)),
        }
        return Ok(());
    }
    let (inputs, leaves) = cut(&incoming, layer)?;
    let outputs = sink::promise(|| built.run(&inputs, &pass))?;
    state.flow = Some(detached(&outputs));
    state.saved.insert(layer, Saved { inputs: leaves, outputs: outputs.tensors().to_vec() });
    Ok(())
}

fn backward(
    model: &Model,
    layer: LayerId,
    state: &mut MicroBatch,
    context: &mut Context<'_>,
    outcome: &mut Outcome,
) -> Result<(), Error> {
    let (inputs, gradients) = if layer + 1 == model.layers().len() {
        let incoming = state.incoming()?;
        let targets = state.targets.as_ref().ok_or_else(|| Error::Batch("a micro-batch has no targets".into()))?;
        let (pass, gradient) = (context.pass(layer, state), context.loss_gradient);
        let (inputs, leaves) = cut(&incoming, layer)?;
        let gradients = context.zero.backward(layer, || {
            let loss = model.loss(&inputs, targets, &pass, gradient)?;
            outcome.losses.push(scalar(&loss)?);
            let seed = Tensor::new(gradient, loss.device())?.to_dtype(loss.dtype())?;
            Ok(backpropagate(&[(loss, seed)], &leaves)?)
        })?;
        (leaves, gradients)
    } else {
        let saved = state.saved.remove(&layer).ok_or_else(|| Error::Batch("a layer's forward has not run".into()))?;
        let upstream = std::mem::take(&mut state.upstream);
        let seeds: Vec<(Tensor, Tensor)> =
            saved.outputs.into_iter().zip(upstream).filter_map(|(y, dy)| dy.map(|dy| (y, dy))).collect();
        let gradients = context.zero.backward(layer, || Ok(backpropagate(&seeds, &saved.inputs)?))?;
        (saved.inputs, gradients)
    };
    let wants_some = inputs.iter().any(Option::is_some);
    if wants_some && gradients.iter().all(Option::is_none) {
        let name = model.layers()[layer].name();
        let what = format!("layer `{name}` passes no gradient to the layer before: an operation without a backward?");
        return Err(Error::Tensor(candle_core::Error::Msg(what)));
    }
    state.upstream = gradients;
    Ok(())
}

/// candle's gradients, and apart those of a layer's inputs.
fn backpropagate(
    seeds: &[(Tensor, Tensor)],
    inputs: &[Option<Tensor>],
) -> candle_core::Result<(GradStore, Vec<Option<Tensor>>)> {
    let mut store = backward_from(seeds)?;
    let gradients = inputs.iter().map(|x| x.as_ref().and_then(|x| store.remove(x))).collect();
    Ok((store, gradients))
}

/// A layer's inputs, and those of them that are leaves. The model's inputs need no gradient; between layers the graph is
/// cut, so that each backward is the layer's own.
fn cut(incoming: &Activations, layer: LayerId) -> candle_core::Result<(Activations, Vec<Option<Tensor>>)> {
    let leaves = incoming.tensors().iter().map(|x| if layer == 0 { Ok(None) } else { leaf(x) });
    let leaves = leaves.collect::<candle_core::Result<Vec<_>>>()?;
    let inputs = incoming.tensors().iter().zip(&leaves).map(|(x, leaf)| leaf.as_ref().unwrap_or(x).clone()).collect();
    Ok((Activations::new(inputs), leaves))
}

/// A new autograd leaf with the values of `x`, if it can have a gradient.
fn leaf(x: &Tensor) -> candle_core::Result<Option<Tensor>> {
    if !x.dtype().is_float() {
        return Ok(None);
    }
    Ok(Some(Var::from_tensor(x)?.into_inner()))
}

fn detached(activations: &Activations) -> Activations {
    Activations::new(activations.tensors().iter().map(Tensor::detach).collect())
}

fn scalar(loss: &Tensor) -> candle_core::Result<f32> {
    loss.to_dtype(DType::F32)?.to_scalar()
}
