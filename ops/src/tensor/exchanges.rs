//! The two exchanges of a tensor group: gathering slices of sequences, and summing whole sequences into slices. Each is
//! the backward of the other.

use super::slices::{OP, Slices, copied, copy_of, host};
#[cfg(feature = "cuda")]
use crate::gpu;
use crate::graph::apply::{applied, apply, in_graph};
use crate::graph::op::{Inputs, Op, leading};
use crate::graph::operand::View;
use crate::graph::output::{build_as, tensor_of};
use crate::graph::storage::{swap, take};
use crate::kernel::Isa;
use crate::linear::affine::bias_gradient;
use crate::measure;
use crate::meta::footprint::{Costs, Exchange, Exchanged, Finish, Footprint, Reads, bytes, rooms};
use crate::meta::tracing;
use crate::sequence::{Element, SequenceGroup, of_element};
use crate::tensor::Along;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, D, Layout, Result, Shape, Storage, Tensor, WithDType, bail};
use zero_comm::Gathered;

/// Gathers the slices of all ranks, `[batch, slice, …]`, along positions to `[batch, time, …]` or along the batch to
/// `[ranks · batch, slice, …]`.
pub(super) fn gather(x: &Tensor, group: &SequenceGroup, along: Along) -> Result<Tensor> {
    let gather = Gather(Slices::new(x.shape(), group, along, 1)?);
    if tracing() || in_graph() {
        return apply([x], gather);
    }
    let whole = (gather.0.gathered(x)?, gather.0.whole());
    Ok(applied([x], gather, whole))
}

/// Sums `[batch, time, width]` or `[ranks · batch, slice, width]` over the ranks. Returns this rank's slice of the sum,
/// plus a bias of `[width]` if there is one.
pub(super) fn sum(y: &Tensor, bias: Option<&Tensor>, group: &SequenceGroup, along: Along) -> Result<Tensor> {
    let sum = Sum(Slices::new(y.shape(), group, along, group.size())?);
    if tracing() || in_graph() {
        return match bias {
            None => apply([y], sum),
            Some(bias) => apply([y, bias], sum),
        };
    }
    let result = (sum.add(sum.0.summed(y)?, bias)?, sum.0.own.clone().into());
    Ok(match bias {
        None => applied([y], sum, result),
        Some(bias) => applied([y, bias], sum, result),
    })
}

struct Gather(Slices);

impl Footprint for Gather {
    const READS: Reads = Reads::NOTHING;
    // The backward keeps only slices and gathers them again.
    const REMADE: bool = true;

    fn make(&self, x: &Tensor) -> Result<Storage> {
        self.0.gathered(x)
    }

    fn exchange(&self) -> Option<&dyn Exchange> {
        self.0.group.overlaps().then_some(self)
    }

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let dtype = inputs[0].dtype();
        let (copied, sent) = self.0.costs(dtype);
        Ok(Costs {
            forward: copied,
            backward: copied,
            exchanged: [sent; 2].map(Exchanged::to_tensor),
            ..Costs::new(self.0.whole(), dtype)
        })
    }
}

impl Exchange for Gather {
    fn start(&self, x: &Tensor, output: &Tensor) -> Result<Finish> {
        let (slices, output) = (self.0.clone(), output.clone());
        #[cfg(feature = "cuda")]
        if gpu::holds(x) {
            let exchange = slices.group.gather_on_gpu(x)?;
            return Ok(Box::new(move || swap(&output, take(&slices.in_order_on_gpu(&exchange()?)?)?).map(drop)));
        }
        // Copies the values of x, since operations may read x during the exchange.
        of_element!(OP, x.dtype(), T => {
            let exchange = slices.group.all_gather::<T>(copy_of(x)?)?;
            Ok(Box::new(move || {
                let _timed = measure::backward(OP);
                let Gathered { output: received, .. } = exchange.wait()?;
                let whole = slices.in_order(T::values(received)?);
                swap(&output, Storage::Cpu(T::to_cpu_storage_owned(whole))).map(drop)
            }))
        })
    }

    fn backward_while(&self, x: &Tensor, dy: &Tensor, compute: &mut dyn FnMut() -> Result<()>) -> Result<Tensor> {
        Ok(tensor_of(self.0.summed_while(dy, compute)?, x.shape()))
    }
}

impl Op<1> for Gather {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, [(xs, xl)]: Inputs<'_, CpuStorage, 1>) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(OP);
        Ok((host(self.0.gathered(&copied(xs, xl)?)?)?, self.0.whole()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, [(xs, xl)]: Inputs<'_, CudaStorage, 1>) -> Result<(CudaStorage, Shape)> {
        Ok((gpu::storage(self.0.gathered(&gpu::copied(OP, xs, xl)?)?)?, self.0.whole()))
    }

    fn bwd(&self, [x]: [&Tensor; 1], _: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 1]> {
        Ok([Some(tensor_of(self.0.summed(dy)?, x.shape()))])
    }
}

struct Sum(Slices);

impl Sum {
    /// Adds a bias, if there is one, to this rank's slices.
    fn add(&self, slices: Storage, bias: Option<&Tensor>) -> Result<Storage> {
        let Some(bias) = bias else { return Ok(slices) };
        let (shape, width) = (Shape::from(self.0.own.clone()), bias.elem_count());
        if shape.dim(D::Minus1)? != width {
            bail!("{OP}: a bias of {width} elements for outputs of shape {shape:?}");
        }
        match slices {
            Storage::Cpu(slices) => {
                let held = bias.storage_and_layout();
                self.add_on_host(&slices, &View::of(OP, &held)?, width).map(Storage::Cpu)
            }
            slices => take(&tensor_of(slices, shape).broadcast_add(&bias.detach())?),
        }
    }

    fn add_on_host(&self, slices: &CpuStorage, bias: &View<'_>, width: usize) -> Result<CpuStorage> {
        let shape = Shape::from(self.0.own.clone());
        let layout = Layout::contiguous(&shape);
        let own = View::new(OP, slices, &layout)?;
        let rows = shape.elem_count() / width;
        build_as(OP, slices.dtype(), rows, width, [own.elements()], |range, [own], out| {
            let mut added = vec![0.0; width];
            bias.elements().read(Isa::current(), 0, &mut added);
            for (out, own) in out.chunks_exact_mut(width).zip(own.chunks_exact(width)).take(range.len()) {
                out.iter_mut().zip(own).zip(&added).for_each(|((out, own), bias)| *out = own + bias);
            }
        })
    }
}

impl Footprint for Sum {
    const READS: Reads = Reads::NOTHING;

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let dtype = inputs[0].dtype();
        let (copied, sent) = self.0.costs(dtype);
        let shape = Shape::from(self.0.own.clone());
        let adding = match inputs.len() {
            1 => 0,
            _ => {
                let width = inputs[1].elem_count();
                bytes(shape.elem_count(), dtype) + rooms(dtype, shape.elem_count() / width, width, 1)
            }
        };
        let gradients = [true, false, false];
        Ok(Costs {
            forward: copied.max(adding),
            backward: copied,
            exchanged: [sent; 2].map(Exchanged::to_tensor),
            gradients,
            ..Costs::new(shape, dtype)
        })
    }
}

impl<const N: usize> Op<N> for Sum {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, inputs: Inputs<'_, CpuStorage, N>) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(OP);
        let (ys, yl) = inputs[0];
        let slices = self.0.summed(&copied(ys, yl)?)?;
        let bias = inputs.get(1).map(|(bs, bl)| copied(bs, bl)).transpose()?;
        Ok((host(self.add(slices, bias.as_ref())?)?, self.0.own.clone().into()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, inputs: Inputs<'_, CudaStorage, N>) -> Result<(CudaStorage, Shape)> {
        let (ys, yl) = inputs[0];
        let slices = self.0.summed(&gpu::copied(OP, ys, yl)?)?;
        let bias = inputs.get(1).map(|(bs, bl)| gpu::copied(OP, bs, bl)).transpose()?;
        Ok((gpu::storage(self.add(slices, bias.as_ref())?)?, self.0.own.clone().into()))
    }

    fn bwd(&self, inputs: [&Tensor; N], _: &Tensor, d_slice: &Tensor) -> Result<[Option<Tensor>; N]> {
        let dy = {
            let _timed = measure::backward(OP);
            tensor_of(self.0.gathered(d_slice)?, inputs[0].shape())
        };
        Ok(leading([Some(dy), bias_gradient(OP, inputs.get(1).copied(), d_slice)?, None]))
    }
}
