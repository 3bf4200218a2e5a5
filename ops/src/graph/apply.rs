//! Applies operations. An operation becomes a node of candle's graph, is recorded in a fused block, runs outside any
//! graph, or is only counted.

use crate::flag::Flag;
#[cfg(feature = "cuda")]
use crate::gpu;
use crate::graph::fused_block::{Operation, record, recording};
use crate::graph::operand::View;
use crate::graph::output::build_as;
use crate::graph::remade::Remake;
use crate::kernel::{Isa, norm::add};
use crate::measure;
use crate::meta;
use crate::meta::footprint::{Costs, Footprint, Reads, element_rooms};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, Result, Shape, Storage, Tensor, bail};
use std::cell::Cell;
use std::sync::Arc;

thread_local! {
    static UNTRACKED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `run` as an evaluation, in which operations keep nothing for a backward.
pub fn untracked<T>(run: impl FnOnce() -> T) -> T {
    let _untracked = Flag::raise(&UNTRACKED);
    run()
}

/// Returns whether operations may have a backward, which is false in an evaluation.
pub(crate) fn has_backward() -> bool {
    recording() || !UNTRACKED.get()
}

/// Returns whether operations become nodes of candle's graph.
pub(crate) fn in_graph() -> bool {
    !recording() && !UNTRACKED.get()
}

/// Returns the output of an operation as a tensor, and records the operation in a fused block. There the tensor is
/// tracked, so that later operations see that it needs a gradient.
fn recorded(operation: Operation, reads: Reads, (storage, shape): (Storage, Shape)) -> Tensor {
    let output = Tensor::from_storage(storage, shape, BackpropOp::none(), recording());
    record(operation, reads, &output);
    output
}

fn on_host((storage, shape): (CpuStorage, Shape)) -> (Storage, Shape) {
    (Storage::Cpu(storage), shape)
}

fn on_gpu((storage, shape): (CudaStorage, Shape)) -> (Storage, Shape) {
    (Storage::Cuda(storage), shape)
}

const DEVICES: &str = "all tensors must be on the CPU, or all on the same GPU";

const NOT_COUNTED: &str = "memory that candle's autograd graph keeps is not counted";

/// Counts the forward of an operation in a trace.
fn counted(op: &impl Footprint, inputs: &[&Tensor]) -> Result<(Tensor, meta::Traced)> {
    if in_graph() {
        bail!("{NOT_COUNTED}");
    }
    meta::forward(op, inputs)
}

/// Applies `op` as `x.apply_op1(op)` does; records or counts it if necessary.
pub(crate) fn apply1<C: CustomOp1 + Footprint + Send + Sync + 'static>(x: &Tensor, op: C) -> Result<Tensor> {
    if meta::tracing() {
        let (output, op) = counted(&op, &[x])?;
        record(one::<C>(op, x), C::READS, &output);
        return Ok(output);
    }
    if in_graph() {
        return x.apply_op1(op);
    }
    let result = {
        let (xs, xl) = x.storage_and_layout();
        match &*xs {
            Storage::Cpu(xs) => on_host(op.cpu_fwd(xs, xl)?),
            Storage::Cuda(xs) => on_gpu(op.cuda_fwd(xs, xl)?),
            Storage::Metal(_) => bail!("{}: {DEVICES}", op.name()),
        }
    };
    Ok(applied1(x, op, result))
}

/// Does the same as [`apply1`], with a result that has already been computed.
pub(crate) fn applied1<C: CustomOp1 + Footprint + Send + Sync + 'static>(
    x: &Tensor,
    op: C,
    result: (Storage, Shape),
) -> Tensor {
    recorded(one::<C>(op, x), C::READS, result)
}

/// Returns the record of `op`, which is a `C` or the trace of a `C`.
fn one<C: Footprint>(op: impl Remake + 'static, x: &Tensor) -> Operation {
    match C::REMADE {
        true => Operation::Remade(Arc::new(op), x.clone()),
        false => Operation::One(Box::new(op), x.clone()),
    }
}

/// Applies `op` as `x.apply_op2(y, op)` does; records or counts it if necessary.
pub(crate) fn apply2<C: CustomOp2 + Footprint + Send + Sync + 'static>(
    x: &Tensor,
    y: &Tensor,
    op: C,
) -> Result<Tensor> {
    if meta::tracing() {
        return count2(x, y, &op);
    }
    if in_graph() {
        return x.apply_op2(y, op);
    }
    let result = {
        let ((xs, xl), (ys, yl)) = (x.storage_and_layout(), y.storage_and_layout());
        match (&*xs, &*ys) {
            (Storage::Cpu(xs), Storage::Cpu(ys)) => on_host(op.cpu_fwd(xs, xl, ys, yl)?),
            (Storage::Cuda(xs), Storage::Cuda(ys)) => on_gpu(op.cuda_fwd(xs, xl, ys, yl)?),
            _ => bail!("{}: {DEVICES}", op.name()),
        }
    };
    Ok(applied2([x, y], op, result))
}

/// Does the same as [`apply2`], for an operation that is only counted.
pub(crate) fn count2<C: Footprint>(x: &Tensor, y: &Tensor, op: &C) -> Result<Tensor> {
    let (output, op) = counted(op, &[x, y])?;
    record(Operation::Two(Box::new(op), [x, y].map(Clone::clone)), C::READS, &output);
    Ok(output)
}

/// Does the same as [`apply2`], for an operation whose output comes from other operations that were already counted.
pub(crate) fn counted2<C: CustomOp2 + Send + Sync + 'static>(
    [x, y]: [&Tensor; 2],
    op: C,
    reads: Reads,
    output: Tensor,
) -> Result<Tensor> {
    if in_graph() {
        bail!("{NOT_COUNTED}");
    }
    record(Operation::Two(Box::new(op), [x, y].map(Clone::clone)), reads, &output);
    Ok(output)
}

/// Does the same as [`apply2`], without the forward. The output has no values, so the backward may not read it.
pub(crate) fn unmade2<C: CustomOp2 + Footprint + Send + Sync + 'static>(
    [x, y]: [&Tensor; 2],
    op: C,
    shape: &Shape,
) -> Result<Tensor> {
    let output = meta::leaf(shape, x.dtype(), true)?;
    let inputs = [x, y].map(Clone::clone);
    let operation = match meta::tracing() {
        true => Operation::Two(Box::new(meta::unmade(&op, &[x, y])?), inputs),
        false => Operation::Two(Box::new(op), inputs),
    };
    record(operation, C::READS, &output);
    Ok(output)
}

/// Does the same as [`unmade2`], for three inputs.
pub(crate) fn unmade3<C: CustomOp3 + Footprint + Send + Sync + 'static>(
    [x, y, z]: [&Tensor; 3],
    op: C,
    shape: &Shape,
) -> Result<Tensor> {
    let output = meta::leaf(shape, x.dtype(), true)?;
    let inputs = [x, y, z].map(Clone::clone);
    let operation = match meta::tracing() {
        true => Operation::Three(Box::new(meta::unmade(&op, &[x, y, z])?), inputs),
        false => Operation::Three(Box::new(op), inputs),
    };
    record(operation, C::READS, &output);
    Ok(output)
}

/// Applies `op` as `x.apply_op3(y, z, op)` does; records or counts it if necessary.
pub(crate) fn apply3<C: CustomOp3 + Footprint + Send + Sync + 'static>(
    x: &Tensor,
    y: &Tensor,
    z: &Tensor,
    op: C,
) -> Result<Tensor> {
    if meta::tracing() {
        let (output, op) = counted(&op, &[x, y, z])?;
        record(Operation::Three(Box::new(op), [x, y, z].map(Clone::clone)), C::READS, &output);
        return Ok(output);
    }
    if in_graph() {
        return x.apply_op3(y, z, op);
    }
    let result = {
        let ((xs, xl), (ys, yl), (zs, zl)) = (x.storage_and_layout(), y.storage_and_layout(), z.storage_and_layout());
        match (&*xs, &*ys, &*zs) {
            (Storage::Cpu(xs), Storage::Cpu(ys), Storage::Cpu(zs)) => on_host(op.cpu_fwd(xs, xl, ys, yl, zs, zl)?),
            (Storage::Cuda(xs), Storage::Cuda(ys), Storage::Cuda(zs)) => on_gpu(op.cuda_fwd(xs, xl, ys, yl, zs, zl)?),
            _ => bail!("{}: {DEVICES}", op.name()),
        }
    };
    Ok(applied3([x, y, z], op, result))
}

/// Returns x + y for tensors of one shape: a residual connection.
pub fn sum(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    if !computed(x, y) {
        return x + y;
    }
    let output = added(x, y, recording())?;
    record(Operation::Sum([x, y].map(Clone::clone)), Reads::NOTHING, &output);
    Ok(output)
}

/// Returns whether operations on these tensors are computed here rather than as nodes of candle's graph.
pub(crate) fn computed(x: &Tensor, y: &Tensor) -> bool {
    !(in_graph() && (x.track_op() || y.track_op()))
}

/// Does the same as [`sum`], with values that have already been computed.
pub(crate) fn summed(x: &Tensor, y: &Tensor, values: Storage) -> Tensor {
    recorded(Operation::Sum([x, y].map(Clone::clone)), Reads::NOTHING, (values, x.shape().clone()))
}

/// Does the same as [`apply2`], with a result that has already been computed.
pub(crate) fn applied2<C: CustomOp2 + Footprint + Send + Sync + 'static>(
    [x, y]: [&Tensor; 2],
    op: C,
    result: (Storage, Shape),
) -> Tensor {
    recorded(Operation::Two(Box::new(op), [x, y].map(Clone::clone)), C::READS, result)
}

/// Does the same as [`apply3`], with a result that has already been computed.
pub(crate) fn applied3<C: CustomOp3 + Footprint + Send + Sync + 'static>(
    [x, y, z]: [&Tensor; 3],
    op: C,
    result: (Storage, Shape),
) -> Tensor {
    recorded(Operation::Three(Box::new(op), [x, y, z].map(Clone::clone)), C::READS, result)
}

/// Reshapes as `x.reshape(shape)` does, and records the operation in a fused block.
pub fn reshape(x: &Tensor, shape: impl Into<Shape>) -> Result<Tensor> {
    let output = x.reshape(shape.into())?;
    record(Operation::View(x.clone()), Reads::NOTHING, &output);
    Ok(output)
}

const SUM: &str = "sum";

/// Returns x + y outside any graph. `wanted` tells whether the sum needs a gradient.
pub(crate) fn added(x: &Tensor, y: &Tensor, wanted: bool) -> Result<Tensor> {
    let _timed = measure::forward(SUM);
    if x.shape() != y.shape() || x.dtype() != y.dtype() {
        bail!("{SUM}: cannot add {:?} {:?} and {:?} {:?}", x.dtype(), x.shape(), y.dtype(), y.shape());
    }
    if meta::tracing() {
        return Ok(meta::forward(&Sum, &[x, y])?.0);
    }
    #[cfg(feature = "cuda")]
    if gpu::holds(x) {
        let sum = Storage::Cuda(gpu::activation::sum(SUM, x, y)?);
        return Ok(Tensor::from_storage(sum, x.shape(), BackpropOp::none(), wanted));
    }
    let held = (x.storage_and_layout(), y.storage_and_layout());
    let (xs, ys) = (View::of(SUM, &held.0)?, View::of(SUM, &held.1)?);
    let (xs, ys) = (xs.elements(), ys.elements());
    let sums = build_as(SUM, x.dtype(), xs.len(), 1, [xs, ys], |_, [x, y], sums| add(Isa::current(), x, y, sums))?;
    Ok(Tensor::from_storage(Storage::Cpu(sums), x.shape(), BackpropOp::none(), wanted))
}

struct Sum;

impl Footprint for Sum {
    const READS: Reads = Reads::NOTHING;

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let (shape, dtype) = (inputs[0].shape(), inputs[0].dtype());
        Ok(Costs { forward: element_rooms(dtype, shape.elem_count(), 2), ..Costs::new(shape, dtype) })
    }
}
