//! Sums f64 numbers exactly, so that the result does not depend on their order.
//!
//! The accumulator is one wide fixed-point number (Kulisch, 1971) that covers the range of f64. It is split into digits
//! of 32 bits, each in an i64 limb. Integer addition is associative, so ranks may add their numbers in any order and
//! grouping, and an all-reduce of the limbs (an i64 sum) gives the sum over the ranks. Carries are propagated often
//! enough that no limb exceeds 2⁴², which leaves room for a million ranks.

use crate::LengthError;

/// Number of digits of 32 bits: f64's 2098 bits from 2⁻¹⁰⁷⁴ to 2¹⁰²³ fill 66, and one more takes the carries.
const DIGITS: usize = 67;
/// The indices of the limbs that count NaNs, +∞ and −∞.
const NAN: usize = DIGITS;
const INFINITY: usize = DIGITS + 1;
const NEG_INFINITY: usize = DIGITS + 2;
/// Length of [`ExactSum::limbs`].
pub const LIMBS: usize = DIGITS + 3;

const DIGIT_BITS: u32 = 32;
const DIGIT_MASK: u128 = 0xffff_ffff;
/// Terms between two carry propagations; each adds less than 2³² to a limb.
const MAX_PENDING: u32 = 512;
/// Number of bits of an f64's significand.
const SIGNIFICAND_BITS: u32 = 53;

/// An exact sum of f64 numbers.
///
/// ```
/// use zero_optim::ExactSum;
/// let mut sum = ExactSum::new();
/// for x in [1e300, 1.0, -1e300] {
///     sum.add(x);
/// }
/// assert_eq!(sum.to_f64(), 1.0);
/// ```
#[derive(Debug, Clone)]
pub struct ExactSum {
    limbs: [i64; LIMBS],
    /// Terms added since carries were last propagated.
    pending: u32,
}

impl ExactSum {
    /// Returns the empty sum, 0.
    pub fn new() -> Self {
        ExactSum { limbs: [0; LIMBS], pending: 0 }
    }

    /// Adds a term exactly. NaNs and infinities are counted; a single one makes the total NaN or infinite.
    #[inline]
    pub fn add(&mut self, x: f64) {
        let bits = x.to_bits();
        let exponent = (bits >> 52) as u32 & 0x7ff;
        let fraction = bits & ((1 << 52) - 1);
        if exponent == 0x7ff {
            let kind = match (x.is_nan(), x > 0.0) {
                (true, _) => NAN,
                (false, true) => INFINITY,
                (false, false) => NEG_INFINITY,
            };
            self.limbs[kind] += 1;
            return;
        }
        // x = ±significand · 2^(position − 1074); subnormal numbers use the exponent of the smallest normal ones.
        let (significand, position) = if exponent == 0 { (fraction, 0) } else { (fraction | 1 << 52, exponent - 1) };
        let first = (position / DIGIT_BITS) as usize;
        let spread = u128::from(significand) << (position % DIGIT_BITS);
        for (i, limb) in self.limbs[first..first + 3].iter_mut().enumerate() {
            let digit = ((spread >> (DIGIT_BITS * i as u32)) & DIGIT_MASK) as i64;
            *limb += if x.is_sign_negative() { -digit } else { digit };
        }
        self.pending += 1;
        if self.pending == MAX_PENDING {
            self.settle();
        }
    }

    /// Adds another sum, exactly.
    pub fn merge(&mut self, other: &ExactSum) {
        for (limb, other) in self.limbs.iter_mut().zip(&other.limbs) {
            *limb += other;
        }
        self.settle();
    }

    /// Returns [`LIMBS`] integers. Their elementwise sums over up to 2²⁰ ranks are the limbs of the total; see
    /// [`ExactSum::from_limbs`]. Two sums of equal value may have different limbs.
    pub fn limbs(&self) -> &[i64] {
        &self.limbs
    }

    /// Builds a sum from its limbs, or from the elementwise sums of the limbs of several sums.
    ///
    /// # Errors
    /// Fails if the number of limbs is not [`LIMBS`].
    pub fn from_limbs(limbs: &[i64]) -> Result<Self, LengthError> {
        let limbs = limbs.try_into().map_err(|_| LengthError { what: "limbs", expected: LIMBS, found: limbs.len() })?;
        let mut sum = ExactSum { limbs, pending: 0 };
        sum.settle();
        Ok(sum)
    }

    /// Returns the total, rounded once to nearest, ties to even. Totals beyond f64's range are infinite. The result is
    /// NaN if a term was NaN or infinities of both signs were added.
    pub fn to_f64(&self) -> f64 {
        match (self.limbs[NAN] != 0, self.limbs[INFINITY] != 0, self.limbs[NEG_INFINITY] != 0) {
            (true, _, _) | (_, true, true) => return f64::NAN,
            (_, true, false) => return f64::INFINITY,
            (_, false, true) => return f64::NEG_INFINITY,
            (false, false, false) => {}
        }
        let mut settled = self.clone();
        settled.settle();
        // The last digit has the sign of the total.
        let negative = settled.limbs[DIGITS - 1] < 0;
        if negative {
            settled.limbs.iter_mut().for_each(|limb| *limb = -*limb);
            settled.settle();
        }
        let magnitude = round_magnitude(&settled.limbs[..DIGITS]);
        if negative { -magnitude } else { magnitude }
    }

    /// Propagates carries, so that every digit but the last is in 0..2³².
    fn settle(&mut self) {
        for i in 0..DIGITS - 1 {
            let carry = self.limbs[i] >> DIGIT_BITS;
            self.limbs[i] -= carry << DIGIT_BITS;
            self.limbs[i + 1] += carry;
        }
        self.pending = 0;
    }
}

impl Default for ExactSum {
    fn default() -> Self {
        Self::new()
    }
}

/// Rounds a non-negative number given as digits with carries propagated, in units of 2⁻¹⁰⁷⁴.
fn round_magnitude(digits: &[i64]) -> f64 {
    let bit =
        |position: u32| -> u64 { (digits[(position / DIGIT_BITS) as usize] >> (position % DIGIT_BITS)) as u64 & 1 };
    let Some(top) = digits.iter().rposition(|&digit| digit != 0) else { return 0.0 };
    let length = top as u32 * DIGIT_BITS + (i64::BITS - digits[top].leading_zeros());
    // 2⁻¹⁰⁷⁴ · 2²⁰⁹⁸ = 2¹⁰²⁴ overflows f64; the last digit may be wider than 32 bits.
    if length > 2098 {
        return f64::INFINITY;
    }
    let dropped = length.saturating_sub(SIGNIFICAND_BITS);
    let significand = (dropped..length).rev().fold(0u64, |value, position| value << 1 | bit(position));
    let round_up = dropped > 0 && bit(dropped - 1) == 1 && {
        let tie = (0..dropped - 1).all(|position| bit(position) == 0);
        !tie || significand & 1 == 1
    };
    // A significand of 53 bits, with its top bit and with `dropped` bits below it, has the exponent field 1 +
    // `dropped`. The sum contains the top bit, which contributes the 1. A shorter significand is subnormal and is its
    // own encoding. A carry out of the rounding increments the exponent, as IEEE 754 requires. At the end of the range
    // this gives infinity.
    f64::from_bits((u64::from(dropped) << 52) + significand + u64::from(round_up))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sum(terms: &[f64]) -> ExactSum {
        let mut sum = ExactSum::new();
        terms.iter().for_each(|&x| sum.add(x));
        sum
    }

    /// x · 2^exponent, in two factors because 2^−1074 is subnormal.
    fn scaled(x: f64, exponent: i32) -> f64 {
        x * 2f64.powi(exponent / 2) * 2f64.powi(exponent - exponent / 2)
    }

    #[test]
    fn one_term_is_itself() {
        for x in [
            0.0,
            1.0,
            -1.0,
            0.1,
            f64::MAX,
            f64::MIN,
            f64::MIN_POSITIVE,
            5e-324,
            -5e-324,
            1e-310,
            2f64.powi(-1022) * 1.5,
        ] {
            assert_eq!(sum(&[x]).to_f64().to_bits(), x.to_bits(), "{x:e}");
        }
        assert_eq!(sum(&[-0.0]).to_f64().to_bits(), 0.0f64.to_bits());
    }

    #[test]
    fn rounds_ties_to_even() {
        let ulp = f64::EPSILON;
        assert_eq!(sum(&[1.0, ulp / 2.0]).to_f64(), 1.0);
        assert_eq!(sum(&[1.0, ulp / 2.0, 5e-324]).to_f64(), 1.0 + ulp);
        assert_eq!(sum(&[1.0 + ulp, ulp / 2.0]).to_f64(), 1.0 + 2.0 * ulp);
        assert_eq!(sum(&[1.0 + ulp, ulp / 2.0, -5e-324]).to_f64(), 1.0 + ulp);
        assert_eq!(sum(&[-1.0, -ulp / 2.0, -5e-324]).to_f64(), -1.0 - ulp);
        // A carry runs through the whole significand.
        assert_eq!(sum(&[2.0 - ulp, ulp / 2.0]).to_f64(), 2.0);
    }

    #[test]
    fn sums_at_the_ends_of_the_f64_range() {
        assert_eq!(sum(&[f64::MAX, f64::MAX]).to_f64(), f64::INFINITY);
        assert_eq!(sum(&[f64::MIN, f64::MIN]).to_f64(), f64::NEG_INFINITY);
        assert_eq!(sum(&[f64::MAX, f64::MAX, f64::MIN, 1.0, f64::MIN]).to_f64(), 1.0);
        // Half a unit above the largest number rounds to infinity; a little less does not.
        let half_ulp = 2f64.powi(970);
        assert_eq!(sum(&[f64::MAX, half_ulp]).to_f64(), f64::INFINITY);
        assert_eq!(sum(&[f64::MAX, half_ulp, -5e-324]).to_f64(), f64::MAX);
        assert_eq!(sum(&vec![f64::MAX; 2000]).to_f64(), f64::INFINITY);
    }

    #[test]
    fn non_finite_terms_determine_the_result() {
        assert!(sum(&[1.0, f64::NAN, f64::INFINITY]).to_f64().is_nan());
        assert!(sum(&[f64::NEG_INFINITY, f64::INFINITY]).to_f64().is_nan());
        assert_eq!(sum(&[f64::INFINITY, f64::MIN]).to_f64(), f64::INFINITY);
        assert_eq!(sum(&[f64::NEG_INFINITY, f64::MAX]).to_f64(), f64::NEG_INFINITY);
    }

    #[test]
    fn limbs_leave_room_for_a_million_ranks() {
        // The worst case: all bits of a digit set, and as many terms as fit before the next carry propagation.
        let x = ((1u64 << 53) - 1) as f64 * 2f64.powi(11);
        let mut rank = sum(&vec![x; 3 * MAX_PENDING as usize]);
        (0..MAX_PENDING - 1).for_each(|_| rank.add(x));
        let ranks = 1i64 << 20;
        let reduced: Vec<i64> = rank.limbs().iter().map(|limb| limb.checked_mul(ranks).unwrap()).collect();
        let expected = ((1i128 << 53) - 1) * i128::from(4 * MAX_PENDING - 1) * i128::from(ranks);
        assert_eq!(ExactSum::from_limbs(&reduced).unwrap().to_f64(), expected as f64 * 2f64.powi(11));
    }

    #[test]
    fn wrong_number_of_limbs_is_an_error() {
        assert_eq!(ExactSum::from_limbs(&[0; 3]).unwrap_err().found, 3);
    }

    proptest! {
        /// Terms of 40 bits over a range of 80 binary places fit an i128, whose conversion to f64 rounds correctly.
        #[test]
        fn agrees_with_integers(
            terms in prop::collection::vec((-(1i64 << 40)..(1i64 << 40), 0i32..80), 0..1500),
            unit in -1074i32..800,
        ) {
            let integer: i128 = terms.iter().map(|&(value, shift)| i128::from(value) << shift).sum();
            // Scaling down to subnormal results would round again, so the comparison uses units where the result stays
            // normal.
            let unit = if integer.unsigned_abs().leading_zeros() > 60 { unit.max(-1000) } else { unit };
            let terms: Vec<f64> = terms.iter().map(|&(value, shift)| scaled(scaled(value as f64, shift), unit)).collect();
            prop_assert_eq!(sum(&terms).to_f64(), scaled(integer as f64, unit));
        }

        #[test]
        fn sum_does_not_depend_on_order(bits in prop::collection::vec(any::<u64>(), 0..300), cut in 0usize..300, rotate in 0usize..300) {
            let terms: Vec<f64> = bits.into_iter().map(f64::from_bits).filter(|x| x.is_finite()).collect();
            let whole = sum(&terms).to_f64();
            let mut moved = terms.clone();
            moved.rotate_left(rotate % terms.len().max(1));
            moved.reverse();
            prop_assert_eq!(sum(&moved).to_f64().to_bits(), whole.to_bits());

            let (left, right) = moved.split_at(cut.min(moved.len()));
            let (left, right) = (sum(left), sum(right));
            let mut merged = left.clone();
            merged.merge(&right);
            prop_assert_eq!(merged.to_f64().to_bits(), whole.to_bits());
            let reduced: Vec<i64> = left.limbs().iter().zip(right.limbs()).map(|(a, b)| a + b).collect();
            prop_assert_eq!(ExactSum::from_limbs(&reduced).unwrap().to_f64().to_bits(), whole.to_bits());
        }

        /// The rounded sum of two numbers is what IEEE 754 addition gives.
        #[test]
        fn two_terms_add_as_the_processor_does(a in any::<f64>(), b in any::<f64>()) {
            prop_assume!(a.is_finite() && b.is_finite());
            prop_assert_eq!(sum(&[a, b]).to_f64(), a + b);
        }
    }
}
