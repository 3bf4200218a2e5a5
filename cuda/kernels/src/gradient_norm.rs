//! The gradient norm on a device, bit-identical to `zero_optim::norm`. Updates read its verdict on the device, without
//! the host.
//!
//! Three launches, in order: [`square_sums`] adds squares in f64, [`limbs`] adds these sums as integers, and
//! [`verdict`] computes the result.

use zero_optim::exact_sum::LIMBS;
use zero_optim::norm::Limits;

use crate::launch::{Address, Dtype, Launch, Source, THREADS};

/// Matches `SquaresRange` of `cu/gradient_norm.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct SquaresRange {
    grads: Address,
    count: u64,
    first_sum: u32,
    first_block: u32,
    communicated: u32,
    unused: u32,
}

/// Matches `SquareSumsArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SquareSumsArgs {
    ranges: [SquaresRange; SQUARES_RANGES],
    sums: Address,
    used: u32,
    unused: u32,
}

/// Matches `LimbsArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LimbsArgs {
    sums: Address,
    count: u64,
    partials: Address,
}

/// Matches `VerdictArgs`.
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

/// Matches `Verdict`: the result of a norm, as the device writes it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Verdict {
    /// The norm. A NaN has the bits of `f64::NAN`.
    pub norm: f64,
    /// The clip coefficient, as in [`zero_optim::norm::Verdict`].
    pub clip: f64,
    /// The factor for the gradients, as in [`zero_optim::norm::Verdict`].
    pub scale: f32,
    /// 0 if the update is skipped.
    pub admitted: u32,
}

impl From<Verdict> for zero_optim::norm::Verdict {
    fn from(Verdict { norm, clip, scale, admitted }: Verdict) -> Self {
        Self { norm, clip, scale, is_admitted: admitted != 0 }
    }
}

/// Consecutive f32 gradients of a parameter, starting at a multiple of [`SQUARES`] elements.
#[derive(Clone, Copy, Debug)]
pub struct Squared {
    /// Device address of the first gradient.
    pub grads: Address,
    /// Number of gradients.
    pub count: u64,
    /// The type to which gradients are rounded when they are read.
    pub communicated: Dtype,
}

/// Number of gradients whose squares are added into one sum. Counting starts with the first gradient of a parameter, as
/// in `zero_optim::norm`.
pub const SQUARES: u64 = zero_optim::norm::BLOCK as u64;
/// Maximum number of ranges of one launch.
pub const SQUARES_RANGES: usize = 112;
/// Number of sums that one block computes.
const SUMS: u64 = THREADS as u64 / 4;
/// Number of sums per block, unless this takes more than `MOST_BLOCKS` blocks.
const SUMS_EACH: u64 = 64;
/// Maximum number of blocks that add limbs.
const MOST_BLOCKS: u64 = 1024;
/// Threads for the limbs of one sum.
const FOR_LIMBS: u32 = 96;
/// Number of blocks whose limbs the last kernel adds concurrently.
const ROWS: u32 = 8;

/// Computes, for every [`SQUARES`] gradients, the sum of their squares in f64, range after range. Returns `None`
/// without gradients.
///
/// # Panics
/// Fails if there are more than [`SQUARES_RANGES`] ranges.
pub fn square_sums(squared: &[Squared], sums: Address) -> Option<Launch<SquareSumsArgs>> {
    let mut ranges = [SquaresRange::default(); SQUARES_RANGES];
    let (mut used, mut first_sum, mut first_block) = (0, 0, 0);
    for &Squared { grads, count, communicated } in squared.iter().filter(|range| range.count > 0) {
        ranges[used] =
            SquaresRange { grads, count, first_sum, first_block, communicated: communicated.number(), unused: 0 };
        first_sum += count.div_ceil(SQUARES) as u32;
        first_block += count.div_ceil(SQUARES).div_ceil(SUMS) as u32;
        used += 1;
    }
    let args = SquareSumsArgs { ranges, sums, used: used as u32, unused: 0 };
    (used > 0).then(|| of("square_sums", first_block, THREADS, 0, args))
}

/// Returns the number of i64 that [`limbs`] writes for `count` sums.
#[must_use]
pub fn partials(count: u64) -> usize {
    blocks(count) as usize * LIMBS
}

fn blocks(count: u64) -> u64 {
    count.div_ceil(SUMS_EACH).min(MOST_BLOCKS)
}

/// Adds the limbs of `count` non-negative f64 sums into several partial results, i64 of [`partials`]. Returns `None` if
/// there are no sums.
pub fn limbs(count: u64, sums: Address, partials: Address) -> Option<Launch<LimbsArgs>> {
    (count > 0).then(|| of("limbs", blocks(count) as u32, FOR_LIMBS, 0, LimbsArgs { sums, count, partials }))
}

/// Computes the verdict from the limbs of `count` sums. Writes the total limbs to `to_limbs` ([`LIMBS`] of i64) and the
/// [`Verdict`] to `device` and to `host`; addresses of 0 are skipped.
pub fn verdict(
    count: u64,
    partials: Address,
    limits: &Limits,
    to_limbs: Address,
    [device, host]: [Address; 2],
) -> Launch<VerdictArgs> {
    let Limits { loss_scale, max_norm, limit, skips_overflow, .. } = *limits;
    let (blocks, skips_overflow) = (blocks(count), u64::from(skips_overflow));
    let args =
        VerdictArgs { partials, blocks, limbs: to_limbs, device, host, loss_scale, max_norm, limit, skips_overflow };
    of("verdict", 1, ROWS * FOR_LIMBS, ROWS * FOR_LIMBS * 8, args)
}

fn of<A>(entry: &str, blocks: u32, threads: u32, shared_bytes: u32, args: A) -> Launch<A> {
    Launch { source: Source::Optimizer, entry: entry.into(), grid: [blocks, 1, 1], threads, shared_bytes, args }
}
