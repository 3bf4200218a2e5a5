//! Rotary position embedding, with the processor's bits.

use super::{count32, room_like};
use crate::device::{Gpu, Operand, address};
use candle_core::backend::BackendStorage;
use candle_core::{CudaDevice, CudaStorage, Layout, Result};
use std::sync::OnceLock;
use zero_kernels::Address;
use zero_kernels::rotary::{Turn, rotary};

/// The table of a [`Rotary`](crate::Rotary) on the GPU that first used it.
#[derive(Debug, Default)]
pub(crate) struct Table(OnceLock<CudaStorage>);

impl Table {
    /// Where it is: cos, and sin behind it.
    fn address(&self, op: &'static str, gpu: &Gpu, table: &[f32]) -> Result<Address> {
        if self.0.get().is_none() {
            let values = CudaStorage::wrap_cuda_slice(gpu.upload(table)?, gpu.device().clone());
            // Whoever was faster has put the same there.
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

/// Rotates `[batch, time, heads, size]` by a table of `[positions, size / 2]`, which are enough.
pub(crate) fn run(
    op: &'static str,
    (on_gpu, table): (&Table, &[f32]),
    (xs, xl): (&CudaStorage, &Layout),
    turn: Turn,
) -> Result<CudaStorage> {
    let (gpu, x) = (Gpu::new(&xs.device)?, Operand::new(op, xs, xl)?);
    let (batch, time, heads, size) = xl.shape().dims4()?;
    let sizes = [count32(op, batch)?, count32(op, time)?, count32(op, heads)?, count32(op, size)?];
    let (y, at) = room_like(op, &gpu, xs.dtype(), x.count)?;
    let cos = on_gpu.address(op, &gpu, table)?;
    let sin = cos + (table.len() / 2 * size_of::<f32>()) as u64;
    // SAFETY: x and y are of this shape and one dtype; the table has as many positions.
    unsafe { gpu.launch_some(rotary(x.dtype, sizes, [cos, sin], [x.address, at], turn)) }?;
    Ok(y)
}
