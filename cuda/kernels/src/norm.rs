//! Layer norm and RMS norm over rows, and the gradients of their weights.
//!
//! A backward is a launch of [`backward`] for the gradient of x, which adds up what some rows each give to the gradients of the weights, and
//! one of [`sums`] for each of them.

use crate::launch::{Address, Dtype, Launch, SUMS_BYTES, Source, threads_for};

/// `NormArgs` of `cu/norm.cu`.
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

/// `NormSumsArgs`.
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

/// Rows of `size` elements that are normalised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rows {
    /// At least 1.
    pub rows: u32,
    /// At least 1.
    pub size: u32,
    /// Of x, y, weights and the gradients of x and y.
    pub dtype: Dtype,
    /// Added to the variance or the mean square.
    pub eps: f32,
}

/// Parameters of a norm, `[size]` each.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Weights {
    /// (x − mean)/√(variance + ε)·weight + bias
    Layer {
        /// Factors.
        weight: Address,
        /// Summands.
        bias: Address,
    },
    /// x/√(mean(x²) + ε)·weight
    Rms {
        /// Factors.
        weight: Address,
    },
}

impl Weights {
    /// Parameters.
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
    /// Rows whose contributions to the gradients of weights are one partial sum: a block's. Blocks enough for all of a device, of which a
    /// thread has the next row on its way while it works on one.
    fn together(&self) -> u32 {
        self.rows.div_ceil(512).max(8)
    }

    /// How many f32 [`backward`] leaves for [`sums`].
    #[must_use]
    pub fn partials(&self, weights: Weights) -> usize {
        self.rows.div_ceil(self.together()) as usize * weights.vectors() as usize * self.size as usize
    }
}

/// Packs of a row that a thread has in registers, as in `cu/norm.cu`.
const KEPT: u32 = 2;
/// Threads of a block.
const MOST_THREADS: u32 = 512;

fn of_rows(rows: &Rows, kernel: &str, blocks: u32, args: Args) -> Launch<Args> {
    let args = Args { rows: rows.rows.into(), size: rows.size.into(), eps: rows.eps, ..args };
    let threads = threads_for(rows.size.div_ceil(rows.dtype.pack() * KEPT), MOST_THREADS);
    let launch = Launch::new(Source::Norm, kernel, rows.dtype, [blocks, 1, 1], args);
    Launch { threads, shared_bytes: SUMS_BYTES, ..launch }
}

/// y = norm(x); y may be x.
pub fn forward(rows: &Rows, weights: Weights, x: Address, y: Address) -> Launch<Args> {
    let (kernel, args) = weights.args();
    of_rows(rows, kernel, rows.rows, Args { x, out: y, ..args })
}

/// total = x + branch and y = norm(total), in one pass; total may be either.
pub fn forward_residual(
    rows: &Rows,
    weights: Weights,
    [x, branch]: [Address; 2],
    [total, y]: [Address; 2],
) -> Launch<Args> {
    let (kernel, args) = weights.args();
    of_rows(rows, kernel, rows.rows, Args { x, branch, total, out: y, ..args })
}

/// dx, the gradient of x; and `partials`, of which [`Rows::partials`] says how many there are. `before` is a gradient that x has already, to
/// which dx is added after it was rounded; 0 if there is none. dx may be x, dy or `before`.
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

/// The gradient of a parameter out of what [`backward`] left, f32 of `[size]`. With `add` onto what is there.
pub fn sums(rows: &Rows, weights: Weights, of: Parameter, [partials, to]: [Address; 2], add: bool) -> Launch<SumsArgs> {
    let size = u64::from(rows.size);
    let partials = partials + if of == Parameter::Bias { 4 * size } else { 0 };
    let (blocks, stride) = (rows.rows.div_ceil(rows.together()).into(), u64::from(weights.vectors()) * size);
    let args = SumsArgs { partials, to, blocks, size, stride, add: add.into() };
    let (source, entry, threads) = (Source::Norm, "norm_sums".into(), MOST_THREADS);
    Launch { source, entry, grid: [rows.size.div_ceil(32), 1, 1], threads, shared_bytes: 4 * threads, args }
}
