//! Batches of samples, and the assignment of micro-batches to ranks.

use candle_core::Tensor;
use zero_model::ops::SequenceGroup;
use zero_model::{Activations, BuiltLayer, Model, Signature};

use crate::error::Error;

/// Samples: inputs for layers and targets for the loss. Dimension 0 of every tensor is the sample.
///
/// A model that is a plain list of layers needs no names: `Batch::new(inputs, targets)`. Layers and losses that name
/// the values they take ([`Layers::with`](zero_model::Layers::with)) find them by name:
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use zero_engine::Batch;
/// # let [tokens, segment] = [(); 2].map(|()| Tensor::zeros((2, 8), DType::U32, &Device::Cpu).unwrap());
/// # let [label, length] = [(); 2].map(|()| Tensor::zeros(2, DType::U32, &Device::Cpu).unwrap());
/// let batch = Batch::named([("tokens", tokens), ("segment", segment)]).target("label", label).target("length", length);
/// assert_eq!(batch.rows()?, 2);
/// # Ok::<(), zero_engine::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Batch {
    /// Inputs without a name, which the first layer receives.
    pub inputs: Activations,
    /// The target without a name.
    pub targets: Option<Tensor>,
    named_inputs: Vec<(String, Tensor)>,
    named_targets: Vec<(String, Tensor)>,
}

impl Batch {
    /// Creates a batch of inputs for the first layer and a target for the loss.
    #[must_use]
    pub fn new(inputs: impl Into<Activations>, targets: Tensor) -> Self {
        Self { inputs: inputs.into(), targets: Some(targets), ..Self::default() }
    }

    /// Creates a batch of named inputs.
    #[must_use]
    pub fn named<S: Into<String>>(inputs: impl IntoIterator<Item = (S, Tensor)>) -> Self {
        let named_inputs = inputs.into_iter().map(|(name, tensor)| (name.into(), tensor)).collect();
        Self { named_inputs, ..Self::default() }
    }

    /// Adds a named input.
    #[must_use]
    pub fn input(mut self, name: impl Into<String>, tensor: Tensor) -> Self {
        self.named_inputs.push((name.into(), tensor));
        self
    }

    /// Adds a named target.
    #[must_use]
    pub fn target(mut self, name: impl Into<String>, tensor: Tensor) -> Self {
        self.named_targets.push((name.into(), tensor));
        self
    }

    /// Returns all tensors: inputs, named inputs, the target without a name, named targets.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let inputs = self.inputs.tensors().iter().chain(self.named_inputs.iter().map(|(_, tensor)| tensor));
        inputs.chain(&self.targets).chain(self.named_targets.iter().map(|(_, tensor)| tensor))
    }

    /// Returns the names of [`Batch::tensors`]. Tensors without a name are called `input` and `target`.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let unnamed = self.inputs.tensors().iter().map(|_| "input");
        let inputs = unnamed.chain(self.named_inputs.iter().map(|(name, _)| name.as_str()));
        let targets = self.targets.iter().map(|_| "target");
        inputs.chain(targets).chain(self.named_targets.iter().map(|(name, _)| name.as_str()))
    }

    /// Returns the batch with every tensor replaced, in the order of [`Batch::tensors`].
    ///
    /// # Errors
    /// Returns the errors of `change`.
    pub fn map(&self, mut change: impl FnMut(&Tensor) -> candle_core::Result<Tensor>) -> candle_core::Result<Self> {
        let inputs = self.inputs.tensors().iter().map(&mut change).collect::<candle_core::Result<_>>()?;
        let named_inputs = changed(&self.named_inputs, &mut change)?;
        let targets = self.targets.as_ref().map(&mut change).transpose()?;
        let named_targets = changed(&self.named_targets, &mut change)?;
        Ok(Self { inputs: Activations::new(inputs), targets, named_inputs, named_targets })
    }

    /// Returns the number of samples.
    ///
    /// # Errors
    /// Fails if there is no tensor, a tensor has no dimensions, or the tensors differ in their number of samples.
    pub fn rows(&self) -> Result<usize, Error> {
        let mut all = self.names().zip(self.tensors());
        let (first, samples) = all.next().ok_or_else(|| Error::Batch("it has no tensors".into()))?;
        let samples = samples.dim(0)?;
        for (name, tensor) in all {
            if tensor.dim(0)? != samples {
                let other = tensor.dim(0)?;
                return Err(Error::Batch(format!("`{first}` has {samples} samples, but `{name}` has {other}")));
            }
        }
        Ok(samples)
    }

    /// Returns samples `start..start + count`.
    ///
    /// # Errors
    /// Fails if the batch has fewer samples.
    pub fn narrow(&self, start: usize, count: usize) -> Result<Self, Error> {
        Ok(self.map(|tensor| tensor.narrow(0, start, count)?.contiguous())?)
    }

    /// Returns this rank's slice of the sequences, `[batch, time, …]`, if ranks share sequences. Inputs named in
    /// `whole`, and batches for ranks that split only layers (tensor groups), stay whole.
    pub(crate) fn own_slice(&self, group: Option<&SequenceGroup>, whole: &[String]) -> Result<Self, Error> {
        let Some(group) = group.and_then(SequenceGroup::of_batch) else { return Ok(self.clone()) };
        let mut names = self.names();
        self.map(|tensor| match names.next() {
            Some(name) if whole.iter().any(|whole| whole == name) => Ok(tensor.clone()),
            Some(name) if tensor.rank() < 2 => {
                candle_core::bail!(
                    "ranks can share sequences only if `{name}` has a sequence dimension, but its shape is {:?}",
                    tensor.shape()
                )
            }
            _ => group.slice(tensor),
        })
        .map_err(|error| Error::Batch(error.to_string()))
    }

    /// Returns the batch's only target.
    ///
    /// # Errors
    /// Fails if the batch has no target or several targets.
    pub fn only_target(&self) -> Result<&Tensor, Error> {
        match (&self.targets, self.named_targets.as_slice()) {
            (Some(target), []) => Ok(target),
            (None, [(_, target)]) => Ok(target),
            (None, []) => Err(Error::Batch("it has no target".into())),
            (unnamed, named) => {
                let names = unnamed.iter().map(|_| "target").chain(named.iter().map(|(name, _)| name.as_str()));
                Err(Error::Batch(format!("it has the targets {}, but must have exactly one", quoted(names))))
            }
        }
    }

    /// Returns named targets and named inputs, in the order of `names`.
    ///
    /// # Errors
    /// Fails if the batch lacks one of them.
    pub fn get<S: AsRef<str>>(&self, names: &[S]) -> Result<Vec<Tensor>, Error> {
        let find = |name: &S| self.find(name.as_ref()).cloned();
        let missing = |name: &S| Error::Batch(format!("it has no `{}`; {}", name.as_ref(), self.listed()));
        names.iter().map(|name| find(name).ok_or_else(|| missing(name))).collect()
    }

    /// Returns whether the batch has a target of this name.
    #[must_use]
    pub fn has_target(&self, name: &str) -> bool {
        self.named_targets.iter().any(|(of, _)| of == name)
    }

    fn find(&self, name: &str) -> Option<&Tensor> {
        let mut all = self.named_targets.iter().chain(&self.named_inputs);
        all.find(|(of, _)| of == name).map(|(_, tensor)| tensor)
    }

    /// Describes in words the names that the batch has.
    fn listed(&self) -> String {
        let part = |what: &str, list: &[(String, Tensor)], unnamed: usize| {
            let unnamed = (unnamed > 0).then(|| format!("{unnamed} without a name"));
            let named = (!list.is_empty()).then(|| quoted(list.iter().map(|(name, _)| name.as_str())));
            let all: Vec<String> = named.into_iter().chain(unnamed).collect();
            if all.is_empty() { format!("no {what}") } else { format!("the {what} {}", all.join(" and ")) }
        };
        let inputs = part("inputs", &self.named_inputs, self.inputs.tensors().len());
        format!("the batch has {inputs} and {}", part("targets", &self.named_targets, self.targets.iter().len()))
    }
}

/// A batch without targets.
impl From<Activations> for Batch {
    fn from(inputs: Activations) -> Self {
        Self { inputs, ..Self::default() }
    }
}

/// A batch of one input, without targets.
impl From<Tensor> for Batch {
    fn from(input: Tensor) -> Self {
        Activations::from(input).into()
    }
}

/// Creates a batch of inputs and a target, like [`Batch::new`].
impl<X: Into<Activations>> From<(X, Tensor)> for Batch {
    fn from((inputs, targets): (X, Tensor)) -> Self {
        Self::new(inputs, targets)
    }
}

fn changed(
    list: &[(String, Tensor)],
    mut change: impl FnMut(&Tensor) -> candle_core::Result<Tensor>,
) -> candle_core::Result<Vec<(String, Tensor)>> {
    list.iter().map(|(name, tensor)| Ok((name.clone(), change(tensor)?))).collect()
}

/// Lists names in backticks.
fn quoted<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// Methods that match a batch to a model.
impl Batch {
    /// Checks that the batch has the inputs that a model takes and, if `scored` is true, the targets that its loss
    /// takes.
    ///
    /// # Errors
    /// Fails if a name is missing, ambiguous or used twice. The error lists the names that the batch has.
    pub fn fits(&self, model: &Signature, scored: bool) -> Result<(), Error> {
        let named = || self.named_inputs.iter().chain(&self.named_targets).map(|(name, _)| name);
        if let Some((_, twice)) = named().enumerate().find(|(index, name)| named().take(*index).any(|o| o == *name)) {
            return Err(Error::Batch(format!("two of its tensors are named `{twice}`")));
        }
        if let Some((layer, _)) = self.named_inputs.iter().find(|(name, _)| model.values.contains(name)) {
            let message = format!("`{layer}` is an input of the batch and an output of the model");
            return Err(Error::setting("Layers::layer", message, "rename one of them"));
        }
        let there = || {
            let values = quoted(model.values.iter().map(String::as_str));
            format!("{}; the outputs of layers are {values}", self.listed())
        };
        let missing = |input: &String| !self.named_inputs.iter().any(|(name, _)| name == input);
        if let Some((input, layer)) = model.inputs.iter().find(|(input, _)| missing(input)) {
            let message =
                format!("layer `{layer}` takes `{input}`, which is neither an input of the batch nor an earlier layer");
            return Err(Error::setting("Layers::inputs", message, there()));
        }
        match (model.takes_unnamed, self.inputs.tensors().is_empty()) {
            (true, true) => {
                let message = format!("layer `{}` takes unnamed inputs, but the batch has none", model.first);
                let help = format!("name the inputs of the layer with `.inputs([\"…\"])`; {}", self.listed());
                return Err(Error::setting("Layers::inputs", message, help));
            }
            (false, false) => {
                let message = format!("layer `{}` takes named inputs, but the batch has unnamed inputs", model.first);
                return Err(Error::setting("Batch::new", message, "name all of them with `Batch::named`"));
            }
            _ => {}
        }
        if !scored {
            return Ok(());
        }
        let Some(targets) = &model.targets else {
            let help = "name the outputs and the targets of the loss: `.loss_of([…], [\"…\"], …)`";
            return self
                .only_target()
                .map(drop)
                .map_err(|error| Error::setting("Layers::loss", error.to_string(), help));
        };
        match targets.iter().find(|target| self.find(target).is_none()) {
            Some(target) => {
                let message = format!("the loss takes the target `{target}`, which the batch does not have");
                Err(Error::setting("Layers::loss_of", message, self.listed()))
            }
            None => Ok(()),
        }
    }

    /// Drops the tensors that no layer of a pipeline stage takes. `holds` returns whether a layer is on the stage.
    pub(crate) fn of_stage(mut self, model: &Model, holds: impl Fn(usize) -> bool) -> Self {
        let layers = model.layers();
        let has_loss = holds(layers.len() - 1);
        if !has_loss {
            self.targets = None;
            self.named_targets.clear();
        }
        if !holds(0) {
            self.inputs = Activations::default();
        }
        let of_loss =
            |name: &String| has_loss && model.signature().targets.iter().flatten().any(|target| target == name);
        let read = |name: &String| {
            layers.iter().enumerate().any(|(layer, built)| built.route().reads().contains(name) && holds(layer))
        };
        self.named_inputs.retain(|(name, _)| read(name) || of_loss(name));
        self
    }

    /// Returns the targets of the model's loss.
    pub(crate) fn loss_targets(&self, model: &Signature) -> Result<Vec<Tensor>, Error> {
        match &model.targets {
            Some(names) => self.get(names),
            None => Ok(vec![self.only_target()?.clone()]),
        }
    }

    /// Appends the inputs that a layer names to its incoming activations.
    pub(crate) fn added_to(&self, flow: Activations, layer: &BuiltLayer) -> Result<Activations, Error> {
        let reads = layer.route().reads();
        match reads.is_empty() {
            true => Ok(flow),
            false => Ok(Activations::new([flow.tensors(), &self.get(reads)?].concat())),
        }
    }
}

/// How the micro-batches of the global batch are assigned to the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MicrobatchOrder {
    /// Micro-batch `m` of rank `r` has the global index `m · ranks + r`.
    InTurn,
    /// Micro-batch `m` of rank `r` has the global index `r · micro_batches + m`: each rank has consecutive
    /// micro-batches, which it sums before the reduction.
    Contiguous,
}

impl MicrobatchOrder {
    /// Returns the global index of a rank's micro-batch.
    pub(crate) fn global(self, rank: usize, ranks: usize, micro_batch: usize, micro_batches: usize) -> usize {
        match self {
            Self::InTurn => micro_batch * ranks + rank,
            Self::Contiguous => rank * micro_batches + micro_batch,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_micro_batch_is_assigned_once() {
        for order in [MicrobatchOrder::InTurn, MicrobatchOrder::Contiguous] {
            for (ranks, micro_batches) in [(1, 8), (2, 4), (3, 3), (8, 1)] {
                let mut seen: Vec<usize> = (0..ranks)
                    .flat_map(|r| (0..micro_batches).map(move |m| order.global(r, ranks, m, micro_batches)))
                    .collect();
                seen.sort_unstable();
                assert_eq!(seen, (0..ranks * micro_batches).collect::<Vec<_>>());
            }
        }
    }
}
