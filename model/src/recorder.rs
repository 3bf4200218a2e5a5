//! The `VarBuilder` backend that builds any candle module without allocating memory and records its parameters.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::Init;
use candle_nn::var_builder::SimpleBackend;

use crate::adapter::Adapter;
use crate::module_buffer::ModuleBuffer;
use crate::parameter::{Parameter, ParameterId, Role};
use crate::trainable::Trainable;
use crate::tuning::Tuning;

/// A parameter that a layer requested.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Use {
    pub(crate) parameter: ParameterId,
    /// Whether the layer's backward may read it.
    pub(crate) in_backward: bool,
}

/// The record of a build so far, in the order of construction.
#[derive(Default)]
pub(crate) struct Record {
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) buffers: Vec<ModuleBuffer>,
    /// Parameters that each layer requested, owned or tied.
    pub(crate) uses: Vec<Vec<Use>>,
    by_name: HashMap<String, ParameterId>,
    /// Maps the name of a tied user to the name of its owner.
    owners: HashMap<String, String>,
    used_ties: Vec<String>,
    trainable: Trainable,
    adapter: Option<Adapter>,
}

impl Record {
    pub(crate) fn new(ties: &[(String, String)], trainable: Trainable, adapter: Option<Adapter>) -> Self {
        let owners = ties.iter().map(|(owner, user)| (user.clone(), owner.clone())).collect();
        Self { owners, trainable, adapter, ..Self::default() }
    }

    pub(crate) fn begin_layer(&mut self) {
        self.uses.push(vec![]);
    }

    /// Returns a tie to a parameter that no layer requested.
    pub(crate) fn unused_ties<'a>(&self, ties: &'a [(String, String)]) -> Option<&'a (String, String)> {
        ties.iter().find(|(_, user)| !self.used_ties.contains(user))
    }

    fn get(&mut self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        if ModuleBuffer::is_one(name) {
            return self.buffer(shape, name, init, dtype, device);
        }
        let owner = self.owners.get(name).cloned();
        if let Some(owner) = &owner {
            self.used_ties.push(name.to_string());
            if !self.by_name.contains_key(owner) {
                candle_core::bail!("`{name}` is tied to `{owner}`, but no earlier layer has that parameter");
            }
        }
        let id = match self.by_name.get(owner.as_deref().unwrap_or(name)) {
            Some(&id) => {
                let known = &self.parameters[id];
                if known.quantization() != zero_ops::asks_quantized() {
                    candle_core::bail!(
                        "`{name}` is tied to `{}`, but only one of the two would be quantized",
                        known.name()
                    );
                }
                if *known.shape() != shape || known.cut() != zero_ops::asks_cut().as_ref() || known.dtype() != dtype {
                    candle_core::bail!(
                        "`{name}` is requested as {shape:?} {dtype:?}, but `{}` is {:?} {:?}",
                        known.name(),
                        known.shape(),
                        known.dtype()
                    );
                }
                id
            }
            None => {
                let id = self.parameters.len();
                let layer = self.uses.len() - 1;
                let (role, quantization) = (self.role(name), zero_ops::asks_quantized());
                let lr_factor =
                    self.adapter.as_ref().map_or(1.0, |adapter| adapter.lr_factor(name, shape.dims().len()));
                let mut parameter = Parameter::new(name.to_string(), shape, dtype, device, init, layer, role)?;
                parameter.set_tuning(Tuning { lr_factor, ..Tuning::default() });
                self.parameters.push(parameter.with_quantization(quantization)?);
                self.by_name.insert(name.to_string(), id);
                id
            }
        };
        let in_backward = !zero_ops::asks_forward_only();
        if let Some(uses) = self.uses.last_mut() {
            match uses.iter_mut().find(|other| other.parameter == id) {
                // One request outside `forward_only` is enough for the backward to read the parameter.
                Some(other) => other.in_backward |= in_backward,
                None => uses.push(Use { parameter: id, in_backward }),
            }
        }
        Ok(self.parameters[id].leaf().clone())
    }

    /// Returns the role of a new parameter. With an adapter, only the adapter's parameters and the parameters that it
    /// names are trained.
    fn role(&self, name: &str) -> Role {
        let is_trained = match &self.adapter {
            _ if zero_ops::asks_adapter() => return Role::Adapter,
            Some(adapter) => adapter.trains(name),
            None => self.trainable.contains(name),
        };
        if is_trained { Role::Trained } else { Role::Frozen }
    }

    fn buffer(&mut self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        if let Some(known) = self.buffers.iter().find(|buffer| buffer.name() == name) {
            if *known.shape() != shape {
                candle_core::bail!(
                    "`{name}` is requested with shape {shape:?}, but an earlier layer created it with {:?}",
                    known.shape()
                );
            }
            return Ok(known.tensor().clone());
        }
        let layer = self.uses.len() - 1;
        let buffer = ModuleBuffer::new(name.to_string(), layer, shape, dtype, device, init)?;
        let tensor = buffer.tensor().clone();
        self.buffers.push(buffer);
        Ok(tensor)
    }
}

/// Shares the record between the builders of the layers and the code that builds the model.
#[derive(Clone)]
pub(crate) struct Recorder(pub(crate) Arc<Mutex<Record>>);

impl SimpleBackend for Recorder {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let mut record = self.0.lock().map_err(|_| candle_core::Error::Msg("building a layer panicked".into()))?;
        record.get(shape, name, init, dtype, device)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        candle_core::bail!("parameter `{name}` is requested without a shape; use `VarBuilder::get`")
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.lock().is_ok_and(|record| {
            record.by_name.contains_key(name) || record.buffers.iter().any(|buffer| buffer.name() == name)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Layers, Model, forward_only, ops, zoo};
    use candle_nn::{Module, VarBuilder};

    fn read_backward(model: &Model) -> Vec<Vec<&str>> {
        let name = |&parameter: &ParameterId| model.parameters()[parameter].name();
        model.layers().iter().map(|layer| layer.read_backward().iter().map(name).collect()).collect()
    }

    #[test]
    fn embedding_tables_are_not_read_in_the_backward() {
        let gpt2 = zoo::gpt2(&zoo::Gpt2Config { n_layer: 1, n_embd: 8, n_head: 2, ..zoo::Gpt2Config::default() });
        let model = gpt2.build(DType::F32).unwrap();
        let read = read_backward(&model);
        assert!(read[0].is_empty(), "{read:?}");
        for (layer, read) in model.layers().iter().zip(&read).skip(1) {
            assert_eq!(layer.uses().len(), read.len(), "{}", layer.name());
        }
        // The last layer's weight is tied to the embedding.
        assert_eq!(read.last().unwrap().last().copied(), Some(model.parameters()[0].name()));
    }

    struct Scaled(ops::Embedding, Tensor);

    impl Module for Scaled {
        fn forward(&self, ids: &Tensor) -> Result<Tensor> {
            self.0.forward(ids)?.broadcast_mul(&self.1)
        }
    }

    #[test]
    fn parameters_may_be_read_in_the_backward_by_default() {
        let scaled = |vb: VarBuilder| {
            Ok(Scaled(ops::Embedding::new(5, 4, 1.0, vb.clone())?, forward_only(|| vb.get(4, "scale"))?))
        };
        let last = |vb: VarBuilder| ops::Embedding::new(4, 4, 1.0, vb);
        let twice = |vb: VarBuilder| {
            vb.get((5, 4), "weight")?;
            ops::Embedding::new(5, 4, 1.0, vb)
        };
        let layers = Layers::new().layer("scaled", scaled).layer("twice", twice).layer("last", last);
        let model = layers.loss(|_, _| unreachable!()).build(DType::F32).unwrap();
        let expected: [&[&str]; 3] = [&[], &["twice.weight"], &["last.weight"]];
        assert_eq!(read_backward(&model), expected, "the last layer's forward is a part of its backward");
        // If a layer requested a parameter in `forward_only` and reads it in the backward, the parameter is already
        // released.
        let scale = model.parameters()[1].leaf();
        let error = ops::gelu(scale).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains("reads a released parameter"), "{error}");
    }
}
