//! Gradients of layers that run on a GPU, on their way to the memory of the host, where they are added up and reduced.

use candle_core::backprop::GradStore;
use candle_core::{Device, TensorId};
use zero_model::device::Array;
use zero_model::sink::{Flat, Gradients};
use zero_pipeline::{LayerId, SegmentId};

use crate::error::ZeroError;
use crate::gradients::no_gradient;
use crate::zero::Zero;

impl Zero {
    /// [`Zero::backward`] on a GPU: gradients are made there, and brought to `host`, their places.
    pub(crate) fn backward_on_gpu<T>(
        &mut self,
        layer: LayerId,
        (ids, mut host): (Vec<SegmentId>, Gradients),
        backward: impl FnOnce() -> Result<(GradStore, T), ZeroError>,
    ) -> Result<T, ZeroError> {
        let (mut made, result) = self.sink_on_gpu(layer)?.capture(backward);
        let (mut store, value) = result?;
        let model = self.model.clone();
        let built = &model.layers()[layer];
        for &parameter in built.uses() {
            let parameter = &model.parameters()[parameter];
            let leaf = parameter.leaf();
            made.absorb(&mut store, leaf)?;
            if !made.is_written(leaf.id()) && !host.is_written(leaf.id()) {
                if !self.options.ignore_unused {
                    return Err(no_gradient(parameter, built));
                }
                made.zero(leaf.id())?;
            }
        }
        self.bring(layer, made, &mut host)?;
        self.keep_open(ids, host);
        Ok(value)
    }

    /// Places on the GPU for the gradients of a layer's parameters, for one backward.
    pub(crate) fn sink_on_gpu(&self, layer: LayerId) -> Result<Gradients, ZeroError> {
        let Device::Cuda(device) = self.model.device() else {
            return Err(ZeroError::internal("gradients on a GPU of a layer that is on none"));
        };
        let mut sink = Gradients::default();
        for &id in &self.layout.shape().layers[layer].segments {
            let segment = &self.layout.segments()[id];
            let places = segment.pieces.iter().map(|piece| (self.leaf(piece.parameter), piece.range.clone(), false));
            sink.add_buffer(Flat::Device(Array::room(device, segment.elements())?), places.collect::<Vec<_>>());
        }
        Ok(sink)
    }

    /// Adds what was made on the GPU to what is on the host.
    pub(crate) fn bring(&self, layer: LayerId, made: Gradients, host: &mut Gradients) -> Result<(), ZeroError> {
        let segments = self.layout.shape().layers[layer].segments.iter().map(|&id| &self.layout.segments()[id]);
        let leaves: Vec<TensorId> =
            segments.flat_map(|segment| segment.pieces.iter().map(|piece| self.leaf(piece.parameter))).collect();
        Ok(host.bring(&made, &leaves)?)
    }

    fn leaf(&self, parameter: usize) -> TensorId {
        self.model.parameters()[parameter].leaf().id()
    }
}
