//! A built model: layers, parameters in a fixed order, and the loss.

use std::sync::{Arc, Mutex};
use zero_ops::Pass;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;

use crate::layers::{Activations, Built, Head, Layer, Layers, Loss};
use crate::parameter::{Parameter, ParameterId};
use crate::recorder::{Record, Recorder};
use zero_ops::graph::untracked;

/// Why a model could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// A layer's constructor failed.
    #[error("layer `{layer}` cannot be built: {source}")]
    Layer {
        /// Its name.
        layer: String,
        /// What it said.
        source: candle_core::Error,
    },
    /// A list without layers.
    #[error("the model has no layers")]
    NoLayers,
    /// No loss was given.
    #[error("the model has no loss; end it with `.loss(…)` or a `.head(…)`")]
    NoLoss,
    /// Two layers have one name.
    #[error("two layers are named `{0}`")]
    DuplicateLayer(String),
    /// A tie names a parameter that no layer asks for.
    #[error("`{owner}` is tied to `{user}`, which no layer has")]
    UnusedTie {
        /// The owner's name.
        owner: String,
        /// The missing user's name.
        user: String,
    },
    /// A parameter with no elements.
    #[error("parameter `{0}` has no elements")]
    Empty(String),
}

/// One layer of a built model.
pub struct BuiltLayer {
    name: String,
    module: Arc<dyn Layer>,
    uses: Vec<ParameterId>,
    read_backward: Vec<ParameterId>,
}

impl BuiltLayer {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Every parameter it needs, its own and tied ones, in the order in which it asked for them.
    #[must_use]
    pub fn uses(&self) -> &[ParameterId] {
        &self.uses
    }

    /// Those of them that its backward reads: all but what was asked for inside of [`forward_only`](zero_ops::forward_only). Of the last
    /// layer all: its forward is a part of its backward.
    #[must_use]
    pub fn read_backward(&self) -> &[ParameterId] {
        &self.read_backward
    }

    /// Whether the gradients of its weights can be deferred.
    #[must_use]
    pub fn splits(&self) -> bool {
        self.module.splits()
    }

    /// Runs it. In an evaluation our own operations keep nothing for a backward.
    ///
    /// # Errors
    /// What the module says, with the layer's name.
    pub fn run(&self, x: &Activations, pass: &Pass) -> Result<Activations> {
        let run = || self.module.run(x, pass);
        if pass.training { run() } else { untracked(run) }.map_err(|e| self.context(e))
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

/// Where the loss comes from.
enum Ending {
    Loss(Loss),
    Head(Arc<dyn Head>),
}

/// A built model. Its parameters are released until somebody fills them.
pub struct Model {
    layers: Vec<BuiltLayer>,
    parameters: Vec<Parameter>,
    /// For each parameter the last layer that uses it.
    last_users: Vec<usize>,
    ending: Ending,
    device: Device,
}

impl Model {
    /// Where it computes.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Layers in the order of the forward pass.
    #[must_use]
    pub fn layers(&self) -> &[BuiltLayer] {
        &self.layers
    }

    /// Parameters in the order of construction; a tied one is there once, under its owner's name.
    #[must_use]
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    pub(crate) fn last_user(&self, parameter: ParameterId) -> usize {
        self.last_users[parameter]
    }

    /// Number of elements of all parameters.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.parameters.iter().map(Parameter::elements).sum()
    }

    /// Runs the last layer, on its input `x`, and the loss: a scalar.
    ///
    /// `gradient` is what the loss's gradient will be in the backward: a [`Head`] makes the gradients along with the loss.
    /// Inside of [`zero_ops::sink::Gradients::capture`] they go to their places at once.
    ///
    /// # Errors
    /// What the layer or the loss function says, or if the result is not a scalar.
    pub fn loss(&self, x: &Activations, targets: &Tensor, pass: &Pass, gradient: f32) -> Result<Tensor> {
        let last = &self.layers[self.layers.len() - 1]; // `build` refuses a model without layers
        let loss = match &self.ending {
            Ending::Loss(loss) => loss(&last.run(x, pass)?, targets).map_err(|e| e.context("in the loss"))?,
            Ending::Head(head) => {
                let loss = || head.loss(x, targets, pass, gradient);
                if pass.training { loss() } else { untracked(loss) }.map_err(|e| last.context(e))?
            }
        };
        scalar(loss)
    }

    /// The last layer's outputs, on its input `x`, and the loss, for an evaluation that looks at both. A [`Head`] runs once for each.
    ///
    /// # Errors
    /// As [`Model::loss`].
    pub fn outputs_and_loss(&self, x: &Activations, targets: &Tensor, pass: &Pass) -> Result<(Activations, Tensor)> {
        let last = &self.layers[self.layers.len() - 1]; // `build` refuses a model without layers
        let outputs = last.run(x, pass)?;
        let loss = match &self.ending {
            Ending::Loss(loss) => scalar(loss(&outputs, targets).map_err(|e| e.context("in the loss"))?)?,
            Ending::Head(_) => self.loss(x, targets, pass, 0.0)?,
        };
        Ok((outputs, loss))
    }
}

/// The loss without dimensions.
fn scalar(loss: Tensor) -> Result<Tensor> {
    if loss.elem_count() != 1 {
        candle_core::bail!("the loss has shape {:?}; it must be a scalar", loss.shape());
    }
    // A reshape, even to the same shape, would hide a head's region from its backward.
    if loss.rank() == 0 { Ok(loss) } else { loss.reshape(()) }
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model").field("layers", &self.layers).field("parameters", &self.parameters).finish()
    }
}

impl Layers {
    /// Builds the model in no memory: every parameter is a released leaf of the working dtype (f32, bf16 or f16).
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn build(self, dtype: DType) -> std::result::Result<Model, BuildError> {
        self.build_on(dtype, &Device::Cpu)
    }

    /// [`Layers::build`] for a device, on which the values of parameters will be.
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn build_on(self, dtype: DType, device: &Device) -> std::result::Result<Model, BuildError> {
        let Self { layers, ties, loss } = self;
        if layers.is_empty() {
            return Err(BuildError::NoLayers);
        }
        let recorder = Recorder(Arc::new(Mutex::new(Record::new(&ties))));
        let root = VarBuilder::from_backend(Box::new(recorder.clone()), dtype, device.clone());
        let mut modules: Vec<(String, Built)> = vec![];
        for (name, build) in layers {
            if modules.iter().any(|(other, _)| *other == name) {
                return Err(BuildError::DuplicateLayer(name));
            }
            if let Ok(mut record) = recorder.0.lock() {
                record.begin_layer();
            }
            match build(root.pp(&name)) {
                Ok(module) => modules.push((name, module)),
                Err(source) => return Err(BuildError::Layer { layer: name, source }),
            }
        }
        let head = modules.last().and_then(|(_, (_, head))| head.clone());
        let ending = match (loss, head) {
            (Some(loss), _) => Ending::Loss(loss),
            (None, Some(head)) => Ending::Head(head),
            (None, None) => return Err(BuildError::NoLoss),
        };
        let record = match recorder.0.lock() {
            Ok(mut record) => std::mem::take(&mut *record),
            Err(poisoned) => std::mem::take(&mut *poisoned.into_inner()),
        };
        if let Some((owner, user)) = record.unused_ties(&ties) {
            return Err(BuildError::UnusedTie { owner: owner.clone(), user: user.clone() });
        }
        if let Some(empty) = record.parameters.iter().find(|p| p.elements() == 0) {
            return Err(BuildError::Empty(empty.name().to_string()));
        }
        let mut last_users = vec![0; record.parameters.len()];
        for (layer, uses) in record.uses.iter().enumerate() {
            uses.iter().for_each(|used| last_users[used.parameter] = layer);
        }
        let last = modules.len() - 1;
        let layers = modules
            .into_iter()
            .zip(record.uses)
            .enumerate()
            .map(|(layer, ((name, (module, _)), uses))| {
                // The last layer's forward is a part of its backward.
                let read = uses.iter().filter(|used| used.in_backward || layer == last);
                let read_backward = read.map(|used| used.parameter).collect();
                BuiltLayer { name, module, uses: uses.iter().map(|used| used.parameter).collect(), read_backward }
            })
            .collect();
        Ok(Model { layers, parameters: record.parameters, last_users, ending, device: device.clone() })
    }
}
