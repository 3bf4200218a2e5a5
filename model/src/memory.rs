//! Computes the memory of a layer before it runs.
//!
//! The layer's own code runs on meta tensors, which have no values (`ops/src/meta/mod.rs`), so each figure equals the
//! bytes that will be allocated, up to 4 KiB of bookkeeping. A dry run takes microseconds and allocates almost nothing,
//! for any size. Figures hold for the number of threads set by [`set_threads`](zero_ops::set_threads) and assume that
//! all of them work at the same time.
//!
//! # How the figures add up
//!
//! The figures exclude parameters and the buffers of their gradients. The inputs of a layer are *leaves*, which are
//! kept until its backward ends. Its outputs are the next layer's leaves ([`hand_on`](crate::hand_on)). The table lists
//! how the allocated bytes change, relative to the bytes before each pass:
//!
//! | | peak | afterwards |
//! |---|---|---|
//! | forward | `+ forward_peak` | `+ kept + outputs` |
//! | backward | `+ backward_peak` | `− leaves − kept − the outputs' gradients + input_gradients` |
//!
//! The model's own inputs are not leaves. An output that does not come from a fused block of this project is copied
//! into a new leaf. If weight gradients are deferred, the backward's peak is `deferred_peak`, and `deferred` bytes stay
//! allocated until these gradients are computed. That computation allocates nothing more. The last layer's forward runs
//! as part of its backward: see [`LossMemory`]. In addition, every thread that computes matrix products keeps a buffer
//! of [`room_of_a_thread`] bytes.

use std::collections::{BTreeMap, HashSet};
use zero_ops::Pass;
pub use zero_ops::room_of_a_thread;

use candle_core::{DType, Result, Shape, Tensor, TensorId, bail};

use crate::activations::Activations;
use crate::model::{BuiltLayer, Model};
use zero_ops::backward_from;
use zero_ops::meta;
pub use zero_ops::meta::Exchanged;
use zero_ops::sink;

/// Upper bound on the bytes of a layer's graph, without its tensors.
const BOOKKEEPING: u64 = 4096;

/// Shape and dtype of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Form {
    /// The shape.
    pub shape: Shape,
    /// The dtype.
    pub dtype: DType,
}

impl Form {
    /// Creates the form of a tensor.
    pub fn new(shape: impl Into<Shape>, dtype: DType) -> Self {
        Self { shape: shape.into(), dtype }
    }

    /// Bytes of the tensor's values.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        (self.shape.elem_count() as u64).saturating_mul(self.dtype.size_in_bytes() as u64)
    }

    fn of(tensor: &Tensor) -> Self {
        Self::new(tensor.shape(), tensor.dtype())
    }
}

/// Memory of a layer in a training step, in bytes. A layer before the first trainable parameter has no backward pass,
/// and keeps nothing: only `outputs` and `forward_peak` are above 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerMemory {
    /// The layer's outputs, which are the next layer's inputs.
    pub outputs: Vec<Form>,
    /// Number of bytes of the inputs that are kept until the backward ends.
    pub leaves: u64,
    /// Number of bytes kept from the forward until the backward, in addition to leaves and outputs.
    pub kept: u64,
    /// Peak of the forward, relative to the bytes before it. Includes the outputs.
    pub forward_peak: u64,
    /// Peak of the backward, relative to the bytes before it. The gradients of the outputs are part of those bytes.
    pub backward_peak: u64,
    /// Number of bytes of the gradients of the inputs, which remain after the backward.
    pub input_gradients: u64,
    /// Like [`LayerMemory::backward_peak`], for a backward that defers the weight gradients.
    pub deferred_peak: u64,
    /// Bytes that a deferring backward keeps until the weight gradients are computed, in addition to the gradients of
    /// the inputs.
    pub deferred: u64,
    /// Bytes sent to other ranks: in the forward, and in the backward.
    pub exchanged: [Exchanged; 2],
}

/// Memory of the last layer and the loss, forward and backward together, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LossMemory {
    /// Number of bytes of the inputs, which are freed after the backward.
    pub leaves: u64,
    /// Peak, relative to the bytes before the pass.
    pub peak: u64,
    /// Number of bytes of the gradients of the inputs, which remain afterwards.
    pub input_gradients: u64,
    /// Bytes sent to other ranks.
    pub exchanged: Exchanged,
}

/// Memory of a layer in an evaluation, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvaluationMemory {
    /// The layer's outputs.
    pub outputs: Vec<Form>,
    /// Peak, relative to the bytes before the pass. Includes the outputs.
    pub peak: u64,
    /// Bytes of the values that the layer's modules compute at their first use and keep, such as the angles of rotary
    /// positions. Layers that share such values have the same key. No other figure includes these bytes.
    pub kept_once: BTreeMap<usize, u64>,
    /// Bytes sent to other ranks.
    pub exchanged: Exchanged,
}

/// Calls `run` and, during the call, computes all figures for layers on a GPU: the figures for the CPU, plus cuBLASLt's
/// workspace for each product that needs one.
pub fn on_gpu<T>(run: impl FnOnce() -> T) -> T {
    meta::on_gpu(run)
}

impl Model {
    /// Computes the memory of layer `layer` in a training step. The layer must not be the last one.
    ///
    /// # Errors
    /// Fails if the inputs do not match the layer, or if the layer uses operations from outside this project, which
    /// have no dry run. The memory of such a layer can only be measured.
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
        if layer < self.first_trained() {
            let EvaluationMemory { outputs, peak, exchanged, .. } = self.forward_memory(layer, inputs, true)?;
            return Ok(LayerMemory {
                outputs,
                forward_peak: peak,
                exchanged: [exchanged, Exchanged::default()],
                ..LayerMemory::default()
            });
        }
        meta::trace(self.written_before(layer), || {
            let (inputs, leaves) = leaves(layer, inputs)?;
            let outputs = sink::promise(|| built.run(&Activations::new(inputs), &pass(layer, true)))?;
            let forms: Vec<Form> = outputs.tensors().iter().map(Form::of).collect();
            let (forward_peak, exchanged) = (meta::peak() + BOOKKEEPING, meta::exchanged());
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
                exchanged: [exchanged, meta::exchanged() - exchanged],
            })
        })
    }

    /// Computes the memory of the last layer and the loss in a training step. `targets` are the targets that the loss
    /// takes.
    ///
    /// # Errors
    /// As [`Model::layer_memory`].
    pub fn loss_memory(&self, inputs: &[Form], targets: &[Form]) -> Result<LossMemory> {
        let layer = self.layers().len() - 1; // a model has at least one layer
        meta::trace(self.written_before(layer), || {
            let (inputs, leaves) = leaves(layer, inputs)?;
            let targets = without_gradients(targets)?;
            let loss = sink::promise(|| self.loss(&Activations::new(inputs), &targets, &pass(layer, true), 1.0))?;
            let seed = meta::tensor(loss.shape(), loss.dtype())?;
            let gradients = gradients(&[(loss, seed)], &leaves)?;
            let [leaves, input_gradients] =
                [&leaves, &gradients].map(|tensors| tensors.iter().map(|x| Form::of(x).bytes()).sum());
            Ok(LossMemory { leaves, peak: meta::peak() + BOOKKEEPING, input_gradients, exchanged: meta::exchanged() })
        })
    }

    /// Computes the memory of a layer in an evaluation.
    ///
    /// # Errors
    /// As [`Model::layer_memory`].
    pub fn evaluation_memory(&self, layer: usize, inputs: &[Form]) -> Result<EvaluationMemory> {
        self.forward_memory(layer, inputs, false)
    }

    /// Computes the memory of a forward that saves nothing for a backward.
    fn forward_memory(&self, layer: usize, inputs: &[Form], training: bool) -> Result<EvaluationMemory> {
        let built = self.layer(layer)?;
        meta::trace(HashSet::new(), || {
            let (inputs, _) = leaves(0, inputs)?;
            let outputs = built.run_forward_only(&Activations::new(inputs), &pass(layer, training))?;
            let outputs = outputs.tensors().iter().map(Form::of).collect();
            let (peak, exchanged) = (meta::peak() + BOOKKEEPING, meta::exchanged());
            Ok(EvaluationMemory { outputs, peak, kept_once: meta::kept_once(), exchanged })
        })
    }

    /// Computes the peak of the last layer and the loss in an evaluation, in bytes. Nothing remains allocated
    /// afterwards.
    ///
    /// # Errors
    /// As [`Model::loss_memory`].
    pub fn evaluation_loss_memory(&self, inputs: &[Form], targets: &[Form]) -> Result<u64> {
        let layer = self.layers().len() - 1;
        meta::trace(HashSet::new(), || {
            let (inputs, _) = leaves(0, inputs)?;
            let targets = without_gradients(targets)?;
            self.loss(&Activations::new(inputs), &targets, &pass(layer, false), 0.0)?;
            Ok(meta::peak() + BOOKKEEPING)
        })
    }

    fn layer(&self, layer: usize) -> Result<&BuiltLayer> {
        match self.layers().get(layer) {
            Some(built) => Ok(built),
            None => bail!("layer {layer} is out of range: the model has {} layers", self.layers().len()),
        }
    }

    /// Returns the parameters that the layer shares with a later one. Their gradients already contain the later layer's
    /// contribution.
    fn written_before(&self, layer: usize) -> HashSet<TensorId> {
        let uses = self.layers()[layer].uses().iter().filter(|&&parameter| self.last_user(parameter) > layer);
        uses.map(|&parameter| self.parameters()[parameter].leaf().id()).collect()
    }
}

/// Returns a pass for measuring memory. A dropout mask depends on all fields of a pass, but its size does not.
fn pass(layer: usize, training: bool) -> Pass {
    Pass { training, seed: 0, step: 1, sample: 0, layer: layer as u32 }
}

/// Returns a layer's inputs, and separately the inputs that need gradients.
fn leaves(layer: usize, forms: &[Form]) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
    let wanted = |form: &Form| layer > 0 && form.dtype.is_float();
    let input = |form: &Form| meta::leaf(&form.shape, form.dtype, wanted(form));
    let inputs = forms.iter().map(input).collect::<Result<Vec<_>>>()?;
    let leaves = inputs.iter().filter(|input| input.is_variable()).cloned().collect();
    Ok((inputs, leaves))
}

fn without_gradients(forms: &[Form]) -> Result<Vec<Tensor>> {
    forms.iter().map(|form| meta::leaf(&form.shape, form.dtype, false)).collect()
}

fn gradients(seeds: &[(Tensor, Tensor)], leaves: &[Tensor]) -> Result<Vec<Tensor>> {
    let mut store = backward_from(seeds)?;
    Ok(leaves.iter().filter_map(|leaf| store.remove(leaf)).collect())
}
