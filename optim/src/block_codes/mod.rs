//! Symmetric block quantization to 8 or 4 bits, so that collectives send fewer bytes, as in ZeRO++ (Wang et al., 2023,
//! arXiv 2306.10209).
//!
//! The elements are split into blocks; the last block may be shorter. The record of a block is a scale in little-endian
//! bf16, followed by a code for each element. A code stands for a signed integer × scale:
//!
//! | codes | elements of a block | bytes of a block of n elements | integers |
//! |---|---|---|---|
//! | `Int8` | 512 | 2 + n | −127 to 127 |
//! | `Fp4` | 256 | 2 + ⌈n/2⌉ | ±{0, 1, 2, 3, 4, 6, 8, 12}; byte i has the code of element i in its lower half, and the code of element ⌈n/2⌉ + i in its upper half |
//!
//! `Fp4` is the format E2M1 of the OCP Microscaling specification 1.0, section 5.3.3: one sign bit, two exponent bits
//! and one mantissa bit. The table has twice the numbers of E2M1, which are integers. Most gradients of a block are far
//! below its largest one. ZeRO++'s integers from −7 to 7 round 23 % of the gradients of a GPT with 0.9M parameters to
//! zero; `Fp4` rounds 14 % to zero. The error is 13 % of the gradients' norm with ZeRO++'s integers, and 11 % with
//! `Fp4`.
//!
//! Smaller blocks have smaller scales and thus smaller errors, but need more bytes. Scales add 0.4 % to the bytes of
//! `Int8` codes and 1.6 % to the bytes of `Fp4` codes. According to ZeRO++, hosts send each other 0.75 × 16 = 12 bits
//! per element. Here too, they gather the weights once as `Int8` (8 bits) and reduce the gradients as `Fp4` (4 bits).
//! With the scales, this is less than 1 % more than 12 bits. The block sizes divide
//! [`norm::BLOCK`](crate::norm::BLOCK), and shards begin at multiples of `norm::BLOCK`, so codes do not depend on the
//! number of ranks.
//!
//! The scale is the largest absolute value divided by the largest integer, rounded up to bf16, so that no element is
//! clipped. Each element becomes the nearest product of an integer and the scale. Of two equally near products, the one
//! with the even code wins. A product has at most 15 significant bits, so f32 holds it exactly. The error is at most
//! half of the distance between the products around the element. That is half a scale for `Int8`. For `Fp4` it is half
//! a scale for elements of up to 4 scales, one scale for elements of up to 8, and two scales for elements of up to 12.
//! The only exceptions are elements within this distance of the largest finite f32: they may become infinite. A block
//! with a NaN or an infinity becomes NaN, so that checks of losses and norms detect it.
//!
//! DeepSpeed's codes are integers of 8 and 4 bits. Its scale is the largest absolute value divided by 128 or 8, so the
//! largest element, if positive, is clipped by a whole step.

use zero_isa::Isa;

use crate::half_float::{HalfFloat, read_half, write_half};
use crate::simd::{Kernel, run};
use crate::{LengthError, expect_length};

/// Number of elements in the largest block.
const LARGEST: usize = 512;

/// Number of bytes of a scale.
const SCALE: usize = 2;

/// How an element is coded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockCodes {
    /// A signed byte.
    Int8,
    /// A float of four bits.
    Fp4,
}

impl BlockCodes {
    /// All codes.
    pub const ALL: [Self; 2] = [Self::Int8, Self::Fp4];

    /// Returns the number of elements in a block.
    #[must_use]
    pub const fn block(self) -> usize {
        match self {
            Self::Int8 => LARGEST,
            Self::Fp4 => 256,
        }
    }

    /// Returns how many bytes the codes and scales of `elements` elements take.
    #[must_use]
    pub const fn bytes(self, elements: usize) -> usize {
        let (full, rest) = (elements / self.block(), elements % self.block());
        full * self.record(self.block()) + if rest > 0 { self.record(rest) } else { 0 }
    }

    const fn record(self, elements: usize) -> usize {
        match self {
            Self::Int8 => SCALE + elements,
            Self::Fp4 => SCALE + elements.div_ceil(2),
        }
    }

    fn largest(self) -> f32 {
        match self {
            Self::Int8 => 127.0,
            Self::Fp4 => 12.0,
        }
    }

    /// Writes the scales and codes of `src`.
    ///
    /// # Errors
    /// Fails if the length of `dst` is not [`BlockCodes::bytes`] of the number of elements. In that case nothing is
    /// written.
    pub fn quantize(self, src: &[f32], dst: &mut [u8]) -> Result<(), LengthError> {
        expect_length("dst", self.bytes(src.len()), dst.len())?;
        run(Isa::current(), Quantize { codes: self, src, dst });
        Ok(())
    }

    /// Does the same as [`BlockCodes::quantize`], for 16-bit floats.
    ///
    /// # Errors
    /// See [`BlockCodes::quantize`].
    pub fn quantize_half<H: HalfFloat>(self, src: &[H], dst: &mut [u8]) -> Result<(), LengthError> {
        expect_length("dst", self.bytes(src.len()), dst.len())?;
        let mut wide = [0.0; LARGEST];
        for (src, dst) in src.chunks(self.block()).zip(dst.chunks_mut(self.record(self.block()))) {
            let wide = &mut wide[..src.len()];
            read_half(src, wide)?;
            self.quantize(wide, dst)?;
        }
        Ok(())
    }

    /// Restores the elements from the scales and codes in `src`.
    ///
    /// # Errors
    /// Fails if the length of `src` is not [`BlockCodes::bytes`] of the number of elements. In that case nothing is
    /// written.
    pub fn dequantize(self, src: &[u8], dst: &mut [f32]) -> Result<(), LengthError> {
        expect_length("src", self.bytes(dst.len()), src.len())?;
        run(Isa::current(), Dequantize::<false> { codes: self, src, dst });
        Ok(())
    }

    /// Does the same as [`BlockCodes::dequantize`], and rounds to 16-bit floats.
    ///
    /// # Errors
    /// See [`BlockCodes::dequantize`].
    pub fn dequantize_half<H: HalfFloat>(self, src: &[u8], dst: &mut [H]) -> Result<(), LengthError> {
        expect_length("src", self.bytes(dst.len()), src.len())?;
        let mut wide = [0.0; LARGEST];
        for (src, dst) in src.chunks(self.record(self.block())).zip(dst.chunks_mut(self.block())) {
            let wide = &mut wide[..dst.len()];
            self.dequantize(src, wide)?;
            write_half(wide, dst)?;
        }
        Ok(())
    }

    /// Restores the elements from the scales and codes in `src` and adds them to `sum`.
    ///
    /// # Errors
    /// Fails if the length of `src` is not [`BlockCodes::bytes`] of the number of elements. In that case nothing is
    /// added.
    pub fn add(self, src: &[u8], sum: &mut [f32]) -> Result<(), LengthError> {
        expect_length("src", self.bytes(sum.len()), src.len())?;
        run(Isa::current(), Dequantize::<true> { codes: self, src, dst: sum });
        Ok(())
    }
}

/// Returns a number rounded up to bf16. `x` is positive and finite. If `x` is the scale of finite elements, the result
/// is finite.
#[inline(always)]
fn rounded_up(x: f32) -> f32 {
    f32::from_bits((x.to_bits() + 0xffff) & 0xffff_0000)
}

/// Returns the integer nearest to `x`, in two's complement. The absolute value of `x` is at most 127. Adds a constant,
/// so that the sum is rounded to nearest, ties to even, and has the integer in its lowest bits.
#[inline(always)]
fn nearest(x: f32) -> u8 {
    const SHIFT: f32 = 1.5 * (1 << 23) as f32;
    (x + SHIFT).to_bits() as u8
}

/// Returns the code in `Fp4` of an element divided by its scale.
#[inline(always)]
fn nearest_fp4(x: f32) -> u8 {
    let size = x.abs();
    // The integers from 0 to 4 are their own codes. Between 4 and 8, consecutive codes are 2 apart; between 8 and 12,
    // they are 4 apart.
    let code =
        nearest(size.min(4.0)) + nearest((size - 4.0).clamp(0.0, 4.0) * 0.5) + nearest((size - 8.0).max(0.0) * 0.25);
    code | (x.to_bits() >> 28) as u8 & 8
}

/// Returns the integer that a code in `Fp4` stands for.
#[inline(always)]
fn of_fp4(code: u8) -> i8 {
    let size = code & 7;
    let integer = (size + size.saturating_sub(4) + 2 * size.saturating_sub(6)) as i8;
    if code & 8 == 0 { integer } else { -integer }
}

struct Quantize<'a> {
    codes: BlockCodes,
    src: &'a [f32],
    dst: &'a mut [u8],
}

impl Kernel for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let block = self.codes.block();
        for (src, record) in self.src.chunks(block).zip(self.dst.chunks_mut(self.codes.record(block))) {
            // The bits of absolute values, read as integers, are in the order of the values. The bits of a NaN exceed
            // the bits of an infinity. The compiler vectorizes the maximum of integers.
            let bits = src.iter().fold(0, |max, x| x.abs().to_bits().max(max));
            let is_finite = bits < f32::INFINITY.to_bits();
            let scale = if is_finite { rounded_up(f32::from_bits(bits) / self.codes.largest()) } else { f32::NAN };
            let (head, codes) = record.split_at_mut(SCALE);
            head.copy_from_slice(&((scale.to_bits() >> 16) as u16).to_le_bytes());
            if bits == 0 || !is_finite {
                codes.fill(0);
                continue;
            }
            match self.codes {
                BlockCodes::Int8 => {
                    for (code, x) in codes.iter_mut().zip(src) {
                        *code = nearest(x / scale);
                    }
                }
                BlockCodes::Fp4 => {
                    let (low, high) = src.split_at(codes.len());
                    for ((code, low), high) in codes.iter_mut().zip(low).zip(high) {
                        *code = nearest_fp4(low / scale) | nearest_fp4(high / scale) << 4;
                    }
                    // With an odd number of elements, the last byte has one code.
                    if let (Some(code), [.., low], true) = (codes.last_mut(), low, high.len() < low.len()) {
                        *code = nearest_fp4(low / scale);
                    }
                }
            }
        }
    }
}

/// Writes the elements, or adds them to the existing values if `ADDS`.
struct Dequantize<'a, const ADDS: bool> {
    codes: BlockCodes,
    src: &'a [u8],
    dst: &'a mut [f32],
}

impl<const ADDS: bool> Dequantize<'_, ADDS> {
    #[inline(always)]
    fn put(place: &mut f32, code: i8, scale: f32) {
        let value = f32::from(code) * scale;
        *place = if ADDS { *place + value } else { value };
    }
}

impl<const ADDS: bool> Kernel for Dequantize<'_, ADDS> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let block = self.codes.block();
        for (record, dst) in self.src.chunks(self.codes.record(block)).zip(self.dst.chunks_mut(block)) {
            let [first, second, codes @ ..] = record else { continue };
            let scale = f32::from_bits(u32::from(u16::from_le_bytes([*first, *second])) << 16);
            match self.codes {
                BlockCodes::Int8 => {
                    for (place, &code) in dst.iter_mut().zip(codes) {
                        Self::put(place, code as i8, scale);
                    }
                }
                BlockCodes::Fp4 => {
                    let (low, high) = dst.split_at_mut(codes.len());
                    for (place, &code) in low.iter_mut().zip(codes) {
                        Self::put(place, of_fp4(code & 0xf), scale);
                    }
                    for (place, &code) in high.iter_mut().zip(codes) {
                        Self::put(place, of_fp4(code >> 4), scale);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
