//! Builds a model from its layers.

use std::sync::{Arc, Mutex};

use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use zero_ops::{with_cuts, with_lora, with_quantization};

use super::{BuiltLayer, Ending, Model};
use crate::build_error::BuildError;
use crate::layers::{Built, Entry, Layers};
use crate::quantized::check_quantized;
use crate::recorder::{Record, Recorder, Use};

impl Layers {
    /// Builds the model without allocating parameters: each parameter is a released leaf of the working dtype (f32,
    /// bf16 or f16).
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn build(self, dtype: DType) -> std::result::Result<Model, BuildError> {
        self.build_on(dtype, &Device::Cpu)
    }

    /// Builds the model like [`Layers::build`], with parameters on `device`.
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn build_on(self, dtype: DType, device: &Device) -> std::result::Result<Model, BuildError> {
        let (routes, signature) = self.resolved()?;
        let Self { layers, ties, loss, loss_weight, trainable, adapter, quantization, .. } = self;
        let Self { base_shapes, optimizer, lr_lambda, whole_inputs, tensor_group, .. } = self;
        // An invalid base model is reported first, because the layers' settings are computed from its sizes.
        let base_shapes = base_shapes.transpose()?;
        let recorder = Recorder(Arc::new(Mutex::new(Record::new(&ties, trainable.clone(), adapter.clone()))));
        let root = VarBuilder::from_backend(Box::new(recorder.clone()), dtype, device.clone());
        let build = || -> std::result::Result<Vec<(String, Built)>, BuildError> {
            let mut modules = vec![];
            for Entry { name, build, .. } in layers {
                if let Ok(mut record) = recorder.0.lock() {
                    record.begin_layer();
                }
                match build(root.pp(&name)) {
                    Ok(module) => modules.push((name, module)),
                    Err(source) => return Err(BuildError::Layer { layer: name, source }),
                }
            }
            Ok(modules)
        };
        let build = || match &adapter {
            Some(adapter) => with_lora(adapter.lora.clone(), build),
            None => (build(), vec![]),
        };
        let build = || match &quantization {
            Some(options) => with_quantization(options.clone(), build),
            None => build(),
        };
        let (modules, maps) = match tensor_group {
            Some(place) => with_cuts(place, build),
            None => build(),
        };
        let modules = modules?;
        let head = modules.last().and_then(|(_, (_, head))| head.clone());
        let ending = match (loss, head) {
            (Some(loss), _) => Ending::Loss(loss),
            (None, Some(head)) => Ending::Head(head),
            (None, None) => return Err(BuildError::NoLoss),
        };
        let mut record = match recorder.0.lock() {
            Ok(mut record) => std::mem::take(&mut *record),
            Err(poisoned) => std::mem::take(&mut *poisoned.into_inner()),
        };
        if let Some((owner, user)) = record.unused_ties(&ties) {
            return Err(BuildError::UnusedTie { owner: owner.clone(), user: user.clone() });
        }
        if let Some(empty) = record.parameters.iter().find(|p| p.elements() == 0) {
            return Err(BuildError::Empty(empty.name().to_string()));
        }
        match &adapter {
            Some(adapter) => adapter.check(&record.parameters, &maps)?,
            None => trainable.check(&record.parameters)?,
        }
        if let Some(shapes) = base_shapes {
            shapes.set(&mut record.parameters)?;
        }
        if let Some(options) = &quantization {
            check_quantized(options, &record.parameters)?;
        }
        let is_trained = |uses: &Vec<Use>| uses.iter().any(|used| record.parameters[used.parameter].is_trainable());
        let first_trained = record.uses.iter().position(is_trained).unwrap_or(0);
        let mut last_users = vec![0; record.parameters.len()];
        for (layer, uses) in record.uses.iter().enumerate() {
            uses.iter().for_each(|used| last_users[used.parameter] = layer);
        }
        let last = modules.len() - 1;
        let layers = modules
            .into_iter()
            .zip(routes)
            .zip(record.uses)
            .enumerate()
            .map(|(layer, (((name, (module, _)), route), uses))| {
                // The last layer's forward runs as part of its backward, which therefore reads all of its parameters.
                let read = uses.iter().filter(|used| used.in_backward || layer == last);
                let read_backward = read.map(|used| used.parameter).collect();
                let uses: Vec<usize> = uses.iter().map(|used| used.parameter).collect();
                let is_cut = uses.iter().any(|&parameter| record.parameters[parameter].cut().is_some());
                BuiltLayer { name, module, route, uses, read_backward, is_cut }
            })
            .collect();
        Ok(Model {
            layers,
            parameters: record.parameters,
            buffers: record.buffers,
            last_users,
            first_trained,
            ending,
            z_loss: 0.0,
            loss_weight,
            signature,
            linear_maps: maps,
            device: device.clone(),
            optimizer,
            lr_lambda,
            whole_inputs,
        })
    }
}
