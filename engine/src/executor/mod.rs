//! Executes a program: one exhaustive `match` over its instructions.

pub(crate) mod activation_offload;
mod layer;
pub(crate) mod messages;
pub(crate) mod tensor_bytes;
pub(crate) mod tracked;

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use candle_core::{DType, Tensor};
use zero_model::ops::SequenceGroup;
use zero_model::{Activations, Pass, Signature};
use zero_optim::Rate;
use zero_optim::norm::{Limits, Verdict};
use zero_partition::{ShardedState, ZeroError};
use zero_pipeline::{Content, Instruction, Item, LayerId, Message, Program};

use crate::batch::Batch;
use crate::device::{explained, onto};
use crate::error::Error;
use crate::executor::activation_offload::ActivationOffload;
use crate::executor::layer::{Capture, MicroBatch, backward, forward, recompute};
use crate::executor::messages::{Boundary, Messages};
use crate::executor::tracked::Tracked;
use crate::loss_weights::LossWeights;
use crate::timing::Timing;

/// The inputs of one program run.
pub(crate) struct Context<'a> {
    pub(crate) zero: &'a mut ShardedState,
    pub(crate) timing: &'a mut Timing,
    pub(crate) tracked: Tracked,
    pub(crate) memory_limit: Option<u64>,
    /// Swap file of layer inputs that are kept for recomputation.
    pub(crate) kept: Option<&'a mut ActivationOffload>,
    /// Loads a local micro-batch.
    pub(crate) load: &'a mut Load<'a>,
    /// The ranks that share sequences or layers; `None` if both are whole. If it is set, micro-batches may be slices of
    /// sequences.
    pub(crate) sequence: Option<&'a SequenceGroup>,
    /// Index of a local micro-batch's first sample in the run.
    pub(crate) sample: &'a dyn Fn(usize) -> u64,
    pub(crate) training: bool,
    /// Whether the last layer computes the loss; otherwise the program returns its outputs.
    pub(crate) scored: bool,
    pub(crate) seed: u64,
    pub(crate) step: u64,
    /// Gradient of the global batch's loss with respect to one micro-batch's loss, times the loss scale, before the
    /// factor of the micro-batch's weight.
    pub(crate) loss_gradient: f64,
    pub(crate) weights: &'a LossWeights,
    /// Clipping and overflow limits of the gradient norm.
    pub(crate) limits: Limits,
    pub(crate) rate: Rate,
    /// Called with the outputs of an evaluation, on ranks that have the last layer.
    pub(crate) observe: Option<&'a mut Observe<'a>>,
}

/// The results of one micro-batch of an evaluation.
#[derive(Clone, Copy)]
pub struct Observed<'a> {
    /// Index of the micro-batch, from 0.
    pub micro_batch: usize,
    /// The loss, a scalar.
    pub loss: &'a Tensor,
    /// The weight of the loss in a mean over several micro-batches; `None` if the number of samples is the weight.
    pub weight: Option<u64>,
    /// Computes the outputs that the loss takes.
    pub(crate) outputs: &'a dyn Fn() -> candle_core::Result<Activations>,
    /// The targets, and the named inputs that layers of the last pipeline stage or the loss take.
    pub batch: &'a Batch,
    /// Names of the outputs.
    pub signature: &'a Signature,
}

impl Observed<'_> {
    /// Returns the outputs that the loss takes. A head that computes the loss without storing its outputs, such as that
    /// of a language model, computes the outputs in this call. The ranks of a tensor group must all call this function.
    ///
    /// # Errors
    /// Returns the error of the layer.
    pub fn outputs(&self) -> Result<Activations, Error> {
        Ok((self.outputs)()?)
    }

    /// Returns outputs by name; see [`Observed::outputs`].
    ///
    /// # Errors
    /// Fails if the loss does not take one of them, and returns the error of the layer.
    pub fn outputs_of<S: AsRef<str>>(&self, names: &[S]) -> Result<Activations, Error> {
        let outputs = self.outputs()?;
        let find = |name: &S| {
            let place = self.signature.outputs.iter().position(|output| output == name.as_ref());
            let found = place.and_then(|place| outputs.tensors().get(place)).cloned();
            found.ok_or_else(|| Error::Batch(format!("the loss receives no output `{}`", name.as_ref())))
        };
        Ok(Activations::new(names.iter().map(find).collect::<Result<_, _>>()?))
    }
}

pub(crate) type Observe<'a> = dyn FnMut(Observed<'_>) -> Result<(), Error> + 'a;
pub(crate) type Load<'a> = dyn FnMut(usize) -> Result<Batch, Error> + 'a;

/// The results of one program run.
#[derive(Debug, Default)]
pub(crate) struct StepOutput {
    /// Loss of each local micro-batch, times the factor of its weight, on the stage of the last layer.
    pub(crate) losses: Vec<f32>,
    /// The part of each loss that the z-loss adds; empty without a z-loss.
    pub(crate) z_losses: Vec<f32>,
    /// (micro-batch, loss, z-loss), kept as tensors until the program ends so that no instruction waits for the GPU.
    pending_losses: Vec<(usize, Tensor, Option<Tensor>)>,
    /// Outputs of the last layer, for each local micro-batch of a program without a loss.
    pub(crate) outputs: Vec<Activations>,
    /// For each local micro-batch, the values that training wrote into the module buffers of this stage's layers, by
    /// buffer index.
    pub(crate) written: Vec<BTreeMap<usize, Tensor>>,
    /// Gradient norm and whether the update ran; `None` in an evaluation.
    pub(crate) verdict: Option<Verdict>,
    /// Tensors that crossed the boundaries of pipeline stages, by the layer after each boundary.
    pub(crate) boundaries: HashMap<LayerId, Boundary>,
}

impl Context<'_> {
    fn pass(&self, layer: LayerId, state: &MicroBatch) -> Pass {
        let (training, seed, step, sample) = (self.training, self.seed, self.step, state.sample);
        Pass { training, seed, step, sample, layer: layer as u32 }
    }
}

/// Runs a whole program.
pub(crate) fn run(program: &Program, context: &mut Context<'_>) -> Result<StepOutput, Error> {
    let Some(group) = context.sequence else { return carry_out(program, context).map_err(explained) };
    group.within(|| carry_out(program, context)).map_err(|error| match group.failure() {
        Some(lost) => Error::Comm(lost.clone()),
        None => explained(error),
    })
}

fn carry_out(program: &Program, context: &mut Context<'_>) -> Result<StepOutput, Error> {
    let model = context.zero.model().clone();
    let mut outcome = StepOutput { written: vec![BTreeMap::new(); program.micro_batches], ..StepOutput::default() };
    let mut messages = Messages::new(context.zero, context.training);
    let mut micro_batches: Vec<MicroBatch> = (0..program.micro_batches)
        .map(|index| MicroBatch { index, sample: (context.sample)(index), ..MicroBatch::default() })
        .collect();
    for (index, instruction) in program.instructions.iter().enumerate() {
        let place = context.training.then_some(index);
        let started = Instant::now();
        context.timing.enter(place)?;
        context.tracked.start();
        match instruction {
            Instruction::Load { micro_batch } => {
                let batch = (context.load)(*micro_batch)?.of_stage(&model, |layer| is_here(context.zero, layer));
                let state = &mut micro_batches[*micro_batch];
                state.batch = batch.map(|tensor| onto(model.device(), tensor))?;
                if is_here(context.zero, 0) {
                    state.flow = Some(std::mem::take(&mut state.batch.inputs));
                }
            }
            Instruction::Gather { segments } => context.zero.gather(segments)?,
            Instruction::AwaitGather { segments } => context.zero.await_gather(segments)?,
            Instruction::GatherSecondary { segments } => context.zero.gather_secondary(segments)?,
            Instruction::AwaitGatherSecondary { segments } => context.zero.await_gather_secondary(segments)?,
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
            Instruction::Reduce { segments, micro_batch } => {
                context.zero.reduce(segments, *micro_batch, program.micro_batches)?;
            }
            Instruction::AwaitReduce { segments, micro_batch } => context.zero.await_reduce(segments, *micro_batch)?,
            Instruction::GradientNorm => context.zero.gradient_norm(&context.limits)?,
            Instruction::Update { segment } => context.zero.update(*segment, context.rate)?,
            Instruction::MeasureTile { segment, tile } => {
                context.zero.measure_tile(*segment, *tile, context.rate)?;
            }
            Instruction::UpdateTile { segment, tile } => context.zero.update_tile(*segment, *tile, context.rate)?,
            Instruction::Fetch { item: Item::Activations { layer, micro_batch } } => {
                disk(&mut context.kept)?.fetch((*layer, *micro_batch))?;
            }
            Instruction::AwaitFetch { item: Item::Activations { layer, micro_batch } } => {
                let inputs = disk(&mut context.kept)?.await_fetch((*layer, *micro_batch), model.device())?;
                micro_batches[*micro_batch].kept.insert(*layer, inputs);
            }
            Instruction::Offload { item: Item::Activations { layer, micro_batch } } => {
                let inputs = micro_batches[*micro_batch].kept.remove(layer);
                let inputs = inputs
                    .ok_or_else(|| Error::Batch("cannot offload the inputs of a layer that were not kept".into()))?;
                disk(&mut context.kept)?.offload((*layer, *micro_batch), &inputs)?;
            }
            Instruction::AwaitOffload { item: Item::Activations { layer, micro_batch } } => {
                disk(&mut context.kept)?.await_offload((*layer, *micro_batch))?;
            }
            Instruction::Fetch { item } => context.zero.fetch(*item)?,
            Instruction::AwaitFetch { item } => context.zero.await_fetch(*item)?,
            Instruction::Offload { item } => context.zero.offload(*item)?,
            Instruction::AwaitOffload { item } => context.zero.await_offload(*item)?,
            Instruction::OuterStep { segment } => context.zero.outer_step(*segment)?,
            Instruction::AwaitOuterStep { segment } => context.zero.await_outer_step(*segment)?,
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
            context.zero.carry_out_updates(context.rate)?;
        }
        let beside = context.tracked.stop(context.zero);
        if let Some(limit) = context.memory_limit {
            tracked::within(limit, context.zero, instruction)?;
        }
        context.timing.leave()?;
        context.timing.hold(instruction, place, context.zero.ledger(), beside);
        context.timing.record(instruction, place, started);
    }
    // A single rank with all its state on the GPU waits for the GPU only here.
    #[cfg(feature = "cuda")]
    zero_model::device::check(model.device())?;
    outcome.verdict = context.zero.finish_step(context.rate)?;
    for (index, loss, z_loss) in std::mem::take(&mut outcome.pending_losses) {
        let factor = context.weights.factor(index);
        outcome.losses.push(weighted(&loss, factor)?);
        outcome.z_losses.extend(z_loss.map(|z| weighted(&z, factor)).transpose()?);
    }
    outcome.boundaries = messages.boundaries();
    context.timing.settle(program)?;
    Ok(outcome)
}

/// Returns whether pending updates may wait for the next instruction, because consecutive updates run as a batch. If
/// this rank has the only shard, a refresh does nothing, so it does not end a batch.
fn puts_off_updates(next: Option<&Instruction>, zero: &ShardedState) -> bool {
    match next {
        Some(Instruction::Update { .. }) => true,
        Some(Instruction::Refresh { .. } | Instruction::AwaitRefresh { .. }) => zero.groups().shard().size() == 1,
        _ => false,
    }
}

/// Returns whether a layer is on this rank's pipeline stage.
fn is_here(zero: &ShardedState, layer: LayerId) -> bool {
    zero.stages().stage_of(layer) == zero.groups().at().stage
}

fn disk<'k>(kept: &'k mut Option<&mut ActivationOffload>) -> Result<&'k mut ActivationOffload, Error> {
    kept.as_deref_mut()
        .ok_or_else(|| Error::Zero(ZeroError::Internal("no file is open for the inputs of layers".into())))
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

/// Returns the loss times a factor. A loss with factor 0 may be NaN, because it is a mean over no targets; the result
/// is then 0.
fn weighted(loss: &Tensor, factor: f64) -> candle_core::Result<f32> {
    let loss: f32 = loss.to_dtype(DType::F32)?.to_scalar()?;
    Ok(if factor == 0.0 { 0.0 } else { (f64::from(loss) * factor) as f32 })
}
