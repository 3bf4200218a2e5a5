//! Layers that run on a GPU: downloads their gradients if the host accumulates them, and computes norm and update on
//! the GPU if their state is there.

use std::ops::Range;

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, DType, Storage, TensorId};
use zero_model::Parameter;
use zero_model::device::optimizer::{Norms, Part, Updated, step as step_on_gpu};
use zero_model::device::{Array, Staging};
use zero_model::sink::{FlatBuffer, Gradients};
use zero_optim::norm::{Limits, Verdict};
use zero_optim::{ExactSum, Step};
use zero_pipeline::{LayerId, Placement, SegmentId};

use crate::error::ZeroError;
use crate::gradients::{Open, no_gradient};
use crate::layout::Piece;
use crate::ledger::Category;
use crate::rounding::working;
use crate::update::Judged;
use crate::zero::{SegmentState, ShardedState};

impl ShardedState {
    /// Returns whether the GPU computes gradients that the host accumulates, for any segment.
    pub(crate) fn brings_gradients(&self) -> bool {
        self.model.device().is_cuda() && self.residents.contains(&false)
    }

    /// Runs [`ShardedState::backward`] on a GPU and downloads the gradients that the host accumulates.
    pub(crate) fn backward_on_gpu<T>(
        &mut self,
        layer: LayerId,
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
            if !made.is_written(leaf.id()) && !self.has_contribution(layer, parameter) {
                if !self.options.ignore_unused {
                    return Err(no_gradient(parameter, built));
                }
                made.zero(leaf.id())?;
            }
        }
        self.bring(layer, made)?;
        Ok(value)
    }

    /// Returns whether another layer's backward has contributed to a tied parameter's gradient.
    fn has_contribution(&self, layer: LayerId, parameter: &Parameter) -> bool {
        self.layout.shape().layers[layer].segments.iter().any(|&id| {
            let pieces = &self.layout.segments()[id].pieces;
            let is_it = |piece: &Piece| self.leaf(piece.parameter) == parameter.leaf().id();
            let place = pieces.iter().position(is_it);
            place.is_some_and(|place| self.segments[id].open.as_ref().is_some_and(|open| open.is_written(place)))
        })
    }

    /// Creates a sink on the GPU for the gradients of a layer's parameters, for one backward. Segments with state on
    /// the GPU use their open gradients.
    pub(crate) fn sink_on_gpu(&mut self, layer: LayerId) -> Result<Gradients, ZeroError> {
        let (layout, device) = (self.layout.clone(), self.gpu()?.clone());
        let mut sink = Gradients::default();
        for &id in &layout.shape().layers[layer].segments {
            let segment = &layout.segments()[id];
            let (buffer, written) = match self.is_resident(id) {
                true => self.opened(id)?.into_parts(),
                false => {
                    (FlatBuffer::Device(Array::room(&device, segment.elements())?), vec![false; segment.pieces.len()])
                }
            };
            let pieces = segment.pieces.iter().zip(written);
            let places = pieces.map(|(piece, written)| (self.leaf(piece.parameter), piece.range.clone(), written));
            sink.add_buffer(buffer, places.collect::<Vec<_>>());
        }
        Ok(sink)
    }

    /// Downloads the gradients that the host accumulates, and runs the instructions that wait for earlier downloads
    /// while the GPU is busy. Waits for gradients that must be added to ones on the host.
    pub(crate) fn bring(&mut self, layer: LayerId, made: Gradients) -> Result<(), ZeroError> {
        let layout = self.layout.clone();
        let ids = &layout.shape().layers[layer].segments;
        let leaves = |id: SegmentId| layout.segments()[id].pieces.iter().map(|piece| self.leaf(piece.parameter));
        let written: Vec<Vec<bool>> =
            ids.iter().map(|&id| leaves(id).map(|leaf| made.is_written(leaf)).collect()).collect();
        let is_first =
            |(&id, written): (&SegmentId, &Vec<bool>)| self.segments[id].open.is_none() && !written.contains(&false);
        let added: Vec<SegmentId> = ids
            .iter()
            .zip(&written)
            .filter(|&(id, written)| !self.is_resident(*id) && !is_first((id, written)))
            .map(|(&id, _)| id)
            .collect();
        if !added.is_empty() {
            let leaves: Vec<TensorId> = added.iter().flat_map(|&id| leaves(id)).collect();
            let (added, mut host) = self.sink(added.clone())?;
            host.bring(&made, &leaves)?;
            self.keep_open(added, host);
        }
        for ((&id, buffer), written) in ids.iter().zip(made.into_flat()).zip(written) {
            let FlatBuffer::Device(array) = buffer else { return Err(elsewhere()) };
            if self.is_resident(id) {
                self.segments[id].open = Some(Open::new(FlatBuffer::Device(array), written));
            } else if !added.contains(&id) {
                self.ledger.add(Category::Staging, array.len(), 4);
                let dtype = self.arrives_in(id);
                let staging = self.staging.as_mut().ok_or_else(elsewhere)?;
                self.segments[id].open = Some(Open::arriving(staging.download(array, dtype)?, written.len()));
            }
        }
        self.catch_up()
    }

    /// Returns the dtype in which a micro-batch's gradient is downloaded. A gradient that is reduced without further
    /// sums is first rounded to the communication dtype, so the GPU may do that with the same bits. This does not hold
    /// if the host accumulates micro-batches, or contributions of several layers.
    fn arrives_in(&self, id: SegmentId) -> DType {
        let is_sharded = self.layout.segments()[id].placements.gradients == Placement::Sharded;
        let layers = self.layout.shape().layers.iter().filter(|layer| layer.segments.contains(&id));
        if is_sharded && layers.count() == 1 { self.options.communication } else { DType::F32 }
    }

    /// Uploads host values to the GPU, for all work queued on its stream from now on.
    pub(crate) fn uploaded(&mut self, values: &CpuStorage) -> Result<Storage, ZeroError> {
        let staging = self.staging.as_mut().ok_or_else(elsewhere)?;
        Ok(Storage::Cuda(staging.upload(values)?))
    }

    fn leaf(&self, parameter: usize) -> TensorId {
        self.model.parameters()[parameter].leaf().id()
    }

    /// Returns the sum of squares of this rank's share of the reduced gradients on the GPU. Waits for the GPU.
    pub(crate) fn squares_on_gpu(&mut self) -> Result<ExactSum, ZeroError> {
        self.with_gradients_on_gpu(|norms, gradients| Ok(norms.sum(gradients)?))
    }

    /// Computes and judges the norm on the GPU, which holds all gradients.
    pub(crate) fn judge_on_gpu(&mut self, limits: &Limits) -> Result<(), ZeroError> {
        self.with_gradients_on_gpu(|norms, gradients| Ok(norms.judge(gradients, limits)?))
    }

    /// Returns the verdict of the norm computed on the GPU.
    pub(crate) fn verdict_of_gpu(&mut self) -> Result<Verdict, ZeroError> {
        Ok(self.norms.as_mut().ok_or_else(elsewhere)?.verdict()?)
    }

    fn with_gradients_on_gpu<T>(
        &mut self,
        then: impl FnOnce(&mut Norms, &[Part<'_>]) -> Result<T, ZeroError>,
    ) -> Result<T, ZeroError> {
        let owned: Vec<SegmentId> =
            (0..self.segments.len()).filter(|&id| self.owns(id) && self.is_resident(id)).collect();
        owned.iter().try_for_each(|&id| self.settle(id))?;
        let mut parts = vec![];
        for &id in &owned {
            let segment = &self.layout.segments()[id];
            let shard = segment.shard(self.comm.rank());
            let Some(FlatBuffer::Device(gradients)) = &self.segments[id].reduced else { return Err(elsewhere()) };
            let offset = segment.begin_in_gradients(&shard);
            let gradients = Part::read(gradients)?;
            for (_, _, at) in segment.overlaps(shard) {
                parts.push(gradients.at(at.start + offset..at.end + offset)?);
            }
        }
        then(self.norms.as_mut().ok_or_else(elsewhere)?, &parts)
    }

    /// Runs the optimizer step on this rank's part of the given segments, whose state is all on the GPU.
    pub(crate) fn update_on_gpu(&mut self, ids: &[SegmentId], lr: f64) -> Result<(), ZeroError> {
        let (device, scale) = (self.gpu()?.clone(), self.scale()?);
        let Some(grad_scale) = scale else { return Ok(()) };
        let own: Vec<Range<usize>> = (0..self.segments.len()).map(|id| self.own_range(id)).collect();
        let Self { layout, model, segments, options, norms, judged, updates, .. } = self;
        let factors =
            [true, false].map(|decay| options.optimizer.factors(&Step { step: *updates + 1, lr, grad_scale, decay }));
        let mut updated = vec![];
        for (id, state) in segments.iter_mut().enumerate().filter(|(id, _)| ids.contains(id)) {
            let SegmentState { reduced, optimizer, master, shard, .. } = state;
            let (segment, own) = (&layout.segments()[id], own[id].clone());
            let Some(FlatBuffer::Device(gradients)) = reduced else { return Err(elsewhere()) };
            let (offset, gradients) = (segment.begin_in_gradients(&own), Part::read(gradients)?);
            let states = optimizer.iter_mut().map(|kind| match kind {
                FlatBuffer::Device(kind) => Ok(Part::write(kind)?),
                FlatBuffer::Host(_) => Err(elsewhere()),
            });
            let states = states.collect::<Result<Vec<_>, ZeroError>>()?;
            let master = match master {
                FlatBuffer::Device(master) if !master.is_empty() => Some(Part::write(master)?),
                _ => None,
            };
            let shard = match shard {
                Some(Storage::Cuda(shard)) => Some(Part::of_shard(shard)?),
                Some(_) => return Err(elsewhere()),
                None => None,
            };
            for (parameter, inside, at) in segment.overlaps(own) {
                let parameter = &model.parameters()[parameter];
                let values = match shard {
                    Some(shard) => shard.at(at.clone())?,
                    None => Part::of_leaf(parameter.leaf())?.at(inside)?,
                };
                let master = master.map(|master| master.at(at.clone())).transpose()?;
                updated.push(Updated {
                    parameters: master.unwrap_or(values),
                    states: states.iter().map(|state| state.at(at.clone())).collect::<Result<_, _>>()?,
                    gradients: gradients.at(at.start + offset..at.end + offset)?,
                    working: master.is_some().then_some(values),
                    decay: options.decay_all || parameter.shape().dims().len() >= 2,
                });
            }
        }
        let norms = norms.as_ref().filter(|_| matches!(judged, Some(Judged::OnGpu)));
        Ok(step_on_gpu(&device, factors.each_ref(), &updated, norms)?)
    }
}

/// Rounds new values to the parameter's dtype and writes them over a range of a parameter on a GPU, after the work
/// queued on its stream.
pub(crate) fn refill(
    parameter: &Parameter,
    range: Range<usize>,
    master: &[f32],
    staging: &mut Option<Staging>,
) -> Result<(), ZeroError> {
    let staging = staging.as_mut().ok_or_else(elsewhere)?;
    let values = Storage::Cuda(staging.upload(&working(master.to_vec(), parameter.dtype()))?);
    if range.len() == parameter.elements() {
        parameter.put(values)?;
    } else {
        crate::parameters::overwrite(parameter, range.clone(), &values, 0..range.len())?;
        drop(values);
    }
    // Either the old storage or the uploaded values have been freed.
    staging.released();
    Ok(())
}

fn elsewhere() -> ZeroError {
    ZeroError::internal("state that should be on a GPU is on the host")
}
