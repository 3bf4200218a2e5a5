//! Tensors without values, and what those of a layer would take in memory.
//!
//! A layer that runs on hollow tensors runs the same code as ever, region and backward included, so what is kept, in which
//! order it is made and when it is let go are the layer's own and need no second description. An operation is not computed
//! but asked for its [`Costs`]. A hollow tensor has a shape and a dtype and the storage of a released parameter: what would
//! read it is an error, and a layer that does anything but our operations is *not known*.
//!
//! All is pure arithmetic on one thread; nothing is as large as what it stands for.

pub(crate) mod footprint;

use crate::flag::Flag;
use crate::graph::storage::take;
use crate::meta::footprint::{Costs, DeferredCosts, Footprint, bytes};
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor, TensorId, bail,
};
use half::{bf16, f16};
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What is imagined to be allocated.
#[derive(Default)]
pub(crate) struct Heap {
    now: u64,
    peak: u64,
    /// Bytes of each block, by its number.
    blocks: HashMap<u64, u64>,
    blocks_made: u64,
    /// The block that a tensor's values are in.
    of: HashMap<TensorId, u64>,
    /// Parameters whose gradient has a contribution already, so that the next one is added to it.
    written: HashSet<TensorId>,
    /// While the gradients of parameters are deferred: what they are to be made of.
    deferred: Option<Vec<(Option<Tensor>, Held)>>,
}

thread_local! {
    static HEAP: RefCell<Option<Heap>> = const { RefCell::new(None) };
    static ON_GPU: Cell<bool> = const { Cell::new(false) };
}

/// Runs `run`, which imagines layers that are on a GPU.
pub fn on_gpu<T>(run: impl FnOnce() -> T) -> T {
    let _on_gpu = Flag::raise(&ON_GPU);
    run()
}

/// Bytes that a product with an epilogue takes of the device while it runs.
pub(crate) fn workspace() -> u64 {
    if ON_GPU.get() { zero_cuda::MOST_WORKSPACE } else { 0 }
}

/// Runs `run`, in which operations on hollow tensors are counted. `written` are the leaves whose gradient another layer's
/// backward has begun.
///
/// # Errors
/// Those of `run`, or that it panics: a layer of somebody else's may rely on values.
pub fn trace<T>(written: HashSet<TensorId>, run: impl FnOnce() -> Result<T>) -> Result<T> {
    let outer = HEAP.replace(Some(Heap { written, ..Heap::default() }));
    let result = catch_unwind(AssertUnwindSafe(run));
    // Dropped only after it has been taken out: what it holds looks for it.
    let inner = HEAP.replace(outer);
    drop(inner);
    result.unwrap_or_else(|_| bail!("{META}: the layer panics where there are no values"))
}

/// Whether operations are counted here, and not computed.
pub(crate) fn tracing() -> bool {
    HEAP.with_borrow(Option::is_some)
}

fn with<T: Default>(run: impl FnOnce(&mut Heap) -> T) -> T {
    HEAP.with_borrow_mut(|heap| heap.as_mut().map(run)).unwrap_or_default()
}

/// Bytes that are imagined to be allocated.
pub fn now() -> u64 {
    with(|heap| heap.now)
}

/// The most that it was since [`reset_peak`].
pub fn peak() -> u64 {
    with(|heap| heap.peak)
}

/// Begins to look for a new [`peak`].
pub fn reset_peak() {
    with(|heap| heap.peak = heap.now);
}

/// So many bytes more for a moment.
pub(crate) fn passing(bytes: u64) {
    with(|heap| heap.peak = heap.peak.max(heap.now.saturating_add(bytes)));
}

/// Whether a contribution to this parameter's gradient is added to one that is there.
pub(crate) fn is_written(parameter: &Tensor) -> bool {
    with(|heap| heap.written.contains(&parameter.id()))
}

/// Begins to put gradients of parameters off.
pub fn defer() {
    with(|heap| heap.deferred = Some(vec![]));
}

/// Runs a backward that makes the gradients of `parameters` a tile of rows at a time, as [`sink::in_tiles`](crate::sink::in_tiles)
/// does: those that cannot grow in their places have room of their own meanwhile, and where they are deferred from then on.
pub(crate) fn in_tiles<T>(parameters: &[&Tensor], backward: impl FnOnce() -> Result<T>) -> Result<T> {
    let (written, deferred) = with(|heap| (std::mem::take(&mut heap.written), heap.deferred.take()));
    let mut seen = written.clone();
    let own = parameters.iter().filter(|parameter| !seen.insert(parameter.id()) || deferred.is_some());
    let mut rooms = Some(Held::new(own.map(|parameter| bytes(parameter.elem_count(), DType::F32)).sum()));
    let result = backward();
    with(|heap| {
        (heap.written, heap.deferred) = (written, deferred);
        if let Some(list) = &mut heap.deferred {
            list.extend(rooms.take().map(|rooms| (None, rooms)));
        }
    });
    result
}

/// A block; it is freed with this, if not before.
#[derive(Debug)]
pub(crate) struct Held(u64);

impl Held {
    fn new(bytes: u64) -> Self {
        Self(with(|heap| {
            heap.now = heap.now.saturating_add(bytes);
            heap.peak = heap.peak.max(heap.now);
            heap.blocks_made += 1;
            heap.blocks.insert(heap.blocks_made, bytes);
            heap.blocks_made
        }))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        free(self.0);
    }
}

fn free(block: u64) {
    with(|heap| heap.now -= heap.blocks.remove(&block).unwrap_or(0));
}

/// The values of a tensor go, the tensor stays.
pub(crate) fn let_go(tensor: &Tensor) {
    if let Some(block) = with(|heap| heap.of.remove(&tensor.id())) {
        free(block);
    }
}

/// A tensor whose values are a block of their own.
pub fn tensor(shape: &Shape, dtype: DType) -> Result<Tensor> {
    let held = Held::new(bytes(shape.elem_count(), dtype));
    let block = held.0;
    // candle lets go of what made a tensor together with it.
    let maker = Tensor::from_storage(Storage::Cpu(CpuStorage::F4(vec![])), (), BackpropOp::none(), true);
    let tensor = maker.apply_op1(Maker { shape: shape.clone(), dtype, _held: held })?;
    take(&tensor)?;
    with(|heap| heap.of.insert(tensor.id(), block));
    Ok(tensor)
}

/// A tensor whose values somebody else accounts for, and whether its gradient is wanted.
pub fn leaf(shape: &Shape, dtype: DType, wanted: bool) -> Result<Tensor> {
    let storage = Storage::Cpu(nothing(dtype)?);
    let leaf = Tensor::from_storage(storage, shape.clone(), BackpropOp::none(), wanted);
    take(&leaf)?;
    Ok(leaf)
}

/// No elements of this dtype.
pub(crate) fn nothing(dtype: DType) -> Result<CpuStorage> {
    Ok(match dtype {
        DType::F32 => CpuStorage::F32(vec![]),
        DType::BF16 => CpuStorage::BF16(Vec::<bf16>::new()),
        DType::F16 => CpuStorage::F16(Vec::<f16>::new()),
        DType::U32 => CpuStorage::U32(vec![]),
        DType::I64 => CpuStorage::I64(vec![]),
        DType::U8 => CpuStorage::U8(vec![]),
        other => bail!("no operation of this crate takes {other:?}"),
    })
}

/// Bytes of a tensor that has values all the same, because the layer made it without an operation of ours.
pub(crate) fn bytes_of_solid(tensor: &Tensor) -> u64 {
    let (storage, _) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(CpuStorage::U32(values)) => bytes(values.len(), DType::U32),
        Storage::Cpu(CpuStorage::I64(values)) => bytes(values.len(), DType::I64),
        Storage::Cpu(CpuStorage::U8(values)) => bytes(values.len(), DType::U8),
        _ => 0,
    }
}

/// What made a hollow tensor.
struct Maker {
    shape: Shape,
    dtype: DType,
    _held: Held,
}

impl CustomOp1 for Maker {
    fn name(&self) -> &'static str {
        META
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((nothing(self.dtype)?, self.shape.clone()))
    }
}

const META: &str = "meta";

/// The forward of an operation: its output, and what stands for it on the tape.
pub(crate) fn forward(op: &impl Footprint, inputs: &[&Tensor]) -> Result<(Tensor, Traced)> {
    let costs = op.footprint(inputs)?;
    let output = bytes(costs.shape.elem_count(), costs.dtype);
    passing(output + costs.saved + costs.forward);
    let saved = Held::new(costs.saved);
    let output = tensor(&costs.shape, costs.dtype)?;
    Ok((output, Traced { costs, saved }))
}

/// What stands on the tape for an operation that has a backward and no forward.
pub(crate) fn unmade(op: &impl Footprint, inputs: &[&Tensor]) -> Result<Traced> {
    Ok(Traced { costs: op.footprint(inputs)?, saved: Held::new(0) })
}

/// An operation that was counted.
pub(crate) struct Traced {
    costs: Costs,
    /// What it keeps for its backward.
    saved: Held,
}

impl Traced {
    /// The gradients of its inputs.
    fn backward(&self, inputs: &[&Tensor]) -> Result<Vec<Option<Tensor>>> {
        let wanted = |i: usize| self.costs.gradients[i] && inputs[i].track_op();
        let size = |i: usize| if wanted(i) { bytes(inputs[i].elem_count(), inputs[i].dtype()) } else { 0 };
        let gradients: u64 = (0..inputs.len()).map(size).sum();
        if self.costs.hands_over {
            free(self.saved.0);
        }
        match self.costs.deferred.filter(|_| with(|heap| heap.deferred.is_some())) {
            None => passing(gradients + self.costs.backward),
            Some(DeferredCosts { input, bytes, backward }) => {
                passing(gradients + backward);
                let kept = (input.map(|i| inputs[i].clone()), Held::new(bytes));
                with(|heap| heap.deferred.as_mut().map(|list| list.push(kept)));
            }
        }
        let gradient = |i: usize| wanted(i).then(|| tensor(inputs[i].shape(), inputs[i].dtype())).transpose();
        (0..inputs.len()).map(gradient).collect()
    }
}

fn never<T>() -> Result<T> {
    bail!("{META}: there are no values to compute with")
}

impl CustomOp1 for Traced {
    fn name(&self) -> &'static str {
        META
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        never()
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(self.backward(&[x])?.swap_remove(0))
    }
}

impl CustomOp2 for Traced {
    fn name(&self) -> &'static str {
        META
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        never()
    }

    fn bwd(&self, x: &Tensor, y: &Tensor, _: &Tensor, _: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let mut gradients = self.backward(&[x, y])?.into_iter();
        Ok((gradients.next().flatten(), gradients.next().flatten()))
    }
}

impl CustomOp3 for Traced {
    fn name(&self) -> &'static str {
        META
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        never()
    }

    fn bwd(
        &self,
        x: &Tensor,
        y: &Tensor,
        z: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let mut gradients = self.backward(&[x, y, z])?.into_iter();
        Ok((gradients.next().flatten(), gradients.next().flatten(), gradients.next().flatten()))
    }
}
