//! The global gradient norm, bit-identical for any sharding.
//!
//! A floating-point sum depends on its order, and with ZeRO the order would depend on how elements are sharded. Squares
//! are therefore added in f64 over aligned blocks of [`BLOCK`] elements of each parameter, in a fixed order inside a
//! block. The block sums are added exactly ([`ExactSum`]). The total is bit-identical as long as shard boundaries fall
//! on block boundaries.
//!
//! ```
//! use zero_optim::{ExactSum, norm};
//!
//! let mut sum = ExactSum::new();
//! sum.add_parameter_range(&[3.0, 4.0]);
//! let norm = sum.to_f64().sqrt();
//! assert_eq!(norm, 5.0);
//! assert!((norm::clip_coefficient(norm, 1.0) - 0.2).abs() < 1e-6);
//! ```

use zero_isa::Isa;

use crate::{
    ExactSum,
    simd::{Kernel, run},
};

/// Number of elements in a block. The squares of a block are added in floating point, in a fixed order. Shards begin at
/// block boundaries, counted from the parameter's first element.
pub const BLOCK: usize = 1024;

/// Independent sums inside a block, so that the additions do not form one dependency chain: two AVX-512 registers of
/// f64.
const LANES: usize = 16;

/// Returns the sum of squares of each block of `grads`. `grads` starts on a block boundary of its parameter; the last
/// block may be short.
pub fn block_square_sums(grads: &[f32]) -> impl Iterator<Item = f64> + '_ {
    block_square_sums_at(Isa::current(), grads)
}

fn block_square_sums_at(isa: Isa, grads: &[f32]) -> impl Iterator<Item = f64> + '_ {
    grads.chunks(BLOCK).map(move |block| square_sum(isa, block))
}

/// Returns the sum of squares of one block.
pub(crate) fn square_sum(isa: Isa, block: &[f32]) -> f64 {
    run(isa, SquareSum(block))
}

impl ExactSum {
    /// Adds the squares of a range of a parameter's gradient. The range starts on a block boundary of the parameter,
    /// and ends on a block boundary or with the parameter.
    pub fn add_parameter_range(&mut self, grads: &[f32]) {
        for sum in block_square_sums(grads) {
            self.add(sum);
        }
    }
}

/// Returns the factor that clips gradients of norm `norm` to `max_norm`: `max_norm / (norm + 1e-6)`, at most 1, as in
/// PyTorch and DeepSpeed. A NaN norm gives NaN, an infinite one 0.
pub fn clip_coefficient(norm: f64, max_norm: f64) -> f64 {
    let coefficient = max_norm / (norm + 1e-6);
    // Not `min`, which would turn a NaN into 1.
    if coefficient > 1.0 { 1.0 } else { coefficient }
}

/// How the gradient of a group of parameters is clipped.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clipping {
    /// Has the meaning of [`Limits::max_norm`], for the norm of the group.
    pub max_norm: f64,
    /// Has the meaning of [`Limits::max_value`].
    pub max_value: f64,
}

/// The bounds that a gradient norm is checked against.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// The factor that the loss was multiplied by before the backward.
    pub loss_scale: f64,
    /// Gradients with a larger norm are clipped to this norm; 0 disables clipping.
    pub max_norm: f64,
    /// Elements of the gradient with a larger absolute value are clipped to it; 0 disables clipping.
    pub max_value: f64,
    /// The optimizer skips the update if the norm is larger than this.
    pub limit: f64,
    /// Whether a non-finite norm skips the update. If false, such a norm never skips it, regardless of `limit`.
    pub skips_overflow: bool,
}

/// The result of checking a gradient norm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Verdict {
    /// L2 norm of all gradients before clipping, divided by the loss scale; NaN or infinite if a gradient is.
    pub norm: f64,
    /// Clip coefficient for the gradients of the unscaled loss; 1 without clipping.
    pub clip: f64,
    /// Factor for the gradients before the update: `clip` divided by the loss scale.
    pub scale: f32,
    /// Whether the optimizer updates the parameters.
    pub is_admitted: bool,
}

impl Limits {
    /// Returns the limit of the absolute value of a gradient of the scaled loss, for [`Step::grad_limit`](crate::Step).
    #[must_use]
    pub fn grad_limit(&self) -> f32 {
        if self.max_value > 0.0 { (self.max_value * self.loss_scale) as f32 } else { f32::INFINITY }
    }

    /// Returns the limits of a group with its own clipping.
    #[must_use]
    pub fn of_group(&self, Clipping { max_norm, max_value }: Clipping) -> Self {
        Self { max_norm, max_value, ..*self }
    }

    /// Checks the sum of all squares against the limits.
    #[must_use]
    pub fn judge(&self, squares: &ExactSum) -> Verdict {
        let norm = squares.to_f64().sqrt() / self.loss_scale;
        let clip = if self.max_norm > 0.0 { clip_coefficient(norm, self.max_norm) } else { 1.0 };
        // A non-finite norm is neither above nor below the limit.
        let is_admitted = if norm.is_finite() { norm <= self.limit } else { !self.skips_overflow };
        Verdict { norm, clip, scale: (clip / self.loss_scale) as f32, is_admitted }
    }
}

struct SquareSum<'a>(&'a [f32]);

impl Kernel for SquareSum<'_> {
    type Output = f64;

    /// Element i goes to lane i mod 16; the lanes are folded in halves. The square of an f32 is exact in f64, so a
    /// fused multiply-add would give the same bits.
    #[inline(always)]
    fn run(self) -> f64 {
        let mut lanes = [0.0f64; LANES];
        let (rows, rest) = self.0.as_chunks::<LANES>();
        for row in rows {
            for (lane, &x) in lanes.iter_mut().zip(row) {
                *lane += f64::from(x) * f64::from(x);
            }
        }
        for (lane, &x) in lanes.iter_mut().zip(rest) {
            *lane += f64::from(x) * f64::from(x);
        }
        let mut width = LANES;
        while width > 1 {
            width /= 2;
            for i in 0..width {
                lanes[i] += lanes[i + width];
            }
        }
        lanes[0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn gradient(n: usize) -> Vec<f32> {
        (0..n as u32).map(|i| (i.wrapping_mul(2_654_435_761) as i32 as f32) * 1e-9 / (1 + i % 97) as f32).collect()
    }

    fn total<'a>(shards: impl IntoIterator<Item = &'a [f32]>) -> f64 {
        let mut sum = ExactSum::new();
        for shard in shards {
            sum.add_parameter_range(shard);
        }
        sum.to_f64()
    }

    #[test]
    fn does_not_depend_on_where_shards_are_cut() {
        let n = 37 * BLOCK + 123;
        let grads = gradient(n);
        let whole = total([&grads[..]]);
        for cut in [BLOCK, 5 * BLOCK, 36 * BLOCK, 37 * BLOCK] {
            assert_eq!(total([&grads[cut..], &grads[..cut]]).to_bits(), whole.to_bits());
        }
        assert_eq!(total(grads.chunks(BLOCK).rev()).to_bits(), whole.to_bits());

        // The total is also close to the plain sum of squares.
        let plain: f64 = grads.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        assert!((whole - plain).abs() < 1e-12 * plain);
    }

    #[test]
    fn clips_as_torch_does() {
        assert_eq!(clip_coefficient(0.5, 1.0), 1.0);
        assert_eq!(clip_coefficient(0.0, 1.0), 1.0);
        assert_eq!(clip_coefficient(4.0, 1.0), 1.0 / (4.0 + 1e-6));
        // Just below the limit, the 1e-6 already makes the coefficient smaller than 1.
        assert!(clip_coefficient(1.0, 1.0) < 1.0);
        assert!(clip_coefficient(f64::NAN, 1.0).is_nan());
        assert_eq!(clip_coefficient(f64::INFINITY, 1.0), 0.0);
    }

    #[test]
    fn the_norm_limit_applies_to_unscaled_gradients() {
        let mut squares = ExactSum::new();
        squares.add_parameter_range(&[3.0 * 256.0, 4.0 * 256.0]);
        let limits = Limits { loss_scale: 256.0, max_norm: 1.0, max_value: 0.0, limit: 5.0, skips_overflow: true };
        let verdict = limits.judge(&squares);
        assert_eq!((verdict.norm, verdict.clip, verdict.is_admitted), (5.0, clip_coefficient(5.0, 1.0), true));
        assert_eq!(verdict.scale, (verdict.clip / 256.0) as f32);
        assert_eq!(limits.grad_limit(), f32::INFINITY);
        assert_eq!(Limits { max_value: 0.25, ..limits }.grad_limit(), 64.0);
        assert!(!Limits { limit: 4.9, ..limits }.judge(&squares).is_admitted);
        assert_eq!(Limits { max_norm: 0.0, ..limits }.judge(&squares).clip, 1.0);
        squares.add(f64::INFINITY);
        assert!(!limits.judge(&squares).is_admitted);
        assert!(Limits { skips_overflow: false, ..limits }.judge(&squares).is_admitted);
    }

    #[test]
    fn overflow_and_nan_reach_the_norm() {
        assert_eq!(total([&[f32::MAX, 1.0][..]]).sqrt(), f64::from(f32::MAX));
        assert_eq!(total([&[f32::NEG_INFINITY, 1.0][..]]), f64::INFINITY);
        assert!(total([&[f32::NAN, f32::INFINITY][..]]).is_nan());
    }

    proptest! {
        #[test]
        fn all_instruction_sets_give_the_same_bits(bits in prop::collection::vec(any::<u32>(), 0..2500), offset in 0usize..17) {
            let grads: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
            let grads = &grads[offset.min(grads.len())..];
            let expected: Vec<f64> = block_square_sums_at(Isa::BASELINE, grads).collect();
            for isa in Isa::available() {
                let sums: Vec<f64> = block_square_sums_at(isa, grads).collect();
                prop_assert_eq!(sums.len(), expected.len());
                for (a, b) in sums.iter().zip(&expected) {
                    prop_assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "{:?}: {} {}", isa, a, b);
                }
            }
        }
    }
}
