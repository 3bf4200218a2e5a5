//! Executes a program: one exhaustive `match` over its instructions.

pub(crate) mod activation_offload;
pub(crate) mod messages;
pub(crate) mod tensor_bytes;
pub(crate) mod tracked;

use std::collections::HashMap;
use std::time::Instant;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use zero_model::{Activations, Model, Pass, backward_from, hand_on, sink};
use zero_optim::norm::{Limits, Verdict};
use zero_partition::{ShardedState, ZeroError};
use zero_pipeline::{Content, Instruction, Item, LayerId, Message, Program};

use crate::device::{explained, onto, onto_one};
use crate::error::Error;
use crate::executor::activation_offload::ActivationOffload;
use crate::executor::messages::{Boundary, Messages};
use crate::executor::tracked::Tracked;
use crate::timing::Timing;

/// The inputs of one program run.
pub(crate) struct Context<'a> {
    pub(crate) zero: &'a mut ShardedState,
    pub(crate) timing: &'a mut Timing,
    pub(crate) tracked: Tracked,
    pub(crate) memory_limit: Option<u64>,
    /// Swap file of layer inputs that are kept for recomputation.
    pub(crate) kept: Option<&'a mut ActivationOffload>,
    /// Loads inputs and targets of a local micro-batch.
    pub(crate) load: &'a mut Load<'a>,
    /// Index of a local micro-batch's first sample in the run.
    pub(crate) sample: &'a dyn Fn(usize) -> u64,
    pub(crate) training: bool,
    pub(crate) seed: u64,
    pub(crate) step: u64,
    /// Gradient of the global batch's loss with respect to one micro-batch's loss, times the loss scale.
    pub(crate) loss_gradient: f32,
    /// Clipping and overflow limits of the gradient norm.
    pub(crate) limits: Limits,
    pub(crate) lr: f64,
    /// Sees the outputs of an evaluation, on ranks that have the last layer.
    pub(crate) observe: Option<&'a mut Observe<'a>>,
}

/// What a micro-batch of an evaluation gave.
#[derive(Debug, Clone, Copy)]
pub struct Observed<'a> {
    /// From 0.
    pub micro_batch: usize,
    /// A scalar.
    pub loss: &'a Tensor,
    /// Those of the last layer.
    pub outputs: &'a Activations,
    /// What they are compared with.
    pub targets: &'a Tensor,
}

pub(crate) type Observe<'a> = dyn FnMut(Observed<'_>) -> Result<(), Error> + 'a;
pub(crate) type Load<'a> = dyn FnMut(usize) -> Result<(Activations, Option<Tensor>), Error> + 'a;

/// The results of one program run.
#[derive(Debug, Default)]
pub(crate) struct StepOutput {
    /// Loss of each local micro-batch, on the stage of the last layer.
    pub(crate) losses: Vec<f32>,
    /// Losses as tensors until the program ends, so that no instruction waits for the GPU.
    pending_losses: Vec<Tensor>,
    /// Outputs of the last layer, for each local micro-batch without targets.
    pub(crate) outputs: Vec<Activations>,
    /// Gradient norm and whether the update was made; `None` in evaluation.
    pub(crate) verdict: Option<Verdict>,
    /// Tensors that crossed the boundaries of pipeline stages, by the layer after each boundary.
    pub(crate) boundaries: HashMap<LayerId, Boundary>,
}

/// A layer's forward, saved until its backward.
struct Saved {
    /// Inputs that are autograd leaves; `None` for inputs that need no gradient.
    inputs: Vec<Option<Tensor>>,
    outputs: Vec<Tensor>,
}

#[derive(Default)]
struct MicroBatch {
    targets: Option<Tensor>,
    sample: u64,
    /// Output of the last layer that ran, detached from its graph; the input of the next layer.
    flow: Option<Activations>,
    saved: HashMap<LayerId, Saved>,
    /// Inputs of layers that will be recomputed.
    kept: HashMap<LayerId, Activations>,
    /// Gradients of the outputs of the layer that runs backward next.
    upstream: Vec<Option<Tensor>>,
}

impl MicroBatch {
    fn incoming(&mut self) -> Result<Activations, Error> {
        self.flow.take().ok_or_else(|| Error::Batch("a layer has no input".into()))
    }

    fn keep(&mut self, layer: LayerId) -> Result<(), Error> {
        let incoming = self.incoming()?;
        self.kept.insert(layer, incoming.clone());
        self.flow = Some(incoming);
        Ok(())
    }
}

impl Context<'_> {
    fn pass(&self, layer: LayerId, state: &MicroBatch) -> Pass {
        let (training, seed, step, sample) = (self.training, self.seed, self.step, state.sample);
        Pass { training, seed, step, sample, layer: layer as u32 }
    }
}

/// Runs a whole program.
pub(crate) fn run(program: &Program, context: &mut Context<'_>) -> Result<StepOutput, Error> {
    carry_out(program, context).map_err(explained)
}

fn carry_out(program: &Program, context: &mut Context<'_>) -> Result<StepOutput, Error> {
    let model = context.zero.model().clone();
    let mut outcome = StepOutput::default();
    let mut messages = Messages::new(context.zero, context.training);
    let mut micro_batches: Vec<MicroBatch> = (0..program.micro_batches)
        .map(|micro_batch| MicroBatch { sample: (context.sample)(micro_batch), ..MicroBatch::default() })
        .collect();
    for (index, instruction) in program.instructions.iter().enumerate() {
        let place = context.training.then_some(index);
        let started = Instant::now();
        context.timing.enter(place)?;
        context.tracked.start();
        match instruction {
            Instruction::Load { micro_batch } => {
                let (inputs, targets) = (context.load)(*micro_batch)?;
                let state = &mut micro_batches[*micro_batch];
                state.targets = targets.map(|targets| onto_one(model.device(), &targets)).transpose()?;
                if context.zero.stages().stage_of(0) == context.zero.groups().at().stage {
                    state.flow = Some(onto(model.device(), &inputs)?);
                }
            }
            Instruction::Gather { segment } => context.zero.gather(*segment)?,
            Instruction::AwaitGather { segment } => context.zero.await_gather(*segment)?,
            Instruction::Release { segment } => context.zero.release(*segment)?,
            Instruction::Forward { layer, micro_batch } => {
                let state = &mut micro_batches[*micro_batch];
                forward(&model, *layer, *micro_batch, state, context, &mut outcome)?;
            }
            Instruction::Keep { layer, micro_batch } => micro_batches[*micro_batch].keep(*layer)?,
            Instruction::Discard { layer, micro_batch } => drop(micro_batches[*micro_batch].saved.remove(layer)),
            Instruction::Recompute { layer, micro_batch } => {
                recompute(&model, *layer, &mut micro_batches[*micro_batch], context)?;
            }
            Instruction::Backward { layer, micro_batch } => {
                let whole: Capture = &|zero, backward| zero.backward(*layer, backward);
                backward(&model, *layer, &mut micro_batches[*micro_batch], context, &mut outcome, whole)?;
            }
            Instruction::BackwardInput { layer, micro_batch } => {
                let first_half: Capture = &|zero, backward| zero.backward_input(*layer, *micro_batch, backward);
                backward(&model, *layer, &mut micro_batches[*micro_batch], context, &mut outcome, first_half)?;
            }
            Instruction::BackwardWeight { layer, micro_batch } => {
                context.zero.backward_weight(*layer, *micro_batch)?;
            }
            Instruction::Accumulate { segment, .. } => context.zero.accumulate(*segment)?,
            Instruction::Reduce { segments, micro_batch } => context.zero.reduce(segments, *micro_batch)?,
            Instruction::AwaitReduce { segments, micro_batch } => context.zero.await_reduce(segments, *micro_batch)?,
            Instruction::GradientNorm => context.zero.gradient_norm(&context.limits)?,
            Instruction::Update { segment } => context.zero.update(*segment, context.lr)?,
            Instruction::UpdateTile { segment, tile } => context.zero.update_tile(*segment, *tile, context.lr)?,
            Instruction::Fetch { item: Item::Activations { layer, micro_batch } } => {
                disk(&mut context.kept)?.fetch((*layer, *micro_batch))?;
            }
            Instruction::AwaitFetch { item: Item::Activations { layer, micro_batch } } => {
                let inputs = disk(&mut context.kept)?.await_fetch((*layer, *micro_batch), model.device())?;
                micro_batches[*micro_batch].kept.insert(*layer, inputs);
            }
            Instruction::Offload { item: Item::Activations { layer, micro_batch } } => {
                let inputs = micro_batches[*micro_batch].kept.remove(layer);
                let inputs =
                    inputs.ok_or_else(|| Error::Batch("inputs that were not kept cannot be written".into()))?;
                disk(&mut context.kept)?.offload((*layer, *micro_batch), &inputs)?;
            }
            Instruction::AwaitOffload { item: Item::Activations { layer, micro_batch } } => {
                disk(&mut context.kept)?.await_offload((*layer, *micro_batch))?;
            }
            Instruction::Fetch { item } => context.zero.fetch(*item)?,
            Instruction::AwaitFetch { item } => context.zero.await_fetch(*item)?,
            Instruction::Offload { item } => context.zero.offload(*item)?,
            Instruction::AwaitOffload { item } => context.zero.await_offload(*item)?,
            Instruction::Refresh { segments } => context.zero.refresh(segments)?,
            Instruction::AwaitRefresh { segments } => context.zero.await_refresh(segments)?,
            Instruction::Send { message } => send(*message, &mut messages, &mut micro_batches, context.zero)?,
            Instruction::AwaitSend { message } => {
                for buffer in messages.await_send(*message)? {
                    give_back(message, buffer, context.zero);
                }
            }
            Instruction::Receive { message } => messages.receive(*message, context.zero)?,
            Instruction::AwaitReceive { message } => {
                take(*message, &mut messages, &mut micro_batches, context.zero)?;
            }
        }
        if !puts_off_updates(program.instructions.get(index + 1), context.zero) {
            context.zero.carry_out_updates(context.lr)?;
        }
        let beside = context.tracked.stop(context.zero);
        if let Some(limit) = context.memory_limit {
            tracked::within(limit, context.zero, instruction)?;
        }
        context.timing.leave()?;
        context.timing.hold(instruction, place, context.zero.ledger(), beside);
        context.timing.record(instruction, place, started);
    }
    // A rank alone with all state on its GPU waits for the GPU here for the first time.
    #[cfg(feature = "cuda")]
    zero_model::device::check(model.device())?;
    outcome.verdict = context.zero.finish_step()?;
    outcome.losses = outcome.pending_losses.drain(..).map(|loss| scalar(&loss)).collect::<candle_core::Result<_>>()?;
    outcome.boundaries = messages.boundaries();
    context.timing.settle(program)?;
    Ok(outcome)
}

/// Whether deferred updates may wait for the next instruction. Consecutive updates are batched. A rank without other
/// replicas has nothing to refresh, so refreshes do not end a batch.
fn puts_off_updates(next: Option<&Instruction>, zero: &ShardedState) -> bool {
    match next {
        Some(Instruction::Update { .. }) => true,
        Some(Instruction::Refresh { .. } | Instruction::AwaitRefresh { .. }) => zero.groups().data().size() == 1,
        _ => false,
    }
}

fn disk<'k>(kept: &'k mut Option<&mut ActivationOffload>) -> Result<&'k mut ActivationOffload, Error> {
    kept.as_deref_mut().ok_or_else(|| Error::Zero(ZeroError::Internal("there is no file for what is kept".into())))
}

fn send(
    message: Message,
    messages: &mut Messages,
    micro_batches: &mut [MicroBatch],
    zero: &mut ShardedState,
) -> Result<(), Error> {
    for buffer in messages.gone()? {
        zero.give_gradient_back(buffer);
    }
    match message.content {
        Content::Activations { micro_batch, .. } => {
            messages.send_activations(message, &micro_batches[micro_batch].incoming()?)
        }
        Content::Gradients { micro_batch, .. } => {
            messages.send_gradients(message, &std::mem::take(&mut micro_batches[micro_batch].upstream))
        }
        Content::TiedGradient { segment, .. } => messages.send_tied(message, zero.take_tied_gradient(segment)?),
        Content::TiedParameters { segment } => messages.send_tied(message, zero.tied_parameters(segment)?),
    }
}

fn give_back(message: &Message, buffer: zero_comm::Buffer, zero: &mut ShardedState) {
    match message.content {
        Content::TiedGradient { .. } => zero.give_gradient_back(buffer),
        Content::TiedParameters { .. } => zero.give_parameters_back(buffer),
        Content::Activations { .. } | Content::Gradients { .. } => {}
    }
}

fn take(
    message: Message,
    messages: &mut Messages,
    micro_batches: &mut [MicroBatch],
    zero: &mut ShardedState,
) -> Result<(), Error> {
    match message.content {
        Content::Activations { micro_batch, .. } => {
            micro_batches[micro_batch].flow = Some(messages.await_activations(message, zero)?);
        }
        Content::Gradients { micro_batch, .. } => {
            micro_batches[micro_batch].upstream = messages.await_gradients(message, zero)?;
        }
        Content::TiedGradient { .. } => {
            let (segment, sum) = messages.await_tied(message, zero)?;
            zero.open_tied_gradient(segment, sum)?;
        }
        Content::TiedParameters { .. } => {
            let (segment, values) = messages.await_tied(message, zero)?;
            zero.set_tied_parameters(segment, values)?;
        }
    }
    Ok(())
}

fn forward(
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
        // the gradient buffers are open only during the backward.
        return Ok(());
    }
    let incoming = state.incoming()?;
    let pass = context.pass(layer, state);
    let built = &model.layers()[layer];
    if !context.training {
        match &state.targets {
            Some(targets) if last => {
                let loss = match &mut context.observe {
                    None => model.loss(&incoming, targets, &pass, 0.0)?.detach(),
                    Some(observe) => {
                        let (outputs, loss) = model.outputs_and_loss(&incoming, targets, &pass)?;
                        let (outputs, loss) = (detached(&outputs), loss.detach());
                        observe(Observed { micro_batch, loss: &loss, outputs: &outputs, targets })?;
                        loss
                    }
                };
                outcome.pending_losses.push(loss);
            }
            None if last => outcome.outputs.push(detached(&built.run(&incoming, &pass)?)),
            _ => state.flow = Some(detached(&built.run(&incoming, &pass)?)),
        }
        return Ok(());
    }
    run_and_save(model, layer, incoming, state, &pass)
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
    let outputs = sink::promise(|| model.layers()[layer].run(&inputs, pass))?;
    state.flow = Some(hand_on(&outputs)?);
    state.saved.insert(layer, Saved { inputs: leaves, outputs: outputs.tensors().to_vec() });
    Ok(())
}

/// Runs a layer's forward again. Dropout masks depend only on the pass, so they equal those of the first run.
fn recompute(model: &Model, layer: LayerId, state: &mut MicroBatch, context: &Context<'_>) -> Result<(), Error> {
    let incoming = match state.kept.remove(&layer) {
        Some(kept) => kept,
        None => state.incoming()?,
    };
    let pass = context.pass(layer, state);
    run_and_save(model, layer, incoming, state, &pass)
}

/// candle's gradient store, and separately the gradients of a layer's inputs.
type Backpropagated = Result<(GradStore, Vec<Option<Tensor>>), ZeroError>;
/// Runs a backward, stores the gradients of parameters in their flat buffers, and returns the gradients of the inputs.
type Capture<'a> =
    &'a dyn Fn(&mut ShardedState, &mut dyn FnMut() -> Backpropagated) -> Result<Vec<Option<Tensor>>, ZeroError>;

fn backward(
    model: &Model,
    layer: LayerId,
    state: &mut MicroBatch,
    context: &mut Context<'_>,
    outcome: &mut StepOutput,
    capture: Capture<'_>,
) -> Result<(), Error> {
    let (inputs, gradients) = if layer + 1 == model.layers().len() {
        let incoming = state.incoming()?;
        let targets = state.targets.as_ref().ok_or_else(|| Error::Batch("a micro-batch has no targets".into()))?;
        let (pass, gradient) = (context.pass(layer, state), context.loss_gradient);
        let (inputs, leaves) = cut(&incoming, layer)?;
        let gradients = capture(context.zero, &mut || {
            let loss = model.loss(&inputs, targets, &pass, gradient)?;
            outcome.pending_losses.push(loss.detach());
            // Create the seed on the device: a copy from the host could wait for the GPU.
            let seed = Tensor::full(gradient, loss.dims(), loss.device())?.to_dtype(loss.dtype())?;
            Ok(backpropagate(&[(loss, seed)], &leaves)?)
        })?;
        (leaves, gradients)
    } else {
        // A recomputed forward leaves an output that no layer consumes.
        state.flow = None;
        let saved = state.saved.remove(&layer).ok_or_else(|| Error::Batch("a layer's forward has not run".into()))?;
        let upstream = std::mem::take(&mut state.upstream);
        let seeds: Vec<(Tensor, Tensor)> =
            saved.outputs.into_iter().zip(upstream).filter_map(|(y, dy)| dy.map(|dy| (y, dy))).collect();
        let gradients = capture(context.zero, &mut || Ok(backpropagate(&seeds, &saved.inputs)?))?;
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

fn backpropagate(
    seeds: &[(Tensor, Tensor)],
    inputs: &[Option<Tensor>],
) -> candle_core::Result<(GradStore, Vec<Option<Tensor>>)> {
    let mut store = backward_from(seeds)?;
    let gradients = inputs.iter().map(|x| x.as_ref().and_then(|x| store.remove(x))).collect();
    Ok((store, gradients))
}

/// Detaches a layer's inputs from the graph of the layer before, so that the backward ends at this layer. Returns the
/// inputs, and separately the leaves among them. Inputs of the model (layer 0) need no gradient.
fn cut(incoming: &Activations, layer: LayerId) -> candle_core::Result<(Activations, Vec<Option<Tensor>>)> {
    let leaves = incoming.tensors().iter().map(|x| if layer == 0 { Ok(None) } else { leaf(x) });
    let leaves = leaves.collect::<candle_core::Result<Vec<_>>>()?;
    let inputs = incoming.tensors().iter().zip(&leaves).map(|(x, leaf)| leaf.as_ref().unwrap_or(x).clone()).collect();
    Ok((Activations::new(inputs), leaves))
}

/// Returns an autograd leaf with the values of `x`, or `None` if the dtype has no gradient. Tensors that were received
/// from another stage, or handed on by a block of the zoo, are leaves already.
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

fn scalar(loss: &Tensor) -> candle_core::Result<f32> {
    loss.to_dtype(DType::F32)?.to_scalar()
}
