//! Layers that run on a GPU: their gradients, on the way to the memory of the host where they are added up there; and norm and update where
//! all of that is on the GPU.

use std::ops::Range;

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, Storage, TensorId};
use zero_model::Parameter;
use zero_model::device::optimizer::{Part, SquareSums, step as step_on_gpu};
use zero_model::device::{Array, Staging};
use zero_model::sink::{Flat, Gradients};
use zero_optim::{ExactSum, Step};
use zero_pipeline::{LayerId, SegmentId};

use crate::error::ZeroError;
use crate::gradients::{Open, no_gradient};
use crate::layout::Piece;
use crate::ledger::Category;
use crate::rounding::working;
use crate::zero::Zero;

impl Zero {
    /// Whether gradients are made on a GPU and added up on the host, all of them or some.
    pub(crate) fn brings_gradients(&self) -> bool {
        self.model.device().is_cuda() && self.residents.contains(&false)
    }

    /// [`Zero::backward`] on a GPU: gradients are made there, and sent to the host.
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

    /// Whether another layer's backward has a part of a tied parameter's gradient.
    fn has_contribution(&self, layer: LayerId, parameter: &Parameter) -> bool {
        self.layout.shape().layers[layer].segments.iter().any(|&id| {
            let pieces = &self.layout.segments()[id].pieces;
            let is_it = |piece: &Piece| self.leaf(piece.parameter) == parameter.leaf().id();
            let place = pieces.iter().position(is_it);
            place.is_some_and(|place| self.segments[id].open.as_ref().is_some_and(|open| open.is_written(place)))
        })
    }

    /// Places on the GPU for the gradients of a layer's parameters, for one backward: their own where they stay there.
    pub(crate) fn sink_on_gpu(&mut self, layer: LayerId) -> Result<Gradients, ZeroError> {
        let (layout, device) = (self.layout.clone(), self.gpu()?.clone());
        let mut sink = Gradients::default();
        for &id in &layout.shape().layers[layer].segments {
            let segment = &layout.segments()[id];
            let (buffer, written) = match self.is_resident(id) {
                true => self.opened(id)?.into_parts(),
                false => (Flat::Device(Array::room(&device, segment.elements())?), vec![false; segment.pieces.len()]),
            };
            let pieces = segment.pieces.iter().zip(written);
            let places = pieces.map(|(piece, written)| (self.leaf(piece.parameter), piece.range.clone(), written));
            sink.add_buffer(buffer, places.collect::<Vec<_>>());
        }
        Ok(sink)
    }

    /// Sends what was made on the GPU to the host, as far as it does not stay, and carries out what waited for what was sent before: the
    /// GPU has something to do meanwhile. What is to be added to what the host has already is waited for.
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
            let Flat::Device(array) = buffer else { return Err(elsewhere()) };
            if self.is_resident(id) {
                self.segments[id].open = Some(Open::new(Flat::Device(array), written));
            } else if !added.contains(&id) {
                self.ledger.add(Category::Staging, array.len(), 4);
                let staging = self.staging.as_mut().ok_or_else(elsewhere)?;
                self.segments[id].open = Some(Open::arriving(staging.download(array)?, written.len()));
            }
        }
        self.catch_up()
    }

    /// A copy on the GPU of what the host has, for all that is put on its stream from now on.
    pub(crate) fn uploaded(&mut self, values: &CpuStorage) -> Result<Storage, ZeroError> {
        let staging = self.staging.as_mut().ok_or_else(elsewhere)?;
        Ok(Storage::Cuda(staging.upload(values)?))
    }

    fn leaf(&self, parameter: usize) -> TensorId {
        self.model.parameters()[parameter].leaf().id()
    }

    /// What the norm needs of this rank's share of the reduced gradients that are on the GPU.
    pub(crate) fn squares_on_gpu(&mut self) -> Result<ExactSum, ZeroError> {
        let owned: Vec<SegmentId> =
            (0..self.segments.len()).filter(|&id| self.owns(id) && self.is_resident(id)).collect();
        let (mut elements, mut pieces) = (0, 0);
        for &id in &owned {
            self.settle(id)?;
            let segment = &self.layout.segments()[id];
            elements += segment.shard(self.comm.rank()).len();
            pieces += segment.pieces.len();
        }
        let mut sums = SquareSums::room(self.gpu()?, elements, pieces)?;
        for &id in &owned {
            let segment = &self.layout.segments()[id];
            let shard = segment.shard(self.comm.rank());
            let Some(Flat::Device(gradients)) = &self.segments[id].reduced else { return Err(elsewhere()) };
            let offset = segment.begin_in_gradients(&shard);
            for (_, _, at) in segment.overlaps(shard) {
                sums.add(Part::read(gradients, at.start + offset..at.end + offset)?)?;
            }
        }
        let mut sum = ExactSum::new();
        sums.to_host()?.into_iter().for_each(|squares| sum.add(squares));
        Ok(sum)
    }

    /// The optimizer step on this rank's part of a segment, all of which is on the GPU.
    pub(crate) fn update_on_gpu(&mut self, id: SegmentId, lr: f64) -> Result<(), ZeroError> {
        let (own, device) = (self.own_range(id), self.gpu()?.clone());
        let Self { layout, model, segments, options, .. } = self;
        let (segment, state) = (&layout.segments()[id], &mut segments[id]);
        let Some(Flat::Device(gradients)) = &state.reduced else { return Err(elsewhere()) };
        let offset = segment.begin_in_gradients(&own);
        for (parameter, inside, at) in segment.overlaps(own) {
            let parameter = &model.parameters()[parameter];
            let decay = options.decay_all || parameter.shape().dims().len() >= 2;
            let step = Step { step: self.updates + 1, lr, grad_scale: self.grad_scale, decay };
            let factors = options.optimizer.factors(&step);
            let gradients = Part::read(gradients, at.start + offset..at.end + offset)?;
            let states = state.optimizer.iter_mut().map(|kind| match kind {
                Flat::Device(kind) => Ok(Part::write(kind, at.clone())?),
                Flat::Host(_) => Err(elsewhere()),
            });
            let states = states.collect::<Result<Vec<_>, ZeroError>>()?;
            let values = match &mut state.shard {
                Some(Storage::Cuda(shard)) => Part::of_shard(shard, at.clone())?,
                Some(_) => return Err(elsewhere()),
                None => Part::of_leaf(parameter.leaf(), inside)?,
            };
            match &mut state.master {
                Flat::Device(master) if !master.is_empty() => {
                    step_on_gpu(&device, &factors, Part::write(master, at)?, &states, gradients, Some(values))?;
                }
                _ => step_on_gpu(&device, &factors, values, &states, gradients, None)?,
            }
        }
        Ok(())
    }
}

/// Puts new values, rounded to the parameter's type, over a range of a parameter on a GPU, behind what is on its stream.
pub(crate) fn refill(
    parameter: &Parameter,
    range: Range<usize>,
    master: &[f32],
    staging: &mut Option<Staging>,
) -> Result<(), ZeroError> {
    let staging = staging.as_mut().ok_or_else(elsewhere)?;
    let values = staging.upload(&working(master.to_vec(), parameter.dtype()))?;
    if range.len() == parameter.elements() {
        parameter.put(Storage::Cuda(values))?;
        return Ok(());
    }
    crate::parameters::overwrite(parameter, range.clone(), &Storage::Cuda(values), 0..range.len())
}

fn elsewhere() -> ZeroError {
    ZeroError::internal("state that should be on a GPU is on the host")
}
