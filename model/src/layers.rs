//! A model as a list of named layers. The engine gathers and releases the layers one by one, and runs the backward pass
//! of each layer separately.

use std::sync::Arc;
use zero_ops::QuantizationOptions;
use zero_optim::CustomOptimizer;

use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;

use crate::activations::{Activations, array};
use crate::adapter::Adapter;
use crate::base_shapes::BaseShapes;
use crate::build_error::BuildError;
use crate::layer::{Head, Layer};
use crate::routes::{self, Names, Route, Signature};
use crate::trainable::Trainable;

/// A layer's module, and the same module as a head if it is a head.
pub(crate) type Built = (Arc<dyn Layer>, Option<Arc<dyn Head>>);
pub(crate) type Build = Box<dyn Fn(VarBuilder<'static>) -> Result<Built> + Send + Sync>;
/// Computes the loss from the outputs and targets that it takes.
pub(crate) type Loss = Box<dyn Fn(&Activations, &[Tensor]) -> Result<Tensor> + Send + Sync>;

/// Computes the weight of a micro-batch's loss from its targets.
pub(crate) type LossWeight = Box<dyn Fn(&[Tensor]) -> Result<u64> + Send + Sync>;

/// Returns the factor on the learning rate after this number of optimizer steps.
pub type LrLambda = Arc<dyn Fn(u64) -> f64 + Send + Sync>;

/// A layer before it is built.
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) build: Build,
    pub(crate) names: Names,
}

/// The layers of a model; [`Layers::build`] builds the model.
///
/// ```
/// use candle_nn::{Module, VarBuilder, linear};
/// use zero_model::Layers;
///
/// let model = Layers::new()
///     .layer("first", |vb: VarBuilder| linear(4, 8, vb))
///     .layer("relu", |_: VarBuilder| Ok(candle_nn::Activation::Relu))
///     .layer("last", |vb: VarBuilder| linear(8, 3, vb))
///     .loss(|logits, targets| zero_model::ops::cross_entropy(logits, targets))
///     .build(candle_core::DType::F32)?;
/// assert_eq!(model.parameters().len(), 4);
/// # Ok::<(), zero_model::BuildError>(())
/// ```
///
/// # Models that are not a plain list
///
/// A layer receives the outputs of the previous layer; the first layer receives the inputs of the batch that have no
/// name. [`with`](Layers::with) adds values to these inputs, and [`inputs`](Layers::inputs) replaces them. A value is a
/// named input of the batch, or the only output of an earlier layer, under the name of that layer.
/// [`exposes`](Layers::exposes) names further outputs. [`loss_of`](Layers::loss_of) names the outputs and targets that
/// the loss receives.
///
/// ```
/// use candle_nn::{VarBuilder, linear, loss::{cross_entropy, mse}};
/// use zero_model::Layers;
///
/// let model = Layers::new()
///     .layer("encoder", |vb: VarBuilder| linear(4, 8, vb))
///     .layer("topic", |vb: VarBuilder| linear(8, 3, vb))
///     .layer("length", |vb: VarBuilder| linear(8, 1, vb))
///     .inputs(["encoder"])
///     .loss_of(["topic", "length"], ["label", "words"], |[topic, length], [label, words]| {
///         cross_entropy(topic, label)? + mse(length, words)?
///     });
/// assert_eq!(model.signature()?.outputs, ["topic", "length"]);
/// # Ok::<(), zero_model::BuildError>(())
/// ```
#[derive(Default)]
pub struct Layers {
    pub(crate) layers: Vec<Entry>,
    pub(crate) ties: Vec<(String, String)>,
    pub(crate) loss: Option<Loss>,
    pub(crate) loss_weight: Option<LossWeight>,
    /// Names of the outputs and targets that the loss takes.
    pub(crate) loss_names: Option<(Vec<String>, Vec<String>)>,
    pub(crate) trainable: Trainable,
    pub(crate) adapter: Option<Adapter>,
    pub(crate) quantization: Option<QuantizationOptions>,
    pub(crate) optimizer: Option<Arc<dyn CustomOptimizer>>,
    pub(crate) lr_lambda: Option<LrLambda>,
    pub(crate) base_shapes: Option<std::result::Result<BaseShapes, BuildError>>,
    /// If ranks can share sequences, the names of the inputs that each rank takes whole.
    pub(crate) whole_inputs: Option<Vec<String>>,
    /// Whether the layers divide their parameters among the ranks of a tensor group.
    is_tensor_parallel: bool,
    /// The index of this rank in its tensor group, and the number of ranks.
    pub(crate) tensor_group: Option<(usize, usize)>,
    /// Number of layers in the list before the last call that appended layers.
    before_last_call: usize,
    /// The first method that describes layers but was called before any layer was added.
    mistake: Option<&'static str>,
}

impl Layers {
    /// Creates an empty list.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a layer. Its parameters are named `name.…`, since `name` is the prefix of the builder that `build`
    /// receives. The builder borrows nothing, so `build` may return a module that keeps it, such as
    /// candle-transformers' `Func<'static>`.
    #[must_use]
    pub fn layer<L: Layer + 'static>(
        self,
        name: impl Into<String>,
        build: impl Fn(VarBuilder<'static>) -> Result<L> + Send + Sync + 'static,
    ) -> Self {
        self.push(name.into(), Box::new(move |vb| Ok((Arc::new(build(vb)?), None))))
    }

    fn push(mut self, name: String, build: Build) -> Self {
        self.before_last_call = self.layers.len();
        self.layers.push(Entry { name, build, names: Names::default() });
        self
    }

    /// Appends a last layer that computes the model's loss itself. A loss that is set with [`Layers::loss`] takes
    /// precedence.
    #[must_use]
    pub fn head<H: Head + 'static>(
        self,
        name: impl Into<String>,
        build: impl Fn(VarBuilder<'static>) -> Result<H> + Send + Sync + 'static,
    ) -> Self {
        let build = move |vb: VarBuilder<'static>| {
            let head = Arc::new(build(vb)?);
            Ok((head.clone() as Arc<dyn Layer>, Some(head as Arc<dyn Head>)))
        };
        self.push(name.into(), Box::new(build))
    }

    /// Appends `count` layers named `prefix.0`, `prefix.1`, …
    #[must_use]
    pub fn layers<L: Layer + 'static>(
        mut self,
        prefix: &str,
        count: usize,
        build: impl Fn(usize, VarBuilder<'static>) -> Result<L> + Send + Sync + Clone + 'static,
    ) -> Self {
        let before = self.layers.len();
        for i in 0..count {
            let build = build.clone();
            self = self.layer(format!("{prefix}.{i}"), move |vb| build(i, vb));
        }
        self.before_last_call = before;
        self
    }

    /// Adds inputs to the layers that the last call appended: each layer receives the outputs of the previous layer,
    /// followed by the values in `names`. Each name is an input of the batch, an earlier layer with one output, or
    /// `layer.output` for an output that the layer [`exposes`](Layers::exposes).
    #[must_use]
    pub fn with<S: Into<String>>(self, names: impl IntoIterator<Item = S>) -> Self {
        let names: Vec<String> = names.into_iter().map(Into::into).collect();
        self.last_call("with", |layer| layer.inputs.extend_from_slice(&names))
    }

    /// Makes `names` the only inputs of the layers that the last call appended. These layers do not receive the outputs
    /// of the previous layer. Names have the same meaning as in [`with`](Layers::with).
    #[must_use]
    pub fn inputs<S: Into<String>>(self, names: impl IntoIterator<Item = S>) -> Self {
        let names: Vec<String> = names.into_iter().map(Into::into).collect();
        self.last_call("inputs", |layer| (layer.only_named, layer.inputs) = (true, names.clone()))
    }

    /// Names the trailing outputs of each layer that the last call appended: the output `kl` of a layer `encoder` is
    /// `encoder.kl`. Neither the next layer nor a loss without names receives these outputs.
    #[must_use]
    pub fn exposes<S: Into<String>>(self, names: impl IntoIterator<Item = S>) -> Self {
        let names: Vec<String> = names.into_iter().map(Into::into).collect();
        self.last_call("exposes", |layer| layer.exposed.extend_from_slice(&names))
    }

    fn last_call(mut self, method: &'static str, change: impl Fn(&mut Names)) -> Self {
        if self.layers.is_empty() {
            self.mistake = self.mistake.or(Some(method));
        }
        self.layers[self.before_last_call..].iter_mut().for_each(|layer| change(&mut layer.names));
        self
    }

    /// Makes `user` the same parameter as `owner`. The owner's layer must come before the user's.
    #[must_use]
    pub fn tie(mut self, owner: impl Into<String>, user: impl Into<String>) -> Self {
        self.ties.push((owner.into(), user.into()));
        self
    }

    /// Adds adapters to linear layers of the model ([`ops::Linear`](zero_ops::Linear),
    /// [`ops::Conv1D`](zero_ops::Conv1D)) that are built from a `VarBuilder`. All other parameters are frozen, except
    /// those that the adapter names.
    #[must_use]
    pub fn adapter(mut self, adapter: Adapter) -> Self {
        self.adapter = Some(adapter);
        self
    }

    /// Quantizes the weights of the linear layers that are built from a `VarBuilder`. These weights must be frozen.
    #[must_use]
    pub fn quantized(mut self, options: QuantizationOptions) -> Self {
        self.quantization = Some(options);
        self
    }

    /// Sets the optimizer for a configuration whose `optimizer.type` is `Custom`.
    #[must_use]
    pub fn optimizer(mut self, optimizer: impl CustomOptimizer + 'static) -> Self {
        self.optimizer = Some(Arc::new(optimizer));
        self
    }

    /// Multiplies the optimizer's learning rate by `factor(steps)`, as `torch.optim.lr_scheduler.LambdaLR`. `steps` is
    /// the number of optimizer steps taken so far, 0 for the first; a step that a gradient overflow skips does not
    /// count. Rank 0 calls the function for all ranks. The configuration must not have a `scheduler`.
    #[must_use]
    pub fn lr_lambda(mut self, factor: impl Fn(u64) -> f64 + Send + Sync + 'static) -> Self {
        self.lr_lambda = Some(Arc::new(factor));
        self
    }

    /// Sets the shapes of the base model of µP. MuAdam, MuAdamW and MuSGD use them to scale learning rates and weight
    /// decays. The layers themselves must apply µP's initialization and multipliers.
    #[must_use]
    pub fn with_base_shapes(mut self, shapes: BaseShapes) -> Self {
        self.base_shapes = Some(Ok(shapes));
        self
    }

    /// Returns whether the layers have a base model of µP.
    #[must_use]
    pub fn has_base_shapes(&self) -> bool {
        self.base_shapes.is_some()
    }

    /// Declares that ranks can share the sequences of this model (`sequence_parallel_size`,
    /// `mesh.context_parallel_degree`). Each rank then runs the layers on a slice of the positions of every input and
    /// target `[batch, time, …]`, except those named in `whole`. A layer must compute each position independently, or
    /// mix positions only with operations of `zero-ops` (attention, [`sum_of_slices`](zero_ops::sum_of_slices)) and
    /// return true from [`Layer::exchanges`]. The loss must be a mean over positions, have a weight, or be computed
    /// from sums over all slices.
    #[must_use]
    pub fn shares_sequences<S: Into<String>>(mut self, whole: impl IntoIterator<Item = S>) -> Self {
        self.whole_inputs = Some(whole.into_iter().map(Into::into).collect());
        self
    }

    /// Declares that the layers support tensor parallelism (`tensor_parallel.autotp_size`). Such layers split their
    /// parameters with [`Linear::column_parallel`](zero_ops::Linear), [`RowParallel`](zero_ops::RowParallel),
    /// [`Embedding::vocab_parallel`](zero_ops::Embedding) and [`LanguageHead`](crate::zoo::LanguageHead), and run
    /// attention and feed-forward networks in [`whole_sequences`](zero_ops::whole_sequences).
    ///
    /// Every rank of a tensor group gets whole inputs and targets. If ranks also share sequences, every rank gets
    /// slices of the inputs and targets. Inputs that are declared whole remain whole, and layers slice them with
    /// [`own_slice`](zero_ops::own_slice). Between layers, activations `[batch, slice, …]` hold this rank's slice of
    /// the positions. The last layer is a head that computes the loss of whole sequences. The gradients of parameters
    /// that are not split are summed over the group.
    #[must_use]
    pub fn tensor_parallel(self) -> Self {
        Self { is_tensor_parallel: true, ..self }
    }

    /// Returns whether the layers support tensor parallelism.
    #[must_use]
    pub fn is_tensor_parallel(&self) -> bool {
        self.is_tensor_parallel
    }

    /// Builds the layers for rank `index` of a tensor group of `ranks`.
    #[must_use]
    pub fn cut_among(self, (index, ranks): (usize, usize)) -> Self {
        Self { tensor_group: (ranks > 1).then_some((index, ranks)), ..self }
    }

    /// Selects the trainable parameters; the others are frozen. [`Layers::adapter`] takes precedence.
    #[must_use]
    pub fn trainable(mut self, trainable: Trainable) -> Self {
        self.trainable = trainable;
        self
    }

    /// Sets the loss: a function of the last layer's only output and the batch's only target. It returns a scalar, the
    /// mean over the micro-batch.
    #[must_use]
    pub fn loss(self, loss: impl Fn(&Tensor, &Tensor) -> Result<Tensor> + Send + Sync + 'static) -> Self {
        self.loss_of_all(move |outputs, targets| loss(outputs.single()?, targets))
    }

    /// Sets the loss of a last layer with several outputs.
    #[must_use]
    pub fn loss_of_all(
        mut self,
        loss: impl Fn(&Activations, &Tensor) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Self {
        self.loss = Some(Box::new(move |outputs, targets| loss(outputs, only_target(targets)?)));
        self.loss_names = None;
        self
    }

    /// Sets a loss that receives several outputs and targets, in the order of their names. An output is a layer with
    /// one output, or `layer.output` for an output that the layer [`exposes`](Layers::exposes). A target is a named
    /// target or a named input of the batch. The loss returns a scalar, the mean over the micro-batch.
    #[must_use]
    pub fn loss_of<const O: usize, const T: usize>(
        mut self,
        outputs: [&str; O],
        targets: [&str; T],
        loss: impl Fn([&Tensor; O], [&Tensor; T]) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Self {
        self.loss = Some(Box::new(move |outputs, targets| loss(array(outputs.tensors())?, array(targets)?)));
        self.loss_names = Some((outputs.map(String::from).to_vec(), targets.map(String::from).to_vec()));
        self
    }

    /// Sets the function that computes the weight of a micro-batch's loss in the mean over the global batch, from the
    /// loss's only target. Without a weight, all micro-batches have the same weight.
    ///
    /// Use it for a loss that is a mean over something other than samples. Steps with gradient accumulation or several
    /// ranks, and evaluations, then compute the mean over the whole batch. For a
    /// [`cross_entropy`](zero_ops::cross_entropy) that ignores some of its targets, pass
    /// [`count_targets`](zero_ops::count_targets).
    ///
    /// ```
    /// # use candle_nn::{VarBuilder, linear};
    /// # use zero_model::{Layers, ops};
    /// let model = Layers::new()
    ///     .layer("tags", |vb: VarBuilder| linear(4, 3, vb))
    ///     .loss(ops::cross_entropy)
    ///     .loss_weight(ops::count_targets)
    ///     .build(candle_core::DType::F32)?;
    /// # Ok::<(), zero_model::BuildError>(())
    /// ```
    #[must_use]
    pub fn loss_weight(mut self, weight: impl Fn(&Tensor) -> Result<u64> + Send + Sync + 'static) -> Self {
        self.loss_weight = Some(Box::new(move |targets| weight(only_target(targets)?)));
        self
    }

    /// Does the same as [`Layers::loss_weight`] for a loss with several targets. The function receives them in the
    /// order in which [`Layers::loss_of`] names them.
    #[must_use]
    pub fn loss_weight_of<const T: usize>(
        mut self,
        weight: impl Fn([&Tensor; T]) -> Result<u64> + Send + Sync + 'static,
    ) -> Self {
        self.loss_weight = Some(Box::new(move |targets| weight(array(targets)?)));
        self
    }

    /// Returns the inputs and targets that the model takes from a batch, without building the model.
    ///
    /// # Errors
    /// Fails if a name cannot be resolved: see [`BuildError`].
    pub fn signature(&self) -> std::result::Result<Signature, BuildError> {
        Ok(self.resolved()?.1)
    }

    /// Resolves all names.
    pub(crate) fn resolved(&self) -> std::result::Result<(Vec<Route>, Signature), BuildError> {
        if let Some(method) = self.mistake {
            return Err(BuildError::NoLayerYet(method));
        }
        let layers: Vec<(&str, &Names)> = self.layers.iter().map(|layer| (&*layer.name, &layer.names)).collect();
        routes::resolve(&layers, self.loss_names.as_ref())
    }
}

/// Returns the only target, for a loss that takes one.
pub(crate) fn only_target(targets: &[Tensor]) -> Result<&Tensor> {
    match targets {
        [one] => Ok(one),
        many => candle_core::bail!("a loss expects one target, but got {} targets", many.len()),
    }
}

impl std::fmt::Debug for Layers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.layers.iter().map(|layer| &layer.name)).finish()
    }
}
