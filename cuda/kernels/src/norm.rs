//! Layer norm and RMS norm over rows, and the gradients of their weights.
//!
//! A backward is three launches: [`backward`] for the gradient of x, which leaves each row's statistics; [`weights`], which
//! adds up to 64 rows each; [`sums`], which adds those.

use crate::launch::{Address, Dtype, Launch, SUMS_BYTES, Source, THREADS};

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
    statistics: Address,
    size: u64,
    eps: f32,
    unused: u32,
}

/// `NormWeightsArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WeightsArgs {
    x: Address,
    d: Address,
    statistics: Address,
    partials: Address,
    rows: u64,
    size: u64,
}

/// `NormSumsArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SumsArgs {
    partials: Address,
    d_weight: Address,
    d_bias: Address,
    blocks: u64,
    size: u64,
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
    fn args(self) -> (&'static str, Args) {
        match self {
            Self::Layer { weight, bias } => ("layer_norm", Args { weight, bias, ..Args::default() }),
            Self::Rms { weight } => ("rms_norm", Args { weight, ..Args::default() }),
        }
    }
}

/// Rows whose contributions to the gradients of weights are added in one go: partial sums depend on nothing else.
pub const BLOCK: u32 = 64;

fn of_rows(rows: &Rows, kernel: &str, args: Args) -> Launch<Args> {
    let args = Args { size: rows.size.into(), eps: rows.eps, ..args };
    let launch = Launch::new(Source::Norm, kernel, rows.dtype, [rows.rows, 1, 1], args);
    Launch { shared_bytes: SUMS_BYTES, ..launch }
}

/// y = norm(x); y may be x.
pub fn forward(rows: &Rows, weights: Weights, x: Address, y: Address) -> Launch<Args> {
    let (kernel, args) = weights.args();
    of_rows(rows, kernel, Args { x, out: y, ..args })
}

/// total = x + branch and y = norm(total), in one pass; total may be either.
pub fn forward_residual(
    rows: &Rows,
    weights: Weights,
    [x, branch]: [Address; 2],
    [total, y]: [Address; 2],
) -> Launch<Args> {
    let (kernel, args) = weights.args();
    of_rows(rows, kernel, Args { x, branch, total, out: y, ..args })
}

/// The gradient of x, and `statistics`, two f32 a row. dx may be dy, if nothing reads that any more, but not x where [`weights`] follows.
pub fn backward(rows: &Rows, weights: Weights, [x, dy]: [Address; 2], [dx, statistics]: [Address; 2]) -> Launch<Args> {
    let (kernel, args) = weights.args();
    of_rows(rows, &format!("{kernel}_backward"), Args { x, d: dy, out: dx, statistics, ..args })
}

/// What every [`BLOCK`] rows give to the gradients of weight and bias: f32 of `[blocks, 2, size]`. Reads what [`backward`] left.
pub fn weights(rows: &Rows, [x, dy]: [Address; 2], statistics: Address, partials: Address) -> Launch<WeightsArgs> {
    let args = WeightsArgs { x, d: dy, statistics, partials, rows: rows.rows.into(), size: rows.size.into() };
    let grid = [rows.size.div_ceil(THREADS), rows.rows.div_ceil(BLOCK), 1];
    Launch::new(Source::Norm, "norm_weights", rows.dtype, grid, args)
}

/// The gradients of weight and bias, f32 of `[size]`; 0 where there is no bias. With `add` onto what is there.
pub fn sums(rows: &Rows, partials: Address, [d_weight, d_bias]: [Address; 2], add: bool) -> Launch<SumsArgs> {
    let blocks = rows.rows.div_ceil(BLOCK).into();
    let args = SumsArgs { partials, d_weight, d_bias, blocks, size: rows.size.into(), add: add.into() };
    let grid = [(2 * rows.size).div_ceil(THREADS), 1, 1];
    Launch { source: Source::Norm, entry: "norm_sums".into(), grid, threads: THREADS, shared_bytes: 0, args }
}
