//! The norm of gradients on a device, with the bits of `zero_optim::norm`, and what updates make of it without the host.
//!
//! Three launches, one behind the other: [`square_sums`] adds up squares in f64, [`limbs`] the sums as integers, and [`verdict`] finishes.

use zero_optim::exact_sum::LIMBS;
use zero_optim::norm::Limits;

use crate::launch::{Address, Dtype, Launch, Source, THREADS};

/// `SquaresRange` of `cu/gradient_norm.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct SquaresRange {
    grads: Address,
    count: u64,
    first_sum: u32,
    first_block: u32,
    travelled: u32,
    unused: u32,
}

/// `SquareSumsArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SquareSumsArgs {
    ranges: [SquaresRange; SQUARES_RANGES],
    sums: Address,
    used: u32,
    unused: u32,
}

/// `LimbsArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LimbsArgs {
    sums: Address,
    count: u64,
    partials: Address,
}

/// `VerdictArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VerdictArgs {
    partials: Address,
    blocks: u64,
    limbs: Address,
    device: Address,
    host: Address,
    loss_scale: f64,
    max_norm: f64,
    limit: f64,
    skips_overflow: u64,
}

/// `Verdict`: what comes of a norm, as the device leaves it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Verdict {
    /// If it is no number, the NaN that `f64::NAN` is.
    pub norm: f64,
    /// As in [`zero_optim::norm::Verdict`].
    pub clip: f64,
    /// Likewise.
    pub scale: f32,
    /// 0 where no update is made.
    pub admitted: u32,
}

impl From<Verdict> for zero_optim::norm::Verdict {
    fn from(Verdict { norm, clip, scale, admitted }: Verdict) -> Self {
        Self { norm, clip, scale, is_admitted: admitted != 0 }
    }
}

/// Consecutive gradients of a parameter, f32, the first of which begins a sum.
#[derive(Clone, Copy, Debug)]
pub struct Squared {
    /// Where they are.
    pub grads: Address,
    /// How many.
    pub count: u64,
    /// The type to which they are rounded when they are read.
    pub travelled: Dtype,
}

/// Gradients whose squares make one sum, counted from the first of a parameter, as in `zero_optim::norm`.
pub const SQUARES: u64 = zero_optim::norm::BLOCK as u64;
/// Ranges that one launch takes at most.
pub const SQUARES_RANGES: usize = 112;
/// Sums that a block makes.
const SUMS: u64 = THREADS as u64 / 4;
/// Sums that are worth a block of their own.
const SUMS_EACH: u64 = 64;
/// Blocks that add up limbs, at most.
const MOST_BLOCKS: u64 = 1024;
/// Threads for the limbs of one sum.
const FOR_LIMBS: u32 = 96;
/// Blocks of limbs that are added at the same time in the end.
const ROWS: u32 = 8;

/// The sums of squares of every [`SQUARES`] gradients, in f64, range after range. `None` without gradients.
///
/// # Panics
/// There are more than [`SQUARES_RANGES`] ranges.
pub fn square_sums(squared: &[Squared], sums: Address) -> Option<Launch<SquareSumsArgs>> {
    let mut ranges = [SquaresRange::default(); SQUARES_RANGES];
    let (mut used, mut first_sum, mut first_block) = (0, 0, 0);
    for &Squared { grads, count, travelled } in squared.iter().filter(|range| range.count > 0) {
        ranges[used] = SquaresRange { grads, count, first_sum, first_block, travelled: travelled.number(), unused: 0 };
        first_sum += count.div_ceil(SQUARES) as u32;
        first_block += count.div_ceil(SQUARES).div_ceil(SUMS) as u32;
        used += 1;
    }
    let args = SquareSumsArgs { ranges, sums, used: used as u32, unused: 0 };
    (used > 0).then(|| of("square_sums", first_block, THREADS, 0, args))
}

/// i64 that [`limbs`] writes for `count` sums.
#[must_use]
pub fn partials(count: u64) -> usize {
    blocks(count) as usize * LIMBS
}

fn blocks(count: u64) -> u64 {
    count.div_ceil(SUMS_EACH).min(MOST_BLOCKS)
}

/// The limbs of `count` sums, f64 that are not below zero, in several parts: [`partials`] of i64. `None` if there are no sums.
pub fn limbs(count: u64, sums: Address, partials: Address) -> Option<Launch<LimbsArgs>> {
    (count > 0).then(|| of("limbs", blocks(count) as u32, FOR_LIMBS, 0, LimbsArgs { sums, count, partials }))
}

/// What the limbs of `count` sums come to. Their total goes to `to_limbs` ([`LIMBS`] of i64), the [`Verdict`] to `device` and to `host`, as far as
/// these are not 0.
pub fn verdict(
    count: u64,
    partials: Address,
    limits: &Limits,
    to_limbs: Address,
    [device, host]: [Address; 2],
) -> Launch<VerdictArgs> {
    let Limits { loss_scale, max_norm, limit, skips_overflow } = *limits;
    let (blocks, skips_overflow) = (blocks(count), u64::from(skips_overflow));
    let args =
        VerdictArgs { partials, blocks, limbs: to_limbs, device, host, loss_scale, max_norm, limit, skips_overflow };
    of("verdict", 1, ROWS * FOR_LIMBS, ROWS * FOR_LIMBS * 8, args)
}

fn of<A>(entry: &str, blocks: u32, threads: u32, shared_bytes: u32, args: A) -> Launch<A> {
    Launch { source: Source::Optimizer, entry: entry.into(), grid: [blocks, 1, 1], threads, shared_bytes, args }
}
