//! Tracks the values of each micro-batch that a rank holds between forward and backward: the inputs that the next layer
//! takes, saved activations, kept inputs and deferred gradients. The executor keeps the same state for each
//! micro-batch.

use std::collections::BTreeSet;

use super::check::{Check, ensure};
use crate::ids::LayerId;
use crate::shape::ModelShape;

/// A micro-batch of one rank.
#[derive(Debug, Clone, Default)]
pub(super) struct MicroBatch {
    /// Number of layers of the model.
    layers: usize,
    /// The first layer with a trainable segment. Layers before it have no backward.
    first_trained: LayerId,
    /// Whether the program trains. If so, the last layer has no outputs, because its forward is part of its backward.
    trains: bool,
    is_loaded: bool,
    /// The layer whose inputs the rank holds. The next field, `upstream`, is the layer for whose outputs it holds
    /// gradients.
    flow: Option<LayerId>,
    upstream: Option<LayerId>,
    /// Layers whose forward has run, and (`backward`) layers whose backward has run.
    forward: BTreeSet<LayerId>,
    backward: BTreeSet<LayerId>,
    /// Layers with activations saved for the backward. The next fields are layers with inputs kept for recomputation
    /// (`kept`) and layers with deferred gradients (`deferred`).
    saved: BTreeSet<LayerId>,
    kept: BTreeSet<LayerId>,
    deferred: BTreeSet<LayerId>,
}

impl MicroBatch {
    pub(super) fn new(shape: &ModelShape, trains: bool) -> Self {
        let (layers, first_trained) = (shape.layers.len(), shape.first_trained());
        Self { layers, first_trained, trains, ..Self::default() }
    }

    fn is_last(&self, layer: LayerId) -> bool {
        layer + 1 == self.layers
    }

    fn recomputes(&self, layer: LayerId) -> Check {
        ensure(!self.is_last(layer), || {
            "the last layer cannot be recomputed: its forward is part of its backward pass".into()
        })?;
        self.trains_behind(layer)
    }

    /// Checks that a layer has a backward.
    fn trains_behind(&self, layer: LayerId) -> Check {
        ensure(layer >= self.first_trained, || {
            "the layer and all layers before it are frozen, so it has no backward pass".into()
        })
    }

    /// Marks the micro-batch as loaded. `is_first` tells whether the first layer is on this rank.
    pub(super) fn load(&mut self, is_first: bool) -> Check {
        self.flow = if is_first { Some(0) } else { self.flow };
        ensure(!std::mem::replace(&mut self.is_loaded, true), || "loaded twice".into())
    }

    /// `needs_data` tells whether the layer reads the batch.
    pub(super) fn forward(&mut self, layer: LayerId, needs_data: bool) -> Check {
        ensure(self.is_loaded || !needs_data, || "its micro-batch is not loaded".into())?;
        ensure(self.forward.insert(layer), || "run twice".into())?;
        ensure(self.flow == Some(layer), || "the previous layer has not run".into())?;
        if !(self.trains && self.is_last(layer)) {
            self.flow = Some(layer + 1);
        }
        if layer >= self.first_trained {
            self.saved.insert(layer);
        }
        Ok(())
    }

    pub(super) fn keep(&mut self, layer: LayerId) -> Check {
        self.recomputes(layer)?;
        ensure(self.flow == Some(layer), || "the previous layer has not run, or the inputs were already used".into())?;
        ensure(self.kept.insert(layer), || "kept twice".into())
    }

    pub(super) fn is_kept(&self, layer: LayerId) -> Check {
        ensure(self.kept.contains(&layer), || "these inputs were not kept".into())
    }

    pub(super) fn discard(&mut self, layer: LayerId) -> Check {
        self.recomputes(layer)?;
        ensure(self.saved.remove(&layer), || "the layer has no saved activations".into())
    }

    pub(super) fn recompute(&mut self, layer: LayerId) -> Check {
        self.recomputes(layer)?;
        ensure(self.forward.contains(&layer), || "its forward has not run".into())?;
        ensure(!self.backward.contains(&layer), || "its backward has already run".into())?;
        let is_kept = self.kept.remove(&layer);
        let flow = self.flow.replace(layer + 1);
        ensure(is_kept || flow == Some(layer), || "its inputs are not in memory".into())?;
        ensure(!is_kept || flow.is_none(), || "another layer has not used its inputs yet".into())?;
        ensure(self.saved.insert(layer), || "the activations that its forward saved were not discarded".into())
    }

    pub(super) fn backward(&mut self, layer: LayerId) -> Check {
        self.trains_behind(layer)?;
        ensure(self.forward.contains(&layer), || "its forward has not run".into())?;
        ensure(self.backward.insert(layer), || "run twice".into())?;
        let before = layer.checked_sub(1).filter(|_| layer > self.first_trained);
        let upstream = std::mem::replace(&mut self.upstream, before);
        let is_fed = if self.is_last(layer) { upstream.is_none() } else { upstream == Some(layer) };
        ensure(is_fed, || "the backward of the next layer has not run".into())?;
        // Only the backward uses the inputs of the last layer. No layer uses the outputs of a recomputation.
        self.flow = None;
        ensure(self.saved.remove(&layer), || "the activations that its forward saved were discarded".into())
    }

    pub(super) fn put_off(&mut self, layer: LayerId) {
        self.deferred.insert(layer);
    }

    pub(super) fn take_deferred(&mut self, layer: LayerId) -> Check {
        ensure(self.deferred.remove(&layer), || "the layer has no deferred weight gradients".into())
    }

    /// Takes the inputs of a layer, to send them to its stage.
    pub(super) fn send_inputs(&mut self, layer: LayerId) -> Check {
        ensure(self.flow.take() == Some(layer) && layer > 0, || "the previous layer has not run".into())
    }

    pub(super) fn receive_inputs(&mut self, layer: LayerId) -> Check {
        ensure(self.flow.replace(layer).is_none(), || "another layer has not used its inputs yet".into())
    }

    /// Takes the gradients of a layer's inputs, to send them to the stage of the previous layer.
    pub(super) fn send_gradients(&mut self, layer: LayerId) -> Check {
        let upstream = self.upstream.take().map(|before| before + 1);
        ensure(upstream == Some(layer), || "the layer's backward has not run".into())
    }

    pub(super) fn receive_gradients(&mut self, layer: LayerId) -> Check {
        let upstream = std::mem::replace(&mut self.upstream, layer.checked_sub(1));
        ensure(upstream.is_none(), || "another layer has not used its gradients yet".into())
    }

    /// Checks the state at the end of a program. The rank runs `layers` layers, and `trained` of them have a backward.
    pub(super) fn finish(&self, layers: usize, trained: usize) -> Check {
        ensure(self.kept.is_empty(), || "inputs were kept for a layer that was never recomputed".into())?;
        ensure(self.deferred.is_empty(), || "deferred weight gradients were never computed".into())?;
        ensure(self.forward.len() == layers, || "not every layer ran on every micro-batch".into())?;
        ensure(!self.trains || self.backward.len() == trained, || {
            "not every layer's backward ran on every micro-batch".into()
        })
    }
}
