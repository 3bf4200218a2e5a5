//! AdamW over a flat shard, squares for a gradient norm, and numbers from one type into another.

use zero_optim::{AdamW, Step};

use crate::launch::{Address, Dtype, Launch, Source, THREADS};

/// `AdamArgs` of `cu/optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamArgs {
    params: Address,
    exp_avg: Address,
    exp_avg_sq: Address,
    grads: Address,
    working: Address,
    count: u64,
    decay: f32,
    grad_scale: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    inv_root_correction2: f32,
    eps: f32,
    minus_step_size: f32,
    decoupled: u32,
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

/// One pass over `count` master parameters (f32), their two moments (f32) and gradients of `dtype`; the parameters that layers read, of
/// the same type, are written in passing unless `working` is 0.
pub fn adam(
    dtype: Dtype,
    count: u64,
    adamw: &AdamW,
    step: &Step,
    [params, exp_avg, exp_avg_sq]: [Address; 3],
    grads: Address,
    working: Address,
) -> Option<Launch<AdamArgs>> {
    let of = adamw.factors(step);
    let args = AdamArgs {
        params,
        exp_avg,
        exp_avg_sq,
        grads,
        working,
        count,
        decay: of.decay,
        grad_scale: of.grad_scale,
        one_minus_beta1: of.one_minus_beta1,
        beta2: of.beta2,
        one_minus_beta2: of.one_minus_beta2,
        inv_root_correction2: of.inv_root_correction2,
        eps: of.eps,
        minus_step_size: of.minus_step_size,
        decoupled: adamw.decoupled.into(),
        unused: 0,
    };
    Launch::over(Source::Optimizer, "adam", dtype, count, args)
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
