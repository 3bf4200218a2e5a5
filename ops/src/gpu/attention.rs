//! Causal attention on a GPU, tile by tile.

use super::{count32, room_like, tensor};
use crate::attention::geometry::{BACKWARD_PRODUCTS, FORWARD_PRODUCTS, Geometry};
use crate::attention::span::Firsts;
use crate::device::{Gpu, Operand, address, kernel_dtype};
use crate::measure::count_macs;
use candle_core::cuda_backend::DeviceId;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};
use candle_core::{CudaStorage, DType, Error, Result, Tensor};
use std::sync::{Arc, Mutex, PoisonError};
use zero_kernels::Address;
use zero_kernels::attention::{self, Saved};

/// The values that the forward keeps for the backward.
#[derive(Debug)]
pub(crate) struct SavedForward {
    /// f32 of `[batch, heads, queries]`.
    pub(crate) log_sums: Tensor,
    /// The first position that each position sees, or `None` if that is position 0 for all.
    firsts: Option<Arc<CudaSlice<u32>>>,
    /// Multiply-accumulates of one product of queries and keys.
    macs: u64,
}

/// The first position that each position sees, in the memory of each GPU that uses it.
#[derive(Debug, Default)]
pub(crate) struct OnGpus(Mutex<Vec<(DeviceId, Arc<CudaSlice<u32>>)>>);

impl Firsts {
    /// Returns a copy of the first positions in the memory of `gpu`, or `None` if all of them are 0.
    fn on(&self, op: &'static str, gpu: &Gpu) -> Result<Option<Arc<CudaSlice<u32>>>> {
        if !self.iter().any(|&first| first > 0) {
            return Ok(None);
        }
        let mut all = self.on_gpus.0.lock().unwrap_or_else(PoisonError::into_inner);
        let id = gpu.device().id();
        if let Some((_, firsts)) = all.iter().find(|(of, _)| *of == id) {
            return Ok(Some(Arc::clone(firsts)));
        }
        let firsts: Vec<u32> = self.iter().map(|&first| count32(op, first)).collect::<Result<_>>()?;
        let firsts = Arc::new(gpu.upload(&firsts)?);
        all.push((id, Arc::clone(&firsts)));
        Ok(Some(firsts))
    }
}

fn geometry(
    op: &'static str,
    of: Geometry,
    dtype: DType,
    packed: bool,
    firsts: Address,
) -> Result<attention::Geometry> {
    let count = |count| count32(op, count);
    let queries = of.queries.only_part()?;
    Ok(attention::Geometry {
        batch: count(of.batch)?,
        from: count(queries.start)?,
        time: count(queries.end)?,
        keys: count(of.time)?,
        heads: count(of.heads)?,
        kv_heads: count(of.kv_heads)?,
        size: count(of.size)?,
        dtype: kernel_dtype(op, dtype)?,
        packed,
        firsts,
    })
}

impl SavedForward {
    /// Returns the values that a backward reads, given the log-sums of the queries. The log-sums may cover more keys
    /// than `of` describes.
    pub(crate) fn new(op: &'static str, gpu: &Gpu, of: Geometry, log_sums: Tensor, firsts: &Firsts) -> Result<Self> {
        Ok(Self { log_sums, firsts: firsts.on(op, gpu)?, macs: of.macs_of_a_product(firsts) })
    }

    fn firsts(&self) -> Address {
        self.firsts.as_ref().map_or(0, |firsts| firsts.device_ptr(firsts.stream()).0)
    }
}

/// Returns the addresses of q, k and v. In a packed operand, k begins after q's heads and v after k's.
fn places(of: Geometry, dtype: DType, operands: &[Operand]) -> [Address; 3] {
    match operands {
        [q, k, v] => [q.address, k.address, v.address],
        packed => {
            let row = (of.heads * of.size * dtype.size_in_bytes()) as u64;
            let begin = packed.first().map_or(0, |packed| packed.address);
            [begin, begin + row, begin + 2 * row]
        }
    }
}

/// Computes the result, `[batch, queries, heads, size]`, and the values that the backward reads. The operands are q, k
/// and v, or one operand that packs them. The queries are at the positions `of.queries`.
pub(crate) fn forward(
    op: &'static str,
    gpu: &Gpu,
    of: Geometry,
    dtype: DType,
    operands: &[Operand],
    firsts: &Firsts,
) -> Result<(CudaStorage, SavedForward)> {
    let (out, at) = room_like(op, gpu, dtype, of.batch * of.queries.len() * of.heads * of.size)?;
    let rows = of.batch * of.heads * of.queries.len();
    let log_sums = tensor(gpu.floats(rows.max(1))?, rows.max(1));
    let kept = SavedForward::new(op, gpu, of, log_sums, firsts)?;
    count_macs(FORWARD_PRODUCTS * kept.macs);
    if of.batch * of.time > 0 {
        let sizes = geometry(op, of, dtype, operands.len() == 1, kept.firsts())?;
        let log_sums = Operand::of(op, &kept.log_sums)?.address;
        let launch = attention::forward(&sizes, places(of, dtype, operands), at, log_sums).map_err(Error::wrap)?;
        // SAFETY: the operands, the result and the sums have these sizes.
        unsafe { gpu.launch(&launch) }?;
    }
    Ok((out, kept))
}

/// Returns the gradients of q, k and v, or of the operand that packs them.
pub(crate) fn backward<const N: usize>(
    op: &'static str,
    gpu: &Gpu,
    of: Geometry,
    dtype: DType,
    operands: &[Operand; N],
    [out, d_out]: [&Operand; 2],
    kept: &SavedForward,
) -> Result<[CudaStorage; N]> {
    count_macs(BACKWARD_PRODUCTS * kept.macs);
    let rooms = operands.iter().map(|operand| room_like(op, gpu, dtype, operand.count)).collect::<Result<Vec<_>>>()?;
    let to: Vec<Operand> =
        rooms.iter().zip(operands).map(|((_, at), of)| Operand::at(*at, of.dtype, of.count)).collect();
    if of.batch * of.time > 0 {
        let sizes = geometry(op, of, dtype, N == 1, kept.firsts())?;
        let deltas = gpu.floats(of.batch * of.heads * of.queries.len())?;
        if sizes.keys > sizes.time {
            // The kernel writes only the gradients of keys and values that a query may see.
            for to in &to[1..] {
                // SAFETY: the place has this many elements.
                unsafe { gpu.zero(to.address, to.count * dtype.size_in_bytes()) }?;
            }
        }
        let saved = Saved {
            qkv: places(of, dtype, operands),
            out: out.address,
            log_sums: Operand::of(op, &kept.log_sums)?.address,
            d_out: d_out.address,
        };
        let deltas = (address(op, &deltas)?, deltas);
        let launches = attention::backward(&sizes, &saved, places(of, dtype, &to), deltas.0).map_err(Error::wrap)?;
        for launch in &launches {
            // SAFETY: the operands, their gradients and the kept values have these sizes.
            unsafe { gpu.launch(launch) }?;
        }
    }
    let rooms: Vec<CudaStorage> = rooms.into_iter().map(|(room, _)| room).collect();
    rooms
        .try_into()
        .map_err(|_| Error::Msg(format!("{op}: the number of gradients differs from the number of operands")))
}
