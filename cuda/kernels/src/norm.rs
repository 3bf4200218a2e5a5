//! Layer norm and RMS norm over rows, and the gradients of their weights.
//!
//! A backward consists of several launches. [`backward`] computes the gradient of x and, over groups of rows, partial
//! sums of the gradients of the weights. [`sums`] adds these partial sums. It is launched once for each weight.

use crate::launch::{Address, Dtype, Launch, SUMS_BYTES, Source, threads_for};

/// Matches `NormArgs` of `cu/norm.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Args {
    x: Address,
    branch: Address,
    total: Address,
    weight: Address,
    bias: Address,
    out: Address,
    d: Address,
    before: Address,
    partials: Address,
    rows: u64,
    size: u64,
    together: u32,
    eps: f32,
}

/// Matches `NormSumsArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SumsArgs {
    partials: Address,
    to: Address,
    blocks: u64,
    size: u64,
    stride: u64,
    add: u64,
}

/// The sizes of a norm over rows of `size` elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rows {
    /// Number of rows, at least 1.
    pub rows: u32,
    /// Number of elements per row, at least 1.
    pub size: u32,
    /// Type of x, y, the weights and the gradients of x and y.
    pub dtype: Dtype,
    /// ε, added to the variance or to the mean square.
    pub eps: f32,
}

/// Parameters of a norm, `[size]` each.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Weights {
    /// (x − mean)/√(variance + ε)·weight + bias
    Layer {
        /// The factors.
        weight: Address,
        /// The summands.
        bias: Address,
    },
    /// x/√(mean(x²) + ε)·weight
    Rms {
        /// The factors.
        weight: Address,
    },
}

impl Weights {
    /// Returns the number of parameter vectors.
    fn vectors(self) -> u32 {
        match self {
            Self::Layer { .. } => 2,
            Self::Rms { .. } => 1,
        }
    }

    fn args(self) -> (&'static str, Args) {
        match self {
            Self::Layer { weight, bias } => ("layer_norm", Args { weight, bias, ..Args::default() }),
            Self::Rms { weight } => ("rms_norm", Args { weight, ..Args::default() }),
        }
    }
}

impl Rows {
    /// Returns the number of rows that one block processes. The block adds their contributions into one partial sum.
    /// The blocks fill the whole device, and each thread loads the next row while it works on the current one.
    fn together(&self) -> u32 {
        self.rows.div_ceil(512).max(8)
    }

    /// Returns the number of f32 that [`backward`] writes for [`sums`].
    #[must_use]
    pub fn partials(&self, weights: Weights) -> usize {
        self.rows.div_ceil(self.together()) as usize * weights.vectors() as usize * self.size as usize
    }
}

/// Number of packs of a row that a thread holds in registers, as in `cu/norm.cu`.
const KEPT: u32 = 2;
/// Maximum number of threads of a block.
const MOST_THREADS: u32 = 512;

fn of_rows(rows: &Rows, kernel: &str, blocks: u32, args: Args) -> Launch<Args> {
    let args = Args { rows: rows.rows.into(), size: rows.size.into(), eps: rows.eps, ..args };
    let threads = threads_for(rows.size.div_ceil(rows.dtype.pack() * KEPT), MOST_THREADS);
    let launch = Launch::new(Source::Norm, kernel, rows.dtype, [blocks, 1, 1], args);
    Launch { threads, shared_bytes: SUMS_BYTES, ..launch }
}

/// Computes y = norm(x); y may be x.
pub fn forward(rows: &Rows, weights: Weights, x: Address, y: Address) -> Launch<Args> {
    let (kernel, args) = weights.args();
    of_rows(rows, kernel, rows.rows, Args { x, out: y, ..args })
}

/// Computes total = x + branch and y = norm(total) in one pass; total may be x or branch.
pub fn forward_residual(
    rows: &Rows,
    weights: Weights,
    [x, branch]: [Address; 2],
    [total, y]: [Address; 2],
) -> Launch<Args> {
    let (kernel, args) = weights.args();
    of_rows(rows, kernel, rows.rows, Args { x, branch, total, out: y, ..args })
}

/// Computes dx, the gradient of x, and writes [`Rows::partials`] values to `partials`. `before` is an earlier gradient
/// of x, to which the rounded dx is added; 0 if there is none. dx may overwrite x, dy or `before`.
pub fn backward(
    rows: &Rows,
    weights: Weights,
    [x, dy, before]: [Address; 3],
    [dx, partials]: [Address; 2],
) -> Launch<Args> {
    let (kernel, args) = weights.args();
    let args = Args { x, d: dy, before, out: dx, partials, together: rows.together(), ..args };
    of_rows(rows, &format!("{kernel}_backward"), rows.rows.div_ceil(rows.together()), args)
}

/// A parameter of a norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parameter {
    /// The factors.
    Weight,
    /// The summands.
    Bias,
}

/// Computes the gradient of a parameter, f32 of `[size]`, from the partial sums of [`backward`]. With `add`, adds it to
/// the existing value.
pub fn sums(rows: &Rows, weights: Weights, of: Parameter, [partials, to]: [Address; 2], add: bool) -> Launch<SumsArgs> {
    let size = u64::from(rows.size);
    let partials = partials + if of == Parameter::Bias { 4 * size } else { 0 };
    let (blocks, stride) = (rows.rows.div_ceil(rows.together()).into(), u64::from(weights.vectors()) * size);
    let args = SumsArgs { partials, to, blocks, size, stride, add: add.into() };
    let (source, entry, threads) = (Source::Norm, "norm_sums".into(), MOST_THREADS);
    Launch { source, entry, grid: [rows.size.div_ceil(32), 1, 1], threads, shared_bytes: 4 * threads, args }
}
