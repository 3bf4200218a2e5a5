//! Laying out blocks of the operands as the innermost loop reads them: in order, as f32, whatever they are stored as.

#[cfg(target_arch = "x86_64")]
use super::super::kernel::lanes::Level;
use super::super::kernel::{HalfFloat, Isa, vectorised};
use super::tile::{COLUMNS, ROWS};
use super::{Elements, Matrix};
use half::{bf16, f16};
use std::ops::Range;

/// Floats between the starts of two panels beyond the panel itself. Without them the starts would share a set of the
/// first-level cache, and writing to all panels in turn would evict each before its next write.
const PAD: usize = 16;

/// Elements from one panel of the right operand to the next.
pub(crate) const fn right_panel(depth: usize) -> usize {
    depth * COLUMNS + PAD
}

/// Elements from one panel of a packed left operand to the next.
pub(crate) const fn left_panel(depth: usize) -> usize {
    depth * ROWS + PAD
}

/// Packs a block of the right operand: panels of [`COLUMNS`] columns, row after row. The last panel may be narrower;
/// what lies beside it is left as it is.
pub(crate) fn pack_right(isa: Isa, right: Matrix<'_>, depth: Range<usize>, columns: Range<usize>, packed: &mut [f32]) {
    let panel = right_panel(depth.len());
    if right.column_stride == 1 {
        let lines = Lines { numbers: depth, stride: right.row_stride, part: columns, panel };
        match right.data {
            Elements::F32(data) => spread_columns(isa, data, lines, packed),
            Elements::Bf16(data) => spread_columns_bf16(isa, data, lines, packed),
            Elements::F16(data) => spread_columns_f16(isa, data, lines, packed),
        }
        return;
    }
    for (index, start) in columns.clone().step_by(COLUMNS).enumerate() {
        let panel = &mut packed[index * panel..(index + 1) * panel];
        for (offset, start) in (start..columns.end.min(start + COLUMNS)).step_by(LANES).enumerate() {
            let columns = (columns.end - start).min(LANES);
            let first = start * right.column_stride;
            let strip = Strip { columns, depth: depth.clone(), first, stride: right.column_stride };
            let out = &mut panel[offset * LANES..];
            match right.data {
                Elements::F32(data) => turn(isa, data, strip, out),
                Elements::Bf16(data) => turn_bf16(isa, data, strip, out),
                Elements::F16(data) => turn_f16(isa, data, strip, out),
            }
        }
    }
}

/// Packs a block of the left operand whose columns are contiguous: panels of [`ROWS`] rows, column after column.
pub(crate) fn pack_left(isa: Isa, left: Matrix<'_>, rows: Range<usize>, depth: Range<usize>, packed: &mut [f32]) {
    let panel = left_panel(depth.len());
    let lines = Lines { numbers: depth, stride: left.column_stride, part: rows, panel };
    match left.data {
        Elements::F32(data) => spread_rows(isa, data, lines, packed),
        Elements::Bf16(data) => spread_rows_bf16(isa, data, lines, packed),
        Elements::F16(data) => spread_rows_f16(isa, data, lines, packed),
    }
}

/// Widens a block of a left operand whose rows are contiguous, row after row.
pub(crate) fn widen_left(isa: Isa, left: Matrix<'_>, rows: Range<usize>, depth: Range<usize>, out: &mut [f32]) {
    for (row, out) in rows.zip(out.chunks_exact_mut(depth.len().max(1))) {
        left.data.read(isa, row * left.row_stride + depth.start, out);
    }
}

/// The same part of some contiguous lines of a matrix.
pub(crate) struct Lines {
    pub(super) numbers: Range<usize>,
    pub(super) stride: usize,
    pub(super) part: Range<usize>,
    /// From one panel to the next.
    pub(super) panel: usize,
}

vectorised! {
    fn spread_columns(data: &[f32], lines: Lines, out: &mut [f32]) {
        spread::<COLUMNS, f32>(data, lines, out, |value| value);
    }
}

vectorised! {
    fn spread_columns_bf16(data: &[bf16], lines: Lines, out: &mut [f32]) {
        spread::<COLUMNS, bf16>(data, lines, out, HalfFloat::wide);
    }
}

vectorised! {
    fn spread_columns_f16(data: &[f16], lines: Lines, out: &mut [f32]) {
        spread::<COLUMNS, f16>(data, lines, out, HalfFloat::wide);
    }
}

vectorised! {
    fn spread_rows(data: &[f32], lines: Lines, out: &mut [f32]) {
        spread::<ROWS, f32>(data, lines, out, |value| value);
    }
}

vectorised! {
    fn spread_rows_bf16(data: &[bf16], lines: Lines, out: &mut [f32]) {
        spread::<ROWS, bf16>(data, lines, out, HalfFloat::wide);
    }
}

vectorised! {
    fn spread_rows_f16(data: &[f16], lines: Lines, out: &mut [f32]) {
        spread::<ROWS, f16>(data, lines, out, HalfFloat::wide);
    }
}

/// Deals each line out over the panels, `N` elements to each.
#[inline(always)]
fn spread<const N: usize, T: Copy>(data: &[T], lines: Lines, out: &mut [f32], widen: impl Fn(T) -> f32) {
    for (to, number) in lines.numbers.enumerate() {
        let (whole, rest) = data[number * lines.stride..][lines.part.clone()].as_chunks::<N>();
        for (index, part) in whole.iter().enumerate() {
            let out = &mut out[index * lines.panel + to * N..][..N];
            for (out, value) in out.iter_mut().zip(part) {
                *out = widen(*value);
            }
        }
        for (i, value) in rest.iter().enumerate() {
            out[whole.len() * lines.panel + to * N + i] = widen(*value);
        }
    }
}

/// A strip of columns of a matrix whose columns are contiguous.
pub(crate) struct Strip {
    /// At most [`LANES`].
    columns: usize,
    depth: Range<usize>,
    /// Where the first column starts.
    first: usize,
    stride: usize,
}

/// Side of the squares in which a strip is turned: a register's f32.
pub(super) const LANES: usize = 16;

fn turn(isa: Isa, data: &[f32], strip: Strip, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if isa.0 == Level::Avx512 {
        // SAFETY: an `Isa` of this level is only made after its features were detected.
        return unsafe { x86::turn_strip(data, strip, out) };
    }
    turn_scalar(isa, data, strip, out);
}

fn turn_bf16(isa: Isa, data: &[bf16], strip: Strip, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if isa.0 == Level::Avx512 {
        // SAFETY: as above.
        return unsafe { x86::turn_strip_bf16(data, strip, out) };
    }
    turn_scalar_bf16(isa, data, strip, out);
}

fn turn_f16(isa: Isa, data: &[f16], strip: Strip, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if isa.0 == Level::Avx512 {
        // SAFETY: as above.
        return unsafe { x86::turn_strip_f16(data, strip, out) };
    }
    turn_scalar_f16(isa, data, strip, out);
}

vectorised! {
    fn turn_scalar(data: &[f32], strip: Strip, out: &mut [f32]) {
        turn_rest(data, &strip, 0, out, |value| value);
    }
}

vectorised! {
    fn turn_scalar_bf16(data: &[bf16], strip: Strip, out: &mut [f32]) {
        turn_rest(data, &strip, 0, out, HalfFloat::wide);
    }
}

vectorised! {
    fn turn_scalar_f16(data: &[f16], strip: Strip, out: &mut [f32]) {
        turn_rest(data, &strip, 0, out, HalfFloat::wide);
    }
}

/// Writes element k of column c to `out[k · COLUMNS + c]`, from the `skip`th on.
#[inline(always)]
fn turn_rest<T: Copy>(data: &[T], strip: &Strip, skip: usize, out: &mut [f32], widen: impl Fn(T) -> f32) {
    // A few rows of the output at a time: the lines that they lie in stay in the first-level cache.
    let count = strip.depth.len();
    for rows in (skip..count).step_by(LANES).map(|start| start..count.min(start + LANES)) {
        for c in 0..strip.columns {
            let column = &data[strip.first + c * strip.stride..][strip.depth.clone()];
            for k in rows.clone() {
                out[k * COLUMNS + c] = widen(column[k]);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use super::{COLUMNS, HalfFloat, LANES, Strip, turn_rest};
    use half::{bf16, f16};
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx512f,avx512dq")]
    pub(super) fn turn_strip(data: &[f32], strip: Strip, out: &mut [f32]) {
        let load = |column: usize, k: usize| {
            let start = strip.first + column * strip.stride + strip.depth.start + k;
            let part: &[f32; LANES] = data[start..].first_chunk().unwrap_or(&[0.0; LANES]);
            // SAFETY: sixteen elements, as its type says.
            unsafe { _mm512_loadu_ps(part.as_ptr()) }
        };
        let skip = squares(strip.columns, strip.depth.len(), load, out);
        turn_rest(data, &strip, skip, out, |value| value);
    }

    #[target_feature(enable = "avx512f,avx512dq")]
    pub(super) fn turn_strip_bf16(data: &[bf16], strip: Strip, out: &mut [f32]) {
        let load = |column: usize, k: usize| {
            let start = strip.first + column * strip.stride + strip.depth.start + k;
            let part: &[bf16; LANES] = data[start..].first_chunk().unwrap_or(&[bf16::ZERO; LANES]);
            // SAFETY: sixteen elements, as its type says.
            let narrow = unsafe { _mm256_loadu_si256(part.as_ptr().cast()) };
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(narrow)))
        };
        let skip = squares(strip.columns, strip.depth.len(), load, out);
        turn_rest(data, &strip, skip, out, HalfFloat::wide);
    }

    #[target_feature(enable = "avx512f,avx512dq")]
    pub(super) fn turn_strip_f16(data: &[f16], strip: Strip, out: &mut [f32]) {
        let load = |column: usize, k: usize| {
            let start = strip.first + column * strip.stride + strip.depth.start + k;
            let part: &[f16; LANES] = data[start..].first_chunk().unwrap_or(&[f16::ZERO; LANES]);
            // SAFETY: sixteen elements, as its type says.
            _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(part.as_ptr().cast()) })
        };
        let skip = squares(strip.columns, strip.depth.len(), load, out);
        turn_rest(data, &strip, skip, out, HalfFloat::wide);
    }

    /// Turns as many whole squares of a strip as it has, and tells how many words of each column that is. `load` gives
    /// sixteen words of a column from a place on.
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    pub(in super::super) fn squares(
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
                // SAFETY: sixteen elements.
                unsafe { _mm512_storeu_ps(out.as_mut_ptr(), row) };
            }
        }
        whole
    }

    /// The transpose of sixteen rows of sixteen: pairs, fours, then quarters of registers.
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    pub(in super::super) fn turned(rows: [__m512; LANES]) -> [__m512; LANES] {
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
