//! Rotary position embedding, bit-identical to the CPU.

use super::{count32, room_like};
use crate::device::{Gpu, Operand, address};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::DevicePtr;
use candle_core::{CudaDevice, CudaStorage, Layout, Result};
use std::sync::OnceLock;
use zero_kernels::Address;
use zero_kernels::rotary::{Turn, rotary};

/// The table of a [`Rotary`](crate::Rotary) on the GPU that first used it.
#[derive(Debug, Default)]
pub(crate) struct Table(OnceLock<CudaStorage>);

impl Table {
    /// Returns the address of the cosines. The sines follow them.
    fn address(&self, op: &'static str, gpu: &Gpu, table: &[f32]) -> Result<Address> {
        if self.0.get().is_none() {
            let values = CudaStorage::wrap_cuda_slice(gpu.upload(table)?, gpu.device().clone());
            // If another thread was faster, it has stored the same values.
            let _ = self.0.set(values);
        }
        let storage = self.0.get().filter(|storage| same(&storage.device, gpu.device()));
        let Some(storage) = storage else { candle_core::bail!("{op}: the table is on another GPU") };
        address(op, storage)
    }
}

fn same(a: &CudaDevice, b: &CudaDevice) -> bool {
    a.cuda_stream().context().ordinal() == b.cuda_stream().context().ordinal()
}

/// Rotates `[batch, time, heads, size]` by a table of `[positions, size / 2]` with enough positions. `positions` holds
/// the position of each token; with `None`, the first token of each row is position 0.
pub(crate) fn run(
    op: &'static str,
    (on_gpu, table): (&Table, &[f32]),
    positions: Option<&[u32]>,
    (xs, xl): (&CudaStorage, &Layout),
    turn: Turn,
) -> Result<CudaStorage> {
    let (gpu, x) = (Gpu::new(&xs.device)?, Operand::new(op, xs, xl)?);
    let (batch, time, heads, size) = xl.shape().dims4()?;
    let sizes = [count32(op, batch)?, count32(op, time)?, count32(op, heads)?, count32(op, size)?];
    let (y, at) = room_like(op, &gpu, xs.dtype(), x.count)?;
    let cos = on_gpu.address(op, &gpu, table)?;
    let sin = cos + (table.len() / 2 * size_of::<f32>()) as u64;
    let positions = positions.map(|positions| gpu.upload(positions)).transpose()?;
    let positions = positions.as_ref().map_or(0, |positions| positions.device_ptr(positions.stream()).0);
    // SAFETY: x and y have this shape and one dtype, there is a position for each token, and the table has all of them.
    unsafe { gpu.launch_some(rotary(x.dtype, sizes, [cos, sin], positions, [x.address, at], turn)) }?;
    Ok(y)
}
