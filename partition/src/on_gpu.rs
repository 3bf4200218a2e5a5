//! Layers that run on a GPU: downloads their gradients if the host accumulates them, and computes norm and update on
//! the GPU if their state is there.

use std::ops::Range;

use candle_core::{DType, Storage, TensorId};
use zero_model::Parameter;
use zero_model::sink::{FlatBuffer, Gradients};
use zero_optim::Step;
use zero_pipeline::{LayerId, Placement, SegmentId};

use crate::error::ZeroError;
use crate::gpu::{self, Gpu, elsewhere};
use crate::gradients::Open;
use crate::ledger::Category;
use crate::rounding::working;
use crate::update::Judged;
use crate::zero::ShardedState;

impl ShardedState {
    /// Returns whether the GPU computes gradients that the host accumulates, for any segment.
    pub(crate) fn brings_gradients(&self) -> bool {
        self.gpu.is_some() && self.residents.contains(&false)
    }

    /// Creates a sink on the GPU for the gradients of a layer's parameters, for one backward. Segments with state on
    /// the GPU use their open gradients.
    pub(crate) fn sink_on_gpu(&mut self, layer: LayerId) -> Result<Gradients, ZeroError> {
        let layout = self.layout.clone();
        let mut sink = Gradients::default();
        for &id in &layout.shape().layers[layer].segments {
            let segment = &layout.segments()[id];
            let (buffer, written) = match self.is_resident(id) {
                true => self.opened(id)?.into_parts(),
                false => (self.gpu()?.room(segment.elements())?, vec![false; segment.pieces.len()]),
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
            let mut host = self.sink(&added)?;
            gpu::add_to_host(&mut host, &made, &leaves)?;
            self.keep_open(&added, host);
        }
        for ((&id, buffer), written) in ids.iter().zip(made.into_flat()).zip(written) {
            if self.is_resident(id) {
                self.segments[id].open = Some(Open::new(buffer, written));
            } else if !added.contains(&id) {
                self.ledger.add(Category::Staging, buffer.len(), 4);
                let dtype = self.arrives_in(id);
                let arriving = self.gpu_mut()?.start_download(buffer, dtype)?;
                self.segments[id].open = Some(Open::arriving(arriving, written.len()));
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

    /// Passes this rank's share of the reduced gradients on the GPU to `then`, as ranges of buffers.
    pub(crate) fn with_gradients_on_gpu<T>(
        &mut self,
        then: impl FnOnce(&mut Gpu, &[(&FlatBuffer, Vec<Range<usize>>)]) -> Result<T, ZeroError>,
    ) -> Result<T, ZeroError> {
        let owned: Vec<SegmentId> =
            (0..self.segments.len()).filter(|&id| self.owns(id) && self.is_resident(id)).collect();
        owned.iter().try_for_each(|&id| self.settle(id))?;
        let mut gradients = vec![];
        for &id in &owned {
            let segment = &self.layout.segments()[id];
            let shard = segment.shard(self.comm.rank());
            let offset = segment.begin_in_gradients(&shard);
            let ranges = segment.overlaps(shard).map(|(_, _, at)| at.start + offset..at.end + offset);
            gradients.push((self.segments[id].reduced.as_ref().ok_or_else(elsewhere)?, ranges.collect()));
        }
        then(self.gpu.as_mut().ok_or_else(elsewhere)?, &gradients)
    }

    /// Runs the optimizer step on this rank's part of the given segments, whose state is all on the GPU.
    pub(crate) fn update_on_gpu(&mut self, ids: &[SegmentId], lr: f64) -> Result<(), ZeroError> {
        let Some(grad_scale) = self.scale()? else { return Ok(()) };
        let own: Vec<Range<usize>> = (0..self.segments.len()).map(|id| self.own_range(id)).collect();
        let Self { layout, model, segments, options, gpu, judged, updates, .. } = self;
        let gpu = gpu.as_ref().ok_or_else(elsewhere)?;
        let factors =
            [true, false].map(|decay| options.optimizer.factors(&Step { step: *updates + 1, lr, grad_scale, decay }));
        let mut updated = vec![];
        for (id, state) in segments.iter_mut().enumerate().filter(|(id, _)| ids.contains(id)) {
            updated.extend(gpu.to_update(&layout.segments()[id], state, own[id].clone(), model, options.decay_all)?);
        }
        gpu.step(factors.each_ref(), &updated, matches!(judged, Some(Judged::OnGpu)))
    }
}

/// Rounds new values to the parameter's dtype and writes them over a range of a parameter on a GPU, after the work
/// queued on its stream.
pub(crate) fn refill(
    parameter: &Parameter,
    range: Range<usize>,
    master: &[f32],
    gpu: Option<&mut Gpu>,
) -> Result<(), ZeroError> {
    let gpu = gpu.ok_or_else(elsewhere)?;
    let values: Storage = gpu.upload_staged(&working(master.to_vec(), parameter.dtype()))?;
    if range.len() == parameter.elements() {
        parameter.put(values)?;
    } else {
        crate::parameters::overwrite(parameter, range.clone(), &values, 0..range.len())?;
        drop(values);
    }
    // Either the old storage or the uploaded values have been freed.
    gpu.released();
    Ok(())
}
