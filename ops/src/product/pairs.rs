//! Products of two bf16 operands on processors that multiply them two at a time.
//!
//! AVX512_BF16's `vdpbf16ps` adds two products to each f32 sum, on some processors in the time that one fused
//! multiply-add takes. The instruction executes two fused multiply-adds in sequence, beginning with the upper halves of
//! its words. With the earlier term in the upper half, a sum is the chain of [`super`], term by term, with one
//! difference: terms and sums below 2⁻¹²⁶ count as zero.

use super::super::kernel::{Isa, vectorised};
use super::pack::{LANES, Lines, left_panel};
use super::tile::{COLUMNS, MOST_ROWS};
use super::{Elements, Matrix};
use half::bf16;
use std::ops::Range;
#[cfg(target_arch = "x86_64")]
use std::sync::LazyLock;

/// Returns whether pairs are faster than widened terms. AMD's processors multiply as many pairs per cycle as f32 terms,
/// but Intel's processors multiply only half as many.
pub(super) fn pay() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        // Cached, because virtual machines trap the instruction `cpuid`, which takes microseconds each time.
        static AMD: LazyLock<bool> = LazyLock::new(|| {
            let maker = std::arch::x86_64::__cpuid(0);
            [maker.ebx, maker.edx, maker.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD"
        });
        super::tile::multiplies_pairs() && *AMD
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

pub(super) fn elements(matrix: Matrix<'_>) -> &[bf16] {
    match matrix.data {
        Elements::Bf16(data) => data,
        Elements::F32(_) | Elements::F16(_) | Elements::Quantized(_) => unreachable!("pairs are made of bf16 operands"),
    }
}

/// Combines two terms into a word.
#[inline(always)]
pub(super) fn pair(earlier: bf16, later: bf16) -> f32 {
    f32::from_bits(u32::from(earlier.to_bits()) << 16 | u32::from(later.to_bits()))
}

/// Packs a block of the right operand as [`super::pack::pack_right`] does, but in words, into panels that are `panel`
/// words apart. A last term without a partner is paired with zero.
pub(super) fn pack_right(
    isa: Isa,
    right: Matrix<'_>,
    depth: Range<usize>,
    columns: Range<usize>,
    panel: usize,
    packed: &mut [f32],
) {
    let data = elements(right);
    if right.column_stride == 1 {
        let lines = Lines { numbers: depth, stride: right.row_stride, part: columns, panel };
        return spread_columns(isa, data, lines, packed);
    }
    for (index, start) in columns.clone().step_by(COLUMNS).enumerate() {
        let panel = &mut packed[index * panel..(index + 1) * panel];
        for (offset, start) in (start..columns.end.min(start + COLUMNS)).step_by(LANES).enumerate() {
            let columns = (columns.end - start).min(LANES);
            let data = &data[start * right.column_stride + depth.start..];
            turn(isa, data, columns, right.column_stride, depth.len(), &mut panel[offset * LANES..]);
        }
    }
}

/// Packs a block of a left operand whose columns are contiguous into panels of a tile's rows, word after word.
pub(super) fn pack_left(isa: Isa, left: Matrix<'_>, rows: Range<usize>, depth: Range<usize>, packed: &mut [f32]) {
    let panel = left_panel(isa, depth.len().div_ceil(2));
    let lines = Lines { numbers: depth, stride: left.column_stride, part: rows, panel };
    spread_rows(isa, elements(left), lines, packed);
}

/// Packs a block of a left operand whose rows are contiguous, row after row.
pub(super) fn pack_left_rows(isa: Isa, left: Matrix<'_>, rows: Range<usize>, depth: Range<usize>, packed: &mut [f32]) {
    let words = depth.len().div_ceil(2);
    for (row, out) in rows.zip(packed.chunks_exact_mut(words.max(1))) {
        swap(isa, &elements(left)[row * left.row_stride..][depth.clone()], out);
    }
}

vectorised! {
    fn swap(terms: &[bf16], out: &mut [f32]) {
        pairs_of(terms, out);
    }
}

#[inline(always)]
pub(super) fn pairs_of(terms: &[bf16], out: &mut [f32]) {
    let (pairs, rest) = terms.as_chunks::<2>();
    for (out, [earlier, later]) in out.iter_mut().zip(pairs) {
        *out = pair(*earlier, *later);
    }
    if let (Some(out), [last]) = (out.last_mut(), rest) {
        *out = pair(*last, bf16::ZERO);
    }
}

vectorised! {
    fn spread_columns(data: &[bf16], lines: Lines, out: &mut [f32]) {
        spread::<COLUMNS>(data, lines, out);
    }
}

vectorised! {
    fn spread_rows(data: &[bf16], lines: Lines, out: &mut [f32]) {
        spread::<MOST_ROWS>(data, lines, out);
    }
}

/// Distributes every two lines over the panels, `N` words to each panel.
#[inline(always)]
fn spread<const N: usize>(data: &[bf16], lines: Lines, out: &mut [f32]) {
    let line = |number: usize| data[number * lines.stride..][lines.part.clone()].as_chunks::<N>();
    let (end, zeros) = (lines.numbers.end, [bf16::ZERO; N]);
    for (to, number) in lines.numbers.step_by(2).enumerate() {
        let (whole, rest) = line(number);
        // The last line may have no partner.
        let next = (number + 1 < end).then(|| line(number + 1));
        let (next, next_rest) = next.unwrap_or((&[], &zeros[..rest.len()]));
        for (index, part) in whole.iter().enumerate() {
            let next = next.get(index).unwrap_or(&zeros);
            let out = &mut out[index * lines.panel + to * N..][..N];
            for ((out, earlier), later) in out.iter_mut().zip(part).zip(next) {
                *out = pair(*earlier, *later);
            }
        }
        for (i, (earlier, later)) in rest.iter().zip(next_rest).enumerate() {
            out[whole.len() * lines.panel + to * N + i] = pair(*earlier, *later);
        }
    }
}

/// Writes word w of column c, which begins at `c · stride`, to `out[w · COLUMNS + c]`.
fn turn(isa: Isa, data: &[bf16], columns: usize, stride: usize, depth: usize, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if isa.vectors() == zero_isa::Vectors::Avx512 {
        // SAFETY: an `Isa` of this level exists only after its features were detected.
        let done = unsafe { x86::turn_squares(data, columns, stride, depth, out) };
        return turn_rest(isa, data, columns, stride, depth, done, out);
    }
    turn_rest(isa, data, columns, stride, depth, 0, out);
}

vectorised! {
    /// Writes the words of [`turn`] starting at the `skip`th.
    fn turn_rest(data: &[bf16], columns: usize, stride: usize, depth: usize, skip: usize, out: &mut [f32]) {
        for w in skip..depth.div_ceil(2) {
            for c in 0..columns {
                let column = &data[c * stride..][..depth];
                let later = column.get(2 * w + 1).copied().unwrap_or(bf16::ZERO);
                out[w * COLUMNS + c] = pair(column[2 * w], later);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::pack::{LANES, x86::squares};
    use half::bf16;
    use std::arch::x86_64::*;

    /// Transposes all whole squares. Returns how many words of each column they cover.
    #[target_feature(enable = "avx512f,avx512dq")]
    pub(super) fn turn_squares(data: &[bf16], columns: usize, stride: usize, depth: usize, out: &mut [f32]) -> usize {
        let load = |column: usize, word: usize| {
            let part: &[bf16; 2 * LANES] =
                data[column * stride + 2 * word..].first_chunk().unwrap_or(&[bf16::ZERO; 2 * LANES]);
            // SAFETY: `part` has 64 bytes.
            let words = unsafe { _mm512_loadu_si512(part.as_ptr().cast()) };
            _mm512_castsi512_ps(_mm512_rol_epi32::<16>(words))
        };
        squares(columns, depth / 2, load, out)
    }
}
