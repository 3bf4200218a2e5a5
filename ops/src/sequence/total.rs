//! Sums over the slices of sequences, for values of whole sequences such as the log-probability of an answer.

use super::{SequenceGroup, Sharing};
use crate::graph::apply::apply;
use crate::graph::op::{Inputs, Op};
use crate::graph::operand::f32s;
use crate::graph::output::tensor;
use crate::measure;
use crate::meta::footprint::{Costs, Exchanged, Footprint, Reads, floats};
use candle_core::{CpuStorage, DType, Result, Shape, Tensor, bail};

/// Sums a tensor of f32 over the slices of the sequences: each rank computes `x` from its own slice, and all ranks that
/// share the sequences get the same sum. Returns `x` itself if sequences are whole.
///
/// Losses that are computed from the sum are the same on all these ranks, which average them. The backward therefore
/// multiplies the gradient by the number of slices.
///
/// # Errors
/// Fails for another dtype, on a GPU, in a layer that does not declare exchanges, and if a rank is lost.
pub fn sum_of_slices(x: &Tensor) -> Result<Tensor> {
    // The ranks of a tensor group compute the same values from gathered sequences.
    let current = SequenceGroup::current();
    let Some(group) = current.as_ref().and_then(SequenceGroup::of_batch).filter(|group| group.slices() > 1) else {
        return Ok(x.clone());
    };
    group.may_exchange()?;
    if x.dtype() != DType::F32 {
        bail!("{OP}: expected f32, got {:?}", x.dtype());
    }
    apply([x], SumOfSlices(group.clone()))
}

const OP: &str = "sum-of-slices";

/// Sums over a group, and then over its outer group.
struct SumOfSlices(SequenceGroup);

impl SumOfSlices {
    fn groups(&self) -> impl Iterator<Item = &SequenceGroup> {
        [Some(&self.0), self.0.outer()].into_iter().flatten()
    }
}

impl Footprint for SumOfSlices {
    const READS: Reads = Reads::NOTHING;

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let count = inputs[0].elem_count();
        let received = self.groups().map(|group| group.size).max().unwrap_or(0);
        let sent = self.groups().fold(Exchanged::default(), |sum, group| {
            let bytes = floats((group.size - 1) * count);
            sum + if group.sharing == Sharing::Heads {
                Exchanged::to_heads(bytes)
            } else {
                Exchanged::to_queries(bytes)
            }
        });
        Ok(Costs {
            forward: floats((1 + received) * count),
            backward: floats(count),
            exchanged: [sent, Exchanged::default()],
            ..Costs::new(inputs[0].shape().clone(), DType::F32)
        })
    }
}

impl Op<1> for SumOfSlices {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, [(storage, layout)]: Inputs<'_, CpuStorage, 1>) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(OP);
        let mut sums = f32s(OP, storage, layout)?.into_owned();
        let count = sums.len();
        for group in self.groups() {
            let all = group.concatenated(sums)?;
            let of_ranks = |i: usize| all[i..].iter().step_by(count).map(|&value| f64::from(value)).sum::<f64>() as f32;
            sums = (0..count).map(of_ranks).collect();
        }
        Ok((CpuStorage::F32(sums), layout.shape().clone()))
    }

    fn bwd(&self, [x]: [&Tensor; 1], _: &Tensor, d_sum: &Tensor) -> Result<[Option<Tensor>; 1]> {
        let slices = self.0.slices() as f32;
        let gradient = d_sum.flatten_all()?.to_vec1::<f32>()?.into_iter().map(|d| d * slices).collect();
        Ok([Some(tensor(CpuStorage::F32(gradient), x.shape()))])
    }
}
