//! The operations on a GPU: the kernels and products that each operation launches in its forward and backward.
//!
//! Most operations of the CPU have a counterpart here with the same name; some, such as `geglu`, do not support GPUs.
//! The results of elementwise operations and embeddings are bit-identical to the CPU's. Most others agree within
//! rounding, since sums are added in a different order.

pub(crate) mod activation;
pub(crate) mod affine;
pub(crate) mod attention;
pub(crate) mod cross_entropy;
pub(crate) mod dropout;
pub(crate) mod embedding;
mod indices;
pub(crate) mod linear_cross_entropy;
pub(crate) mod norm;
mod product;
pub(crate) mod rotary;

use crate::device::{Gpu, address};
use crate::graph::output::tensor_of;
use crate::sink;
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Device, Layout, Result, Shape, Storage, Tensor, bail};
use zero_kernels::Address;
use zero_kernels::optimizer::narrow;
use zero_kernels::rows::Onto;

/// Returns whether operations on this tensor run on a GPU.
pub(crate) fn holds(tensor: &Tensor) -> bool {
    tensor.device().is_cuda()
}

/// Returns a tensor outside any graph, as a backward returns it.
pub(crate) fn tensor(storage: CudaStorage, shape: impl Into<Shape>) -> Tensor {
    tensor_of(Storage::Cuda(storage), shape)
}

/// Returns a copy of a view as a tensor outside any graph.
pub(crate) fn copied(op: &'static str, storage: &CudaStorage, layout: &Layout) -> Result<Tensor> {
    let mut copy = Gpu::new(&storage.device)?.room(op, storage.dtype(), layout.shape().elem_count())?;
    storage.copy_strided_src(&mut copy, 0, layout)?;
    Ok(tensor(copy, layout.shape()))
}

/// Returns indices as the tensor that candle's operations take.
pub(crate) fn places(of: &[usize], device: &Device) -> Result<Tensor> {
    Tensor::new(of.iter().map(|&place| place as u32).collect::<Vec<_>>(), device)
}

/// Returns the CUDA storage in `storage`, which must be on a GPU.
pub(crate) fn storage(storage: Storage) -> Result<CudaStorage> {
    match storage {
        Storage::Cuda(storage) => Ok(storage),
        _ => bail!("expected values on a GPU"),
    }
}

/// Passes the gradient of `parameter` to the sink, or returns it as a tensor if no sink wants it.
///
/// `make` receives the address of a buffer with an f32 for each element of the parameter, and whether the buffer holds
/// values to add to. `make` is not called for a frozen parameter.
pub(super) fn deliver(
    op: &'static str,
    gpu: &Gpu,
    parameter: &Tensor,
    make: impl FnOnce(Address, Onto) -> Result<()>,
) -> Result<Option<Tensor>> {
    if !parameter.track_op() {
        return Ok(None);
    }
    let mut make = Some(make);
    let mut once = |to, onto| make.take().map_or(Ok(()), |make| make(to, onto));
    if sink::device::write(gpu, parameter, &mut once)? {
        return Ok(None);
    }
    let gradient = gpu.floats(parameter.elem_count())?;
    once(address(op, &gradient)?, Onto::Nothing)?;
    Ok(Some(tensor(stored(op, gpu, gradient, parameter.dtype())?, parameter.shape())))
}

/// Converts f32 values to a dtype: f32, bf16 or f16.
fn stored(op: &'static str, gpu: &Gpu, values: CudaStorage, dtype: DType) -> Result<CudaStorage> {
    if dtype == DType::F32 {
        return Ok(values);
    }
    let count = values.as_cuda_slice::<f32>()?.len();
    let to = gpu.room(op, dtype, count)?;
    let launch =
        narrow(crate::device::kernel_dtype(op, dtype)?, count as u64, address(op, &values)?, address(op, &to)?);
    // SAFETY: both hold `count` elements, of f32 and of `dtype`.
    unsafe { gpu.launch_some(launch) }?;
    Ok(to)
}

/// Converts a count to the u32 that kernels take.
fn count32(op: &'static str, count: usize) -> Result<u32> {
    u32::try_from(count)
        .map_err(|_| candle_core::Error::Msg(format!("{op}: a count of {count} exceeds the maximum of 2³² − 1")))
}

/// Allocates a result of `count` elements and returns it with its address.
fn room_like(op: &'static str, gpu: &Gpu, dtype: DType, count: usize) -> Result<(CudaStorage, Address)> {
    let storage = gpu.room(op, dtype, count)?;
    let at = address(op, &storage)?;
    Ok((storage, at))
}
