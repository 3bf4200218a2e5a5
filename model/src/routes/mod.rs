//! Resolves the names of a model: which values each layer receives, and which it passes on.
//!
//! Each layer passes one list of tensors to the next: its own outputs, then the *carried* values. These were computed
//! by this or an earlier layer, and a later layer or the loss names them. Gradients of carried values flow back the
//! same way, so pipeline messages, recomputation and offload need no names. Named inputs of the batch are not carried:
//! every pipeline stage takes them from the micro-batch.

use std::collections::HashMap;

use candle_core::{Result, Tensor};

use crate::activations::Activations;
use crate::build_error::BuildError;

/// The inputs that a layer names, and the names of its auxiliary outputs.
#[derive(Debug, Clone, Default)]
pub(crate) struct Names {
    /// Inputs that the layer names, in order.
    pub(crate) inputs: Vec<String>,
    /// Whether the layer receives only the named inputs, and not the outputs of the previous layer.
    pub(crate) only_named: bool,
    /// Names of the layer's last outputs, the auxiliary ones.
    pub(crate) exposed: Vec<String>,
}

/// The inputs and targets that a model takes from a batch, and the outputs that its loss takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    /// Name of the first layer.
    pub first: String,
    /// Whether the first layer takes the unnamed inputs of the batch.
    pub takes_unnamed: bool,
    /// Each input of the batch that a layer names, with the name of that layer.
    pub inputs: Vec<(String, String)>,
    /// Names of all values that layers compute.
    pub values: Vec<String>,
    /// Names of the outputs that the loss takes. If the loss names none, the name of the last layer.
    pub outputs: Vec<String>,
    /// Names of the targets; `None` for a loss that takes the batch's only target.
    pub targets: Option<Vec<String>>,
}

/// The sources of one layer's inputs, and the tensors that the layer passes on.
///
/// The tensors that [`BuiltLayer::run`](crate::BuiltLayer::run) receives are the outputs of the previous layer, the
/// carried values, and the inputs of the batch that this layer names ([`Route::reads`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    takes: Vec<Take>,
    carried: usize,
    reads: Vec<String>,
    exposed: usize,
    passes_on: Vec<PassOn>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Take {
    /// All outputs of the previous layer.
    Before,
    /// The only output of the previous layer, under that layer's name.
    Named,
    Carried(usize),
    Batch(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PassOn {
    /// All outputs of the layer that are not auxiliary.
    Outputs,
    /// The layer's only output that is not auxiliary, under the layer's name.
    Output,
    Exposed(usize),
    /// The only output of the previous layer.
    Before,
    Carried(usize),
}

/// A value that a layer computes: its only output, or one of its auxiliary outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Value {
    layer: usize,
    exposed: Option<usize>,
}

impl Route {
    /// Returns the inputs of the batch that the layer names, in order.
    #[must_use]
    pub fn reads(&self) -> &[String] {
        &self.reads
    }

    /// Returns whether the layer takes exactly the outputs of the previous layer: it names no inputs, and no carried
    /// values bypass it.
    pub(crate) fn is_plain(&self) -> bool {
        self.takes == [Take::Before] && self.carried == 0 && self.reads.is_empty()
    }

    /// Selects the layer's inputs among the tensors `x`; `None` if they are all of `x`.
    pub(crate) fn inputs(&self, x: &Activations) -> Result<Option<Activations>> {
        if self.is_plain() {
            return Ok(None);
        }
        let (before, carried, batch) = self.parts(x)?;
        let mut inputs = vec![];
        for take in &self.takes {
            match *take {
                Take::Before => inputs.extend_from_slice(before),
                Take::Named => inputs.push(only(before)?.clone()),
                Take::Carried(index) => inputs.push(carried[index].clone()),
                Take::Batch(index) => inputs.push(batch[index].clone()),
            }
        }
        Ok(Some(Activations::new(inputs)))
    }

    /// Returns the tensors that the layer passes on, given its outputs and the tensors that it received. The last layer
    /// passes on the outputs that the loss takes.
    ///
    /// # Errors
    /// Fails if the layer has fewer outputs than it exposes, or if it has several outputs and its name is used as a
    /// value.
    pub fn pass_on(&self, outputs: Activations, x: &Activations) -> Result<Activations> {
        if self.passes_on == [PassOn::Outputs] && self.exposed == 0 {
            return Ok(outputs);
        }
        let own = outputs.tensors();
        let Some(count) = own.len().checked_sub(self.exposed) else {
            candle_core::bail!("it has {} outputs, but exposes {}", own.len(), self.exposed);
        };
        let ((own, exposed), (before, carried, _)) = (own.split_at(count), self.parts(x)?);
        let mut flow = vec![];
        for value in &self.passes_on {
            match *value {
                PassOn::Outputs => flow.extend_from_slice(own),
                PassOn::Output => flow.push(only(own)?.clone()),
                PassOn::Exposed(index) => flow.push(exposed[index].clone()),
                PassOn::Before => flow.push(only(before)?.clone()),
                PassOn::Carried(index) => flow.push(carried[index].clone()),
            }
        }
        Ok(Activations::new(flow))
    }

    /// Splits the gradients of the tensors that the layer passes on. Returns the gradients of its `outputs` outputs,
    /// and, for each of the `flowing` tensors that flow into it, the gradient that bypasses it.
    #[must_use]
    pub fn gradients(&self, behind: Vec<Option<Tensor>>, outputs: usize, flowing: usize) -> [Vec<Option<Tensor>>; 2] {
        let (mut own, mut bypass) = (vec![None; outputs], vec![None; flowing]);
        let (count, before) = (outputs - self.exposed, flowing - self.carried);
        let mut behind = behind.into_iter();
        for value in &self.passes_on {
            match *value {
                PassOn::Outputs => own[..count].iter_mut().for_each(|own| *own = behind.next().flatten()),
                PassOn::Output => own[0] = behind.next().flatten(),
                PassOn::Exposed(index) => own[count + index] = behind.next().flatten(),
                PassOn::Before => bypass[0] = behind.next().flatten(),
                PassOn::Carried(index) => bypass[before + index] = behind.next().flatten(),
            }
        }
        [own, bypass]
    }

    /// Returns whether the layer takes tensor `index` of the `flowing` tensors that flow into it. It passes on the
    /// other tensors without reading them.
    #[must_use]
    pub fn takes(&self, index: usize, flowing: usize) -> bool {
        match index.checked_sub(flowing - self.carried) {
            None => self.takes.iter().any(|take| matches!(take, Take::Before | Take::Named)),
            Some(carried) => self.takes.contains(&Take::Carried(carried)),
        }
    }

    /// Splits the tensors that the layer received into outputs of the previous layer, carried values, and inputs of the
    /// batch.
    fn parts<'a>(&self, x: &'a Activations) -> Result<(&'a [Tensor], &'a [Tensor], &'a [Tensor])> {
        let all = x.tensors();
        let Some(flowing) = all.len().checked_sub(self.reads.len()).filter(|&flowing| flowing >= self.carried) else {
            candle_core::bail!("{} tensors for {} named values", all.len(), self.carried + self.reads.len());
        };
        let (flow, batch) = all.split_at(flowing);
        let (before, carried) = flow.split_at(flowing - self.carried);
        Ok((before, carried, batch))
    }
}

/// Returns the output that a layer's name stands for.
fn only(outputs: &[Tensor]) -> Result<&Tensor> {
    match outputs {
        [one] => Ok(one),
        many => candle_core::bail!(
            "a layer's name stands for its only output, and the layer has {}: name the others with `.exposes([…])`",
            many.len()
        ),
    }
}

/// Resolves all names. `loss` has the outputs and the targets that the loss names.
pub(crate) fn resolve(
    layers: &[(&str, &Names)],
    loss: Option<&(Vec<String>, Vec<String>)>,
) -> std::result::Result<(Vec<Route>, Signature), BuildError> {
    let (values, count) = (values(layers)?, layers.len());
    let value_named = |name: &String| values.iter().find(|(of, _)| of == name).map(|(_, value)| *value);
    let Some(first) = layers.first().map(|(name, _)| name.to_string()) else { return Err(BuildError::NoLayers) };
    // Collects the values and batch inputs that each layer names, and the last user of each value.
    let (mut named, mut inputs) = (vec![], vec![]);
    let mut last_use: HashMap<Value, usize> = HashMap::new();
    for (layer, (name, names)) in layers.iter().enumerate() {
        if names.only_named && names.inputs.is_empty() {
            return Err(BuildError::NoInputs(name.to_string()));
        }
        let mut found = vec![];
        for input in &names.inputs {
            let value = value_named(input);
            match value {
                Some(value) if value.layer >= layer => {
                    return Err(BuildError::LaterValue { layer: name.to_string(), value: input.clone() });
                }
                Some(value) => {
                    last_use.insert(value, layer);
                }
                None => inputs.push((input.clone(), name.to_string())),
            }
            found.push((input, value));
        }
        named.push(found);
    }
    let seen = match loss {
        None => vec![],
        Some((outputs, _)) => {
            let value = |output: &String| {
                value_named(output).ok_or_else(|| BuildError::UnknownOutput {
                    output: output.clone(),
                    values: values.iter().map(|(name, _)| name.clone()).collect(),
                })
            };
            outputs.iter().map(value).collect::<std::result::Result<Vec<_>, _>>()?
        }
    };
    last_use.extend(seen.iter().map(|&value| (value, count)));
    let is_used = |value: Value, layer: usize| last_use.get(&value).is_some_and(|&last| last >= layer);
    let output = |layer: usize| Value { layer, exposed: None };
    // Whether the outputs of the previous layer flow into `layer`, and which values are carried to it.
    let flows_before = |layer: usize| layer == 0 || !layers[layer].1.only_named || is_used(output(layer - 1), layer);
    let carried = |layer: usize| -> Vec<Value> {
        let earlier = values.iter().map(|(_, value)| *value).filter(|value| value.layer < layer);
        earlier.filter(|&value| value != output(layer.wrapping_sub(1)) && is_used(value, layer)).collect()
    };
    let mut routes = vec![];
    for (layer, (name, names)) in layers.iter().enumerate() {
        let arriving = carried(layer);
        let place = |value: Value| arriving.iter().position(|&other| other == value);
        let pass_on = |value: Value| match place(value) {
            Some(index) => PassOn::Carried(index),
            None if value == output(layer) => PassOn::Output,
            None => value.exposed.filter(|_| value.layer == layer).map_or(PassOn::Before, PassOn::Exposed),
        };
        let mut passes_on = vec![];
        if layer + 1 == count {
            match loss {
                None => passes_on.push(PassOn::Outputs),
                Some(_) => passes_on.extend(seen.iter().map(|&value| pass_on(value))),
            }
        } else {
            if flows_before(layer + 1) {
                passes_on.push(PassOn::Outputs);
            }
            passes_on.extend(carried(layer + 1).into_iter().map(pass_on));
        }
        let is_own = |value: &PassOn| matches!(value, PassOn::Outputs | PassOn::Output | PassOn::Exposed(_));
        if !passes_on.iter().any(is_own) {
            return Err(BuildError::UnusedLayer(name.to_string()));
        }
        let mut takes = if names.only_named { vec![] } else { vec![Take::Before] };
        let mut reads: Vec<String> = vec![];
        for (input, value) in &named[layer] {
            takes.push(match value {
                Some(value) => place(*value).map_or(Take::Named, Take::Carried),
                None => {
                    reads.push(input.to_string());
                    Take::Batch(reads.len() - 1)
                }
            });
        }
        routes.push(Route { takes, carried: arriving.len(), reads, exposed: names.exposed.len(), passes_on });
    }
    let (outputs, targets) = match loss {
        Some((outputs, targets)) => (outputs.clone(), Some(targets.clone())),
        None => (layers.last().iter().map(|(name, _)| name.to_string()).collect(), None),
    };
    let takes_unnamed = !layers[0].1.only_named;
    let values = values.into_iter().map(|(name, _)| name).collect();
    Ok((routes, Signature { first, takes_unnamed, inputs, values, outputs, targets }))
}

/// Returns all values that layers compute, with their names.
fn values(layers: &[(&str, &Names)]) -> std::result::Result<Vec<(String, Value)>, BuildError> {
    let mut values: Vec<(String, Value)> = vec![];
    for (layer, (name, names)) in layers.iter().enumerate() {
        values.push((name.to_string(), Value { layer, exposed: None }));
        let exposed = names.exposed.iter().enumerate();
        values.extend(exposed.map(|(index, own)| (format!("{name}.{own}"), Value { layer, exposed: Some(index) })));
    }
    for (index, (name, value)) in values.iter().enumerate() {
        if let Some((_, other)) = values[..index].iter().find(|(other, _)| other == name) {
            return Err(match (value.exposed, other.exposed) {
                (None, None) => BuildError::DuplicateLayer(name.clone()),
                _ => BuildError::DuplicateValue(name.clone()),
            });
        }
    }
    Ok(values)
}

#[cfg(test)]
mod tests;
