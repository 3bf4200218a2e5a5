//! Module buffers, such as running statistics, in a training step: combines the values that a module wrote for each
//! micro-batch into one value, which is the same on every rank.

use candle_core::{DType, Tensor};
use zero_comm::Buffer;
use zero_model::ModuleBuffer;

use super::Engine;
use crate::error::Error;
use crate::executor::StepOutput;

impl Engine {
    /// Adds to each buffer the mean change over all micro-batches of the global batch. A skipped step changes nothing.
    /// Collective.
    ///
    /// Every micro-batch starts from the same values. The number of ranks therefore affects the result only through the
    /// order of the sum, as for gradients.
    pub(super) fn settle_buffers(&self, outcome: &StepOutput) -> Result<(), Error> {
        let buffers = self.model().buffers();
        let is_admitted = outcome.verdict.is_some_and(|verdict| verdict.is_admitted);
        if buffers.is_empty() || !is_admitted {
            return Ok(());
        }
        let (mesh, own) = (self.stage_plan.mesh, self.zero.groups().at().stage);
        let change = |(index, tensor): (&usize, &Tensor)| {
            let written: Vec<f32> = tensor.to_dtype(DType::F32)?.to_vec1()?;
            let before = buffers[*index].values();
            Ok(written.into_iter().zip(before).map(|(written, before)| written - before).collect())
        };
        let changes = outcome.written.iter().map(|written| {
            let changes: candle_core::Result<Vec<Vec<f32>>> = written.iter().map(change).collect();
            Ok(changes?.concat())
        });
        let mut changes = changes.collect::<Result<Vec<_>, Error>>()?;
        let micro_batches = (self.settings.micro_batches * self.stage_plan.mesh.data()) as f32;
        for stage in 0..mesh.pipe() {
            let of_stage: Vec<&ModuleBuffer> =
                buffers.iter().filter(|buffer| self.stage_plan.stages.stage_of(buffer.layer()) == stage).collect();
            if of_stage.is_empty() {
                continue;
            }
            let mut total = match stage == own {
                true => self.sum_over_micro_batches(std::mem::take(&mut changes))?,
                false => vec![0.0; of_stage.iter().map(|buffer| buffer.shape().elem_count()).sum()],
            };
            if mesh.pipe() > 1 {
                let root = mesh.ranks(stage).start;
                total = self.comm.broadcast(Buffer::F32(total), root).wait()?.into_f32()?;
            }
            let mut total = total.into_iter();
            for buffer in of_stage {
                let mut values = buffer.values();
                values.iter_mut().zip(&mut total).for_each(|(value, total)| *value += total / micro_batches);
                buffer.set(&values)?;
            }
        }
        Ok(())
    }

    /// Fails if an evaluation changed a module buffer.
    pub(super) fn buffers_unchanged(&self) -> Result<(), Error> {
        for buffer in self.model().buffers() {
            if buffer.is_changed()? {
                return Err(Error::ChangedBuffer { name: buffer.name().to_string() });
            }
        }
        Ok(())
    }
}
