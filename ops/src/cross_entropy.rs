//! Softmax and negative log-likelihood in one operation.

#[cfg(feature = "cuda")]
use crate::gpu;
use crate::graph::apply::apply;
use crate::graph::op::{Inputs, Op};
use crate::graph::operand::{IGNORE_INDEX, NO_TARGET, View, rows, targets as read, targets_of};
use crate::graph::output::{Reader, build_as, tensor};
use crate::kernel::{Isa, softmax as kernel};
use crate::measure;
use crate::meta::footprint::{Costs, Footprint, Reads, floats, indices_room, rooms};
use crate::parallel::{Output, parts, split};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, DType, Layout, Result, Shape, Tensor, bail};
use std::sync::OnceLock;

/// Computes the mean over rows of −ln `softmax(logits)[target]`, an f32 scalar.
///
/// `logits` is `[.., classes]` in f32, bf16 or f16. `targets` has the same leading dimensions and holds u32, i64 or u8
/// below `classes`. The losses of the rows are added in f64, in row order.
///
/// An i64 target may also be [`IGNORE_INDEX`]. The mean leaves out such a row, and its gradient is zero. If all rows
/// are ignored, the loss and all gradients are 0, where PyTorch returns NaN: a micro-batch without a target then adds
/// nothing to the gradient of the global batch.
///
/// # Errors
/// Fails if a target is neither below `classes` nor an i64 `IGNORE_INDEX`. On a GPU the loss becomes NaN instead, and
/// `device::check` reports the error later.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    cross_entropy_with_z_loss(logits, targets, 0.0)
}

/// Computes the [`cross_entropy`] plus `z_loss` times the mean of ln²Z over the rows that are not ignored, where Z is
/// the sum of e^logit over the classes. This is the auxiliary loss of PaLM (Chowdhery et al., 2022, section 5), which
/// keeps ln Z near 0. With `z_loss` 0 the result is bit-identical to [`cross_entropy`].
///
/// # Errors
/// Fails in the same cases as [`cross_entropy`].
pub fn cross_entropy_with_z_loss(logits: &Tensor, targets: &Tensor, z_loss: f32) -> Result<Tensor> {
    apply([logits, targets], CrossEntropy { z_loss, ..CrossEntropy::default() })
}

/// Returns the number of targets that are not [`IGNORE_INDEX`]. If the targets are on a GPU, waits for it.
///
/// # Errors
/// Fails if `targets` cannot be read from its device.
pub fn count_targets(targets: &Tensor) -> Result<u64> {
    let all = targets.elem_count() as u64;
    if targets.dtype() != DType::I64 {
        return Ok(all);
    }
    let ignored = targets.flatten_all()?.to_vec1::<i64>()?.into_iter().filter(|&target| target == IGNORE_INDEX).count();
    Ok(all - ignored as u64)
}

/// Returns the divisor of the mean: the number of rows with a target, but at least 1.
pub(crate) fn mean_over(targets: &[usize]) -> usize {
    targets.iter().filter(|&&target| target != NO_TARGET).count().max(1)
}

/// Keeps three statistics of each row: its largest logit, Σ e^(x − largest) and its target's logit. The backward needs
/// the first two. An ignored row keeps 0, 1 and 0, which give a loss of 0.
#[derive(Default)]
struct CrossEntropy {
    z_loss: f32,
    statistics: OnceLock<Vec<f32>>,
    #[cfg(feature = "cuda")]
    on_gpu: OnceLock<CudaStorage>,
}

const OP: &str = "cross-entropy";

/// The loss of one row, in f64.
#[derive(Clone, Copy, Default)]
pub(crate) struct RowLoss {
    /// −ln softmax of the target's logit.
    pub(crate) loss: f64,
    /// ln²Z.
    pub(crate) z: f64,
}

impl RowLoss {
    /// Computes the loss from the `largest` and `sum` of [`kernel::max_and_sum`] and the target's logit.
    pub(crate) fn new(largest: f32, sum: f32, logit: f32) -> Self {
        let ln_sum = libm::log(f64::from(sum));
        let ln_z = ln_sum + f64::from(largest);
        Self { loss: ln_sum + (f64::from(largest) - f64::from(logit)), z: ln_z * ln_z }
    }
}

/// The sum of the rows' losses, added in row order.
#[derive(Clone, Copy, Default)]
pub(crate) struct Total(RowLoss);

impl Total {
    pub(crate) fn add(&mut self, row: RowLoss) {
        self.0.loss += row.loss;
        self.0.z += row.z;
    }

    /// Returns the mean loss including its z-loss, and the z-loss alone.
    pub(crate) fn mean(self, rows: usize, z_loss: f32) -> [f32; 2] {
        let rows = rows as f64;
        match z_loss {
            0.0 => [(self.0.loss / rows) as f32, 0.0],
            _ => {
                let z = f64::from(z_loss) * self.0.z;
                [((self.0.loss + z) / rows) as f32, (z / rows) as f32]
            }
        }
    }
}

/// Returns the factor that multiplies a row's softmax in the gradient of the row's loss: `factor`·(1 + 2·`z_loss`·ln
/// Z).
pub(crate) fn softmax_factor(factor: f32, z_loss: f32, largest: f32, sum: f32) -> f32 {
    match z_loss {
        0.0 => factor,
        _ => {
            let ln_z = libm::log(f64::from(sum)) + f64::from(largest);
            (f64::from(factor) * (1.0 + 2.0 * f64::from(z_loss) * ln_z)) as f32
        }
    }
}

fn fits(count: usize, logits: &Layout, targets: &Layout) -> Result<()> {
    match count > 0 && targets.dims() == &logits.dims()[..logits.dims().len() - 1] {
        true => Ok(()),
        false => {
            bail!("{OP}: the shapes of logits {:?} and targets {:?} do not match", logits.shape(), targets.shape())
        }
    }
}

impl Footprint for CrossEntropy {
    const READS: Reads = Reads::inputs([true, true, false]);

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let (logits, targets) = (inputs[0], inputs[1]);
        let ((count, classes), dtype) = (rows(OP, logits.shape())?, logits.dtype());
        let (copied, kept) = indices_room(targets);
        let statistics = floats(3 * count);
        let row = if dtype == DType::F32 { 0 } else { parts(count, classes) as u64 * floats(classes) };
        Ok(Costs {
            saved: statistics,
            forward: copied.saturating_sub(statistics).max(kept + row),
            backward: kept + rooms(dtype, count, classes, 0),
            gradients: [true, false, false],
            ..Costs::new((), DType::F32)
        })
    }
}

impl Op<2> for CrossEntropy {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, [(ls, ll), (ts, tl)]: Inputs<'_, CpuStorage, 2>) -> Result<(CpuStorage, Shape)> {
        let _timed = measure::forward(OP);
        let (count, classes) = rows(OP, ll.shape())?;
        fits(count, ll, tl)?;
        let targets = read(OP, ts, tl, classes)?;
        let logits = View::new(OP, ls, ll)?;
        let mut statistics = vec![0.0; 3 * count];
        split(count, classes, [Output { data: &mut statistics, floats: 3 }], |range, [statistics]| {
            let (isa, mut logits) = (Isa::current(), Reader::new(logits.elements()));
            for (row, out) in range.zip(statistics.chunks_exact_mut(3)) {
                if targets[row] == NO_TARGET {
                    out.copy_from_slice(&[0.0, 1.0, 0.0]);
                    continue;
                }
                let logits = logits.floats(row * classes..(row + 1) * classes);
                let (largest, sum) = kernel::max_and_sum(isa, logits);
                out.copy_from_slice(&[largest, sum, logits[targets[row]]]);
            }
        });
        let mut total = Total::default();
        statistics.chunks_exact(3).for_each(|row| total.add(RowLoss::new(row[0], row[1], row[2])));
        // The forward runs once, because each call of `cross_entropy` creates its own operation.
        let _ = self.statistics.set(statistics);
        let [loss, _] = total.mean(mean_over(&targets), self.z_loss);
        Ok((CpuStorage::F32(vec![loss]), Shape::from(())))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, [(ls, ll), (ts, tl)]: Inputs<'_, CudaStorage, 2>) -> Result<(CudaStorage, Shape)> {
        let (count, _) = rows(OP, ll.shape())?;
        fits(count, ll, tl)?;
        let [loss, statistics] = gpu::cross_entropy::forward(OP, (ls, ll), (ts, tl), self.z_loss)?;
        let _ = self.on_gpu.set(statistics);
        Ok((loss, Shape::from(())))
    }

    fn bwd(&self, [logits, targets]: [&Tensor; 2], _: &Tensor, d_loss: &Tensor) -> Result<[Option<Tensor>; 2]> {
        #[cfg(feature = "cuda")]
        if gpu::holds(logits) {
            let Some(statistics) = self.on_gpu.get() else { bail!("{OP}: the backward ran before the forward") };
            let dx = gpu::cross_entropy::backward(OP, logits, targets, (statistics, self.z_loss), d_loss)?;
            return Ok([Some(dx), None]);
        }
        let _timed = measure::backward(OP);
        let (count, classes) = rows(OP, logits.shape())?;
        let Some(statistics) = self.statistics.get() else { bail!("{OP}: the backward ran before the forward") };
        let targets = targets_of(OP, targets, classes)?;
        let held = logits.storage_and_layout();
        let xs = View::of(OP, &held)?;
        let factor = d_loss.to_dtype(DType::F32)?.to_scalar::<f32>()? / mean_over(&targets) as f32;
        let dx = build_as(OP, logits.dtype(), count, classes, [], |range, [], dx| {
            let isa = Isa::current();
            for (row, dx) in range.zip(dx.chunks_exact_mut(classes)) {
                if targets[row] == NO_TARGET {
                    dx.fill(0.0);
                    continue;
                }
                let (largest, sum) = (statistics[3 * row], statistics[3 * row + 1]);
                xs.elements().read(isa, row * classes, dx);
                kernel::scaled_softmax(isa, dx, largest, sum, softmax_factor(factor, self.z_loss, largest, sum));
                dx[targets[row]] -= factor;
            }
        })?;
        Ok([Some(tensor(dx, logits.shape())), None])
    }
}
