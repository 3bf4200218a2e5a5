//! What a layer takes in memory, known before it runs.
//!
//! The layer runs its own code on tensors without values (`ops/hollow.rs`), so a figure is what will be allocated, to within
//! bookkeeping, for which 4 KiB are set down. It takes microseconds and no memory worth the name, whatever the sizes. Figures
//! hold for the number of threads that [`set_threads`](zero_ops::set_threads) has set, all of which may be at work at a time.
//!
//! # How the figures add up
//!
//! Not in them are parameters and the buffers that their gradients go to. The inputs of a layer are *leaves*, kept until its
//! backward is done; its outputs are the next layer's ([`hand_on`](crate::hand_on)):
//!
//! | | at most | afterwards |
//! |---|---|---|
//! | forward | `+ forward_peak` | `+ kept + outputs` |
//! | backward | `+ backward_peak` | `− leaves − kept − the outputs' gradients + input_gradients` |
//!
//! The model's own inputs are no leaves. Those of a layer behind one that cannot be known are copied first. Where the gradients of weights are deferred,
//! the backward has `deferred_peak` instead, and afterwards `deferred` bytes stay until they are made, which takes no more.
//! The last layer's forward is a part of its backward: [`LossMemory`]. Besides, every thread that multiplies keeps
//! [`room_of_a_thread`].

use std::collections::HashSet;
use zero_ops::Pass;
pub use zero_ops::room_of_a_thread;

use candle_core::{DType, Result, Shape, Tensor, TensorId, bail};

use crate::layers::Activations;
use crate::model::{BuiltLayer, Model};
use zero_ops::backward_from;
use zero_ops::meta;
use zero_ops::sink;

/// More than a layer's graph takes, its tensors aside.
const BOOKKEEPING: u64 = 4096;

/// A tensor as far as its memory goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Form {
    /// Its shape.
    pub shape: Shape,
    /// What its elements are.
    pub dtype: DType,
}

impl Form {
    /// A tensor of this shape and dtype.
    pub fn new(shape: impl Into<Shape>, dtype: DType) -> Self {
        Self { shape: shape.into(), dtype }
    }

    /// Bytes of its values.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        (self.shape.elem_count() as u64).saturating_mul(self.dtype.size_in_bytes() as u64)
    }

    fn of(tensor: &Tensor) -> Self {
        Self::new(tensor.shape(), tensor.dtype())
    }
}

/// What a layer takes in a training step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerMemory {
    /// What the layer gives, and the next one's inputs.
    pub outputs: Vec<Form>,
    /// Inputs that are kept until after the backward.
    pub leaves: u64,
    /// What stays after the forward until the backward, beyond leaves and outputs.
    pub kept: u64,
    /// The most during the forward beyond what there was before. The outputs are in it.
    pub forward_peak: u64,
    /// The most during the backward beyond what there was before it, the gradients of the outputs included.
    pub backward_peak: u64,
    /// The gradients of the inputs, which the backward leaves.
    pub input_gradients: u64,
    /// [`LayerMemory::backward_peak`] of a backward that puts the gradients of the weights off.
    pub deferred_peak: u64,
    /// What such a backward leaves behind it, beyond the gradients of the inputs, until those of the weights are made.
    pub deferred: u64,
}

/// What the last layer and the loss take: forward and backward in one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LossMemory {
    /// Inputs, which are there before and gone afterwards.
    pub leaves: u64,
    /// The most beyond what there was before.
    pub peak: u64,
    /// The gradients of the inputs, which stay.
    pub input_gradients: u64,
}

/// What a layer takes in an evaluation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvaluationMemory {
    /// What the layer gives.
    pub outputs: Vec<Form>,
    /// The most beyond what there was before. The outputs are in it.
    pub peak: u64,
}

/// Runs `run`, in which figures are those of layers on a GPU: those of the processor, and what cuBLASLt takes for a product.
pub fn on_gpu<T>(run: impl FnOnce() -> T) -> T {
    meta::on_gpu(run)
}

impl Model {
    /// What layer `layer`, not the last one, takes in a training step.
    ///
    /// # Errors
    /// If the forms do not fit, or it cannot be known because the layer computes otherwise than by the operations and blocks of
    /// this crate: then it can only be measured.
    pub fn layer_memory(&self, layer: usize, inputs: &[Form]) -> Result<LayerMemory> {
        let built = self.layer(layer)?;
        let memory = self.step(layer, built, inputs, false)?;
        if !built.splits() {
            return Ok(memory);
        }
        let later = self.step(layer, built, inputs, true)?;
        Ok(LayerMemory { deferred_peak: later.deferred_peak, deferred: later.deferred, ..memory })
    }

    fn step(&self, layer: usize, built: &BuiltLayer, inputs: &[Form], defers: bool) -> Result<LayerMemory> {
        meta::trace(self.written_before(layer), || {
            let (inputs, leaves) = leaves(layer, inputs)?;
            let outputs = sink::promise(|| built.run(&Activations::new(inputs), &pass(layer, true)))?;
            let forms: Vec<Form> = outputs.tensors().iter().map(Form::of).collect();
            let forward_peak = meta::peak() + BOOKKEEPING;
            let kept = meta::now().saturating_sub(forms.iter().map(Form::bytes).sum()) + BOOKKEEPING;
            let seed = |y: &Tensor| Ok((y.clone(), meta::tensor(y.shape(), y.dtype())?));
            let seeds: Vec<(Tensor, Tensor)> = outputs.tensors().iter().map(seed).collect::<Result<_>>()?;
            drop(outputs);
            let before = meta::now();
            meta::reset_peak();
            if defers {
                meta::defer();
            }
            let gradients = gradients(&seeds, &leaves)?;
            let peak = meta::peak() - before + BOOKKEEPING;
            drop(seeds);
            let input_gradients = gradients.iter().map(|gradient| Form::of(gradient).bytes()).sum();
            let rest = meta::now().saturating_sub(input_gradients) + BOOKKEEPING;
            Ok(LayerMemory {
                outputs: forms,
                leaves: leaves.iter().map(|leaf| Form::of(leaf).bytes()).sum(),
                kept,
                forward_peak,
                backward_peak: if defers { 0 } else { peak },
                input_gradients,
                deferred_peak: if defers { peak } else { 0 },
                deferred: if defers { rest } else { 0 },
            })
        })
    }

    /// What the last layer and the loss take in a training step.
    ///
    /// # Errors
    /// As [`Model::layer_memory`]; also where the loss is no [`Head`](crate::Head)'s.
    pub fn loss_memory(&self, inputs: &[Form], targets: &Form) -> Result<LossMemory> {
        let layer = self.layers().len() - 1; // no model is without
        meta::trace(self.written_before(layer), || {
            let (inputs, leaves) = leaves(layer, inputs)?;
            let targets = meta::leaf(&targets.shape, targets.dtype, false)?;
            let loss = sink::promise(|| self.loss(&Activations::new(inputs), &targets, &pass(layer, true), 1.0))?;
            let seed = meta::tensor(loss.shape(), loss.dtype())?;
            let gradients = gradients(&[(loss, seed)], &leaves)?;
            let [leaves, input_gradients] =
                [&leaves, &gradients].map(|tensors| tensors.iter().map(|x| Form::of(x).bytes()).sum());
            Ok(LossMemory { leaves, peak: meta::peak() + BOOKKEEPING, input_gradients })
        })
    }

    /// What a layer takes in an evaluation.
    ///
    /// # Errors
    /// As [`Model::layer_memory`].
    pub fn evaluation_memory(&self, layer: usize, inputs: &[Form]) -> Result<EvaluationMemory> {
        let built = self.layer(layer)?;
        meta::trace(HashSet::new(), || {
            let (inputs, _) = leaves(0, inputs)?;
            let outputs = built.run(&Activations::new(inputs), &pass(layer, false))?;
            let outputs = outputs.tensors().iter().map(Form::of).collect();
            Ok(EvaluationMemory { outputs, peak: meta::peak() + BOOKKEEPING })
        })
    }

    /// What the last layer and the loss take at most in an evaluation. Nothing of it stays.
    ///
    /// # Errors
    /// As [`Model::loss_memory`].
    pub fn evaluation_loss_memory(&self, inputs: &[Form], targets: &Form) -> Result<u64> {
        let layer = self.layers().len() - 1;
        meta::trace(HashSet::new(), || {
            let (inputs, _) = leaves(0, inputs)?;
            let targets = meta::leaf(&targets.shape, targets.dtype, false)?;
            self.loss(&Activations::new(inputs), &targets, &pass(layer, false), 0.0)?;
            Ok(meta::peak() + BOOKKEEPING)
        })
    }

    fn layer(&self, layer: usize) -> Result<&BuiltLayer> {
        match self.layers().get(layer) {
            Some(built) => Ok(built),
            None => bail!("layer {layer} of a model of {}", self.layers().len()),
        }
    }

    /// The parameters of a layer whose gradient a later one's backward has begun.
    fn written_before(&self, layer: usize) -> HashSet<TensorId> {
        let uses = self.layers()[layer].uses().iter().filter(|&&parameter| self.last_user(parameter) > layer);
        uses.map(|&parameter| self.parameters()[parameter].leaf().id()).collect()
    }
}

/// Dropout's masks depend on more than this, what they take does not.
fn pass(layer: usize, training: bool) -> Pass {
    Pass { training, seed: 0, step: 1, sample: 0, layer: layer as u32 }
}

/// A layer's inputs, and those of them that gradients are wanted for.
fn leaves(layer: usize, forms: &[Form]) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
    let wanted = |form: &Form| layer > 0 && form.dtype.is_float();
    let input = |form: &Form| meta::leaf(&form.shape, form.dtype, wanted(form));
    let inputs = forms.iter().map(input).collect::<Result<Vec<_>>>()?;
    let leaves = inputs.iter().filter(|input| input.is_variable()).cloned().collect();
    Ok((inputs, leaves))
}

fn gradients(seeds: &[(Tensor, Tensor)], leaves: &[Tensor]) -> Result<Vec<Tensor>> {
    let mut store = backward_from(seeds)?;
    Ok(leaves.iter().filter_map(|leaf| store.remove(leaf)).collect())
}
