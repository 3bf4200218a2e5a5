//! Runs one layer of a micro-batch: its forward, its recomputation or its backward.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use zero_model::{Activations, Model, Pass, backward_from, hand_on, sink};
use zero_partition::{ShardedState, ZeroError};
use zero_pipeline::LayerId;

use super::{Context, Observed, StepOutput, is_here};
use crate::batch::Batch;
use crate::error::Error;

/// A layer's forward, saved until its backward.
pub(super) struct Saved {
    /// Inputs that are autograd leaves; `None` for inputs that need no gradient.
    inputs: Vec<Option<Tensor>>,
    outputs: Vec<Tensor>,
}

#[derive(Default)]
pub(super) struct MicroBatch {
    /// Index among this rank's micro-batches.
    pub(super) index: usize,
    /// Targets and named inputs that layers of this stage take.
    pub(super) batch: Batch,
    pub(super) sample: u64,
    /// Output of the last layer that ran, detached from its graph; the input of the next layer.
    pub(super) flow: Option<Activations>,
    pub(super) saved: HashMap<LayerId, Saved>,
    /// Inputs of layers that will be recomputed.
    pub(super) kept: HashMap<LayerId, Activations>,
    /// Gradients of the outputs of the layer that runs backward next.
    pub(super) upstream: Vec<Option<Tensor>>,
}

impl MicroBatch {
    pub(super) fn incoming(&mut self) -> Result<Activations, Error> {
        self.flow.take().ok_or_else(|| Error::Batch("a layer has no input".into()))
    }

    pub(super) fn keep(&mut self, layer: LayerId) -> Result<(), Error> {
        let incoming = self.incoming()?;
        self.kept.insert(layer, incoming.clone());
        self.flow = Some(incoming);
        Ok(())
    }
}

/// Runs a layer's forward. In an evaluation, the last layer computes the loss.
pub(super) fn forward(
    model: &Model,
    layer: LayerId,
    micro_batch: usize,
    state: &mut MicroBatch,
    context: &mut Context<'_>,
    outcome: &mut StepOutput,
) -> Result<(), Error> {
    let last = layer + 1 == model.layers().len();
    if context.training && last {
        // The last layer's forward runs as part of its backward: a head computes gradients together with the loss, and
        // gradient buffers are writable only during the backward.
        return Ok(());
    }
    let incoming = state.incoming()?;
    let pass = context.pass(layer, state);
    if context.training && layer >= model.first_trained() {
        run_and_save(model, layer, incoming, state, &pass)?;
        return take_buffers(model, layer, micro_batch, outcome);
    }
    let built = &model.layers()[layer];
    let x = state.batch.added_to(incoming, built)?;
    if !(last && context.scored) {
        // In training, this layer and all layers before it are frozen. They have no backward, so nothing is saved.
        let outputs = built.pass_on(detached(&built.run_forward_only(&x, &pass)?), &x)?;
        match last {
            true => outcome.outputs.push(outputs),
            false => state.flow = Some(outputs),
        }
        if context.training {
            take_buffers(model, layer, micro_batch, outcome)?;
        }
        let behind = layer + 1..model.layers().len();
        if is_last_reader(model, context.zero, layer, behind.clone()) && !is_here(context.zero, behind.end - 1) {
            state.batch = Batch::default();
        }
        return Ok(());
    }
    let targets = state.batch.loss_targets(model.signature())?;
    let loss = match &mut context.observe {
        None => model.loss(&x, &targets, &pass, 0.0)?.detach(),
        Some(observe) => {
            let (loss, outputs) = model.loss_and_outputs(&x, &targets, &pass)?;
            let (loss, known) = (loss.detach(), RefCell::new(outputs));
            let outputs = || {
                let mut known = known.borrow_mut();
                let outputs = known.take().map_or_else(|| model.outputs(&x, &pass), Ok)?;
                Ok(detached(known.insert(outputs)))
            };
            observe(Observed {
                micro_batch,
                loss: &loss,
                weight: context.weights.own(micro_batch),
                outputs: &outputs,
                batch: &state.batch,
                signature: model.signature(),
            })?;
            loss
        }
    };
    outcome.pending_losses.push((micro_batch, loss, None));
    Ok(())
}

/// Runs a layer's forward and saves its graph for the backward.
fn run_and_save(
    model: &Model,
    layer: LayerId,
    incoming: Activations,
    state: &mut MicroBatch,
    pass: &Pass,
) -> Result<(), Error> {
    let (inputs, leaves) = cut(&incoming, layer)?;
    drop(incoming);
    let built = &model.layers()[layer];
    let x = state.batch.added_to(inputs, built)?;
    let outputs = sink::promise(|| built.run(&x, pass))?;
    state.flow = Some(built.pass_on(hand_on(&outputs)?, &x)?);
    state.saved.insert(layer, Saved { inputs: leaves, outputs: outputs.tensors().to_vec() });
    Ok(())
}

/// Takes the values that the forward of a micro-batch wrote into the layer's module buffers.
fn take_buffers(model: &Model, layer: LayerId, micro_batch: usize, outcome: &mut StepOutput) -> Result<(), Error> {
    for (index, buffer) in model.buffers_of(layer) {
        outcome.written[micro_batch].insert(index, buffer.take()?);
    }
    Ok(())
}

/// Runs a layer's forward again. Dropout masks depend only on the pass, so they equal those of the first run. Module
/// buffers keep the values of the first run.
pub(super) fn recompute(
    model: &Model,
    layer: LayerId,
    state: &mut MicroBatch,
    context: &Context<'_>,
) -> Result<(), Error> {
    let incoming = match state.kept.remove(&layer) {
        Some(kept) => kept,
        None => state.incoming()?,
    };
    let pass = context.pass(layer, state);
    run_and_save(model, layer, incoming, state, &pass)?;
    Ok(model.buffers_of(layer).try_for_each(|(_, buffer)| buffer.restore())?)
}

/// candle's gradient store, and the gradients of a layer's inputs.
pub(super) type Backpropagated = Result<(GradStore, Vec<Option<Tensor>>), ZeroError>;
/// Runs a backward, stores the gradients of parameters in their flat buffers, and returns the gradients of the inputs.
pub(super) type Capture<'a> =
    &'a dyn Fn(&mut ShardedState, &mut dyn FnMut() -> Backpropagated) -> Result<Vec<Option<Tensor>>, ZeroError>;

/// Runs a layer's backward, starting from the gradients of its outputs in the micro-batch's state.
pub(super) fn backward(
    model: &Model,
    layer: LayerId,
    state: &mut MicroBatch,
    context: &mut Context<'_>,
    outcome: &mut StepOutput,
    capture: Capture<'_>,
) -> Result<(), Error> {
    let built = &model.layers()[layer];
    let in_backward =
        |error: candle_core::Error| error.context(format!("in the backward pass of layer `{}`", built.name()));
    let (inputs, gradients, bypass) = if layer + 1 == model.layers().len() {
        let incoming = state.incoming()?;
        let targets = state.batch.loss_targets(model.signature())?;
        let pass = context.pass(layer, state);
        let gradient = (context.loss_gradient * context.weights.factor(state.index)) as f32;
        let (inputs, leaves) = cut(&incoming, layer)?;
        let x = state.batch.added_to(inputs, built)?;
        let gradients = capture(context.zero, &mut || {
            let (loss, z_loss) = model.loss_and_z_loss(&x, &targets, &pass, gradient)?;
            outcome.pending_losses.push((state.index, loss.detach(), z_loss));
            knows_variables(model, layer, &[&loss], &leaves)?;
            // Create the seed on the device: a copy from the host could wait for the GPU.
            let seed = Tensor::full(gradient, loss.dims(), loss.device())?.to_dtype(loss.dtype())?;
            Ok(backpropagate(&[(loss, seed)], &leaves).map_err(in_backward)?)
        })?;
        take_buffers(model, layer, state.index, outcome)?;
        let bypass = vec![None; leaves.len()];
        (leaves, gradients, bypass)
    } else {
        // No layer consumes the output of a recomputed forward.
        state.flow = None;
        let saved = state.saved.remove(&layer).ok_or_else(|| Error::Batch("a layer's forward has not run".into()))?;
        let upstream = std::mem::take(&mut state.upstream);
        let [own, bypass] = built.route().gradients(upstream, saved.outputs.len(), saved.inputs.len());
        let seeds: Vec<(Tensor, Tensor)> =
            saved.outputs.into_iter().zip(own).filter_map(|(y, dy)| dy.map(|dy| (y, dy))).collect();
        if seeds.is_empty() {
            let what = format!("no gradient reaches the outputs of layer `{}`", built.name());
            return Err(Error::Tensor(candle_core::Error::Msg(what)));
        }
        knows_variables(model, layer, &seeds.iter().map(|(y, _)| y).collect::<Vec<_>>(), &saved.inputs)?;
        let gradients = capture(context.zero, &mut || Ok(backpropagate(&seeds, &saved.inputs).map_err(in_backward)?))?;
        (saved.inputs, gradients, bypass)
    };
    let taken = |index: &usize| inputs[*index].is_some() && built.route().takes(*index, inputs.len());
    let mut taken = (0..inputs.len()).filter(taken).peekable();
    if taken.peek().is_some() && taken.all(|index| gradients[index].is_none()) {
        let what = format!(
            "layer `{}` passes no gradient to the previous layer; one of its operations may have no backward pass",
            built.name()
        );
        return Err(Error::Tensor(candle_core::Error::Msg(what)));
    }
    // Inputs that the layer passes on to later layers also get gradients from those layers.
    let sum = |(own, later): (Option<Tensor>, Option<Tensor>)| match (own, later) {
        (Some(own), Some(later)) => Ok(Some((later + own)?)),
        (own, later) => Ok(own.or(later)),
    };
    if is_last_reader(model, context.zero, layer, 0..layer) {
        state.batch = Batch::default();
    }
    // Layers before the first trained layer have no backward.
    if layer > model.first_trained() {
        state.upstream = gradients.into_iter().zip(bypass).map(sum).collect::<candle_core::Result<_>>()?;
    }
    Ok(())
}

/// Checks that all variables of a layer's graph are its inputs or parameters, because no optimizer would update any
/// other variable.
fn knows_variables(
    model: &Model,
    layer: LayerId,
    outputs: &[&Tensor],
    inputs: &[Option<Tensor>],
) -> candle_core::Result<()> {
    let built = &model.layers()[layer];
    let parameters = built.uses().iter().map(|&parameter| model.parameters()[parameter].leaf());
    let known: Vec<_> =
        inputs.iter().flatten().chain(outputs.iter().copied()).chain(parameters).map(Tensor::id).collect();
    let mut nodes = outputs.iter().flat_map(|output| output.sorted_nodes());
    match nodes.any(|node| node.is_variable() && !known.contains(&node.id())) {
        false => Ok(()),
        true => candle_core::bail!(
            "layer `{}` uses a variable that its `VarBuilder` did not create, so training would not change it\n  help: \
             get the parameter from the layer's `VarBuilder`, use `Layers::tie` for a parameter of another layer, or \
             detach the variable",
            built.name()
        ),
    }
}

fn backpropagate(
    seeds: &[(Tensor, Tensor)],
    inputs: &[Option<Tensor>],
) -> candle_core::Result<(GradStore, Vec<Option<Tensor>>)> {
    let mut store = backward_from(seeds)?;
    let gradients = inputs.iter().map(|x| x.as_ref().and_then(|x| store.remove(x))).collect();
    Ok((store, gradients))
}

/// Detaches a layer's inputs from the graph of the previous layer, so that the backward ends at this layer. Returns the
/// inputs and, for each input, its leaf if it has one. Inputs of the model (layer 0) need no gradient.
fn cut(incoming: &Activations, layer: LayerId) -> candle_core::Result<(Activations, Vec<Option<Tensor>>)> {
    let leaves = incoming.tensors().iter().map(|x| if layer == 0 { Ok(None) } else { leaf(x) });
    let leaves = leaves.collect::<candle_core::Result<Vec<_>>>()?;
    let inputs = incoming.tensors().iter().zip(&leaves).map(|(x, leaf)| leaf.as_ref().unwrap_or(x).clone()).collect();
    Ok((Activations::new(inputs), leaves))
}

/// Returns an autograd leaf with the values of `x`, or `None` if the dtype has no gradient. Tensors from another stage,
/// and tensors that a block of the zoo passes on, are leaves already.
fn leaf(x: &Tensor) -> candle_core::Result<Option<Tensor>> {
    if !x.dtype().is_float() {
        return Ok(None);
    }
    if x.is_variable() {
        return Ok(Some(x.clone()));
    }
    Ok(Some(Var::from_tensor(x)?.into_inner()))
}

fn detached(activations: &Activations) -> Activations {
    Activations::new(activations.tensors().iter().map(Tensor::detach).collect())
}

/// Returns whether a layer takes named inputs of the batch, and is the last layer on this rank's stage to do so in a
/// pass. `coming` are the layers that run after it: later layers in a forward, earlier layers in a backward.
fn is_last_reader(model: &Model, zero: &ShardedState, layer: LayerId, mut coming: Range<LayerId>) -> bool {
    let reads = |layer: LayerId| !model.layers()[layer].route().reads().is_empty();
    reads(layer) && !coming.any(|layer| reads(layer) && is_here(zero, layer))
}
