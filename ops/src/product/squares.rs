//! Packs blocks of bf16 operands for [`amx`]: pairs, in steps of sixteen words.

use super::super::kernel::{Isa, vectorised};
use super::amx::{SIDE, SQUARE, STEP};
#[cfg(target_arch = "x86_64")]
use super::pack::Lines;
use super::pack::right_panel;
use super::pairs::{elements, pair, pairs_of};
use super::tile::COLUMNS;
use super::{Matrix, pairs};
use half::bf16;
use std::ops::Range;

/// Returns the number of words for this many terms, rounded up to a whole step.
pub(super) fn words(terms: usize) -> usize {
    terms.div_ceil(2).next_multiple_of(STEP)
}

/// Packs a block of the right operand as [`pairs::pack_right`] does, and adds zeros up to a whole step.
pub(super) fn pack_right(isa: Isa, right: Matrix<'_>, depth: Range<usize>, columns: Range<usize>, packed: &mut [f32]) {
    let (used, words) = (depth.len().div_ceil(2), words(depth.len()));
    for panel in packed.chunks_mut(right_panel(words)) {
        panel[used * COLUMNS..words * COLUMNS].fill(0.0);
    }
    pairs::pack_right(isa, right, depth, columns, right_panel(words), packed);
}

/// Packs a block of the left operand: for every [`SIDE`] rows, one square per step, in the order of the steps, with
/// zeros up to a whole step. The squares are then read in memory order. Unpacked rows, at the stride of the matrix,
/// would share sets of the cache.
pub(super) fn pack_left(isa: Isa, left: Matrix<'_>, rows: Range<usize>, depth: Range<usize>, packed: &mut [f32]) {
    let (data, words) = (elements(left), words(depth.len()));
    if left.is_transposed() {
        assert!(Isa::current().has_amx());
        #[cfg(target_arch = "x86_64")]
        {
            let lines = Lines { stride: left.column_stride, part: rows, panel: words, numbers: depth };
            // SAFETY: this path is chosen only with AMX, which counts as available only together with AVX-512.
            unsafe { x86::turn(data, lines, packed) };
        }
        return;
    }
    for (i, row) in rows.enumerate() {
        let out = &mut packed[i / SIDE * SIDE * words + i % SIDE * STEP..];
        spread(isa, &data[row * left.row_stride..][depth.clone()], out);
    }
}

vectorised! {
    /// Distributes a row's words over its squares, with zeros up to a whole step.
    fn spread(terms: &[bf16], out: &mut [f32]) {
        let (whole, rest) = terms.as_chunks::<{ 2 * STEP }>();
        for (terms, out) in whole.iter().zip(out.chunks_mut(SQUARE)) {
            for (out, [earlier, later]) in out[..STEP].iter_mut().zip(terms.as_chunks::<2>().0) {
                *out = pair(*earlier, *later);
            }
        }
        if !rest.is_empty() {
            let (used, zeros) = out[whole.len() * SQUARE..][..STEP].split_at_mut(rest.len().div_ceil(2));
            pairs_of(rest, used);
            zeros.fill(0.0);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::pack::{LANES, Lines, x86::turned};
    use super::SQUARE;
    use half::bf16;
    use std::arch::x86_64::*;

    /// Each register holds one word of sixteen rows, and sixteen registers are transposed at a time.
    #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
    pub(super) fn turn(data: &[bf16], lines: Lines, out: &mut [f32]) {
        let (end, panel) = (lines.numbers.end, lines.panel);
        for (strip, first) in lines.part.clone().step_by(LANES).enumerate() {
            let rows = (lines.part.end - first).min(LANES);
            let mask: __mmask16 = 0xffff >> (LANES - rows);
            let line = |k: usize| {
                if k >= end {
                    return _mm512_setzero_si512();
                }
                let part = &data[k * lines.stride + first..][..rows];
                // SAFETY: elements outside the part are masked.
                _mm512_cvtepu16_epi32(unsafe { _mm256_maskz_loadu_epi16(mask, part.as_ptr().cast()) })
            };
            let squares = out[strip * LANES * panel..].chunks_exact_mut(SQUARE);
            for (out, w) in squares.zip((0..panel).step_by(LANES)) {
                let mut square = [_mm512_setzero_ps(); LANES];
                for (i, register) in square.iter_mut().enumerate() {
                    let k = lines.numbers.start + 2 * (w + i);
                    let words = _mm512_or_si512(_mm512_slli_epi32::<16>(line(k)), line(k + 1));
                    *register = _mm512_castsi512_ps(words);
                }
                for (out, row) in out.as_chunks_mut::<LANES>().0.iter_mut().zip(turned(square)) {
                    // SAFETY: `out` has sixteen words.
                    unsafe { _mm512_storeu_ps(out.as_mut_ptr(), row) };
                }
            }
        }
    }
}
