//! The gradient norm and the optimizer step.

use candle_core::{CpuStorage, DType};
use zero_comm::{Buffer, ReduceOp};
use zero_optim::norm::clip_coefficient;
use zero_optim::{ExactSum, Step, write_bf16};
use zero_pipeline::{Placement, SegmentId};

use crate::error::ZeroError;
use crate::ledger::Category;
use crate::threads::{add_parameter_range, update};
use crate::zero::Zero;

/// The global gradient norm of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    /// L2 norm of all gradients before clipping; not a number or infinite if a gradient is.
    pub norm: f64,
    /// What the gradients are multiplied with before the update; 1 without clipping.
    pub clip: f64,
}

impl Norm {
    /// Whether the step can be taken.
    #[must_use]
    pub fn is_finite(&self) -> bool {
        self.norm.is_finite()
    }
}

impl Zero {
    /// The norm of all reduced gradients, the same bits for every layout; a collective.
    ///
    /// # Errors
    /// What the collective says.
    pub fn gradient_norm(&mut self) -> Result<Norm, ZeroError> {
        let mut sum = ExactSum::new();
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
            // Where gradients are replicated, every rank sums its shard all the same: none is counted twice.
            let held = match segment.placements.gradients {
                Placement::Replicated => 0..segment.elements(),
                Placement::Sharded => shard.clone(),
            };
            let gradients = self.segments[id].reduced.as_deref().unwrap_or_default();
            for (_, _, at) in segment.overlaps(shard.clone()) {
                let offset = shard.start - held.start;
                add_parameter_range(&mut sum, &gradients[at.start + offset..at.end + offset]);
            }
        }
        self.drop_buffers();
        let limbs = Buffer::I64(sum.limbs().to_vec());
        let Buffer::I64(limbs) = self.groups.world().all_reduce(limbs, ReduceOp::Sum).wait()? else {
            return Err(ZeroError::internal("a collective gave back another dtype"));
        };
        let norm = ExactSum::from_limbs(&limbs)?.to_f64().sqrt();
        let clip = match self.options.gradient_clipping {
            max if max > 0.0 => clip_coefficient(norm, max),
            _ => 1.0,
        };
        self.grad_scale = clip as f32;
        Ok(Norm { norm, clip })
    }

    /// The optimizer step on this rank's part of a segment; its gradients are done with.
    ///
    /// # Errors
    /// If the gradients are not reduced.
    pub fn update(&mut self, id: SegmentId, lr: f64) -> Result<(), ZeroError> {
        let gradients = self.take_reduced(id)?;
        let segment = &self.layout.segments()[id];
        let own = self.own_range(id);
        let offset = match segment.placements.gradients {
            Placement::Replicated => own.start,
            Placement::Sharded => 0,
        };
        let state = &mut self.segments[id];
        for (parameter, inside, at) in segment.overlaps(own) {
            let parameter = &self.model.parameters()[parameter];
            let decay = self.options.decay_all || parameter.shape().dims().len() >= 2;
            let step = Step { step: self.updates + 1, lr, grad_scale: self.grad_scale, decay };
            let gradients = &gradients[at.start + offset..at.end + offset];
            let mut moments: Vec<&mut [f32]> = state.optimizer.iter_mut().map(|s| &mut s[at.clone()]).collect();
            let mut run = |values: &mut [f32]| update(&self.options.optimizer, &step, values, gradients, &mut moments);
            match (self.dtype, &mut state.shard) {
                (DType::BF16, _) => {
                    let master = &mut state.master[at.clone()];
                    run(master)?;
                    match &mut state.shard {
                        Some(CpuStorage::BF16(shard)) => write_bf16(master, &mut shard[at])?,
                        _ => parameter.update(|values| match values {
                            CpuStorage::BF16(full) => {
                                write_bf16(master, &mut full[inside]).map_err(candle_core::Error::wrap)
                            }
                            _ => candle_core::bail!("a released parameter cannot be updated"),
                        })?,
                    }
                }
                (_, Some(CpuStorage::F32(shard))) => run(&mut shard[at])?,
                (_, None) => parameter.update(|values| match values {
                    CpuStorage::F32(full) => run(&mut full[inside]).map_err(candle_core::Error::wrap),
                    _ => candle_core::bail!("a released parameter cannot be updated"),
                })?,
                _ => return Err(ZeroError::internal("a shard of another dtype than f32 or bf16")),
            }
        }
        self.done_with(id, gradients);
        Ok(())
    }

    /// Counts the step: all segments are updated.
    pub fn finish_step(&mut self) {
        self.drop_buffers();
        self.updates += 1;
    }

    /// Drops a segment's reduced gradients: the step is skipped.
    ///
    /// # Errors
    /// If they are not reduced.
    pub fn discard(&mut self, id: SegmentId) -> Result<(), ZeroError> {
        let gradients = self.take_reduced(id)?;
        self.done_with(id, gradients);
        Ok(())
    }

    pub(crate) fn take_reduced(&mut self, id: SegmentId) -> Result<Vec<f32>, ZeroError> {
        let gradients = self.segments[id].reduced.take();
        let gradients = gradients.ok_or_else(|| ZeroError::internal("update of gradients that are not reduced"))?;
        self.ledger.remove(Category::Gradients, gradients.len(), 4);
        Ok(gradients)
    }
}
