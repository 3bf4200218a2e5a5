//! A model as a list of named layers. A layer is the unit that is gathered, released and run backward on its own.

use std::sync::Arc;
use zero_ops::Pass;

use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};

/// The values passed between layers: one or more tensors.
#[derive(Debug, Clone)]
pub struct Activations(Vec<Tensor>);

impl Activations {
    /// Creates activations from several tensors.
    #[must_use]
    pub fn new(tensors: Vec<Tensor>) -> Self {
        Self(tensors)
    }

    /// Returns the only tensor.
    ///
    /// # Errors
    /// If there is not exactly one.
    pub fn single(&self) -> Result<&Tensor> {
        match self.0.as_slice() {
            [one] => Ok(one),
            many => candle_core::bail!("a layer for one tensor was given {}", many.len()),
        }
    }

    /// Returns all tensors.
    #[must_use]
    pub fn tensors(&self) -> &[Tensor] {
        &self.0
    }
}

impl From<Tensor> for Activations {
    fn from(tensor: Tensor) -> Self {
        Self(vec![tensor])
    }
}

/// Maps activations to activations. Every `candle_nn::Module` is one.
pub trait Layer: Send + Sync {
    /// Runs the layer. The name differs from `forward` so that both traits can be in scope.
    ///
    /// # Errors
    /// If shapes or dtypes do not match.
    fn run(&self, x: &Activations, pass: &Pass) -> Result<Activations>;

    /// Returns whether most of the work for the gradients of its weights can be deferred, as for the operations of
    /// `zero-ops`. A zero-bubble pipeline then splits the layer's backward. The backward of a plain candle module
    /// runs as a whole.
    fn splits(&self) -> bool {
        false
    }
}

impl<M: Module + Send + Sync> Layer for M {
    fn run(&self, x: &Activations, _: &Pass) -> Result<Activations> {
        Module::forward(self, x.single()?).map(Activations::from)
    }
}

/// A last layer that computes the loss without holding all of its outputs, such as a language model's head
/// ([`linear_cross_entropy`](zero_ops::linear_cross_entropy)). Run as a layer, it returns the outputs.
pub trait Head: Layer {
    /// Computes the loss, the mean over the micro-batch. `gradient` is the gradient that the loss will receive in the
    /// backward. Unless `pass` is training, no gradient is wanted.
    ///
    /// # Errors
    /// If shapes or dtypes do not match.
    fn loss(&self, x: &Activations, targets: &Tensor, pass: &Pass, gradient: f32) -> Result<Tensor>;
}

/// A layer's module, and the same module again as a head if it is one.
pub(crate) type Built = (Arc<dyn Layer>, Option<Arc<dyn Head>>);
type Build = Box<dyn Fn(VarBuilder<'static>) -> Result<Built> + Send + Sync>;
pub(crate) type Loss = Box<dyn Fn(&Activations, &Tensor) -> Result<Tensor> + Send + Sync>;

/// The layers of a model, from which [`Layers::build`] builds it.
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
#[derive(Default)]
pub struct Layers {
    pub(crate) layers: Vec<(String, Build)>,
    pub(crate) ties: Vec<(String, String)>,
    pub(crate) loss: Option<Loss>,
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
        mut self,
        name: impl Into<String>,
        build: impl Fn(VarBuilder<'static>) -> Result<L> + Send + Sync + 'static,
    ) -> Self {
        self.layers.push((name.into(), Box::new(move |vb| Ok((Arc::new(build(vb)?), None)))));
        self
    }

    /// Appends a last layer that computes the model's loss itself. A [`Layers::loss`] set in addition takes
    /// precedence.
    #[must_use]
    pub fn head<H: Head + 'static>(
        mut self,
        name: impl Into<String>,
        build: impl Fn(VarBuilder<'static>) -> Result<H> + Send + Sync + 'static,
    ) -> Self {
        let build = move |vb: VarBuilder<'static>| {
            let head = Arc::new(build(vb)?);
            Ok((head.clone() as Arc<dyn Layer>, Some(head as Arc<dyn Head>)))
        };
        self.layers.push((name.into(), Box::new(build)));
        self
    }

    /// Appends `count` layers named `prefix.0`, `prefix.1`, …
    #[must_use]
    pub fn layers<L: Layer + 'static>(
        mut self,
        prefix: &str,
        count: usize,
        build: impl Fn(usize, VarBuilder<'static>) -> Result<L> + Send + Sync + Clone + 'static,
    ) -> Self {
        for i in 0..count {
            let build = build.clone();
            self = self.layer(format!("{prefix}.{i}"), move |vb| build(i, vb));
        }
        self
    }

    /// Makes `user` the same parameter as `owner`. The owner's layer must come before the user's.
    #[must_use]
    pub fn tie(mut self, owner: impl Into<String>, user: impl Into<String>) -> Self {
        self.ties.push((owner.into(), user.into()));
        self
    }

    /// Sets the loss, which maps the last layer's only output and the targets to a scalar, the mean over the
    /// micro-batch.
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
        self.loss = Some(Box::new(loss));
        self
    }
}

impl std::fmt::Debug for Layers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.layers.iter().map(|(name, _)| name)).finish()
    }
}
