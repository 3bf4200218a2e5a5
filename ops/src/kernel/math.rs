//! Elementary functions without branches. The compiler turns loops over them into SIMD code, which gives the same
//! results as scalar code.

use super::lanes::LANES;

/// Below this, `exp` returns 0, since its results would be subnormal.
const EXP_LOWEST: f32 = -87.0;
/// Above this, `exp` returns e^88 (1.65e38); e^89 would exceed the largest f32.
const EXP_HIGHEST: f32 = 88.0;

/// Computes e^x within 8.1e-8 relative on [-87, 88], at most 2 units in the last place. Returns 0 below that range,
/// e^88 above it, and NaN for NaN.
///
/// This is Cephes' `expf`: x = n·ln 2 + r, e^x = 2^n · (1 + r + r²·P(r)).
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    exp_up_to_88(at_most_88(x))
}

/// Computes [`exp`] of a number that is at most 88.
#[inline(always)]
pub(crate) fn exp_up_to_88(x: f32) -> f32 {
    let e = expanded(reduced(x));
    if x < EXP_LOWEST { 0.0 } else { e }
}

/// Limits x to 88 as [`exp`] does.
#[inline(always)]
pub(crate) fn at_most_88(x: f32) -> f32 {
    if x > EXP_HIGHEST { EXP_HIGHEST } else { x }
}

/// Returns r, and n + 127 in the low bits of a mantissa.
#[inline(always)]
fn reduced(x: f32) -> (f32, f32) {
    // Adding 1.5·2^23 rounds to an integer in the low bits of the mantissa, without a rounding instruction. 127 is the
    // exponent's bias. Because 127 is odd, it changes how ties are rounded, but no x between -88 and 88 is a tie:
    // halfway between two multiples of ln 2.
    const MAGIC: f32 = 12_582_912.0 + 127.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let shifted = x.mul_add(std::f32::consts::LOG2_E, MAGIC);
    let n = shifted - MAGIC;
    (n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x)), shifted)
}

/// Computes 2^n · (1 + r + r²·P(r)) from the result of [`reduced`].
#[inline(always)]
fn expanded((r, shifted): (f32, f32)) -> f32 {
    let p = 1.987_569_1e-4f32;
    let p = p.mul_add(r, 1.398_2e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 1.666_666_6e-1);
    let p = p.mul_add(r, 5e-1);
    let p = p.mul_add(r * r, r) + 1.0;
    p * f32::from_bits(shifted.to_bits() << 23)
}

/// Computes `libm::logf` of a normal number above 0, without branches. Returns ∞ for ∞ and NaN for NaN.
#[inline(always)]
pub(crate) fn ln(x: f32) -> f32 {
    const SQRT_HALF: u32 = 0x3F35_04F3;
    // x = 2ᵏ·(1 + f) with 1 + f in [√½, √2].
    let bits = x.to_bits().wrapping_add(1f32.to_bits() - SQRT_HALF);
    let k = ((bits >> 23) as i32 - 127) as f32;
    let f = f32::from_bits((bits & 0x007F_FFFF) + SQRT_HALF) - 1.0;
    let s = f / (2.0 + f);
    let z = s * s;
    let w = z * z;
    let even = w * (0.400_009_72 + w * 0.242_790_79);
    let odd = z * (0.666_666_6 + w * 0.284_987_87);
    let r = odd + even;
    let half_square = 0.5 * f * f;
    let ln = s * (half_square + r) + k * 9.058_001e-6 - half_square + f + k * 0.693_138_1;
    if x < f32::INFINITY { ln } else { x }
}

/// Number of elements in a batch. Each loop of a kernel processes a whole batch before the next loop begins, so
/// intermediate results stay in the first-level cache.
pub(crate) const BATCH: usize = 128;

/// Intermediate results between two loops of a kernel. Aligned, because storing a vector across two cache lines takes
/// twice as long.
#[repr(align(64))]
pub(crate) struct Room(pub(crate) [f32; BATCH]);

impl Room {
    fn new() -> Self {
        Self([0.0; BATCH])
    }
}

/// Computes [`exp`] of a batch, in two loops.
///
/// An exponential is a chain of about fifteen operations, each of which waits for the previous one. The processor
/// overlaps as many chains as its schedulers hold: two or three vectors if one loop contains the whole chain, but
/// five or more in each of several short loops.
pub(crate) struct Exps {
    remainders: Room,
    shifted: Room,
    results: Room,
}

impl Exps {
    pub(crate) fn new() -> Self {
        Self { remainders: Room::new(), shifted: Room::new(), results: Room::new() }
    }

    /// Returns [`exp`] of at most [`BATCH`] numbers, none of which may be above 88.
    #[inline(always)]
    pub(crate) fn of(&mut self, numbers: impl ExactSizeIterator<Item = f32>) -> &[f32] {
        let len = self.reduce(numbers);
        let (remainders, shifted) = (&self.remainders.0[..len], &self.shifted.0[..len]);
        let results = &mut self.results.0[..len];
        for ((e, &r), &n) in results.iter_mut().zip(remainders).zip(shifted) {
            *e = expanded((r, n));
        }
        results
    }

    /// Adds e^(x − `less`) of a whole batch to the lanes: element `i` goes to lane `i mod 16`. No exponential may
    /// exceed 1.
    #[inline(always)]
    pub(crate) fn add(&mut self, x: &[f32; BATCH], less: f32, lanes: [f32; LANES]) -> [f32; LANES] {
        self.reduce(x.iter().map(|x| x - less));
        let mut lanes = lanes;
        for (r, n) in self.remainders.0.as_chunks::<LANES>().0.iter().zip(self.shifted.0.as_chunks::<LANES>().0) {
            let mut e = [0.0; LANES];
            for lane in 0..LANES {
                e[lane] = expanded((r[lane], n[lane]));
            }
            for lane in 0..LANES {
                lanes[lane] += e[lane];
            }
        }
        lanes
    }

    /// Runs the first loop and returns the number of elements.
    #[inline(always)]
    fn reduce(&mut self, numbers: impl ExactSizeIterator<Item = f32>) -> usize {
        /// At this argument n is −127, and the bits of 2^n are 0.
        const LOWER: f32 = -88.0;
        let len = numbers.len();
        let (remainders, shifted) = (&mut self.remainders.0[..len], &mut self.shifted.0[..len]);
        for ((r, n), x) in remainders.iter_mut().zip(shifted).zip(numbers) {
            (*r, *n) = reduced(if x < EXP_LOWEST { LOWER } else { x });
        }
        len
    }
}

/// Returns (σ(x), 1 − σ(x)) for the logistic function σ, given e^−|x|, both within 4e-7 relative on [-80, 80].
#[inline(always)]
pub(crate) fn sigmoid_from(x: f32, e: f32) -> (f32, f32) {
    let large = 1.0 / (1.0 + e);
    let small = e * large;
    if x < 0.0 { (small, large) } else { (large, small) }
}

#[inline(always)]
fn erfc_z(x: f32) -> f32 {
    x.abs() * std::f32::consts::FRAC_1_SQRT_2
}

/// Returns t and the upper half of the fit's polynomial in t.
#[inline(always)]
fn erfc_begun(x: f32) -> (f32, f32) {
    let t = 1.0 / erfc_z(x).mul_add(0.5, 1.0);
    let p = 0.170_872_77f32;
    let p = p.mul_add(t, -0.822_152_23);
    let p = p.mul_add(t, 1.488_515_9);
    let p = p.mul_add(t, -1.135_204);
    (t, p.mul_add(t, 0.278_868_07))
}

/// Returns ln(erfc(z)/t).
#[inline(always)]
fn erfc_exponent(x: f32, t: f32, p: f32) -> f32 {
    let z = erfc_z(x);
    let p = p.mul_add(t, -0.186_288_06);
    let p = p.mul_add(t, 0.096_784_18);
    let p = p.mul_add(t, 0.374_091_96);
    let p = p.mul_add(t, 1.000_023_7);
    let p = p.mul_add(t, -1.265_512_2);
    z.mul_add(-z, p)
}

#[inline(always)]
fn normal_cdf_from(x: f32, t: f32, e: f32) -> f32 {
    // erfc(z)/2 is the smaller tail.
    let tail = 0.5 * t * e;
    if x < 0.0 { tail } else { 1.0 - tail }
}

/// The standard normal distribution function Φ(x) of a batch, in short loops like those of [`Exps`]. Accurate within
/// 2e-6 relative on [-5, 5] and 2e-7 absolute.
///
/// Φ(x) = erfc(−x/√2)/2 with the Chebyshev fit of erfc in Press et al., "Numerical Recipes", section 6.2.
pub(crate) struct NormalCdfs {
    ts: Room,
    polynomials: Room,
    results: Room,
}

impl NormalCdfs {
    pub(crate) fn new() -> Self {
        Self { ts: Room::new(), polynomials: Room::new(), results: Room::new() }
    }

    /// Returns Φ(x) of at most [`BATCH`] elements.
    #[inline(always)]
    pub(crate) fn of(&mut self, x: &[f32], exps: &mut Exps) -> &[f32] {
        let len = x.len();
        let (ts, polynomials, results) =
            (&mut self.ts.0[..len], &mut self.polynomials.0[..len], &mut self.results.0[..len]);
        for ((t, p), &x) in ts.iter_mut().zip(polynomials.iter_mut()).zip(x) {
            (*t, *p) = erfc_begun(x);
        }
        let e = exps.of(x.iter().zip(&*ts).zip(&*polynomials).map(|((&x, &t), &p)| erfc_exponent(x, t, p)));
        for (((cdf, &x), &t), &e) in results.iter_mut().zip(x).zip(&*ts).zip(e) {
            *cdf = normal_cdf_from(x, t, e);
        }
        results
    }
}

/// 1/√(2π)
pub(crate) const ONE_OVER_SQRT_TAU: f32 = 0.398_942_3;

#[cfg(test)]
mod tests {
    use super::*;

    fn worst(from: f32, to: f32, f: impl Fn(f32) -> f32, exact: impl Fn(f64) -> f64) -> f64 {
        let steps = 20_000;
        (0..=steps)
            .map(|i| from + (to - from) * i as f32 / steps as f32)
            .map(|x| ((f64::from(f(x)) - exact(f64::from(x))) / exact(f64::from(x))).abs())
            .fold(0.0, f64::max)
    }

    #[test]
    fn exp_is_accurate_and_saturates() {
        assert!(worst(-87.0, 88.0, exp, f64::exp) < 2.0 * f64::from(f32::EPSILON));
        assert_eq!((exp(0.0), exp(-1e4), exp(f32::NEG_INFINITY)), (1.0, 0.0, 0.0));
        assert!(exp(1e4).is_finite() && exp(f32::INFINITY).is_finite() && exp(f32::NAN).is_nan());
    }

    #[test]
    fn ln_matches_libm() {
        let numbers = || (0..200_000).map(|i| f32::from_bits(0x0080_0000 + i * 10_653));
        for x in numbers().chain((0..2000).map(|i| 0.5 + i as f32 / 1000.0)).chain([f32::INFINITY]) {
            assert_eq!(ln(x).to_bits(), libm::logf(x).to_bits(), "ln {x:e}");
        }
        assert!(numbers().next_back().is_some_and(|last| last > 1e38));
        assert!(ln(f32::NAN).is_nan());
    }

    #[test]
    fn a_batch_is_bit_identical_to_single_elements() {
        let specials =
            [f32::NEG_INFINITY, -1e30, -88.5, -88.0, -87.5, -87.000_01, -87.0, -86.99, -0.0, 0.0, 1e-40, 88.0];
        let numbers: Vec<f32> = specials.into_iter().chain((0..117).map(|i| i as f32 * 1.496 - 87.3)).collect();
        for len in [0, 1, 15, 16, 17, BATCH] {
            let numbers = &numbers[..len];
            let want: Vec<u32> = numbers.iter().map(|&x| exp(x).to_bits()).collect();
            let got: Vec<u32> = Exps::new().of(numbers.iter().copied()).iter().map(|e| e.to_bits()).collect();
            assert_eq!(got, want);
        }
        assert!(Exps::new().of([f32::NAN].into_iter())[0].is_nan());
    }

    fn sigmoid(x: f32) -> (f32, f32) {
        sigmoid_from(x, exp(-x.abs()))
    }

    #[test]
    fn sigmoid_keeps_both_tails() {
        assert!(worst(-80.0, 80.0, |x| sigmoid(x).0, |x| 1.0 / (1.0 + (-x).exp())) < 4e-7);
        assert!(worst(-80.0, 80.0, |x| sigmoid(x).1, |x| 1.0 / (1.0 + x.exp())) < 4e-7);
        assert!(sigmoid(f32::NAN).0.is_nan());
    }

    #[test]
    fn normal_cdf_matches_an_integral() {
        // Computes Φ by Simpson's rule in f64.
        let exact = |x: f64| {
            let n = 2_000;
            let h = (x + 12.0) / f64::from(n);
            let density = |t: f64| (-0.5 * t * t).exp() / std::f64::consts::TAU.sqrt();
            let inner: f64 =
                (1..n).map(|i| density(-12.0 + h * f64::from(i)) * if i % 2 == 1 { 4.0 } else { 2.0 }).sum();
            h / 3.0 * (density(-12.0) + inner + density(x))
        };
        for i in -40..=40 {
            let x = i as f32 / 8.0;
            let (got, want) = (f64::from(NormalCdfs::new().of(&[x], &mut Exps::new())[0]), exact(f64::from(x)));
            assert!(((got - want) / want).abs() < 2e-6 && (got - want).abs() < 2e-7, "x = {x}: {got} against {want}");
        }
    }
}
