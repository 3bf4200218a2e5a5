//! Applies operations. An operation becomes a node of candle's graph, is recorded in a fused block, or runs outside any
//! graph. On meta tensors, it only counts its memory.

use crate::flag::Flag;
#[cfg(feature = "cuda")]
use crate::gpu;
use crate::graph::fused_block::{Operation, record, recording};
use crate::graph::op::{CustomOp, Inputs, Node, Op, Taped};
use crate::graph::operand::View;
use crate::graph::output::build_as;
use crate::kernel::{Isa, norm::add};
use crate::measure;
use crate::meta;
use crate::meta::footprint::{Costs, Footprint, Reads, element_rooms};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, Layout, Result, Shape, Storage, Tensor, bail};
use std::cell::Cell;
use std::ops::Deref;
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

/// Returns the output of an operation as a tensor, and records the operation if a fused block is running. The tensor is
/// then tracked, so that later operations see that it needs a gradient.
fn recorded(operation: Operation, reads: Reads, (storage, shape): (Storage, Shape)) -> Tensor {
    let output = Tensor::from_storage(storage, shape, BackpropOp::none(), recording());
    record(operation, reads, &output);
    output
}

/// Applies `op`: adds it to candle's graph, records it in a fused block, runs it outside any graph, or counts its
/// memory.
pub(crate) fn apply<const N: usize, O: Op<N>>(inputs: [&Tensor; N], op: O) -> Result<Tensor>
where
    Node<N, O>: CustomOp<N>,
{
    if meta::tracing() {
        return traced(inputs, &op);
    }
    if in_graph() {
        return Node::<N, O>(op).apply(inputs);
    }
    let result = {
        let held = inputs.map(Tensor::storage_and_layout);
        if let Some(inputs) = values(&held, on_cpu) {
            let (values, shape) = op.cpu_fwd(inputs)?;
            (Storage::Cpu(values), shape)
        } else if let Some(inputs) = values(&held, on_gpu) {
            let (values, shape) = op.cuda_fwd(inputs)?;
            (Storage::Cuda(values), shape)
        } else {
            bail!("{}: all tensors must be on the CPU, or all on the same GPU", op.name())
        }
    };
    Ok(applied(inputs, op, result))
}

fn on_cpu(storage: &Storage) -> Option<&CpuStorage> {
    if let Storage::Cpu(values) = storage { Some(values) } else { None }
}

fn on_gpu(storage: &Storage) -> Option<&CudaStorage> {
    if let Storage::Cuda(values) = storage { Some(values) } else { None }
}

/// Returns the values and layouts of an operation's inputs, or `None` if `of` returns `None` for an input.
fn values<'a, S, const N: usize>(
    held: &'a [(impl Deref<Target = Storage>, &'a Layout); N],
    of: fn(&Storage) -> Option<&S>,
) -> Option<Inputs<'a, S, N>> {
    let inputs: Vec<_> = held.iter().filter_map(|(storage, layout)| Some((of(storage)?, *layout))).collect();
    inputs.try_into().ok()
}

/// Does the same as [`apply`], with a result that has already been computed.
pub(crate) fn applied<const N: usize, O: Op<N>>(inputs: [&Tensor; N], op: O, result: (Storage, Shape)) -> Tensor {
    recorded(operation::<O>(Node::<N, O>(op), &inputs), O::READS, result)
}

/// Returns the record of `op`, which is an `O` or the trace of an `O`.
fn operation<O: Footprint>(op: impl Taped + 'static, inputs: &[&Tensor]) -> Operation {
    match (O::REMADE, inputs) {
        (true, [x]) => Operation::Remade(Arc::new(op), (*x).clone()),
        _ => Operation::Of(Box::new(op), inputs.iter().copied().cloned().collect()),
    }
}

const NOT_COUNTED: &str = "memory that candle's autograd graph keeps is not counted";

/// Does the same as [`apply`], for an operation on meta tensors, which only counts its memory.
pub(crate) fn traced<const N: usize, O: Footprint>(inputs: [&Tensor; N], op: &O) -> Result<Tensor> {
    if in_graph() {
        bail!("{NOT_COUNTED}");
    }
    let (output, op) = meta::forward(op, &inputs)?;
    record(operation::<O>(op, &inputs), O::READS, &output);
    Ok(output)
}

/// Does the same as [`apply`], for an operation whose output comes from other operations that were already counted.
pub(crate) fn counted<const N: usize, O: Op<N>>(inputs: [&Tensor; N], op: O, output: Tensor) -> Result<Tensor> {
    if in_graph() {
        bail!("{NOT_COUNTED}");
    }
    record(operation::<O>(Node::<N, O>(op), &inputs), O::READS, &output);
    Ok(output)
}

/// Does the same as [`apply`], without the forward. The output has no values, so the backward may not read it.
pub(crate) fn unmade<const N: usize, O: Op<N>>(inputs: [&Tensor; N], op: O, shape: &Shape) -> Result<Tensor> {
    let output = meta::leaf(shape, inputs[0].dtype(), true)?;
    let operation = match meta::tracing() {
        true => operation::<O>(meta::unmade(&op, &inputs)?, &inputs),
        false => operation::<O>(Node::<N, O>(op), &inputs),
    };
    record(operation, O::READS, &output);
    Ok(output)
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
