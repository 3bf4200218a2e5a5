//! Optimizer states in 8 bits: block-wise dynamic quantization (Dettmers et al., 2022, "8-bit Optimizers via Block-wise
//! Quantization"), in the format of bitsandbytes.
//!
//! A block has [`BLOCK`] elements. Its largest absolute value is kept in f32. Each element is divided by this largest
//! value, and the quotient is stored as the index of the nearest of 256 values in [−1, 1]. Of two equally near values,
//! the lower one is stored. The values lie densely around zero, so that small and large elements have similar relative
//! errors.

use std::sync::LazyLock;

use zero_isa::Isa;

use crate::simd::{Kernel, run};
use crate::{LengthError, expect_length};

/// Number of elements in a block.
pub const BLOCK: usize = 256;

/// The 256 values that indices stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EightBit {
    /// Values of both signs, for a first moment.
    Signed,
    /// Values from 0 on, for a second moment.
    Unsigned,
}

/// The values, with a table to find the nearest one. The upper 16 bits of a number, its [`place`], select the index of
/// the smallest value that may be nearest, and one comparison decides between this value and the next.
struct Map {
    values: [f32; 256],
    /// For each value, the smallest number that rounds to the next larger value instead. NaN for the last value.
    bounds: [f32; 256],
    /// For each place, the index of the smallest value that may be nearest: first for non-negative, then for negative
    /// numbers.
    first: [u8; PLACES],
}

/// Numbers below 2^−24 have the index of zero.
const SMALLEST: u32 = (127 - 24) << 7;
/// The buckets of magnitudes from 2^−24 to 1: 128 in each power of two, and one for 1.
const BUCKETS: usize = 24 * 128 + 1;
/// Number of places in [`Map::first`]: enough for the buckets of both signs, and a power of two, so that a lookup needs
/// no bounds check.
const PLACES: usize = 8192;

static SIGNED: LazyLock<Map> = LazyLock::new(|| Map::new(true));
static UNSIGNED: LazyLock<Map> = LazyLock::new(|| Map::new(false));

impl EightBit {
    fn map(self) -> &'static Map {
        match self {
            Self::Signed => &SIGNED,
            Self::Unsigned => &UNSIGNED,
        }
    }

    /// Returns the values in ascending order.
    #[must_use]
    pub fn all(self) -> &'static [f32; 256] {
        &self.map().values
    }

    /// Stores `src` as indices and the largest absolute value of each block. A block with a NaN becomes NaN.
    ///
    /// # Errors
    /// Fails if the lengths do not fit. In that case nothing is written.
    pub fn quantize(self, src: &[f32], indices: &mut [u8], largest: &mut [f32]) -> Result<(), LengthError> {
        expect_length("indices", src.len(), indices.len())?;
        expect_length("largest", src.len().div_ceil(BLOCK), largest.len())?;
        run(Isa::current(), Quantize { map: self.map(), src, indices, largest });
        Ok(())
    }

    /// Restores values from indices.
    ///
    /// # Errors
    /// Fails if the lengths do not fit. In that case nothing is written.
    pub fn dequantize(self, indices: &[u8], largest: &[f32], dst: &mut [f32]) -> Result<(), LengthError> {
        expect_length("dst", indices.len(), dst.len())?;
        expect_length("largest", indices.len().div_ceil(BLOCK), largest.len())?;
        run(Isa::current(), Dequantize { map: self.map(), indices, largest, dst });
        Ok(())
    }

    /// Does the same as [`EightBit::dequantize`], except that quantizing the result again restores exactly the same
    /// indices and largest values. The two functions differ only where the largest element of a block was negative,
    /// because no value is −1. This function restores such an element as the negated largest absolute value.
    ///
    /// # Errors
    /// See [`EightBit::dequantize`].
    pub fn dequantize_losslessly(self, indices: &[u8], largest: &[f32], dst: &mut [f32]) -> Result<(), LengthError> {
        self.dequantize(indices, largest, dst)?;
        if self == Self::Signed {
            for ((indices, largest), dst) in indices.chunks(BLOCK).zip(largest).zip(dst.chunks_mut(BLOCK)) {
                if !indices.contains(&255)
                    && let Some(at) = indices.iter().position(|&index| index == 0)
                {
                    dst[at] = -largest;
                }
            }
        }
        Ok(())
    }
}

impl Map {
    /// Computes the values as `bitsandbytes.functional.create_dynamic_map` does. The decade that ends at 10^−k is split
    /// into 2^(6−k) equal parts, or into twice as many if there are no negative values. The middle of each part is a
    /// value, and so are 0 and 1.
    fn new(signed: bool) -> Self {
        let mut values = vec![0.0, 1.0];
        for (decade, scale) in [1e-6f32, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0].into_iter().enumerate() {
            let parts: usize = 1 << if signed { decade } else { decade + 1 };
            let boundary = |i: usize| {
                // Computes each half from its own end, as PyTorch's linspace does.
                let step = (1.0f32 - 0.1) / parts as f32;
                if i < parts.div_ceil(2) {
                    step.mul_add(i as f32, 0.1)
                } else {
                    (-step).mul_add((parts - i) as f32, 1.0)
                }
            };
            for i in 0..parts {
                let value = scale * ((boundary(i) + boundary(i + 1)) / 2.0);
                values.push(value);
                if signed {
                    values.push(-value);
                }
            }
        }
        values.sort_by(f32::total_cmp);
        let values: [f32; 256] = std::array::from_fn(|i| values[i]);
        let bounds: [f32; 256] = std::array::from_fn(|i| match values.get(i + 1) {
            Some(&next) => bound(values[i], next),
            None => f32::NAN,
        });
        let first = std::array::from_fn(|at| {
            let number = |bucket: usize| f32::from_bits((bucket as u32 + SMALLEST) << 16);
            // The lowest number of the bucket. The first bucket of each sign also contains all smaller magnitudes.
            let lowest = match at.checked_sub(BUCKETS) {
                None if at == 0 => 0.0,
                None => number(at),
                Some(bucket) => (-number(bucket + 1)).next_up(),
            };
            bounds[..255].partition_point(|bound| lowest >= *bound) as u8
        });
        Self { values, bounds, first }
    }

    /// Returns the index of the value nearest to `x`, whose place is `place`.
    #[inline(always)]
    fn nearest(&self, place: u16, x: f32) -> u8 {
        let index = self.first[usize::from(place) % PLACES];
        index.wrapping_add(u8::from(x >= self.bounds[usize::from(index)]))
    }
}

/// Returns the position of a number's index in [`Map::first`].
#[inline(always)]
fn place(x: f32) -> u16 {
    let bits = x.to_bits();
    let bucket = ((bits >> 16) & 0x7fff).saturating_sub(SMALLEST).min(BUCKETS as u32 - 1);
    (bucket + (bits >> 31) * BUCKETS as u32) as u16
}

/// Returns the smallest number that is nearer to `next` than to `value`, where distances are rounded to f32.
fn bound(value: f32, next: f32) -> f32 {
    let is_nearer = |x: f32| (x - next).abs() < (x - value).abs();
    let middle = value + (next - value) / 2.0;
    let mut x = middle;
    while is_nearer(x) {
        x = x.next_down();
    }
    while !is_nearer(x) {
        x = x.next_up();
    }
    x
}

struct Quantize<'a> {
    map: &'static Map,
    src: &'a [f32],
    indices: &'a mut [u8],
    largest: &'a mut [f32],
}

impl Kernel for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let blocks = self.src.chunks(BLOCK).zip(self.indices.chunks_mut(BLOCK)).zip(self.largest);
        for ((src, indices), largest) in blocks {
            // The bits of absolute values, read as integers, are in the order of the values. The bits of a NaN exceed
            // the bits of an infinity. The compiler vectorizes the maximum of integers.
            let bits = src.iter().fold(0, |max, x| x.abs().to_bits().max(max));
            let max = if bits > f32::INFINITY.to_bits() { f32::NAN } else { f32::from_bits(bits) };
            // Makes all elements of a block of zeros get the same index on every processor.
            let inverse = if max == 0.0 { 0.0 } else { 1.0 / max };
            *largest = max;
            // Places are computed in vectors. The lookup cannot be vectorized, so it is a separate loop.
            let (mut scaled, mut places) = ([0.0; BLOCK], [0; BLOCK]);
            for ((scaled, to), x) in scaled.iter_mut().zip(&mut places).zip(src) {
                *scaled = x * inverse;
                *to = place(*scaled);
            }
            for ((index, place), x) in indices.iter_mut().zip(places).zip(scaled) {
                *index = self.map.nearest(place, x);
            }
        }
    }
}

struct Dequantize<'a> {
    map: &'static Map,
    indices: &'a [u8],
    largest: &'a [f32],
    dst: &'a mut [f32],
}

impl Kernel for Dequantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let blocks = self.indices.chunks(BLOCK).zip(self.dst.chunks_mut(BLOCK)).zip(self.largest);
        for ((indices, dst), largest) in blocks {
            for (dst, index) in dst.iter_mut().zip(indices) {
                *dst = self.map.values[usize::from(*index)] * largest;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Finds the nearest value by its definition.
    fn nearest(values: &[f32; 256], x: f32) -> u8 {
        let distance = |i: usize| (x - values[i]).abs();
        (1..256).fold(0, |best, i| if distance(i) < distance(best) { i } else { best }) as u8
    }

    #[test]
    fn every_bucket_and_bound_gives_the_nearest_value() {
        for of in [EightBit::Signed, EightBit::Unsigned] {
            let map = of.map();
            let mut xs = vec![0.0, -0.0, 1e-30, -1e-30, 1.0, -1.0];
            for bucket in (SMALLEST - 300)..=(127 << 7) {
                for low in [0, 1, 0x7fff, 0xffff] {
                    let x = f32::from_bits(bucket << 16 | low);
                    xs.extend([x, -x].into_iter().filter(|x| x.abs() <= 1.0));
                }
            }
            for bound in &map.bounds[..255] {
                xs.extend([bound.next_down(), *bound, bound.next_up()]);
            }
            for x in xs {
                assert_eq!(map.nearest(place(x), x), nearest(&map.values, x), "{of:?}, {x:e}");
            }
        }
    }

    #[test]
    fn restored_values_are_near_and_are_quantized_to_the_same_bits() {
        let n = 5 * BLOCK + 77;
        let wave = |i: usize| ((i * i * 31 + i * 7) % 1021) as f32 / 512.0 - 1.0;
        let src: Vec<f32> = (0..n).map(|i| wave(i).powi(5) * 10f32.powi((i / BLOCK) as i32 * 3 - 9)).collect();
        for of in [EightBit::Signed, EightBit::Unsigned] {
            let mut src = src.clone();
            src[BLOCK..2 * BLOCK].fill(0.0);
            if of == EightBit::Unsigned {
                src.iter_mut().for_each(|x| *x = x.abs());
            }
            let quantize = |src: &[f32]| {
                let (mut indices, mut largest) = (vec![0; n], vec![0.0; n.div_ceil(BLOCK)]);
                of.quantize(src, &mut indices, &mut largest).unwrap();
                (indices, largest)
            };
            let (indices, largest) = quantize(&src);
            let (mut restored, mut lossless) = (vec![0.0; n], vec![0.0; n]);
            of.dequantize(&indices, &largest, &mut restored).unwrap();
            of.dequantize_losslessly(&indices, &largest, &mut lossless).unwrap();
            for (i, (x, restored)) in src.iter().zip(&restored).enumerate() {
                assert!((x - restored).abs() <= 0.008 * largest[i / BLOCK], "{of:?}: {x} {restored}");
            }
            assert!(restored.iter().zip(&lossless).filter(|(a, b)| a != b).count() <= 6);
            assert_eq!(quantize(&lossless), (indices, largest), "{of:?}");
            src[300] = f32::NAN;
            src[3 * BLOCK] = f32::INFINITY;
            let (indices, largest) = quantize(&src);
            of.dequantize(&indices, &largest, &mut restored).unwrap();
            assert!(restored[BLOCK..2 * BLOCK].iter().all(|x| x.is_nan()) && !restored[3 * BLOCK].is_finite());
        }
    }

    #[test]
    fn lengths_are_checked() {
        let of = EightBit::Signed;
        assert!(of.quantize(&[1.0; 300], &mut [0; 300], &mut [0.0; 1]).is_err());
        assert!(of.quantize(&[1.0; 300], &mut [0; 299], &mut [0.0; 2]).is_err());
        assert!(of.dequantize(&[0; 300], &[0.0; 2], &mut [0.0; 299]).is_err());
        assert!(of.dequantize(&[0; 300], &[0.0; 1], &mut [0.0; 300]).is_err());
    }
}
