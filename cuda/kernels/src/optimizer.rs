//! A step of an optimizer over a flat shard, squares for a gradient norm, and numbers from one type into another.

use zero_optim::Factors;

use crate::launch::{Address, Dtype, Launch, Source, THREADS};

/// `UpdateArgs` of `cu/optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateArgs {
    params: Address,
    states: [Address; 2],
    grads: Address,
    working: Address,
    count: u64,
    factors: [f32; 8],
    formula: u32,
    unused: u32,
}

/// `SquareSumsArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SquareSumsArgs {
    grads: Address,
    sums: Address,
    count: u64,
}

/// `CastArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CastArgs {
    from: Address,
    to: Address,
    count: u64,
}

/// One pass over `count` master parameters (f32), the optimizer's states (f32, 0 for those that it does not have) and reduced gradients
/// (f32). The parameters that layers read, of `dtype`, are written in passing unless `working` is 0.
pub fn update(
    dtype: Dtype,
    count: u64,
    factors: &Factors,
    params: Address,
    states: [Address; 2],
    grads: Address,
    working: Address,
) -> Option<Launch<UpdateArgs>> {
    let (factors, formula) = (factors.values, factors.formula as u32);
    let args = UpdateArgs { params, states, grads, working, count, factors, formula, unused: 0 };
    Launch::over(Source::Optimizer, "update", dtype, count, args)
}

/// Gradients of which the squares are one sum, counted from the first of a parameter: those of `zero_optim::norm`.
pub const SQUARES: u64 = 1024;
/// Threads that make one.
const LANES: u64 = 16;

/// The sums of squares of every [`SQUARES`] of `count` gradients: f64 of as many.
pub fn square_sums(dtype: Dtype, count: u64, grads: Address, sums: Address) -> Option<Launch<SquareSumsArgs>> {
    let blocks = (count.div_ceil(SQUARES) * LANES).div_ceil(u64::from(THREADS)) as u32;
    let args = SquareSumsArgs { grads, sums, count };
    (count > 0).then(|| Launch::new(Source::Optimizer, "square_sums", dtype, [blocks, 1, 1], args))
}

/// To f32, exactly.
pub fn widen(from_dtype: Dtype, count: u64, from: Address, to: Address) -> Option<Launch<CastArgs>> {
    Launch::over(Source::Optimizer, "widen", from_dtype, count, CastArgs { from, to, count })
}

/// From f32, rounded to nearest, ties to even.
pub fn narrow(to_dtype: Dtype, count: u64, from: Address, to: Address) -> Option<Launch<CastArgs>> {
    Launch::over(Source::Optimizer, "narrow", to_dtype, count, CastArgs { from, to, count })
}

/// to += from, where `to` is f32.
pub fn add_to(from_dtype: Dtype, count: u64, from: Address, to: Address) -> Option<Launch<CastArgs>> {
    Launch::over(Source::Optimizer, "add_to", from_dtype, count, CastArgs { from, to, count })
}
