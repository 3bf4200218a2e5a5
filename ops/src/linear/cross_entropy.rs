//! The head of a language model and its loss, without holding the logits of all rows.
//!
//! Logits are a model's largest activation: rows × vocabulary, the same size again for their gradient, and twice more
//! if candle adds that to zeros. This operation multiplies out one chunk of rows at a time. It computes the chunk's
//! losses, turns the logits in place into their gradients, and adds these to dx and dW at once. The gradients are
//! thus computed together with the loss. The backward only returns them and no longer needs x or the weight.

use crate::cross_entropy::{mean_over, row_loss};
#[cfg(feature = "cuda")]
use crate::gpu;
use crate::graph::apply::{apply2, count2};
use crate::graph::gradient::deliver;
use crate::graph::operand::{NO_TARGET, View, rows, targets_of};
use crate::graph::output::{stored, tensor};
use crate::kernel::{HalfFloat, Isa, softmax as kernel};
use crate::measure;
use crate::meta;
use crate::meta::footprint::{Costs, Footprint, Reads, bytes, element_rooms, floats, indices_room};
use crate::parallel::{Output, split, threads};
use crate::product::{Elements, Matrix, Start, add_product, new_product, product};
use crate::sink;
use candle_core::{CpuStorage, CustomOp2, D, DType, Layout, Result, Shape, Tensor, bail};
use half::{bf16, f16};

/// Computes the [`cross_entropy`](crate::cross_entropy) of x·Wᵀ: an f32 scalar, the mean over rows.
///
/// `x` is `[.., inputs]`, `weight` `[classes, inputs]`; `targets` has the leading dimensions of `x` and holds u32,
/// i64 or u8 below `classes`. Logits are f32 even if `x` and `weight` are bf16 or f16.
///
/// Rows whose i64 target is [`IGNORE_INDEX`](crate::IGNORE_INDEX) are not part of the mean, and their gradient is zero,
/// as for `cross_entropy`. On the CPU they cost nothing: products contain the other rows only.
///
/// `gradient` is the gradient that this loss will receive in the backward: 1 for `loss.backward()`, c for `(loss *
/// c)?.backward()`. Inside [`sink::Gradients::capture`], the gradient of the weight is written to its place at once,
/// with this factor, and a different gradient in the backward is an error. Elsewhere the gradients are kept until the
/// backward, which rescales them if necessary. Pass detached tensors if no gradient is wanted.
///
/// # Errors
/// Fails if shapes or dtypes do not match, there are no rows, or another target is not below `classes`. On a GPU such a
/// target produces NaN; `gpu::check` later reports it, and also a gradient in the backward that differs from
/// `gradient`.
pub fn linear_cross_entropy(x: &Tensor, weight: &Tensor, targets: &Tensor, gradient: f32) -> Result<Tensor> {
    let (count, inputs) = rows(OP, x.shape())?;
    let (classes, weight_inputs) = weight.dims2()?;
    if inputs != weight_inputs || classes == 0 {
        bail!("{OP}: the input {:?} does not match the weight {:?}", x.shape(), weight.shape());
    }
    if count == 0 || targets.dims() != &x.dims()[..x.rank() - 1] {
        bail!("{OP}: the input {:?} does not match the targets {:?}", x.shape(), targets.shape());
    }
    if meta::tracing() {
        return count2(x, weight, &ToCompute { targets });
    }
    #[cfg(feature = "cuda")]
    if gpu::holds(x) {
        return gpu::linear_cross_entropy::linear_cross_entropy(x, weight, targets, gradient);
    }
    let mut targets = targets_of(OP, targets, classes)?;
    let counted = mean_over(&targets);
    let rows = some_rows(&mut targets);
    let (loss, dx, d_weight) = {
        let held = (x.storage_and_layout(), weight.storage_and_layout());
        let (xs, w) = (View::of(OP, &held.0)?, View::of(OP, &held.1)?);
        let weight_matrix = Matrix::new(w.elements(), classes, inputs);
        let head =
            Head { x: xs.elements(), weight: weight_matrix, inputs, classes, rows: rows.as_deref(), targets: &targets };
        let mut dx = x.track_op().then(|| vec![0.0; x.elem_count()]);
        let factor = gradient / counted as f32;
        let (mut total, mut d_weight) = (0.0, None);
        if !weight.track_op() {
            total = head.run(factor, dx.as_deref_mut(), None);
        } else if sink::has(weight) {
            deliver(OP, weight, |out| total = head.run(factor, dx.as_deref_mut(), Some(out)))?;
        } else {
            let out = d_weight.insert(vec![0.0; classes * inputs]);
            total = head.run(factor, dx.as_deref_mut(), Some(out));
        }
        let dx = dx.map(|dx| stored(OP, dx, x.dtype())).transpose()?.map(|dx| tensor(dx, x.shape()));
        ((total / counted as f64) as f32, dx, d_weight)
    };
    apply2(x, weight, Computed { loss, gradient, dx, d_weight })
}

const OP: &str = "linear-cross-entropy";

/// Returns how many rows to multiply out at a time: 4 MiB of logits, but at least 256 rows. Every chunk packs the
/// weight twice and makes one pass over dW, which for GPT-2's 50257 × 768 costs a tenth of the time of 256 rows. The
/// number does not affect the results, since the sums of dW continue from chunk to chunk.
fn chunk_rows(classes: usize) -> usize {
    const FLOATS: usize = 1 << 20;
    (FLOATS / classes).clamp(256, 1024)
}

/// Drops the targets of ignored rows and returns the numbers of the other rows; `None` if no row is ignored.
fn some_rows(targets: &mut Vec<usize>) -> Option<Vec<usize>> {
    if !targets.contains(&NO_TARGET) {
        return None;
    }
    let rows = targets.iter().enumerate().filter(|(_, target)| **target != NO_TARGET).map(|(row, _)| row).collect();
    targets.retain(|&target| target != NO_TARGET);
    Some(rows)
}

/// The operands, after all checks.
struct Head<'a> {
    x: Elements<'a>,
    weight: Matrix<'a>,
    inputs: usize,
    classes: usize,
    /// The row of x for each target; `None` if they are all rows, in order.
    rows: Option<&'a [usize]>,
    targets: &'a [usize],
}

/// The rows of x of a chunk.
enum Rows<'a> {
    /// Consecutive, from this row on.
    From(usize),
    /// Copied.
    At(&'a [usize]),
}

impl Head<'_> {
    /// Returns the sum of the rows' losses. Writes the gradients multiplied by `factor` where they are wanted. `dx` is
    /// zero before.
    fn run(&self, factor: f32, mut dx: Option<&mut [f32]>, mut d_weight: Option<&mut [f32]>) -> f64 {
        let (inputs, at_once) = (self.inputs, chunk_rows(self.classes));
        let (mut total, mut copied, mut d_copied) = (0.0, Copied::default(), vec![]);
        if let (true, Some(d_weight)) = (self.targets.is_empty(), &mut d_weight) {
            d_weight.fill(0.0);
        }
        for (chunk, targets) in self.targets.chunks(at_once).enumerate() {
            let (rows, len) = (self.rows_of(chunk * at_once, targets.len()), targets.len());
            let x = match rows {
                Rows::From(first) => self.x.skip(first * inputs),
                Rows::At(rows) => copied.of(self.x, rows, inputs),
            };
            let x = Matrix::new(x, len, inputs);
            let mut logits = new_product(Start::Zero, x, self.weight.t(), threads());
            let wanted = dx.is_some() || d_weight.is_some();
            total = self.losses(&mut logits, targets, wanted.then_some(factor), total);
            let d_logits = match self.x {
                Elements::F32(_) => Matrix::new(&logits, len, self.classes),
                Elements::Bf16(_) => rounded_rows::<bf16>(&logits, len, self.classes),
                Elements::F16(_) => rounded_rows::<f16>(&logits, len, self.classes),
                Elements::Quantized(_) => unreachable!("{NO_WEIGHT}"),
            };
            match (&mut dx, rows) {
                (None, _) => {}
                (Some(dx), Rows::From(first)) => {
                    product(&mut dx[first * inputs..(first + len) * inputs], d_logits, self.weight, threads());
                }
                (Some(dx), Rows::At(rows)) => {
                    d_copied.resize(len * inputs, 0.0);
                    product(&mut d_copied, d_logits, self.weight, threads());
                    for (&row, from) in rows.iter().zip(d_copied.chunks_exact(inputs)) {
                        dx[row * inputs..(row + 1) * inputs].copy_from_slice(from);
                    }
                }
            }
            if let Some(d_weight) = &mut d_weight {
                match chunk {
                    0 => product(d_weight, d_logits.t(), x, threads()),
                    _ => add_product(d_weight, d_logits.t(), x, threads()),
                }
            }
        }
        total
    }

    /// Returns the rows of x for `len` targets from `first` on.
    fn rows_of(&self, first: usize, len: usize) -> Rows<'_> {
        match self.rows {
            None => Rows::From(first),
            Some(rows) => match &rows[first..first + len] {
                [from, .., to] if to - from + 1 != len => Rows::At(&rows[first..first + len]),
                rows => Rows::From(rows[0]),
            },
        }
    }

    /// Returns `total` plus the losses of a chunk's rows, in order. With a factor, replaces the logits by their
    /// gradients times the factor. The gradients of a bf16 or f16 model are rounded, as in PyTorch, and fill the
    /// first half of each row.
    fn losses(&self, logits: &mut [f32], targets: &[usize], factor: Option<f32>, total: f64) -> f64 {
        let _timed = measure::forward("cross-entropy");
        let mut parts = vec![0.0; 3 * targets.len()];
        let outputs = [Output { data: logits, floats: self.classes }, Output { data: &mut parts, floats: 3 }];
        split(targets.len(), self.classes, outputs, |range, [logits, parts]| {
            let isa = Isa::current();
            let rows = logits.chunks_exact_mut(self.classes).zip(parts.chunks_exact_mut(3));
            for ((row, part), &target) in rows.zip(&targets[range]) {
                let (largest, sum) = kernel::max_and_sum(isa, row);
                part.copy_from_slice(&[largest, sum, row[target]]);
                if let Some(factor) = factor {
                    kernel::scaled_softmax(isa, row, largest, sum, factor);
                    row[target] -= factor;
                    match self.x {
                        Elements::F32(_) => {}
                        Elements::Bf16(_) => round_in_place::<bf16>(isa, row),
                        Elements::F16(_) => round_in_place::<f16>(isa, row),
                        Elements::Quantized(_) => unreachable!("{NO_WEIGHT}"),
                    }
                }
            }
        });
        parts.chunks_exact(3).fold(total, |total, part| total + row_loss(part[0], part[1], part[2]))
    }
}

/// Copies of rows of x. Only the vector of its dtype is used.
#[derive(Default)]
struct Copied {
    f32: Vec<f32>,
    bf16: Vec<bf16>,
    f16: Vec<f16>,
}

impl Copied {
    fn of(&mut self, x: Elements<'_>, rows: &[usize], width: usize) -> Elements<'_> {
        fn copy<'r, T: Copy>(from: &[T], rows: &[usize], width: usize, to: &'r mut Vec<T>) -> &'r [T] {
            to.clear();
            to.reserve_exact(rows.len() * width);
            rows.iter().for_each(|row| to.extend_from_slice(&from[row * width..(row + 1) * width]));
            to
        }
        match x {
            Elements::F32(x) => Elements::F32(copy(x, rows, width, &mut self.f32)),
            Elements::Bf16(x) => Elements::Bf16(copy(x, rows, width, &mut self.bf16)),
            Elements::F16(x) => Elements::F16(copy(x, rows, width, &mut self.f16)),
            Elements::Quantized(_) => unreachable!("{NO_WEIGHT}"),
        }
    }
}

/// Only weights of linear maps are quantized, and [`View`] makes no such elements.
const NO_WEIGHT: &str = "the input of a loss is not quantized";

/// Rounds a row to a 16-bit float and stores it in the first half of the row.
fn round_in_place<H: HalfFloat>(isa: Isa, row: &mut [f32]) {
    let mut rounded = [H::ZERO; 512];
    for start in (0..row.len()).step_by(rounded.len()) {
        let part = start..row.len().min(start + rounded.len());
        let rounded = &mut rounded[..part.len()];
        H::round(isa, &row[part], rounded);
        // SAFETY: element `start` of half the size lies at or before the elements that have been read, `H` has two
        // bytes, and any bits are valid floats.
        unsafe {
            let to = row.as_mut_ptr().cast::<H>().add(start);
            std::ptr::copy_nonoverlapping(rounded.as_ptr(), to, rounded.len());
        }
    }
}

/// Views rows of f32 whose first halves were rounded in place.
fn rounded_rows<'a, H: HalfFloat>(rows: &'a [f32], count: usize, width: usize) -> Matrix<'a>
where
    Elements<'a>: From<&'a [H]>,
{
    // SAFETY: the slices have the same number of bytes, `H` has a smaller alignment, and any bits are a valid 16-bit
    // float.
    let halves: &'a [H] = unsafe { std::slice::from_raw_parts(rows.as_ptr().cast(), 2 * rows.len()) };
    Matrix::strided(halves, count, width, 2 * width)
}

/// The node of the graph. Its forward only returns values that were computed before.
struct Computed {
    loss: f32,
    /// The factor of the gradients.
    gradient: f32,
    dx: Option<Tensor>,
    /// `None` if it is not wanted or already written to its place.
    d_weight: Option<Vec<f32>>,
}

impl Footprint for Computed {
    const READS: Reads = Reads::NOTHING;

    fn footprint(&self, _: &[&Tensor]) -> Result<Costs> {
        bail!("{OP}: the operation has already run")
    }
}

/// The operation in a trace, which computes nothing.
struct ToCompute<'a> {
    targets: &'a Tensor,
}

impl Footprint for ToCompute<'_> {
    const READS: Reads = Reads::NOTHING;

    fn footprint(&self, inputs: &[&Tensor]) -> Result<Costs> {
        let (x, weight) = (inputs[0], inputs[1]);
        let (count, classes) = (self.targets.elem_count(), weight.dim(0)?);
        let (copied, kept) = indices_room(self.targets);
        let at_once = chunk_rows(classes).min(count);
        let another = if meta::is_written(weight) { floats(weight.elem_count()) } else { 0 };
        let (elements, dtype) = (if x.track_op() { x.elem_count() } else { 0 }, x.dtype());
        // Only i64 targets can be ignored. Then the chunk's rows of x, and its part of dx, may be copies.
        let of_some = match self.targets.dtype() {
            DType::I64 => {
                let copied = at_once * x.dim(D::Minus1)?;
                floats(2 * count) + bytes(copied, dtype) + if x.track_op() { floats(copied) } else { 0 }
            }
            _ => 0,
        };
        let chunk = floats(at_once * classes) + floats(3 * at_once) + of_some;
        let saved = bytes(elements, dtype);
        // The gradient of x in f32, before it is rounded.
        let wide = floats(elements) - saved;
        let rounding = if wide == 0 { 0 } else { floats(elements) + element_rooms(dtype, elements, 0) };
        Ok(Costs {
            saved,
            hands_over: true,
            forward: copied.saturating_sub(saved).max(kept + (another + chunk + wide).max(rounding)),
            gradients: [true, false, false],
            ..Costs::new((), DType::F32)
        })
    }
}

impl CustomOp2 for Computed {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![self.loss]), Shape::from(())))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        d_loss: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let d_loss = d_loss.to_dtype(DType::F32)?.to_scalar::<f32>()?;
        let scale = if d_loss == self.gradient { 1.0 } else { d_loss / self.gradient };
        let d_weight = match &self.d_weight {
            Some(d_weight) => deliver(OP, weight, |out| {
                for (out, d) in out.iter_mut().zip(d_weight) {
                    *out = d * scale;
                }
            })?,
            None if scale != 1.0 && weight.track_op() => {
                bail!("{OP}: the gradient of the loss is {d_loss}, but the forward assumed {}", self.gradient)
            }
            None => None,
        };
        let dx = match &self.dx {
            Some(dx) if scale == 1.0 => Some(dx.to_dtype(x.dtype())?),
            Some(dx) => Some((dx * f64::from(scale))?.to_dtype(x.dtype())?),
            None => None,
        };
        Ok((dx, d_weight))
    }
}
