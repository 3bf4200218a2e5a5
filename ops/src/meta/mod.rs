//! Meta tensors, which have no values, and the memory that a layer would take if it ran on real tensors.
//!
//! A layer runs the same code on meta tensors as on real ones, including fused blocks and the backward. The layer's own
//! code therefore determines which tensors are kept, in which order memory is allocated and when it is freed. No second
//! description is needed. An operation on meta tensors is not computed; it only reports its costs. A meta tensor has a
//! shape, a dtype and the storage of a released parameter, so reading its values is an error. A layer that uses
//! operations from outside this crate has an *unknown* cost.
//!
//! A trace is pure arithmetic on one thread and never allocates the memory that it counts.

pub(crate) mod footprint;
mod traced;

use crate::flag::{Flag, Replaced};
use crate::graph::storage::take;
pub use crate::meta::footprint::Exchanged;
use crate::meta::footprint::{bytes, floats};
pub(crate) use crate::meta::traced::{forward, unmade};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Storage, Tensor, TensorId, bail};
use half::{bf16, f16};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The simulated allocator of a trace.
#[derive(Default)]
pub(crate) struct Heap {
    now: u64,
    peak: u64,
    /// Bytes of each block, by block number.
    blocks: HashMap<u64, u64>,
    blocks_made: u64,
    /// The block that contains a tensor's values.
    of: HashMap<TensorId, u64>,
    /// Parameters whose gradient already has a contribution, so that the next one is added to it.
    written: HashSet<TensorId>,
    /// Bytes that modules compute once and keep, by the module's address.
    kept_once: BTreeMap<usize, u64>,
    /// Bytes sent to other ranks.
    exchanged: Exchanged,
    /// If the gradients of parameters are deferred, the operands that are kept for their computation.
    deferred: Option<Vec<Operands>>,
}

/// Tensors and other operands that are kept for the gradients of parameters.
struct Operands {
    _tensors: [Option<Tensor>; 2],
    _others: Held,
}

impl Operands {
    fn others(held: Held) -> Self {
        Self { _tensors: [None, None], _others: held }
    }
}

thread_local! {
    static HEAP: RefCell<Option<Heap>> = const { RefCell::new(None) };
    static ON_GPU: Cell<bool> = const { Cell::new(false) };
}

/// Runs `run` and counts memory as if its layers were on a GPU.
pub fn on_gpu<T>(run: impl FnOnce() -> T) -> T {
    let _on_gpu = Flag::raise(&ON_GPU);
    run()
}

/// Returns the bytes of device memory that a product with an epilogue takes while it runs.
pub(crate) fn workspace() -> u64 {
    if ON_GPU.get() { zero_cuda::MOST_WORKSPACE } else { 0 }
}

/// Runs `run` and counts the operations on meta tensors in it. `written` holds the leaves whose gradient already has a
/// contribution from another layer's backward.
///
/// # Errors
/// Returns the error of `run`. A panic in `run` is also an error, since a user's layer may rely on values.
pub fn trace<T>(written: HashSet<TensorId>, run: impl FnOnce() -> Result<T>) -> Result<T> {
    let heap = Heap { written, ..Heap::default() };
    let (inner, result) = Replaced::during(&HEAP, Some(heap), || catch_unwind(AssertUnwindSafe(run)));
    // Drops the inner heap only after it has been replaced, because its contents look up `HEAP` when they are dropped.
    drop(inner);
    result.unwrap_or_else(|_| bail!("{META}: the layer panicked on tensors without values"))
}

/// Returns whether operations on this thread are counted instead of computed.
pub(crate) fn tracing() -> bool {
    HEAP.with_borrow(Option::is_some)
}

fn with<T: Default>(run: impl FnOnce(&mut Heap) -> T) -> T {
    HEAP.with_borrow_mut(|heap| heap.as_mut().map(run)).unwrap_or_default()
}

/// Returns the bytes that are currently allocated in the trace.
pub fn now() -> u64 {
    with(|heap| heap.now)
}

/// Returns the peak of [`now`] since [`reset_peak`].
pub fn peak() -> u64 {
    with(|heap| heap.peak)
}

/// Restarts the measurement of [`peak`].
pub fn reset_peak() {
    with(|heap| heap.peak = heap.now);
}

/// Returns the bytes sent to other ranks so far.
pub fn exchanged() -> Exchanged {
    with(|heap| heap.exchanged)
}

/// Counts a temporary allocation of `bytes`, which only affects the peak.
pub(crate) fn passing(bytes: u64) {
    with(|heap| heap.peak = heap.peak.max(heap.now.saturating_add(bytes)));
}

/// Counts bytes that the module at `address` computes at its first use and then keeps. They are not part of [`now`].
pub(crate) fn keep_once(address: usize, bytes: u64) {
    with(|heap| {
        let kept = heap.kept_once.entry(address).or_default();
        *kept = bytes.max(*kept);
    });
}

/// Returns the bytes that each module has computed and keeps, by the module's key. Layers that share a module have the
/// same key, so its bytes count once.
pub fn kept_once() -> BTreeMap<usize, u64> {
    with(|heap| heap.kept_once.clone())
}

/// Returns the bytes of a contribution to this parameter's gradient if it will be added to an existing one,
/// otherwise 0.
pub(crate) fn another(parameter: &Tensor) -> u64 {
    if is_written(parameter) { floats(parameter.elem_count()) } else { 0 }
}

/// Returns whether a contribution to this parameter's gradient will be added to an existing one.
pub(crate) fn is_written(parameter: &Tensor) -> bool {
    with(|heap| heap.written.contains(&parameter.id()))
}

/// Starts to defer the gradients of parameters.
pub fn defer() {
    with(|heap| heap.deferred = Some(vec![]));
}

/// Returns whether the gradients of parameters are deferred.
pub(crate) fn is_deferring() -> bool {
    with(|heap| heap.deferred.is_some())
}

/// Runs a backward that computes the gradients of `parameters` one tile of rows at a time, as
/// [`sink::in_tiles`](crate::sink::in_tiles) does. A gradient that cannot accumulate in its place takes a buffer of its
/// own during the backward. A deferred gradient keeps this buffer afterwards.
pub(crate) fn in_tiles<T>(parameters: &[&Tensor], backward: impl FnOnce() -> Result<T>) -> Result<T> {
    let (written, deferred) = with(|heap| (std::mem::take(&mut heap.written), heap.deferred.take()));
    let mut seen = written.clone();
    let own = parameters.iter().filter(|parameter| !seen.insert(parameter.id()) || deferred.is_some());
    let mut rooms = Some(Held::new(own.map(|parameter| bytes(parameter.elem_count(), DType::F32)).sum()));
    let result = backward();
    with(|heap| {
        (heap.written, heap.deferred) = (written, deferred);
        if let Some(list) = &mut heap.deferred {
            list.extend(rooms.take().map(Operands::others));
        }
    });
    result
}

/// A simulated block. It is freed when this value is dropped, if it has not been freed before.
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

/// Frees the values of a tensor while the tensor itself stays.
pub(crate) fn let_go(tensor: &Tensor) {
    if let Some(block) = with(|heap| heap.of.remove(&tensor.id())) {
        free(block);
    }
}

/// Returns a meta tensor whose values take a block of their own.
pub fn tensor(shape: &Shape, dtype: DType) -> Result<Tensor> {
    let held = Held::new(bytes(shape.elem_count(), dtype));
    let block = held.0;
    // When a tensor is dropped, candle also drops the operation that made it, and with it the block.
    let maker = Tensor::from_storage(Storage::Cpu(CpuStorage::F4(vec![])), (), BackpropOp::none(), true);
    let tensor = maker.apply_op1(Maker { shape: shape.clone(), dtype, _held: held })?;
    take(&tensor)?;
    with(|heap| heap.of.insert(tensor.id(), block));
    Ok(tensor)
}

/// Returns a meta tensor whose values are counted elsewhere. `wanted` tells whether it needs a gradient.
pub fn leaf(shape: &Shape, dtype: DType, wanted: bool) -> Result<Tensor> {
    let storage = Storage::Cpu(nothing(dtype)?);
    let leaf = Tensor::from_storage(storage, shape.clone(), BackpropOp::none(), wanted);
    take(&leaf)?;
    Ok(leaf)
}

/// Returns empty storage of this dtype.
pub(crate) fn nothing(dtype: DType) -> Result<CpuStorage> {
    Ok(match dtype {
        DType::F32 => CpuStorage::F32(vec![]),
        DType::BF16 => CpuStorage::BF16(Vec::<bf16>::new()),
        DType::F16 => CpuStorage::F16(Vec::<f16>::new()),
        DType::U32 => CpuStorage::U32(vec![]),
        DType::I64 => CpuStorage::I64(vec![]),
        DType::U8 => CpuStorage::U8(vec![]),
        other => bail!("no operation supports {other:?}"),
    })
}

/// Returns the bytes of an integer tensor that has real values because the layer made it without this crate's
/// operations. Returns 0 for any other tensor.
pub(crate) fn bytes_of_solid(tensor: &Tensor) -> u64 {
    let (storage, _) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(CpuStorage::U32(values)) => bytes(values.len(), DType::U32),
        Storage::Cpu(CpuStorage::I64(values)) => bytes(values.len(), DType::I64),
        Storage::Cpu(CpuStorage::U8(values)) => bytes(values.len(), DType::U8),
        _ => 0,
    }
}

/// The operation that makes a meta tensor and holds its block.
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
