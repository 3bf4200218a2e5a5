//! Collects the local gradients of a micro-batch until all layers have contributed to them.
//!
//! If layers run on a GPU and the host accumulates, a backward writes its gradients to GPU memory, and the rank
//! downloads them while the next layer's backward runs.

use std::collections::HashMap;

use candle_core::backprop::GradStore;
use candle_core::{DType, TensorId};
use zero_comm::Buffer;
use zero_model::sink::{DeferredGradients, FlatBuffer, Gradients};
use zero_model::{BuiltLayer, Parameter};
use zero_pipeline::{LayerId, Placement, SegmentId};

use crate::accounting::ledger::Category;
use crate::accounting::memory::Memory;
use crate::error::ZeroError;
use crate::gpu::{self, Arriving};
use crate::rank::Rank;

/// A segment's local gradient of one micro-batch, to which layers still contribute.
pub(crate) struct Open {
    buffer: FlatBuffer,
    /// The download from the GPU in flight; its result replaces the buffer.
    arriving: Option<Arriving>,
    /// Whether each piece has received a contribution.
    written: Vec<bool>,
}

impl Open {
    fn new(buffer: FlatBuffer, written: Vec<bool>) -> Self {
        Self { buffer, arriving: None, written }
    }

    /// Waits for the gradient to arrive from the GPU, if it is in flight.
    fn arrived(self, memory: &mut Memory) -> Result<Self, ZeroError> {
        let Self { arriving: Some(arriving), written, .. } = self else { return Ok(self) };
        let mut values = memory.take(arriving.len());
        memory.gpu()?.await_download(arriving, &mut values)?;
        Ok(Self::new(FlatBuffer::Host(values), written))
    }

    /// Returns the values, once they have arrived.
    pub(crate) fn into_buffer(self, memory: &mut Memory) -> Result<FlatBuffer, ZeroError> {
        Ok(self.arrived(memory)?.buffer)
    }
}

/// The local gradients of one rank.
#[derive(Default)]
pub(crate) struct LocalGradients {
    /// By segment, the gradient of the current micro-batch.
    open: Vec<Option<Open>>,
    /// Inputs of the deferred parameter gradients, by layer and micro-batch.
    deferred: HashMap<(LayerId, usize), DeferredGradients>,
}

impl LocalGradients {
    /// Creates the state of `segments` segments without gradients.
    pub(crate) fn new(segments: usize) -> Self {
        Self { open: (0..segments).map(|_| None).collect(), ..Self::default() }
    }

    /// Runs the backward of a layer and stores the gradients of its parameters.
    pub(crate) fn backward<T>(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        layer: LayerId,
        backward: impl FnOnce() -> Result<(GradStore, T), ZeroError>,
    ) -> Result<T, ZeroError> {
        let (mut sink, result) = self.sink_of(rank, memory, layer)?.capture(backward);
        let (mut store, value) = result?;
        let built = &rank.model.layers()[layer];
        for parameter in trained(rank, built) {
            sink.absorb(&mut store, parameter.leaf())?;
            if !self.is_written(rank, layer, parameter, &sink) {
                if !rank.options.ignore_unused {
                    return Err(no_gradient(parameter, built));
                }
                sink.zero(parameter.leaf().id())?;
            }
        }
        self.store(rank, memory, layer, sink)?;
        Ok(value)
    }

    /// Runs the backward of a layer for the gradient of its input, and defers the gradients of its parameters.
    pub(crate) fn backward_input<T>(
        &mut self,
        rank: &Rank,
        layer: LayerId,
        micro_batch: usize,
        backward: impl FnOnce() -> Result<(GradStore, T), ZeroError>,
    ) -> Result<T, ZeroError> {
        let built = &rank.model.layers()[layer];
        let leaves = trained(rank, built).map(|parameter| parameter.leaf().id());
        let (mut later, result) = DeferredGradients::new(leaves).capture(backward);
        let (mut store, value) = result?;
        for parameter in trained(rank, built) {
            later.absorb(&mut store, parameter.leaf())?;
            if !later.has(parameter.leaf().id()) && !rank.options.ignore_unused {
                return Err(no_gradient(parameter, built));
            }
        }
        self.deferred.insert((layer, micro_batch), later);
        Ok(value)
    }

    /// Computes the deferred gradients of a layer's parameters.
    pub(crate) fn backward_weight(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        layer: LayerId,
        micro_batch: usize,
    ) -> Result<(), ZeroError> {
        let later = self.deferred.remove(&(layer, micro_batch));
        let later = later.ok_or_else(|| ZeroError::internal("the layer has no deferred weight gradients"))?;
        let mut sink = self.sink_of(rank, memory, layer)?;
        later.flush(&mut sink)?;
        for parameter in trained(rank, &rank.model.layers()[layer]) {
            if !self.is_written(rank, layer, parameter, &sink) {
                sink.zero(parameter.leaf().id())?;
            }
        }
        self.store(rank, memory, layer, sink)
    }

    /// Returns whether a parameter has a gradient, either in the sink or in an open host buffer to which GPU gradients
    /// are added.
    fn is_written(&self, rank: &Rank, layer: LayerId, parameter: &Parameter, sink: &Gradients) -> bool {
        let leaf = parameter.leaf().id();
        let is_open = |&id: &SegmentId| {
            let place = rank.segment(id).pieces.iter().position(|piece| rank.leaf(piece.parameter) == leaf);
            place.zip(self.open[id].as_ref()).is_some_and(|(place, open)| open.written[place])
        };
        sink.is_written(leaf) || rank.layout.shape().layers[layer].segments.iter().any(is_open)
    }

    /// Creates the sink of a layer's backward (the buffers into which it writes gradients), on the device that computes
    /// the gradients.
    fn sink_of(&mut self, rank: &Rank, memory: &mut Memory, layer: LayerId) -> Result<Gradients, ZeroError> {
        self.sink(rank, memory, &trained_segments(rank, layer), rank.brings_gradients())
    }

    /// Creates a sink that adds to the open gradients of segments. With `brings`, a segment whose state is on the host
    /// gets a new GPU buffer for this backward instead.
    fn sink(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        ids: &[SegmentId],
        brings: bool,
    ) -> Result<Gradients, ZeroError> {
        let mut sink = Gradients::default();
        for &id in ids {
            let segment = rank.segment(id);
            let Open { buffer, written, .. } = match brings && !rank.is_resident(id) {
                true => Open::new(memory.gpu()?.room(segment.elements())?, vec![false; segment.pieces.len()]),
                false => self.opened(rank, memory, id)?,
            };
            let pieces = segment.pieces.iter().zip(written);
            let places = pieces.map(|(piece, written)| (rank.leaf(piece.parameter), piece.range.clone(), written));
            sink.add_buffer(buffer, places.collect::<Vec<_>>());
        }
        Ok(sink)
    }

    /// Takes a segment's partial gradient of the current micro-batch, opening a new one if necessary.
    fn opened(&mut self, rank: &Rank, memory: &mut Memory, id: SegmentId) -> Result<Open, ZeroError> {
        if let Some(open) = self.open[id].take() {
            return open.arrived(memory);
        }
        let segment = rank.segment(id);
        memory.count(Category::Staging, segment.elements(), 4);
        Ok(Open::new(memory.room(rank, id, segment.elements())?, vec![false; segment.pieces.len()]))
    }

    /// Stores the gradients that a backward has written into the sink of [`LocalGradients::sink_of`].
    fn store(&mut self, rank: &Rank, memory: &mut Memory, layer: LayerId, sink: Gradients) -> Result<(), ZeroError> {
        let ids = trained_segments(rank, layer);
        if rank.brings_gradients() {
            return self.bring(rank, memory, &ids, sink);
        }
        self.keep_open(rank, &ids, sink);
        Ok(())
    }

    fn keep_open(&mut self, rank: &Rank, ids: &[SegmentId], sink: Gradients) {
        let written = written(rank, ids, &sink);
        for ((&id, buffer), written) in ids.iter().zip(sink.into_flat()).zip(written) {
            self.open[id] = Some(Open::new(buffer, written));
        }
    }

    /// Starts downloading the gradients that the host accumulates. Waits for those that must be added to gradients on
    /// the host.
    fn bring(&mut self, rank: &Rank, memory: &mut Memory, ids: &[SegmentId], made: Gradients) -> Result<(), ZeroError> {
        let written = written(rank, ids, &made);
        let is_added = |(&id, written): (&SegmentId, &Vec<bool>)| {
            !rank.is_resident(id) && (self.open[id].is_some() || written.contains(&false))
        };
        let added: Vec<SegmentId> =
            ids.iter().zip(&written).filter(|&segment| is_added(segment)).map(|(&id, _)| id).collect();
        if !added.is_empty() {
            let leaves = added.iter().flat_map(|&id| rank.segment(id).pieces.iter().map(|p| rank.leaf(p.parameter)));
            let leaves: Vec<TensorId> = leaves.collect();
            let mut host = self.sink(rank, memory, &added, false)?;
            gpu::add_to_host(&mut host, &made, &leaves)?;
            self.keep_open(rank, &added, host);
        }
        for ((&id, buffer), written) in ids.iter().zip(made.into_flat()).zip(written) {
            if rank.is_resident(id) {
                self.open[id] = Some(Open::new(buffer, written));
            } else if !added.contains(&id) {
                memory.count(Category::Staging, buffer.len(), 4);
                let arriving = Some(memory.gpu()?.start_download(buffer, arrives_in(rank, id))?);
                self.open[id] = Some(Open { buffer: FlatBuffer::default(), arriving, written });
            }
        }
        Ok(())
    }

    /// Takes a segment's complete gradient of the current micro-batch.
    pub(crate) fn take(&mut self, id: SegmentId) -> Result<Open, ZeroError> {
        self.open[id].take().ok_or_else(|| ZeroError::internal("the segment has no gradient"))
    }

    /// Opens a tied segment's gradient with the partial sum of another stage. This stage adds its own gradient to it.
    pub(crate) fn open_tied(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        id: SegmentId,
        sum: Buffer,
    ) -> Result<(), ZeroError> {
        let buffer = memory.settled(rank, id, sum.into_f32()?)?;
        match self.open[id].replace(Open::new(buffer, vec![true; rank.segment(id).pieces.len()])) {
            None => Ok(()),
            Some(_) => Err(ZeroError::internal("a tied gradient arrived after the segment already had a gradient")),
        }
    }
}

/// Returns the trainable parameters of a layer.
fn trained<'a>(rank: &'a Rank, layer: &'a BuiltLayer) -> impl Iterator<Item = &'a Parameter> + 'a {
    let parameters = layer.uses().iter().map(|&parameter| &rank.model.parameters()[parameter]);
    parameters.filter(|parameter| parameter.is_trainable())
}

/// Returns the trainable segments of a layer.
fn trained_segments(rank: &Rank, layer: LayerId) -> Vec<SegmentId> {
    let segments = rank.layout.shape().layers[layer].segments.iter().copied();
    segments.filter(|&id| rank.segment(id).is_trainable).collect()
}

/// Returns, for each piece of each segment, whether the sink has its gradient.
fn written(rank: &Rank, ids: &[SegmentId], sink: &Gradients) -> Vec<Vec<bool>> {
    let of_segment = |&id: &SegmentId| {
        rank.segment(id).pieces.iter().map(|piece| sink.is_written(rank.leaf(piece.parameter))).collect()
    };
    ids.iter().map(of_segment).collect()
}

/// Returns the dtype in which a micro-batch's gradient is downloaded. If nothing is added to a gradient before its
/// reduction, the reduction first rounds it to the communication dtype. The GPU may then round it instead, with a
/// bit-identical result. If the host adds up micro-batches or contributions of several layers, the gradient is
/// downloaded in f32.
fn arrives_in(rank: &Rank, id: SegmentId) -> DType {
    let is_sharded = rank.placements(id).gradients == Placement::Sharded;
    let layers = rank.layout.shape().layers.iter().filter(|layer| layer.segments.contains(&id));
    if is_sharded && layers.count() == 1 { rank.options.communication } else { DType::F32 }
}

/// Recycles the buffer of a tied gradient after it was sent.
pub(crate) fn give_tied_back(memory: &mut Memory, sent: Buffer) {
    if let Buffer::F32(values) = sent {
        memory.uncount(Category::Staging, values.len(), 4);
        memory.give(values);
    }
}

/// Allocates a buffer to receive the partial gradient of a tied segment.
pub(crate) fn room_for_tied(rank: &Rank, memory: &mut Memory, id: SegmentId) -> Buffer {
    let elements = rank.segment(id).elements();
    memory.count(Category::Staging, elements, 4);
    Buffer::F32(memory.take(elements))
}

fn no_gradient(parameter: &Parameter, layer: &BuiltLayer) -> ZeroError {
    ZeroError::NoGradient { parameter: parameter.name().to_string(), layer: layer.name().to_string() }
}
