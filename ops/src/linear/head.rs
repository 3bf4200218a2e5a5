//! Computes a language model's head row by row, without holding the logits of all rows.
//!
//! Logits are a model's largest activation: rows × vocabulary. [`Head`] computes the logits of one chunk of rows at a
//! time and passes on the loss of each row. It replaces the logits in place by their gradients and adds the chunk's
//! contributions to dx and dW at once.

use crate::cross_entropy::{RowLoss, softmax_factor};
use crate::kernel::{HalfFloat, Isa, softmax as kernel};
use crate::measure;
use crate::parallel::{Output, split, threads};
use crate::product::{Elements, Matrix, Start, add_product, new_product, product};
use crate::tensor::OfRank;
use candle_core::Result;
use half::{bf16, f16};
use std::ops::Range;

/// Returns how many rows of logits to compute at a time: 4 MiB of logits, but at least 256 and at most 1024 rows. Every
/// chunk packs the weight twice and makes one pass over dW. For GPT-2's head of 50257 × 768, this overhead is a tenth
/// of the time of a chunk of 256 rows. The number of rows does not affect the results, since the sums of dW continue
/// from chunk to chunk.
pub(super) fn chunk_rows(classes: usize) -> usize {
    const FLOATS: usize = 1 << 20;
    (FLOATS / classes).clamp(256, 1024)
}

/// The operands, after all checks.
pub(super) struct Head<'a> {
    pub(super) x: Elements<'a>,
    pub(super) weight: Matrix<'a>,
    pub(super) inputs: usize,
    pub(super) classes: usize,
    /// The row of x for each target, or `None` if they are all rows, in order.
    pub(super) rows: Option<&'a [usize]>,
    pub(super) targets: &'a [usize],
    /// The coefficient of ln²Z in the gradients.
    pub(super) z_loss: f32,
    /// Which of all classes `weight` holds, if ranks split the classes.
    pub(super) own: Option<&'a OfRank>,
}

/// The factors of the gradients of the rows' losses.
#[derive(Clone, Copy)]
pub(super) enum Factors<'a> {
    Same(f32),
    /// One factor per target.
    Each(&'a [f32]),
}

impl Factors<'_> {
    fn of(self, target: usize) -> f32 {
        match self {
            Self::Same(factor) => factor,
            Self::Each(factors) => factors[target],
        }
    }
}

/// The rows of x of a chunk.
enum Rows<'a> {
    /// Consecutive rows, starting at this one.
    From(usize),
    /// The rows with these indices, which must be copied.
    At(&'a [usize]),
}

impl Head<'_> {
    /// Passes the loss of each target to `loss`, in the order of the targets. Writes the requested gradients,
    /// multiplied by `factors`. `dx` must contain zeros.
    ///
    /// # Errors
    /// Fails if a rank with other classes is lost.
    pub(super) fn run(
        &self,
        factors: Factors<'_>,
        mut dx: Option<&mut [f32]>,
        mut d_weight: Option<&mut [f32]>,
        mut loss: impl FnMut(usize, RowLoss),
    ) -> Result<()> {
        let (inputs, at_once) = (self.inputs, chunk_rows(self.classes));
        let (mut copied, mut d_copied) = (Copied::default(), vec![]);
        if let (true, Some(d_weight)) = (self.targets.is_empty(), &mut d_weight) {
            d_weight.fill(0.0);
        }
        for (chunk, targets) in self.targets.chunks(at_once).enumerate() {
            let (first, len) = (chunk * at_once, targets.len());
            let rows = self.rows_of(first, len);
            let x = match rows {
                Rows::From(first) => self.x.skip(first * inputs),
                Rows::At(rows) => copied.of(self.x, rows, inputs),
            };
            let x = Matrix::new(x, len, inputs);
            let mut logits = new_product(Start::Zero, x, self.weight.t(), threads());
            let wanted = dx.is_some() || d_weight.is_some();
            self.losses(&mut logits, first..first + len, wanted.then_some(factors), &mut loss)?;
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
        Ok(())
    }

    /// Returns the rows of x for `len` targets starting at `first`.
    fn rows_of(&self, first: usize, len: usize) -> Rows<'_> {
        match self.rows {
            None => Rows::From(first),
            Some(rows) => match &rows[first..first + len] {
                [from, .., to] if to - from + 1 != len => Rows::At(&rows[first..first + len]),
                rows => Rows::From(rows[0]),
            },
        }
    }

    /// Passes the losses of a chunk's rows to `loss`, in order. With factors, replaces the logits by their gradients
    /// times the factors. The gradients of a bf16 or f16 model are rounded, as in PyTorch, and fill the first half of
    /// each row.
    fn losses(
        &self,
        logits: &mut [f32],
        chunk: Range<usize>,
        factors: Option<Factors<'_>>,
        loss: &mut impl FnMut(usize, RowLoss),
    ) -> Result<()> {
        let _timed = measure::forward("cross-entropy");
        let targets = &self.targets[chunk.clone()];
        let mut parts = vec![0.0; 3 * targets.len()];
        let outputs = [Output { data: &mut *logits, floats: self.classes }, Output { data: &mut parts, floats: 3 }];
        split(targets.len(), self.classes, outputs, |range, [logits, parts]| {
            let isa = Isa::current();
            let rows = logits.chunks_exact_mut(self.classes).zip(parts.chunks_exact_mut(3));
            for ((row, part), at) in rows.zip(range) {
                if let Some(own) = self.own {
                    part.copy_from_slice(&own.statistics(isa, row, targets[at]));
                    continue;
                }
                let (largest, sum) = kernel::max_and_sum(isa, row);
                part.copy_from_slice(&[largest, sum, row[targets[at]]]);
                if let Some(factors) = factors {
                    self.differentiate(isa, row, part, (Some(targets[at]), factors.of(chunk.start + at)));
                    self.round(row);
                }
            }
        });
        if let Some(own) = self.own {
            parts = own.joined(parts, targets)?;
            if let Some(factors) = factors {
                let outputs = [Output { data: logits, floats: self.classes }];
                split(targets.len(), self.classes, outputs, |range, [logits]| {
                    let isa = Isa::current();
                    for (row, at) in logits.chunks_exact_mut(self.classes).zip(range) {
                        let place = (own.place(targets[at]), factors.of(chunk.start + at));
                        self.differentiate(isa, &mut row[..own.len()], &parts[3 * at..3 * at + 3], place);
                        row[own.len()..].fill(0.0);
                        self.round(row);
                    }
                });
            }
        }
        for (target, part) in chunk.zip(parts.chunks_exact(3)) {
            loss(target, RowLoss::new(part[0], part[1], part[2]));
        }
        Ok(())
    }

    /// Replaces a row of logits by their gradients. `target` is the column of the row's target, if this rank has its
    /// class. The gradient is multiplied by `factor`.
    fn differentiate(&self, isa: Isa, row: &mut [f32], part: &[f32], (target, factor): (Option<usize>, f32)) {
        let of_softmax = softmax_factor(factor, self.z_loss, part[0], part[1]);
        kernel::scaled_softmax(isa, row, part[0], part[1], of_softmax);
        if let Some(target) = target {
            row[target] -= factor;
        }
    }

    /// Rounds a row to the dtype of x, if that has 16 bits: see [`round_in_place`].
    fn round(&self, row: &mut [f32]) {
        match self.x {
            Elements::F32(_) => {}
            Elements::Bf16(_) => round_in_place::<bf16>(row),
            Elements::F16(_) => round_in_place::<f16>(row),
            Elements::Quantized(_) => unreachable!("{NO_WEIGHT}"),
        }
    }
}

/// Copies of rows of x. Only the vector for the dtype of x is used.
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

/// The message of a case that cannot occur: only weights of linear layers are quantized, and x comes from a `View`,
/// which is never quantized.
const NO_WEIGHT: &str = "the input of a loss is not quantized";

/// Rounds a row to a 16-bit float and stores it in the first half of the row.
fn round_in_place<H: HalfFloat>(row: &mut [f32]) {
    let mut rounded = [H::ZERO; 512];
    for start in (0..row.len()).step_by(rounded.len()) {
        let part = start..row.len().min(start + rounded.len());
        let rounded = &mut rounded[..part.len()];
        H::round(&row[part], rounded);
        // SAFETY: the 16-bit element `start` lies at or before the f32 elements that have been read, `H` has two bytes,
        // and any bits are valid floats.
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
