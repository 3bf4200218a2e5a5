//! Gathers columns that are split among the ranks of a tensor group, for evaluation.

#[cfg(feature = "cuda")]
use crate::gpu;
use crate::graph::apply::apply;
use crate::graph::op::{Inputs, Op};
use crate::graph::operand::{rows, with_last};
#[cfg(feature = "cuda")]
use crate::graph::storage::take;
use crate::measure;
use crate::meta::footprint::{Costs, Exchanged, Footprint, Reads, bytes};
use crate::sequence::{Element, SequenceGroup, dense, of_element};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Result, Shape, Tensor, WithDType, bail};

/// Gathers the `[.., share]` of all ranks to `[.., columns]`. In rank order, each rank has ⌈columns / ranks⌉
/// consecutive columns; the last ranks may have fewer.
pub(super) fn gather_columns(x: &Tensor, group: &SequenceGroup, columns: usize) -> Result<Tensor> {
    apply([x], GatherColumns { group: group.clone(), columns })
}

const OP: &str = "gather-columns";

struct GatherColumns {
    group: SequenceGroup,
    columns: usize,
}

impl GatherColumns {
    fn shape(&self, own: &Shape) -> Result<Shape> {
        match own.dims().last() {
            Some(share) if *share == self.columns.div_ceil(self.group.size()) => Ok(with_last(own, self.columns)),
            _ => bail!("{OP}: {own:?} is not a share of {} columns", self.columns),
        }
    }

    fn run<T: Element>(&self, own: &[T], shape: &Shape) -> Result<Vec<T>> {
        let (count, share) = rows(OP, shape)?;
        let received = self.group.concatenated(own.to_vec())?;
        let mut all = Vec::with_capacity(count * self.columns);
        for row in 0..count {
            let end = all.len() + self.columns;
            for rank in 0..self.group.size() {
                let at = (rank * count + row) * share;
                all.extend_from_slice(&received[at..at + share.min(end - all.len())]);
            }
        }
        Ok(all)
    }
}

impl Footprint for GatherColumns {
    const READS: Reads = Reads::NOTHING;

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let (elements, dtype) = (inputs[0].elem_count(), inputs[0].dtype());
        let (own, others) = (bytes(elements, dtype), self.group.size() as u64 - 1);
        // The copy that is sent, and the values of all ranks that are received.
        let forward = own * (others + 2);
        Ok(Costs {
            forward,
            exchanged: [own * others, 0].map(Exchanged::to_tensor),
            ..Costs::new(self.shape(inputs[0].shape())?, dtype)
        })
    }
}

impl Op<1> for GatherColumns {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, [(xs, xl)]: Inputs<'_, CpuStorage, 1>) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(OP);
        let shape = xl.shape();
        let all = of_element!(OP, xs.dtype(), T => T::to_cpu_storage_owned(self.run::<T>(&dense(xs, xl)?, shape)?));
        Ok((all, self.shape(shape)?))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, [(xs, xl)]: Inputs<'_, CudaStorage, 1>) -> Result<(CudaStorage, Shape)> {
        let ((count, share), ranks) = (rows(OP, xl.shape())?, self.group.size());
        let all = self.group.gather_on_gpu(&gpu::copied(OP, xs, xl)?)?()?.reshape((ranks, count, share))?;
        let all = all.transpose(0, 1)?.reshape((count, ranks * share))?.narrow(1, 0, self.columns)?.contiguous()?;
        Ok((gpu::storage(take(&all)?)?, self.shape(xl.shape())?))
    }

    fn bwd(&self, _: [&Tensor; 1], _: &Tensor, _: &Tensor) -> Result<[Option<Tensor>; 1]> {
        bail!("{OP}: the logits of classes that are split across ranks have no gradient; let the head compute the loss")
    }
}
