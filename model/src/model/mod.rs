//! A built model: layers, parameters in a fixed order, and the loss.

mod build;

use std::sync::Arc;

use candle_core::{Device, Result, Tensor};
use zero_ops::graph::untracked;
use zero_ops::{LinearMap, Pass, SequenceGroup};
use zero_optim::{CustomOptimizer, MatrixStates};

use crate::activations::Activations;
use crate::build_error::BuildError;
use crate::layer::{Head, Layer};
use crate::layers::{Loss, LossWeight, LrLambda, only_target};
use crate::module_buffer::ModuleBuffer;
use crate::parameter::{Parameter, ParameterId};
use crate::routes::{Route, Signature};
use crate::tuning::Tuning;

/// One layer of a built model.
pub struct BuiltLayer {
    name: String,
    module: Arc<dyn Layer>,
    route: Route,
    uses: Vec<ParameterId>,
    read_backward: Vec<ParameterId>,
    /// Whether its parameters are split across the ranks of a tensor group.
    is_cut: bool,
}

impl BuiltLayer {
    /// Returns the layer's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns all parameters that the layer uses, owned or tied, in the order in which it requested them.
    #[must_use]
    pub fn uses(&self) -> &[ParameterId] {
        &self.uses
    }

    /// Returns the parameters that the layer's backward reads: all except those requested within
    /// [`forward_only`](zero_ops::forward_only). The last layer reads all, since its forward runs as part of its
    /// backward.
    #[must_use]
    pub fn read_backward(&self) -> &[ParameterId] {
        &self.read_backward
    }

    /// Returns whether the layer can defer its weight gradients.
    #[must_use]
    pub fn splits(&self) -> bool {
        self.module.splits()
    }

    /// Returns whether the layer exchanges values with the ranks that share its sequences.
    #[must_use]
    pub fn exchanges(&self) -> bool {
        self.module.exchanges()
    }

    /// Returns whether the layer exchanges values with the ranks of a tensor group: its parameters are split across
    /// them, or it declares exchanges.
    #[must_use]
    pub fn exchanges_parts(&self) -> bool {
        self.is_cut || self.exchanges()
    }

    /// Returns the sources of the layer's inputs, and the tensors that it passes on.
    #[must_use]
    pub fn route(&self) -> &Route {
        &self.route
    }

    /// Runs the layer on the tensors that [`Route`] describes, and returns its outputs, auxiliary outputs last. In an
    /// evaluation, operations of this project save nothing for a backward pass.
    ///
    /// # Errors
    /// Returns the module's error, with the layer's name added.
    pub fn run(&self, x: &Activations, pass: &Pass) -> Result<Activations> {
        let run = || self.within(pass, || self.module.run(self.route.inputs(x)?.as_ref().unwrap_or(x), pass));
        if pass.training { run() } else { untracked(run) }.map_err(|e| self.context(e))
    }

    /// Runs `run` in the pass. A layer that did not declare exchanges cannot begin an exchange, because other ranks may
    /// be in a different layer.
    fn within<T>(&self, pass: &Pass, run: impl FnOnce() -> T) -> T {
        match SequenceGroup::current() {
            Some(group) => {
                group.declared_by(&self.name, self.exchanges(), self.exchanges_parts()).within(|| pass.within(run))
            }
            None => pass.within(run),
        }
    }

    /// Runs the layer like [`BuiltLayer::run`], but saves nothing for a backward pass, even in training.
    ///
    /// # Errors
    /// The same errors as [`BuiltLayer::run`].
    pub fn run_forward_only(&self, x: &Activations, pass: &Pass) -> Result<Activations> {
        untracked(|| self.run(x, pass))
    }

    /// Returns the tensors that the layer passes on, given its outputs and the tensors that it ran on.
    ///
    /// # Errors
    /// As [`Route::pass_on`], with the layer's name added.
    pub fn pass_on(&self, outputs: Activations, x: &Activations) -> Result<Activations> {
        self.route.pass_on(outputs, x).map_err(|e| self.context(e))
    }

    fn context(&self, error: candle_core::Error) -> candle_core::Error {
        error.context(format!("in layer `{}`", self.name))
    }
}

impl std::fmt::Debug for BuiltLayer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BuiltLayer").field("name", &self.name).field("uses", &self.uses).finish_non_exhaustive()
    }
}

/// How the model computes its loss.
enum Ending {
    Loss(Loss),
    Head(Arc<dyn Head>),
}

/// A built model. Its parameters are in the released state until they are filled.
pub struct Model {
    layers: Vec<BuiltLayer>,
    parameters: Vec<Parameter>,
    buffers: Vec<ModuleBuffer>,
    /// For each parameter, the last layer that uses it.
    last_users: Vec<usize>,
    first_trained: usize,
    ending: Ending,
    z_loss: f32,
    loss_weight: Option<LossWeight>,
    signature: Signature,
    linear_maps: Vec<LinearMap>,
    device: Device,
    optimizer: Option<Arc<dyn CustomOptimizer>>,
    lr_lambda: Option<LrLambda>,
    whole_inputs: Option<Vec<String>>,
}

impl Model {
    /// Returns the device that the model computes on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the layers in the order of the forward pass.
    #[must_use]
    pub fn layers(&self) -> &[BuiltLayer] {
        &self.layers
    }

    /// Returns which inputs and targets the model takes from a batch, and which outputs its loss takes.
    #[must_use]
    pub fn signature(&self) -> &Signature {
        &self.signature
    }

    /// Returns all linear layers of a model with adapters, including those without an adapter. Empty for a model
    /// without adapters.
    #[must_use]
    pub fn linear_maps(&self) -> &[LinearMap] {
        &self.linear_maps
    }

    /// Returns the optimizer that was set on the layers.
    #[must_use]
    pub fn optimizer(&self) -> Option<&Arc<dyn CustomOptimizer>> {
        self.optimizer.as_ref()
    }

    /// Returns the function of [`Layers::lr_lambda`](crate::Layers::lr_lambda).
    #[must_use]
    pub fn lr_lambda(&self) -> Option<&LrLambda> {
        self.lr_lambda.as_ref()
    }

    /// Returns the names of the batch's inputs that each rank takes whole if ranks share sequences. `None` if ranks
    /// cannot share the sequences of this model.
    #[must_use]
    pub fn whole_inputs(&self) -> Option<&[String]> {
        self.whole_inputs.as_deref()
    }

    /// Sets the optimizer states of parameters that are updated as whole matrices. `matrices` has one entry for each
    /// parameter. A parameter with states is trainable and has two dimensions.
    #[must_use]
    pub fn with_matrices(mut self, matrices: Vec<Option<MatrixStates>>) -> Self {
        for (parameter, matrix) in self.parameters.iter_mut().zip(matrices) {
            parameter.set_matrix(matrix);
        }
        self
    }

    /// Sets how the update of each parameter differs from the optimizer's settings. `tunings` has one entry for each
    /// parameter.
    #[must_use]
    pub fn with_tunings(mut self, tunings: &[Tuning]) -> Self {
        for (parameter, &tuning) in self.parameters.iter_mut().zip(tunings) {
            parameter.set_tuning(tuning);
        }
        self
    }

    /// Adds `coefficient` times the mean of ln²Z to the training loss, where Z is the normalizer of the head's softmax
    /// (Chowdhery et al., "PaLM", 2022, section 5). 0 adds nothing.
    ///
    /// # Errors
    /// Fails if the coefficient is not 0 and the model does not end with a head that supports a z-loss.
    pub fn with_z_loss(mut self, coefficient: f32) -> std::result::Result<Self, BuildError> {
        if coefficient != 0.0 && !matches!(&self.ending, Ending::Head(head) if head.has_z_loss()) {
            return Err(BuildError::NoZLoss);
        }
        self.z_loss = coefficient;
        Ok(self)
    }

    /// Returns whether training adds a z-loss.
    #[must_use]
    pub fn has_z_loss(&self) -> bool {
        self.z_loss != 0.0
    }

    /// Returns the parameters in the order of construction. A tied parameter occurs once, under its owner's name.
    #[must_use]
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Returns the buffers in the order of construction: running statistics, which are not parameters.
    #[must_use]
    pub fn buffers(&self) -> &[ModuleBuffer] {
        &self.buffers
    }

    /// Returns the buffers of a layer, each with its index among all buffers.
    pub fn buffers_of(&self, layer: usize) -> impl Iterator<Item = (usize, &ModuleBuffer)> {
        self.buffers.iter().enumerate().filter(move |(_, buffer)| buffer.layer() == layer)
    }

    /// Returns the first layer with a trainable parameter. The layers before it have no backward pass.
    #[must_use]
    pub fn first_trained(&self) -> usize {
        self.first_trained
    }

    pub(crate) fn last_user(&self, parameter: ParameterId) -> usize {
        self.last_users[parameter]
    }

    /// Returns the number of elements of all parameters. A parameter that is split across ranks counts in full.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.parameters.iter().map(Parameter::whole_elements).sum()
    }

    /// Returns the number of elements of all trainable parameters. A parameter that is split across ranks counts in
    /// full.
    #[must_use]
    pub fn trainable_elements(&self) -> usize {
        self.parameters.iter().filter(|parameter| parameter.is_trainable()).map(Parameter::whole_elements).sum()
    }

    /// Runs the last layer on its input `x`, and computes the loss. Returns a scalar. `targets` are the tensors that
    /// [`Signature::targets`] names.
    ///
    /// `gradient` is the gradient that the loss will receive in the backward. A [`Head`] needs it in advance, because
    /// it computes gradients together with the loss. Within [`zero_ops::sink::Gradients::capture`], the head writes
    /// these gradients to their buffers immediately.
    ///
    /// # Errors
    /// Returns errors of the layer and of the loss function. Fails if the result is not a scalar.
    pub fn loss(&self, x: &Activations, targets: &[Tensor], pass: &Pass, gradient: f32) -> Result<Tensor> {
        Ok(self.loss_and_z_loss(x, targets, pass, gradient)?.0)
    }

    /// Returns [`Model::loss`], and the part of it that is the z-loss. The second value is `None` in an evaluation and
    /// without [`Model::with_z_loss`].
    ///
    /// # Errors
    /// As [`Model::loss`].
    pub fn loss_and_z_loss(
        &self,
        x: &Activations,
        targets: &[Tensor],
        pass: &Pass,
        gradient: f32,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let last = self.last();
        let head = match &self.ending {
            Ending::Loss(_) => return Ok((self.loss_and_outputs(x, targets, pass)?.0, None)),
            Ending::Head(head) => head,
        };
        let losses = || {
            let inputs = last.route.inputs(x)?;
            let (x, targets) = (inputs.as_ref().unwrap_or(x), only_target(targets)?);
            last.within(pass, || match pass.training && self.has_z_loss() {
                true => head.loss_with_z_loss(x, targets, pass, gradient, self.z_loss),
                false => Ok((head.loss(x, targets, pass, gradient)?, None)),
            })
        };
        let (loss, z) = if pass.training { losses() } else { untracked(losses) }.map_err(|e| last.context(e))?;
        Ok((scalar(loss)?, z.map(scalar).transpose()?))
    }

    /// Runs the last layer on its input `x`, and returns the loss and the outputs that the loss takes. A [`Head`]
    /// computes the loss without its outputs, which are then `None`; see [`Model::outputs`].
    ///
    /// # Errors
    /// As [`Model::loss`].
    pub fn loss_and_outputs(
        &self,
        x: &Activations,
        targets: &[Tensor],
        pass: &Pass,
    ) -> Result<(Tensor, Option<Activations>)> {
        let Ending::Loss(loss) = &self.ending else { return Ok((self.loss(x, targets, pass, 0.0)?, None)) };
        let run = || {
            let outputs = self.last().pass_on(self.last().run(x, pass)?, x)?;
            let loss = scalar(loss(&outputs, targets).map_err(|e| e.context("in the loss"))?)?;
            Ok((loss, Some(outputs)))
        };
        if pass.training { run() } else { untracked(run) }
    }

    /// Runs the last layer on its input `x`, and returns its outputs, for an evaluation.
    ///
    /// # Errors
    /// Returns the error of the layer.
    pub fn outputs(&self, x: &Activations, pass: &Pass) -> Result<Activations> {
        untracked(|| self.last().pass_on(self.last().run(x, pass)?, x))
    }

    /// Returns the weight of a micro-batch's loss in the mean over the global batch: see
    /// [`Layers::loss_weight`](crate::Layers::loss_weight). `None` if all micro-batches have the same weight.
    ///
    /// # Errors
    /// Returns errors of the function that computes the weight.
    pub fn loss_weight(&self, targets: &[Tensor]) -> Result<Option<u64>> {
        match (&self.loss_weight, &self.ending) {
            (Some(weight), _) => weight(targets).map(Some).map_err(|e| e.context("in the weight of the loss")),
            (None, Ending::Head(head)) => head.weight(only_target(targets)?),
            (None, Ending::Loss(_)) => Ok(None),
        }
    }

    /// Returns whether each position of the outputs depends only on the same position of the last layer's input.
    pub(crate) fn ends_by_position(&self) -> bool {
        matches!(&self.ending, Ending::Head(head) if head.is_by_position()) && self.last().route.is_plain()
    }

    fn last(&self) -> &BuiltLayer {
        &self.layers[self.layers.len() - 1] // `build` rejects a model without layers
    }
}

/// Returns the loss as a tensor without dimensions.
fn scalar(loss: Tensor) -> Result<Tensor> {
    if loss.elem_count() != 1 {
        candle_core::bail!("the loss has shape {:?}; it must be a scalar", loss.shape());
    }
    // A reshape, even to the same shape, would hide a head's fused block from its backward.
    if loss.rank() == 0 { Ok(loss) } else { loss.reshape(()) }
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model").field("layers", &self.layers).field("parameters", &self.parameters).finish()
    }
}
