//! Packs a right operand whose columns are contiguous, or a left operand whose rows are contiguous, by transposing
//! squares of the operand in registers.

use super::super::super::kernel::{HalfFloat, Isa, vectorised};
use super::COLUMNS;
#[cfg(target_arch = "x86_64")]
use super::Elements;
use half::{bf16, f16};
use std::ops::Range;
#[cfg(target_arch = "x86_64")]
use zero_isa::Vectors;

/// A strip of columns of a matrix with contiguous columns, or of rows of a matrix with contiguous rows. The field names
/// say "column" for both.
pub(super) struct Strip {
    /// At most [`LANES`] columns, or [`ROWS`] rows of a left operand.
    pub(super) columns: usize,
    pub(super) depth: Range<usize>,
    /// The start of the first column.
    pub(super) first: usize,
    pub(super) stride: usize,
}

#[cfg(target_arch = "x86_64")]
impl Strip {
    /// # Panics
    /// Panics unless a slice of `len` elements contains the strip.
    #[inline(always)]
    fn check(&self, len: usize) {
        assert!(self.columns == 0 || self.first + (self.columns - 1) * self.stride + self.depth.end <= len);
    }
}

/// Side of the squares in which a strip is transposed: the number of f32 in a register.
pub(in super::super) const LANES: usize = 16;

/// Number of rows of a left operand that are packed side by side: the rows of an AVX2 tile.
pub(super) const ROWS: usize = 6;

/// Packs rows of a left operand as columns of [`ROWS`] elements, with AVX2.
#[cfg(target_arch = "x86_64")]
pub(super) fn turn_rows(isa: Isa, data: Elements<'_>, strip: Strip, out: &mut [f32]) {
    match (isa.vectors(), data) {
        // SAFETY: an `Isa` of this level exists only after its features were detected.
        (Vectors::Avx2, Elements::F32(data)) => unsafe { x86::turn_rows(data, strip, out) },
        // SAFETY: as above.
        (Vectors::Avx2, Elements::Bf16(data)) => unsafe { x86::turn_rows_bf16(data, strip, out) },
        _ => unreachable!("`turns_left` does not hold"),
    }
}

pub(super) fn turn(isa: Isa, data: &[f32], strip: Strip, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if isa.vectors() == Vectors::Avx512 {
        // SAFETY: an `Isa` of this level exists only after its features were detected.
        return unsafe { x86::turn_strip(data, strip, out) };
    }
    #[cfg(target_arch = "x86_64")]
    if isa.vectors() == Vectors::Avx2 {
        // SAFETY: as above.
        return unsafe { x86::turn_strip_avx2(data, strip, out) };
    }
    turn_scalar(isa, data, strip, out);
}

pub(super) fn turn_bf16(isa: Isa, data: &[bf16], strip: Strip, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if isa.vectors() == Vectors::Avx512 {
        // SAFETY: as above.
        return unsafe { x86::turn_strip_bf16(data, strip, out) };
    }
    #[cfg(target_arch = "x86_64")]
    if isa.vectors() == Vectors::Avx2 {
        // SAFETY: as above.
        return unsafe { x86::turn_strip_bf16_avx2(data, strip, out) };
    }
    turn_scalar_bf16(isa, data, strip, out);
}

pub(super) fn turn_f16(isa: Isa, data: &[f16], strip: Strip, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if isa.vectors() == Vectors::Avx512 {
        // SAFETY: as above.
        return unsafe { x86::turn_strip_f16(data, strip, out) };
    }
    turn_scalar_f16(isa, data, strip, out);
}

vectorised! {
    fn turn_scalar(data: &[f32], strip: Strip, out: &mut [f32]) {
        turn_rest::<COLUMNS, _>(data, &strip, 0, out, |value| value);
    }
}

vectorised! {
    fn turn_scalar_bf16(data: &[bf16], strip: Strip, out: &mut [f32]) {
        turn_rest::<COLUMNS, _>(data, &strip, 0, out, HalfFloat::wide);
    }
}

vectorised! {
    fn turn_scalar_f16(data: &[f16], strip: Strip, out: &mut [f32]) {
        turn_rest::<COLUMNS, _>(data, &strip, 0, out, HalfFloat::wide);
    }
}

/// Writes element k of column c to `out[k · WIDTH + c]`, starting at the `skip`th.
#[inline(always)]
fn turn_rest<const WIDTH: usize, T: Copy>(
    data: &[T],
    strip: &Strip,
    skip: usize,
    out: &mut [f32],
    widen: impl Fn(T) -> f32,
) {
    // Writes a few rows of the output at a time, so that their cache lines stay in the first-level cache.
    let count = strip.depth.len();
    for rows in (skip..count).step_by(LANES).map(|start| start..count.min(start + LANES)) {
        for c in 0..strip.columns {
            let column = &data[strip.first + c * strip.stride..][strip.depth.clone()];
            for k in rows.clone() {
                out[k * WIDTH + c] = widen(column[k]);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(in super::super) mod x86 {
    use super::{COLUMNS, HalfFloat, LANES, ROWS, Strip, turn_rest};
    use half::{bf16, f16};
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx512f,avx512dq")]
    pub(super) fn turn_strip(data: &[f32], strip: Strip, out: &mut [f32]) {
        let load = |column: usize, k: usize| {
            let start = strip.first + column * strip.stride + strip.depth.start + k;
            let part: &[f32; LANES] = data[start..].first_chunk().unwrap_or(&[0.0; LANES]);
            // SAFETY: `part` has sixteen elements; a prefetch reads nothing.
            unsafe {
                _mm_prefetch::<_MM_HINT_T1>(part.as_ptr().wrapping_add(LANES * strip.stride).cast());
                _mm512_loadu_ps(part.as_ptr())
            }
        };
        let skip = squares(strip.columns, strip.depth.len(), load, out);
        turn_rest::<COLUMNS, _>(data, &strip, skip, out, |value| value);
    }

    #[target_feature(enable = "avx512f,avx512dq")]
    pub(super) fn turn_strip_bf16(data: &[bf16], strip: Strip, out: &mut [f32]) {
        let load = |column: usize, k: usize| {
            let start = strip.first + column * strip.stride + strip.depth.start + k;
            let part: &[bf16; LANES] = data[start..].first_chunk().unwrap_or(&[bf16::ZERO; LANES]);
            // SAFETY: `part` has sixteen elements.
            let narrow = unsafe { _mm256_loadu_si256(part.as_ptr().cast()) };
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(narrow)))
        };
        let skip = squares(strip.columns, strip.depth.len(), load, out);
        turn_rest::<COLUMNS, _>(data, &strip, skip, out, HalfFloat::wide);
    }

    #[target_feature(enable = "avx512f,avx512dq")]
    pub(super) fn turn_strip_f16(data: &[f16], strip: Strip, out: &mut [f32]) {
        let load = |column: usize, k: usize| {
            let start = strip.first + column * strip.stride + strip.depth.start + k;
            let part: &[f16; LANES] = data[start..].first_chunk().unwrap_or(&[f16::ZERO; LANES]);
            // SAFETY: `part` has sixteen elements.
            _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(part.as_ptr().cast()) })
        };
        let skip = squares(strip.columns, strip.depth.len(), load, out);
        turn_rest::<COLUMNS, _>(data, &strip, skip, out, HalfFloat::wide);
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn turn_strip_avx2(data: &[f32], strip: Strip, out: &mut [f32]) {
        strip.check(data.len());
        let load = |column: usize, k: usize| {
            let ahead = strip.first + (column + LANES) * strip.stride + strip.depth.start + k;
            _mm_prefetch::<_MM_HINT_T1>(data.as_ptr().wrapping_add(ahead).cast());
            // SAFETY: the strip is in `data`.
            unsafe { eight(data, &strip, column, k) }
        };
        let skip = small_squares::<LANES, COLUMNS>(strip.columns, strip.depth.len(), load, out);
        turn_rest::<COLUMNS, _>(data, &strip, skip, out, |value| value);
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn turn_strip_bf16_avx2(data: &[bf16], strip: Strip, out: &mut [f32]) {
        strip.check(data.len());
        // SAFETY: the strip is in `data`.
        let load = |column: usize, k: usize| unsafe { eight_bf16(data, &strip, column, k) };
        let skip = small_squares::<LANES, COLUMNS>(strip.columns, strip.depth.len(), load, out);
        turn_rest::<COLUMNS, _>(data, &strip, skip, out, HalfFloat::wide);
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn turn_rows(data: &[f32], strip: Strip, out: &mut [f32]) {
        strip.check(data.len());
        // SAFETY: the strip is in `data`.
        let load = |row: usize, k: usize| unsafe { eight(data, &strip, row, k) };
        let skip = small_squares::<ROWS, ROWS>(strip.columns, strip.depth.len(), load, out);
        turn_rest::<ROWS, _>(data, &strip, skip, out, |value| value);
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn turn_rows_bf16(data: &[bf16], strip: Strip, out: &mut [f32]) {
        strip.check(data.len());
        // SAFETY: the strip is in `data`.
        let load = |row: usize, k: usize| unsafe { eight_bf16(data, &strip, row, k) };
        let skip = small_squares::<ROWS, ROWS>(strip.columns, strip.depth.len(), load, out);
        turn_rest::<ROWS, _>(data, &strip, skip, out, HalfFloat::wide);
    }

    /// Loads eight elements of a column starting at the `k`th.
    ///
    /// # Safety
    /// The strip must be in `data` and have the column, which must have these elements.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn eight(data: &[f32], strip: &Strip, column: usize, k: usize) -> __m256 {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm256_loadu_ps(data.as_ptr().add(strip.first + column * strip.stride + strip.depth.start + k)) }
    }

    /// Loads eight bf16 elements as [`eight`] does, and widens them.
    ///
    /// # Safety
    /// The requirements of [`eight`] apply.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn eight_bf16(data: &[bf16], strip: &Strip, column: usize, k: usize) -> __m256 {
        // SAFETY: guaranteed by the caller.
        let narrow = unsafe {
            _mm_loadu_si128(data.as_ptr().add(strip.first + column * strip.stride + strip.depth.start + k).cast())
        };
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(narrow)))
    }

    /// Does the same as [`squares`], with registers of eight words, for a strip of `COUNT` columns and an output of
    /// `WIDTH` columns. A store writes eight elements. Those beyond the strip overwrite the start of the next row,
    /// which is written later, or the padding after the last row.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn small_squares<const COUNT: usize, const WIDTH: usize>(
        columns: usize,
        words: usize,
        load: impl Fn(usize, usize) -> __m256,
        out: &mut [f32],
    ) -> usize {
        if columns < COUNT {
            return 0;
        }
        let whole = words / 8 * 8;
        for k in (0..whole).step_by(8) {
            for first in (0..COUNT).step_by(8) {
                let mut square = [_mm256_setzero_ps(); 8];
                for (c, register) in square.iter_mut().enumerate().take(COUNT - first) {
                    *register = load(first + c, k);
                }
                let out = &mut out[k * WIDTH + first..][..7 * WIDTH + 8];
                for (i, row) in turned_eight(square).into_iter().enumerate() {
                    // SAFETY: `out` has eight elements from there on.
                    unsafe { _mm256_storeu_ps(out.as_mut_ptr().add(i * WIDTH), row) };
                }
            }
        }
        whole
    }

    /// Transposes eight rows of eight: pairs, fours, then halves of registers.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(in super::super::super) fn turned_eight(rows: [__m256; 8]) -> [__m256; 8] {
        let (mut a, mut b) = (rows, rows);
        for i in 0..4 {
            b[2 * i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
            b[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
        }
        for i in [0, 4] {
            a[i] = _mm256_shuffle_ps::<0x44>(b[i], b[i + 2]);
            a[i + 1] = _mm256_shuffle_ps::<0xee>(b[i], b[i + 2]);
            a[i + 2] = _mm256_shuffle_ps::<0x44>(b[i + 1], b[i + 3]);
            a[i + 3] = _mm256_shuffle_ps::<0xee>(b[i + 1], b[i + 3]);
        }
        for i in 0..4 {
            b[i] = _mm256_permute2f128_ps::<0x20>(a[i], a[i + 4]);
            b[i + 4] = _mm256_permute2f128_ps::<0x31>(a[i], a[i + 4]);
        }
        b
    }

    /// Transposes all whole squares of a strip and returns how many words of each column they cover. `load` returns
    /// sixteen words of a column starting at an offset.
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    pub(in super::super::super) fn squares(
        columns: usize,
        words: usize,
        load: impl Fn(usize, usize) -> __m512,
        out: &mut [f32],
    ) -> usize {
        if columns < LANES {
            return 0;
        }
        let whole = words / LANES * LANES;
        for k in (0..whole).step_by(LANES) {
            let mut square = [_mm512_setzero_ps(); LANES];
            for (c, register) in square.iter_mut().enumerate() {
                *register = load(c, k);
            }
            for (i, row) in turned(square).into_iter().enumerate() {
                let out = &mut out[(k + i) * COLUMNS..][..LANES];
                // SAFETY: `out` has sixteen elements.
                unsafe { _mm512_storeu_ps(out.as_mut_ptr(), row) };
            }
        }
        whole
    }

    /// Transposes sixteen rows of sixteen: pairs, fours, then quarters of registers.
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    pub(in super::super::super) fn turned(rows: [__m512; LANES]) -> [__m512; LANES] {
        let (mut a, mut b) = (rows, rows);
        let (pd, ps) = (|x| _mm512_castps_pd(x), |x| _mm512_castpd_ps(x));
        for i in 0..8 {
            b[2 * i] = _mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]);
            b[2 * i + 1] = _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]);
        }
        for i in (0..16).step_by(4) {
            a[i] = ps(_mm512_unpacklo_pd(pd(b[i]), pd(b[i + 2])));
            a[i + 1] = ps(_mm512_unpackhi_pd(pd(b[i]), pd(b[i + 2])));
            a[i + 2] = ps(_mm512_unpacklo_pd(pd(b[i + 1]), pd(b[i + 3])));
            a[i + 3] = ps(_mm512_unpackhi_pd(pd(b[i + 1]), pd(b[i + 3])));
        }
        for i in 0..4 {
            b[i] = _mm512_shuffle_f32x4::<0x88>(a[i], a[4 + i]);
            b[4 + i] = _mm512_shuffle_f32x4::<0xdd>(a[i], a[4 + i]);
            b[8 + i] = _mm512_shuffle_f32x4::<0x88>(a[8 + i], a[12 + i]);
            b[12 + i] = _mm512_shuffle_f32x4::<0xdd>(a[8 + i], a[12 + i]);
        }
        for i in 0..8 {
            a[i] = _mm512_shuffle_f32x4::<0x88>(b[i], b[8 + i]);
            a[8 + i] = _mm512_shuffle_f32x4::<0xdd>(b[i], b[8 + i]);
        }
        a
    }
}
