//! The head of a language model and its loss, without holding the logits of all rows.
//!
//! As on the CPU, the logits are f32, and only one chunk of rows is in memory at a time. Their gradients overwrite
//! them, rounded to 16 bits in a 16-bit model. dW is accumulated in f32, directly in its gradient buffer. The host
//! never waits: the loss stays on the GPU. The forward assumes the gradient that the loss will receive. In the
//! backward, the GPU compares the actual gradient with it, and [`crate::device::check`] reports a difference.

use super::indices::{Indices, limits};
use super::product::{Matrix, To, product, product_strided};
use super::{deliver, room_like, tensor};
use crate::device::{Finding, Gpu, Operand, address};
use crate::gpu::count32;
use crate::graph::apply::apply;
use crate::graph::op::{Inputs, Op};
use crate::meta::footprint::{Costs, Footprint, Reads};
use crate::sink;
use crate::tensor::OfRank;
use candle_core::{CpuStorage, CudaStorage, DType, Result, Shape, Tensor, bail};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use zero_kernels::cross_entropy::{self as kernels, Logits, Upstream};
use zero_kernels::rows::Onto;
use zero_kernels::{Address, Dtype};

const OP: &str = "linear-cross-entropy";

/// Computes [`linear_cross_entropy_with_z_loss`](crate::linear_cross_entropy_with_z_loss). The caller has checked the
/// shapes. With `own`, this rank computes the logits of its own classes only, and the ranks join their statistics.
pub(crate) fn linear_cross_entropy(
    x: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    (gradient, z_loss): (f32, f32),
    own: Option<&OfRank>,
) -> Result<(Tensor, Option<Tensor>)> {
    let (rows, inputs) = weight.dims2()?;
    let classes = own.map_or(rows, OfRank::len);
    let gpu = Gpu::of(OP, x)?;
    let limits = limits(OP, classes, own.map(OfRank::entries))?;
    let (xs, w, targets) =
        (Operand::of(OP, x)?, Operand::of(OP, weight)?, Indices::of_targets(OP, &gpu, targets, &limits)?);
    if xs.dtype != w.dtype {
        bail!("{OP}: the input {:?} does not match the weight {:?}", x.dtype(), weight.dtype());
    }
    let dx = x.track_op().then(|| room_like(OP, &gpu, x.dtype(), xs.count)).transpose()?;
    let loss = gpu.floats(1)?;
    let z = (z_loss != 0.0).then(|| room_like(OP, &gpu, DType::F32, 1)).transpose()?;
    let head = Head {
        gpu: &gpu,
        x: &xs,
        weight: Matrix::new(w.address, w.dtype, classes, inputs),
        inputs,
        classes,
        padding: rows - classes,
        own,
        targets: &targets,
        gradient,
        dx: dx.as_ref().map(|(_, at)| *at),
        z_loss,
        losses: [address(OP, &loss)?, z.as_ref().map_or(0, |(_, at)| *at)],
    };
    let (mut d_weight, mut is_delivered) = (None, false);
    if !weight.track_op() {
        head.run(None)?;
    } else if sink::has(weight) {
        if deliver(OP, &gpu, weight, |to, onto| head.run(Some((to, onto))))?.is_some() {
            bail!("{OP}: the gradient buffer of the weight is not on the weight's GPU");
        }
        is_delivered = true;
    } else {
        let room = gpu.floats(rows * inputs)?;
        head.run(Some((address(OP, &room)?, Onto::Nothing)))?;
        d_weight = Some(room);
    }
    let dx = dx.map(|(dx, _)| tensor(dx, x.shape()));
    let z = z.map(|(z, _)| tensor(z, ()));
    let loss = Mutex::new(Some(loss));
    Ok((apply([x, weight], Computed { loss, gradient, dx, d_weight, is_delivered })?, z))
}

/// Returns how many rows of logits to compute at a time. A full chunk has 512 MiB of f32 logits, but at least 1,024 and
/// at most 4,096 rows. Every chunk makes one pass over dW. On an H200 the pass takes 167/rows of the time of the
/// chunk's products (8 bytes at 4.8 TB/s for 6·rows operations at 600 TFLOP/s). All chunks have about the same size: a
/// small last chunk would pass over dW for only a few rows, and its products would be too small for the whole GPU.
/// Chunks are multiples of 8 rows, so that x of every chunk begins at a multiple of 16 bytes.
fn chunk_rows(count: usize, stride: usize) -> usize {
    const FLOATS: usize = 1 << 27;
    let chunks = count.div_ceil((FLOATS / stride).clamp(1024, 4096));
    count.div_ceil(chunks).next_multiple_of(8).min(count)
}

/// Splits the classes into two parts: the classes beyond the last multiple of 8, and all others. Leaves out an empty
/// part. For 16-bit floats, cuBLAS uses slow kernels for products of matrices with an odd number of columns in memory.
/// On an H100 the products for GPT-2's 50,257 classes ran at 90 to 400 TFLOP/s, and those for 50,256 classes at 480 to
/// 650.
fn parts(classes: usize, dtype: Dtype) -> impl Iterator<Item = Range<usize>> + Clone {
    let even = if dtype == Dtype::F32 { classes } else { classes / 8 * 8 };
    [even..classes, 0..even].into_iter().filter(|part| !part.is_empty())
}

/// The operands, after all checks, and the destinations of the results.
struct Head<'a> {
    gpu: &'a Gpu,
    x: &'a Operand,
    weight: Matrix,
    inputs: usize,
    /// Number of classes of this rank.
    classes: usize,
    /// Number of padding rows of the weight after the classes.
    padding: usize,
    /// Which of all classes belong to this rank, if ranks split the classes.
    own: Option<&'a OfRank>,
    targets: &'a Indices,
    gradient: f32,
    dx: Option<Address>,
    z_loss: f32,
    /// Addresses that receive the loss and the z-loss. The second is 0 if no z-loss is requested.
    losses: [Address; 2],
}

impl Head<'_> {
    fn run(&self, d_weight: Option<(Address, Onto)>) -> Result<()> {
        let &Self { gpu, x, weight, inputs, classes, gradient, z_loss, .. } = self;
        let (count, bytes) = (self.targets.count as usize, x.dtype.bytes());
        // Rows begin at multiples of 32 bytes; otherwise products of 16-bit floats do not reach the tensor cores' full
        // speed. With the padding, the stride and therefore the chunks are the same on all ranks.
        let stride = (classes + self.padding).next_multiple_of(8);
        let (rows, parts) = (chunk_rows(count, stride), parts(classes, x.dtype));
        let (logits, statistics) = (gpu.floats(rows * stride)?, gpu.floats(3 * count)?);
        let (at, statistics) = (address(OP, &logits)?, address(OP, &statistics)?);
        for first in (0..count).step_by(rows) {
            let len = rows.min(count - first);
            let offset = (first * inputs * bytes) as u64;
            let x = Matrix::new(x.address + offset, x.dtype, len, inputs);
            let of = Logits {
                rows: count32(OP, len)?,
                classes: count32(OP, classes)?,
                stride: stride as u64,
                dtype: Dtype::F32,
                logits: at,
                targets: self.targets.address() + 4 * first as u64,
                z_loss,
            };
            let statistics = statistics + 12 * first as u64;
            // SAFETY: x has a row for each of the `count` targets, and the sizes of both operands were checked; the
            // rest was allocated for them.
            unsafe {
                for part in parts.clone() {
                    let to = To { address: at + 4 * part.start as u64, dtype: Dtype::F32, add: false };
                    product_strided(OP, gpu, x, weight.rows(&part).t(), to, stride)?;
                }
                gpu.launch(&kernels::forward(&of, statistics))?;
            }
            if let Some(own) = self.own {
                self.join(own, &of, statistics)?;
            }
            if self.dx.is_none() && d_weight.is_none() {
                continue;
            }
            let mean = (Upstream::Known(gradient), self.targets.counted());
            // If the gradients are 16-bit floats, rows begin twice as many elements apart.
            let d_logits = Matrix::strided(at, self.x.dtype, [len, classes], stride * 4 / bytes);
            // SAFETY: as above, and the logits are not read any more.
            unsafe { gpu.launch(&kernels::backward(&of, statistics, mean, (self.x.dtype, at))) }?;
            if classes == 0 {
                // SAFETY: as above.
                unsafe { self.zero_chunk(first * inputs, len * inputs) }?;
            }
            // dx is a sum over both parts of the classes. The result of the first part, of at most 7 classes, is
            // rounded before the second is added.
            for (index, part) in parts.clone().enumerate() {
                let d_logits = d_logits.columns(&part);
                if let Some(dx) = self.dx {
                    let to = To { address: dx + offset, dtype: self.x.dtype, add: index > 0 };
                    // SAFETY: dx has the size of x.
                    unsafe { product(OP, gpu, d_logits, weight.rows(&part), to) }?;
                }
                if let Some((to, onto)) = d_weight {
                    let to = to + 4 * (part.start * inputs) as u64;
                    let to = To { address: to, dtype: Dtype::F32, add: first > 0 || onto != Onto::Nothing };
                    // SAFETY: the place has an f32 for each element of the weight.
                    unsafe { product(OP, gpu, d_logits.t(), x, to) }?;
                }
            }
        }
        if let Some((to, Onto::Nothing)) = d_weight {
            let at = to + (4 * classes * inputs) as u64;
            // SAFETY: the place has an f32 for each element of the weight.
            unsafe { gpu.zero(at, 4 * self.padding * inputs) }?;
        }
        let (rows, counted) = (self.targets.count, self.targets.counted());
        // SAFETY: earlier launches on the stream write all statistics; a loss is one f32.
        unsafe { gpu.launch(&kernels::mean_loss(rows, counted, statistics, z_loss, self.losses)) }
    }

    /// Joins the ranks' statistics of a chunk's rows into statistics over the classes of all ranks.
    fn join(&self, own: &OfRank, of: &Logits, statistics: Address) -> Result<()> {
        let (gpu, count) = (self.gpu, 3 * of.rows as usize);
        let (part, at) = room_like(OP, gpu, DType::F32, count)?;
        // SAFETY: both have three floats for each row.
        unsafe { gpu.copy(statistics, at, count * size_of::<f32>()) }?;
        let all = own.group().gather_on_gpu(&tensor(part, count))?()?;
        let (all, ranks) = (Operand::of(OP, &all)?, count32(OP, own.ranks())?);
        // SAFETY: each rank has three floats for each row, and there is a target for each.
        unsafe { gpu.launch(&kernels::join([ranks, of.rows], all.address, of.targets, statistics)) }
    }

    /// Sets the gradient of some elements of x to zero.
    ///
    /// # Safety
    /// The gradient must have these elements.
    unsafe fn zero_chunk(&self, first: usize, count: usize) -> Result<()> {
        let (Some(dx), bytes) = (self.dx, self.x.dtype.bytes()) else { return Ok(()) };
        // SAFETY: guaranteed by the caller.
        unsafe { self.gpu.zero(dx + (first * bytes) as u64, count * bytes) }
    }
}

/// The node of candle's graph. Its forward only returns the loss, whose kernels were launched before.
struct Computed {
    /// Present until the forward takes it.
    loss: Mutex<Option<CudaStorage>>,
    /// The gradient that the forward assumed for the loss. `dx` and `d_weight` are already multiplied by it.
    gradient: f32,
    dx: Option<Tensor>,
    /// In f32. `None` if the weight needs no gradient, or if the gradient was already written to its buffer.
    d_weight: Option<CudaStorage>,
    is_delivered: bool,
}

impl Footprint for Computed {
    const READS: Reads = Reads::NOTHING;

    fn footprint(&self, _: &[&Tensor]) -> Result<Costs> {
        bail!("{OP}: the operation has already run")
    }
}

impl Op<2> for Computed {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, _: Inputs<'_, CpuStorage, 2>) -> Result<(CpuStorage, Shape)> {
        bail!("{OP}: the operation ran on a GPU")
    }

    fn cuda_fwd(&self, _: Inputs<'_, CudaStorage, 2>) -> Result<(CudaStorage, Shape)> {
        match self.loss.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(loss) => Ok((loss, Shape::from(()))),
            None => bail!("{OP}: the forward ran twice"),
        }
    }

    fn bwd(&self, [x, weight]: [&Tensor; 2], _: &Tensor, d_loss: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let gpu = Gpu::of(OP, x)?;
        let upstream = d_loss.to_dtype(DType::F32)?;
        let upstream = Operand::of(OP, &upstream)?;
        let upstream = (self.gradient, upstream.address);
        if self.is_delivered {
            // A gradient that was already written to its buffer cannot be rescaled, so the kernel checks that the loss
            // has the assumed gradient.
            let faults = gpu.faults();
            let (fault, what) = (faults.address(), faults.what(OP, Finding::Gradient));
            // SAFETY: a loss's gradient is one f32; the rest lives as long as the device.
            unsafe { gpu.launch(&kernels::foreseen(upstream, fault, what)) }?;
            return Ok([self.dx.clone(), None]);
        }
        let d_weight = match &self.d_weight {
            Some(d_weight) => deliver(OP, &gpu, weight, |to, onto| {
                let (count, from) = (weight.elem_count() as u64, address(OP, d_weight)?);
                let add = onto != Onto::Nothing;
                // SAFETY: both have an f32 for each element of the weight.
                unsafe { gpu.launch_some(kernels::rescale(Dtype::F32, count, [from, to], upstream, add)) }
            })?,
            None => None,
        };
        let dx = match &self.dx {
            Some(dx) => {
                let from = Operand::of(OP, dx)?;
                let (to, at) = room_like(OP, &gpu, x.dtype(), from.count)?;
                let (count, at) = (from.count as u64, [from.address, at]);
                // SAFETY: both have the same number of elements of one dtype.
                unsafe { gpu.launch_some(kernels::rescale(from.dtype, count, at, upstream, false)) }?;
                Some(tensor(to, x.shape()))
            }
            None => None,
        };
        Ok([dx, d_weight])
    }
}

#[cfg(test)]
mod tests {
    use super::{chunk_rows, parts};
    use zero_kernels::Dtype;

    #[test]
    fn parts_cover_the_classes() {
        let of = |classes, dtype| parts(classes, dtype).map(|part| (part.start, part.end)).collect::<Vec<_>>();
        assert_eq!(of(50_257, Dtype::Bf16), [(50_256, 50_257), (0, 50_256)]);
        assert_eq!(of(128_256, Dtype::F16), [(0, 128_256)]);
        assert_eq!(of(5, Dtype::Bf16), [(0, 5)]);
        assert_eq!(of(50_257, Dtype::F32), [(0, 50_257)]);
    }

    #[test]
    fn chunks_are_about_equally_large() {
        // With GPT-2's vocabulary a chunk holds at most 2,670 rows.
        for (count, rows) in [(1, 1), (100, 100), (2670, 2670), (2671, 1336), (4096, 2048), (8192, 2048), (8200, 2056)]
        {
            assert_eq!(chunk_rows(count, 50_264), rows, "{count}");
        }
        for stride in [8, 4096, 50_264, 128_256, 1 << 20] {
            for count in (1..40_000).step_by(37) {
                let rows = chunk_rows(count, stride);
                let rest = (count - 1) % rows + 1;
                assert!(rows * stride <= (1 << 27).max(1024 * stride) + 8 * stride, "{count} {stride}");
                assert!(rows - rest < 8 * count.div_ceil(rows), "{count} {stride}");
            }
        }
    }
}
