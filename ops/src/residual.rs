//! A residual connection and the norm that follows it, in one pass over memory.
//!
//! The sum is normalized while its rows are in the first-level cache. A fused block records the two operations as if
//! they had run in sequence. Their backwards are therefore unchanged, and so are the bits of the results.

use crate::graph::apply::{computed, sum, summed};
use crate::graph::operand::{View, rows};
use crate::graph::output::{Fresh, Reader, at_once};
use crate::kernel::{HalfFloat, Isa, norm::add};
use crate::measure;
use crate::meta;
use crate::meta::footprint::rooms;
use crate::parallel::split;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{DType, Result, Storage, Tensor, bail};
use half::{bf16, f16};

/// Computes (x + branch, norm(x + branch)). `norm` normalizes a block of whole rows of the sum. `after` applies the
/// norm as a separate operation. `record` records the norm, given the sum and the values of the normalized rows.
pub(crate) fn residual_norm(
    op: &'static str,
    x: &Tensor,
    branch: &Tensor,
    norm: impl Fn(&[f32], &mut [f32]) + Sync,
    after: impl FnOnce(&Tensor) -> Result<Tensor>,
    record: impl FnOnce(&Tensor, Storage) -> Tensor,
) -> Result<(Tensor, Tensor)> {
    let dtype = x.dtype();
    if meta::tracing() || !computed(x, branch) {
        let total = sum(x, branch)?;
        let normal = after(&total)?;
        if meta::tracing() {
            // Counts the buffers for rows of two operands and two results. The results themselves are already counted.
            let (count, size) = rows(op, x.shape())?;
            meta::passing(rooms(dtype, count, size, 3));
        }
        return Ok((total, normal));
    }
    fits(op, x, branch)?;
    let _timed = measure::forward(op);
    let (count, size) = rows(op, x.shape())?;
    let (mut sums, mut normals) = (Fresh::new(op, dtype, count * size)?, Fresh::new(op, dtype, count * size)?);
    {
        let held = (x.storage_and_layout(), branch.storage_and_layout());
        let (xs, ys) = (View::of(op, &held.0)?, View::of(op, &held.1)?);
        let (xs, ys) = (xs.elements(), ys.elements());
        let (to_sums, to_normals) = (sums.shared(), normals.shared());
        let at_once = at_once(size);
        split::<f32, 0>(count, size, [], |range, []| {
            let (isa, mut room_of_sums, mut room_of_normals) = (Isa::current(), vec![], vec![]);
            let mut operands = [xs, ys].map(Reader::new);
            for start in range.clone().step_by(at_once) {
                let part = start * size..range.end.min(start + at_once) * size;
                let [x, y] = operands.each_mut().map(|operand| operand.floats(part.clone()));
                // SAFETY: each row is in one part, and each part belongs to one thread.
                unsafe {
                    to_sums.write(part.start, part.len(), &mut room_of_sums, |sums| {
                        add(isa, x, y, sums);
                        match dtype {
                            DType::BF16 => as_stored::<bf16>(sums),
                            DType::F16 => as_stored::<f16>(sums),
                            _ => {}
                        }
                        to_normals.write(part.start, part.len(), &mut room_of_normals, |normals| norm(sums, normals));
                    });
                }
            }
        });
    }
    // SAFETY: the ranges of `split` cover all rows, so all elements are written.
    let (sums, normals) = unsafe { (sums.filled(count * size), normals.filled(count * size)) };
    let total = summed(x, branch, Storage::Cpu(sums));
    let normal = record(&total, Storage::Cpu(normals));
    Ok((total, normal))
}

/// Computes [`residual_norm`] on a GPU, where `made` launches both operations.
#[cfg(feature = "cuda")]
pub(crate) fn residual_norm_on_gpu(
    op: &'static str,
    [x, branch]: [&Tensor; 2],
    made: impl FnOnce() -> Result<[CudaStorage; 2]>,
    after: impl FnOnce(&Tensor) -> Result<Tensor>,
    record: impl FnOnce(&Tensor, Storage) -> Tensor,
) -> Result<(Tensor, Tensor)> {
    if !computed(x, branch) {
        let total = sum(x, branch)?;
        let normal = after(&total)?;
        return Ok((total, normal));
    }
    fits(op, x, branch)?;
    let [sums, normals] = made()?;
    let total = summed(x, branch, Storage::Cuda(sums));
    let normal = record(&total, Storage::Cuda(normals));
    Ok((total, normal))
}

/// # Errors
/// Fails if the shapes or dtypes differ.
fn fits(op: &'static str, x: &Tensor, branch: &Tensor) -> Result<()> {
    let (dtype, other) = (x.dtype(), branch.dtype());
    if x.shape() != branch.shape() || dtype != other {
        bail!("{op}: {dtype:?} {:?} and {other:?} {:?} do not match", x.shape(), branch.shape());
    }
    Ok(())
}

/// Rounds values to the 16-bit dtype in which they are stored, and widens them again.
fn as_stored<H: HalfFloat>(values: &mut [f32]) {
    let mut rounded = [H::ZERO; 512];
    for values in values.chunks_mut(rounded.len()) {
        let rounded = &mut rounded[..values.len()];
        H::round(values, rounded);
        H::widen(rounded, values);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LayerNorm;
    use crate::RmsNorm;
    use crate::graph::apply::untracked;
    use crate::random::Stream;
    use candle_core::Device;
    use candle_nn::Module;

    fn normal(name: &str, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let mut values = vec![0.0; shape.iter().product()];
        Stream::new(3, name, 0).fill_normal(0, &mut values);
        Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)
    }

    fn values(x: &Tensor) -> Result<Vec<f32>> {
        x.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
    }

    #[test]
    fn is_bit_identical_to_sum_and_norm() -> Result<()> {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for (count, size) in [(1, 1), (7, 33), (130, 100), (3, 9000)] {
                let [x, branch] = ["x", "branch"].map(|name| normal(name, &[count, size], dtype));
                let (x, branch) = (x?, branch?);
                let (weight, bias) = (normal("weight", &[size], dtype)?, normal("bias", &[size], dtype)?);
                let layer = LayerNorm::from_tensors(weight.clone(), bias, 1e-5);
                let rms = RmsNorm::from_tensor(weight, 1e-6);
                // candle's own 16-bit sum is not rounded on every processor.
                let want = (x.to_dtype(DType::F32)? + branch.to_dtype(DType::F32)?)?.to_dtype(dtype)?;
                for threads in [1, 3] {
                    crate::set_threads(threads);
                    let (total, normal) = untracked(|| layer.forward_residual(&x, &branch))?;
                    assert_eq!(values(&total)?, values(&want)?, "{dtype:?} {count}x{size}");
                    assert_eq!(values(&normal)?, values(&layer.forward(&want)?)?, "{dtype:?} {count}x{size}");
                    let (total, normal) = untracked(|| rms.forward_residual(&x, &branch))?;
                    assert_eq!(values(&total)?, values(&want)?, "{dtype:?} {count}x{size}");
                    assert_eq!(values(&normal)?, values(&rms.forward(&want)?)?, "{dtype:?} {count}x{size}");
                }
                crate::set_threads(1);
            }
        }
        Ok(())
    }

    #[test]
    fn mismatched_shapes_are_errors() -> Result<()> {
        let (x, branch) = (normal("x", &[2, 8], DType::F32)?, normal("b", &[3, 8], DType::F32)?);
        let rms = RmsNorm::from_tensor(normal("w", &[8], DType::F32)?, 1e-6);
        let error = untracked(|| rms.forward_residual(&x, &branch)).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains("do not match"), "{error}");
        let error =
            untracked(|| rms.forward_residual(&normal("x", &[2, 6], DType::F32)?, &normal("b", &[2, 6], DType::F32)?));
        let error = error.err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains("weight"), "{error}");
        Ok(())
    }
}
