//! Computes the gradient norm and runs the optimizer step.

use std::ops::Range;

use candle_core::{CpuStorage, Storage};
use zero_comm::{Buffer, ReduceOp};
use zero_model::sink::FlatBuffer;
use zero_optim::norm::{Limits, Verdict};
use zero_optim::{ExactSum, Step};
use zero_pipeline::{Placement, SegmentId};
use zero_tier::AlignedBuffer;

use crate::disk::{Tile, stride};
use crate::error::ZeroError;
use crate::gpu::Gpu;
use crate::ledger::Category;
use crate::on_gpu::refill;
use crate::parameters::copy;
use crate::rounding::{round_bytes, round_to, working};
use crate::threads::{add_parameter_range, update};
use crate::zero::ShardedState;

/// Location of the verdict on the current step's gradient norm.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Judged {
    Here(Verdict),
    /// Still on the GPU; the host does not wait for it.
    OnGpu,
}

impl ShardedState {
    /// Computes the norm of all reduced gradients and checks it against `limits`. Collective: every rank must call it.
    /// The norm is bit-identical for every layout. Updates act on the verdict, which [`ShardedState::finish_step`]
    /// returns.
    ///
    /// # Errors
    /// Returns the error of the collective.
    pub fn gradient_norm(&mut self, limits: &Limits) -> Result<(), ZeroError> {
        let has_residents = self.residents.contains(&true);
        if self.groups.world().size() == 1 && has_residents && !self.brings_gradients() {
            self.with_gradients_on_gpu(|gpu, gradients| gpu.judge(gradients, limits))?;
            self.judged = Some(Judged::OnGpu);
            return Ok(());
        }
        let mut sum = match has_residents {
            true => self.with_gradients_on_gpu(Gpu::squares)?,
            false => ExactSum::new(),
        };
        let rank = self.comm.rank();
        let owned: Vec<SegmentId> = (0..self.segments.len()).filter(|&id| self.owns(id)).collect();
        for id in owned {
            if self.disk.is_some()
                && let Some(squares) = self.segments[id].squares.take()
            {
                sum.merge(&squares);
                continue;
            }
            self.settle(id)?;
            let segment = &self.layout.segments()[id];
            let shard = segment.shard(rank);
            // With replicated gradients too, each rank sums only its shard, so that no element is counted twice.
            let offset = segment.begin_in_gradients(&shard);
            // Gradients on a GPU are already in the sum.
            let Some(gradients) = self.segments[id].reduced.as_ref().and_then(FlatBuffer::host) else { continue };
            for (_, _, at) in segment.overlaps(shard) {
                add_parameter_range(&mut sum, &gradients[at.start + offset..at.end + offset]);
            }
        }
        self.drop_buffers();
        let limbs = Buffer::I64(sum.limbs().to_vec());
        let Buffer::I64(limbs) = self.groups.world().all_reduce(limbs, ReduceOp::Sum).wait()? else {
            return Err(ZeroError::internal("a collective gave back another dtype"));
        };
        self.judged = Some(Judged::Here(limits.judge(&ExactSum::from_limbs(&limbs)?)));
        Ok(())
    }

    /// Returns the factor by which the host scales gradients; `None` if the step is skipped. On a GPU, the kernels
    /// apply the verdict's factor themselves.
    pub(crate) fn scale(&self) -> Result<Option<f32>, ZeroError> {
        match self.judged {
            Some(Judged::Here(verdict)) => Ok(verdict.is_admitted.then_some(verdict.scale)),
            Some(Judged::OnGpu) => Ok(Some(1.0)),
            None => Err(ZeroError::internal("an update without a gradient norm")),
        }
    }

    /// Runs the optimizer step on this rank's part of a segment, or skips it if the norm was not admitted, and frees
    /// the gradients. On a GPU, one launch updates several segments, at the latest in
    /// [`ShardedState::carry_out_updates`].
    ///
    /// # Errors
    /// Fails if the gradients are not reduced.
    pub fn update(&mut self, id: SegmentId, lr: f64) -> Result<(), ZeroError> {
        if self.scale()?.is_none() {
            return self.discard(id);
        }
        if self.is_resident(id) {
            self.updating.push(id);
            return Ok(());
        }
        let own = 0..self.own_range(id).len();
        self.update_part(id, own, &mut Tile::empty(), lr)?;
        self.discard(id)
    }

    /// Runs the pending updates on the GPU, in as few launches as possible.
    ///
    /// # Errors
    /// Returns the error of the GPU driver.
    pub fn carry_out_updates(&mut self, lr: f64) -> Result<(), ZeroError> {
        if self.updating.is_empty() {
            return Ok(());
        }
        let ids = std::mem::take(&mut self.updating);
        self.update_on_gpu(&ids, lr)?;
        ids.into_iter().try_for_each(|id| self.discard(id))
    }

    /// Runs the optimizer step on `part` of this rank's part of a segment. Uses the values in `tile`, and memory for
    /// the rest.
    pub(crate) fn update_part(
        &mut self,
        id: SegmentId,
        part: Range<usize>,
        tile: &mut Tile<AlignedBuffer>,
        lr: f64,
    ) -> Result<(), ZeroError> {
        let Some(grad_scale) = self.scale()? else { return Ok(()) };
        let own = self.own_range(id);
        let states = self.options.optimizer.states().len();
        let Self { layout, model, segments, options, gpu, .. } = self;
        let (segment, state) = (&layout.segments()[id], &mut segments[id]);
        let is_sharded = segment.placements.optimizer == Placement::Sharded;
        let is_refreshed = self.comm.size() > 1 && tile.state.is_none() && is_sharded;
        let gradients: &[f32] = match (&tile.gradients, &state.reduced) {
            (Some(buffer), _) => buffer.as_f32(),
            (None, Some(reduced)) => {
                let offset = segment.begin_in_gradients(&own);
                &on_host(reduced.host())?[part.start + offset..part.end + offset]
            }
            (None, None) => return Err(ZeroError::internal("update of gradients that are not reduced")),
        };
        // Optimizer states, and the master last: from the tile's buffer or from memory.
        let mut kinds: Vec<&mut [f32]> = match &mut tile.state {
            Some(buffer) => buffer.as_f32_mut().chunks_mut(stride(part.len()) / 4).collect(),
            None => {
                let master = (!state.master.is_empty()).then_some(&mut state.master);
                let kinds = state.optimizer.iter_mut().chain(master);
                kinds.map(|kind| Ok(&mut on_host(kind.host_mut())?[part.clone()])).collect::<Result<_, ZeroError>>()?
            }
        };
        let mut master = (kinds.len() > states).then(|| kinds.pop()).flatten();
        for (parameter, inside, at) in segment.overlaps(own.start + part.start..own.start + part.end) {
            let parameter = &model.parameters()[parameter];
            let decay = options.decay_all || parameter.shape().dims().len() >= 2;
            let step = Step { step: self.updates + 1, lr, grad_scale, decay };
            let mut moments: Vec<&mut [f32]> = kinds.iter_mut().map(|kind| &mut kind[at.clone()]).collect();
            let mut run =
                |values: &mut [f32]| update(&options.optimizer, &step, values, &gradients[at.clone()], &mut moments);
            let (in_tile, in_shard) = (at.clone(), part.start + at.start..part.start + at.end);
            if let Some(master) = &mut master {
                let master = &mut master[at.clone()];
                run(master)?;
                match (&mut tile.parameters, &mut state.shard) {
                    (Some(buffer), _) => round_bytes(master, parameter.dtype(), buffer.as_bytes_mut(), in_tile)?,
                    (None, Some(Storage::Cpu(shard))) => round_to(master, shard, in_shard)?,
                    (None, Some(shard)) => {
                        let rounded = Storage::Cpu(working(master.to_vec(), parameter.dtype()));
                        copy(&rounded, 0..in_shard.len(), shard, in_shard)?;
                    }
                    // A refresh will gather these parameters from the masters.
                    _ if parameter.is_on_gpu() && is_refreshed => {}
                    _ if parameter.is_on_gpu() => refill(parameter, inside, master, gpu.as_mut())?,
                    _ => parameter.update(|full| round_to(master, full, inside).map_err(candle_core::Error::wrap))?,
                }
                continue;
            }
            match (&mut tile.parameters, &mut state.shard) {
                (Some(buffer), _) => run(&mut buffer.as_f32_mut()[in_tile])?,
                (None, Some(Storage::Cpu(CpuStorage::F32(shard)))) => run(&mut shard[in_shard])?,
                _ => parameter.update(|values| match values {
                    CpuStorage::F32(full) => run(&mut full[inside]).map_err(candle_core::Error::wrap),
                    _ => candle_core::bail!("a released parameter cannot be updated"),
                })?,
            }
        }
        Ok(())
    }

    /// Ends the step, and counts it if its norm was admitted. On a GPU, this waits for all work queued on its stream.
    /// Returns the verdict; `None` if there was no norm since the last call.
    ///
    /// # Errors
    /// Returns the error of the GPU.
    pub fn finish_step(&mut self) -> Result<Option<Verdict>, ZeroError> {
        let verdict = match self.judged.take() {
            None => return Ok(None),
            Some(Judged::Here(verdict)) => verdict,
            Some(Judged::OnGpu) => self.gpu_mut()?.verdict()?,
        };
        if verdict.is_admitted {
            self.drop_buffers();
            self.updates += 1;
        }
        Ok(Some(verdict))
    }

    /// Frees a segment's reduced gradients, after an update or in a skipped step.
    ///
    /// # Errors
    /// Fails if the gradients are not reduced.
    pub fn discard(&mut self, id: SegmentId) -> Result<(), ZeroError> {
        let gradients = self.take_reduced(id)?;
        self.done_with(id, gradients);
        Ok(())
    }

    pub(crate) fn take_reduced(&mut self, id: SegmentId) -> Result<FlatBuffer, ZeroError> {
        let gradients = self.segments[id].reduced.take();
        let gradients = gradients.ok_or_else(|| ZeroError::internal("update of gradients that are not reduced"))?;
        self.ledger.remove(Category::Gradients, gradients.len(), 4);
        Ok(gradients)
    }
}

fn on_host<T>(values: Option<T>) -> Result<T, ZeroError> {
    values.ok_or_else(|| ZeroError::internal("state that is on a GPU was to be updated on the host"))
}
