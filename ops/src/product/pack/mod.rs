//! Packs blocks of the operands as the innermost loop reads them: in order, as f32, whatever their stored dtype.
//! A quantized operand is dequantized a few lines at a time, into a buffer that stays in the first-level cache.

use super::super::kernel::{HalfFloat, Isa, vectorised};
use super::super::quantized::QuantizedWeight;
use super::tile::{self, COLUMNS};
use super::{Elements, Matrix};
use half::{bf16, f16};
use std::ops::Range;
pub(super) use turn::LANES;
#[cfg(target_arch = "x86_64")]
use turn::turn_rows;
#[cfg(target_arch = "x86_64")]
pub(super) use turn::x86;
use turn::{Strip, turn, turn_bf16, turn_f16};

mod turn;

/// Padding between two panels, in floats. Without it the starts of the panels would share a set of the first-level
/// cache, and writing to all panels in turn would evict each panel's cache line before the next write to it.
const PAD: usize = 16;

/// Returns the distance in elements from one panel of the right operand to the next.
pub(crate) const fn right_panel(depth: usize) -> usize {
    depth * COLUMNS + PAD
}

/// Returns the distance in elements from one panel of a packed left operand to the next.
pub(crate) fn left_panel(isa: Isa, depth: usize) -> usize {
    depth * tile::rows(isa) + PAD
}

/// Returns an upper bound on the number of elements of a packed left operand.
pub(crate) const fn left_room(rows: usize, depth: usize) -> usize {
    (rows + tile::MOST_ROWS) * depth + rows.div_ceil(tile::LEAST_ROWS) * PAD
}

/// Packs a block of the right operand into panels of [`COLUMNS`] columns, row after row. The last panel may have fewer
/// columns; the rest of its elements are left unchanged.
pub(crate) fn pack_right(isa: Isa, right: Matrix<'_>, depth: Range<usize>, columns: Range<usize>, packed: &mut [f32]) {
    pack_panels(isa, right, depth, columns, COLUMNS, packed);
}

/// Does the same as [`pack_right`], but uses only the first `wide` columns of each panel. `wide` is 32 or [`COLUMNS`].
pub(super) fn pack_panels(
    isa: Isa,
    right: Matrix<'_>,
    depth: Range<usize>,
    columns: Range<usize>,
    wide: usize,
    packed: &mut [f32],
) {
    let panel = right_panel(depth.len());
    if right.column_stride == 1 {
        let lines = Lines { numbers: depth, stride: right.row_stride, part: columns, panel };
        match right.data {
            Elements::F32(data) => spread_columns(isa, data, wide, lines, packed),
            Elements::Bf16(data) => spread_columns_bf16(isa, data, wide, lines, packed),
            Elements::F16(data) => spread_columns_f16(isa, data, wide, lines, packed),
            Elements::Quantized(weight) => {
                decoded_lines(isa, weight, lines, wide, packed, |data, lines, packed| {
                    spread_columns(isa, data, wide, lines, packed)
                });
            }
        }
        return;
    }
    for (index, start) in columns.clone().step_by(wide).enumerate() {
        let panel = &mut packed[index * panel..(index + 1) * panel];
        for (offset, start) in (start..columns.end.min(start + wide)).step_by(LANES).enumerate() {
            let columns = (columns.end - start).min(LANES);
            let first = start * right.column_stride;
            let strip = Strip { columns, depth: depth.clone(), first, stride: right.column_stride };
            let out = &mut panel[offset * LANES..];
            match right.data {
                Elements::F32(data) => turn(isa, data, strip, out),
                Elements::Bf16(data) => turn_bf16(isa, data, strip, out),
                Elements::F16(data) => turn_f16(isa, data, strip, out),
                Elements::Quantized(weight) => turn_quantized(isa, weight, strip, out),
            }
        }
    }
}

/// Returns whether [`pack_left`] supports a left operand whose rows are contiguous. It does on AVX2, where products are
/// up to a tenth faster if a tile reads consecutive cache lines instead of parts of six rows.
pub(super) fn turns_left(isa: Isa, data: Elements<'_>) -> bool {
    tile::rows(isa) == turn::ROWS && matches!(data, Elements::F32(_) | Elements::Bf16(_))
}

/// Packs a block of the left operand into panels with as many rows as a tile, column after column. The columns of the
/// operand must be contiguous, or [`turns_left`] must hold.
pub(crate) fn pack_left(isa: Isa, left: Matrix<'_>, rows: Range<usize>, depth: Range<usize>, packed: &mut [f32]) {
    assert!(left.column_stride != 1 || turns_left(isa, left.data));
    let panel = left_panel(isa, depth.len());
    #[cfg(target_arch = "x86_64")]
    if left.column_stride == 1 {
        for (start, panel) in rows.clone().step_by(turn::ROWS).zip(packed.chunks_exact_mut(panel)) {
            let columns = (rows.end - start).min(turn::ROWS);
            let first = start * left.row_stride;
            let strip = Strip { columns, depth: depth.clone(), first, stride: left.row_stride };
            turn_rows(isa, left.data, strip, panel);
        }
        return;
    }
    let lines = Lines { numbers: depth, stride: left.column_stride, part: rows, panel };
    match left.data {
        Elements::F32(data) => spread_rows(isa, data, tile::rows(isa), lines, packed),
        Elements::Bf16(data) => spread_rows_bf16(isa, data, tile::rows(isa), lines, packed),
        Elements::F16(data) => spread_rows_f16(isa, data, tile::rows(isa), lines, packed),
        Elements::Quantized(weight) => {
            let rows = tile::rows(isa);
            decoded_lines(isa, weight, lines, rows, packed, |data, lines, packed| {
                spread_rows(isa, data, rows, lines, packed)
            });
        }
    }
}

/// Number of elements of a quantized operand that are dequantized at a time, on the stack.
const DECODED: usize = 4096;

/// Dequantizes and transposes a strip of a quantized operand, a part of its depth at a time.
fn turn_quantized(isa: Isa, weight: QuantizedWeight<'_>, strip: Strip, out: &mut [f32]) {
    const DEPTH: usize = DECODED / LANES;
    let mut decoded = [0.0; DECODED];
    for start in strip.depth.clone().step_by(DEPTH) {
        let depth = DEPTH.min(strip.depth.end - start);
        for (column, decoded) in decoded.chunks_exact_mut(depth).take(strip.columns).enumerate() {
            weight.read(isa, strip.first + column * strip.stride + start, decoded);
        }
        let part = Strip { columns: strip.columns, depth: 0..depth, first: 0, stride: depth };
        turn(isa, &decoded[..strip.columns * depth], part, &mut out[(start - strip.depth.start) * COLUMNS..]);
    }
}

/// Dequantizes lines of a quantized operand, a part of a line at a time. Calls `spread` with each part and its place in
/// the panels. A line of a panel has `wide` elements.
fn decoded_lines(
    isa: Isa,
    weight: QuantizedWeight<'_>,
    lines: Lines,
    wide: usize,
    packed: &mut [f32],
    spread: impl Fn(&[f32], Lines, &mut [f32]),
) {
    let mut decoded = [0.0; DECODED];
    let most = DECODED / wide * wide;
    for (to, number) in lines.numbers.enumerate() {
        for (index, start) in lines.part.clone().step_by(most).enumerate() {
            let decoded = &mut decoded[..most.min(lines.part.end - start)];
            weight.read(isa, number * lines.stride + start, decoded);
            let line = Lines { numbers: 0..1, stride: decoded.len(), part: 0..decoded.len(), panel: lines.panel };
            spread(decoded, line, &mut packed[index * most / wide * lines.panel + to * wide..]);
        }
    }
}

/// Widens a block of a left operand to f32, row after row. The operand's rows are contiguous.
pub(crate) fn widen_left(isa: Isa, left: Matrix<'_>, rows: Range<usize>, depth: Range<usize>, out: &mut [f32]) {
    for (row, out) in rows.zip(out.chunks_exact_mut(depth.len().max(1))) {
        left.data.read(isa, row * left.row_stride + depth.start, out);
    }
}

/// One range of positions, `part`, in several contiguous lines of a matrix.
pub(crate) struct Lines {
    pub(super) numbers: Range<usize>,
    pub(super) stride: usize,
    pub(super) part: Range<usize>,
    /// Distance from one panel to the next.
    pub(super) panel: usize,
}

vectorised! {
    fn spread_columns(data: &[f32], wide: usize, lines: Lines, out: &mut [f32]) {
        spread_wide(data, wide, lines, out);
    }
}

vectorised! {
    fn spread_columns_bf16(data: &[bf16], wide: usize, lines: Lines, out: &mut [f32]) {
        spread_wide(data, wide, lines, out);
    }
}

vectorised! {
    fn spread_columns_f16(data: &[f16], wide: usize, lines: Lines, out: &mut [f32]) {
        spread_wide(data, wide, lines, out);
    }
}

vectorised! {
    fn spread_rows(data: &[f32], rows: usize, lines: Lines, out: &mut [f32]) {
        spread_over(data, rows, lines, out);
    }
}

vectorised! {
    fn spread_rows_bf16(data: &[bf16], rows: usize, lines: Lines, out: &mut [f32]) {
        spread_over(data, rows, lines, out);
    }
}

vectorised! {
    fn spread_rows_f16(data: &[f16], rows: usize, lines: Lines, out: &mut [f32]) {
        spread_over(data, rows, lines, out);
    }
}

/// Calls [`spread`] for panels that use `wide` columns.
#[inline(always)]
fn spread_wide<T: Widen>(data: &[T], wide: usize, lines: Lines, out: &mut [f32]) {
    match wide {
        32 => spread::<32, COLUMNS, T>(data, lines, out),
        COLUMNS => spread::<COLUMNS, COLUMNS, T>(data, lines, out),
        _ => unreachable!("no panel has {wide} columns"),
    }
}

/// Calls [`spread`] for a number of rows that is the height of a tile on some instruction set.
#[inline(always)]
fn spread_over<T: Widen>(data: &[T], rows: usize, lines: Lines, out: &mut [f32]) {
    match rows {
        6 => spread::<6, 6, T>(data, lines, out),
        8 => spread::<8, 8, T>(data, lines, out),
        _ => unreachable!("no tile has {rows} rows"),
    }
}

/// A stored number.
trait Widen: Copy {
    fn widen(self) -> f32;

    /// Widens a part of a line.
    #[inline(always)]
    fn widen_part<const N: usize>(part: &[Self; N], out: &mut [f32; N]) {
        for (out, value) in out.iter_mut().zip(part) {
            *out = value.widen();
        }
    }
}

impl Widen for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    /// A copy of known size takes fewer instructions than a loop.
    #[inline(always)]
    fn widen_part<const N: usize>(part: &[Self; N], out: &mut [f32; N]) {
        *out = *part;
    }
}

impl<H: HalfFloat> Widen for H {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.wide()
    }
}

/// A line is prefetched this many lines before its use. The parts of lines are too short for the hardware prefetcher.
const AHEAD: usize = 4;

/// Distributes each line over the panels, `N` elements to each. Lines of a panel are `WIDTH` elements apart.
#[inline(always)]
fn spread<const N: usize, const WIDTH: usize, T: Widen>(data: &[T], lines: Lines, out: &mut [f32]) {
    for (to, number) in lines.numbers.enumerate() {
        let line = &data[number * lines.stride..][lines.part.clone()];
        let ahead = line.as_ptr().wrapping_add(AHEAD * lines.stride);
        (0..line.len()).step_by(64 / size_of::<T>()).for_each(|i| tile::prefetch(ahead.wrapping_add(i).cast()));
        let (whole, rest) = line.as_chunks::<N>();
        for (index, part) in whole.iter().enumerate() {
            let out = &mut out[index * lines.panel + to * WIDTH..];
            T::widen_part(part, out.first_chunk_mut().expect("a panel has room for the part"));
        }
        if rest.is_empty() {
            continue;
        }
        let out = &mut out[whole.len() * lines.panel + to * WIDTH..][..rest.len()];
        let ((parts, rest), (outs, out)) = (rest.as_chunks::<LANES>(), out.as_chunks_mut::<LANES>());
        parts.iter().zip(outs).for_each(|(part, out)| T::widen_part(part, out));
        rest.iter().zip(out).for_each(|(value, out)| *out = value.widen());
    }
}
