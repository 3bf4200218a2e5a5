//! Compares matrix products with their definition, a chain of fused multiply-adds for each element.

use super::*;
use crate::random::Stream;
use half::{bf16, f16};

fn normal(name: &str, len: usize) -> Vec<f32> {
    let mut values = vec![0.0; len];
    Stream::new(1, name, 0).fill_normal(0, &mut values);
    values
}

/// Returns the sum of products by its definition: one fused multiply-add per term, in order.
fn chain(start: f32, depth: usize, left: impl Fn(usize) -> f32, right: impl Fn(usize) -> f32) -> f32 {
    (0..depth).fold(start, |sum, k| left(k).mul_add(right(k), sum))
}

/// Returns an operand as units that flush numbers below 2⁻¹²⁶ read it.
fn flushed(value: f32) -> f32 {
    if value.abs() < f32::MIN_POSITIVE { 0f32.copysign(value) } else { value }
}

/// Returns the sum of bf16 products with the order and the roundings that each of the units guarantees.
fn sum(units: Bf16Units, start: f32, depth: usize, left: impl Fn(usize) -> f32, right: impl Fn(usize) -> f32) -> f32 {
    let add = |sum: f32, k: usize| flushed(flushed(left(k)).mul_add(flushed(right(k)), sum));
    match units {
        Bf16Units::Widened => chain(start, depth, left, right),
        Bf16Units::Pairs => {
            let chain = (0..depth).fold(start, |sum, k| add(flushed(sum), k));
            // If the number of terms is odd, the last term is paired with a zero product, which turns a sum of −0 into
            // 0.
            if depth.is_multiple_of(2) { chain } else { chain + 0.0 }
        }
        Bf16Units::Squares => (0..depth).step_by(32).fold(start, |sum, first| {
            let each = |offset: usize| (first + offset..depth.min(first + 32)).step_by(2).fold(0.0, add);
            flushed(flushed(sum) + flushed(each(0) + each(1)))
        }),
    }
}

/// How operands are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stored {
    Wide,
    Brain,
    Half,
}

fn rounded(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|v| bf16::from_f32(*v)).collect()
}

fn same(got: &[f32], want: &[f32]) -> bool {
    got.len() == want.len() && got.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits())
}

#[test]
fn every_layout_gives_the_defined_sums() {
    let sizes = [
        (1, 1, 1),
        (1, 50, 3),
        (2, 3, 600),
        (3, 100, 17),
        (4, 80, 600),
        (8, 48, 16),
        (9, 49, 33),
        (23, 97, 40),
        (65, 64, 513),
    ];
    for (rows, columns, depth) in sizes {
        let (a, b, bias) = (normal("a", rows * depth), normal("b", depth * columns), normal("c", columns));
        let (a16, b16) = (rounded(&a), rounded(&b));
        let halves = |values: &[f32]| values.iter().map(|v| f16::from_f32(*v)).collect::<Vec<_>>();
        let (ah, bh) = (halves(&a), halves(&b));
        let element = |i: usize, j: usize, start: f32, l: (usize, usize), r: (usize, usize), stored: Stored| {
            let a = |at: usize| match stored {
                Stored::Wide => a[at],
                Stored::Brain => a16[at].to_f32(),
                Stored::Half => ah[at].to_f32(),
            };
            let b = |at: usize| match stored {
                Stored::Wide => b[at],
                Stored::Brain => b16[at].to_f32(),
                Stored::Half => bh[at].to_f32(),
            };
            let units = if stored == Stored::Brain { Bf16Units::best() } else { Bf16Units::Widened };
            sum(units, start, depth, |k| a(i * l.0 + k * l.1), |k| b(k * r.0 + j * r.1))
        };
        let each = [Stored::Wide, Stored::Brain, Stored::Half];
        for (left_t, right_t, stored) in
            each.into_iter().flat_map(|stored| (0..4).map(move |n| (n & 1 == 1, n & 2 == 2, stored)))
        {
            let (lefts, rights): (Elements<'_>, Elements<'_>) = match stored {
                Stored::Wide => ((&a).into(), (&b).into()),
                Stored::Brain => (a16[..].into(), b16[..].into()),
                Stored::Half => (ah[..].into(), bh[..].into()),
            };
            let left = if left_t { Matrix::new(lefts, depth, rows).t() } else { Matrix::new(lefts, rows, depth) };
            let right =
                if right_t { Matrix::new(rights, columns, depth).t() } else { Matrix::new(rights, depth, columns) };
            let (l, r) = (if left_t { (1, rows) } else { (depth, 1) }, if right_t { (1, depth) } else { (columns, 1) });
            let all = |start: &dyn Fn(usize, usize) -> f32| -> Vec<f32> {
                (0..rows * columns)
                    .map(|at| (at / columns, at % columns))
                    .map(|(i, j)| element(i, j, start(i, j), l, r, stored))
                    .collect()
            };
            let what = format!("{rows}x{columns}x{depth}, left transposed {left_t}, right {right_t}, {stored:?}");
            let want = all(&|_, _| 0.0);
            assert!(same(&new_product(Start::Zero, left, right, 1), &want), "{what}");
            let want = all(&|_, j| bias[j]);
            assert!(same(&new_product(Start::Row(&bias), left, right, 2), &want), "{what} + row");
            assert_eq!(
                new_product_rounded::<bf16>(Start::Row(&bias), left, right, 1),
                rounded(&want),
                "{what}, rounded"
            );
            assert_eq!(new_product_rounded::<f16>(Start::Row(&bias), left, right, 1), halves(&want), "{what}, rounded");
            let before = normal("out", rows * columns);
            let want = all(&|i, j| before[i * columns + j]);
            let mut out = before.clone();
            add_product(&mut out, left, right, 3);
            assert!(same(&out, &want), "{what} + output");
        }
    }
}

#[test]
fn inner_dimensions_of_any_length_are_rounded_once() {
    // In the first two cases, a block contains the whole inner dimension: with many columns, and with the fewest
    // columns per block. In the last case, the inner dimension is longer than `LONGEST`, and all sums are computed
    // before any is rounded.
    for (rows, columns, depth) in [(20, 1600, 600), (9, 100, 3 * LONGEST / 4 + 1), (3, 50, 2 * LONGEST + 1)] {
        let (a, b) = (rounded(&normal("a", rows * depth)), rounded(&normal("b", columns * depth)));
        let (left, right) = (Matrix::new(&a[..], rows, depth), Matrix::new(&b[..], columns, depth).t());
        let want = rounded(&new_product(Start::Zero, left, right, 1));
        for threads in [1, 3] {
            let got: Vec<bf16> = new_product_rounded(Start::Zero, left, right, threads);
            assert_eq!(got, want, "{rows}x{columns}x{depth}");
            let halves: Vec<f16> = new_product_rounded(Start::Zero, left, right, threads);
            let want = new_product(Start::Zero, left, right, 1).into_iter().map(f16::from_f32);
            assert!(want.eq(halves), "{rows}x{columns}x{depth}");
        }
    }
}

#[test]
fn all_bf16_units_match_their_definition() {
    let sizes =
        [(1, 1, 0), (1, 1, 1), (3, 49, 31), (16, 48, 32), (17, 16, 33), (31, 100, 96), (33, 15, 2100), (70, 790, 40)];
    for (rows, columns, depth) in sizes {
        // At these scales, products and sums of a few terms are below the smallest normal number.
        let tiny = |name: &str, len: usize| -> Vec<bf16> {
            let scales = [1.0, 1e-19, 3e-39, -1e-25];
            normal(name, len).iter().zip(scales.iter().cycle()).map(|(v, scale)| bf16::from_f32(v * scale)).collect()
        };
        let (a, b) = (tiny("a", rows * depth), tiny("b", depth * columns));
        let before: Vec<f32> = tiny("out", rows * columns).iter().map(|v| v.to_f32()).collect();
        for (units, left_t, right_t) in
            Bf16Units::available().into_iter().flat_map(|units| (0..4).map(move |n| (units, n & 1 == 1, n & 2 == 2)))
        {
            let left = if left_t { Matrix::new(&a[..], depth, rows).t() } else { Matrix::new(&a[..], rows, depth) };
            let right =
                if right_t { Matrix::new(&b[..], columns, depth).t() } else { Matrix::new(&b[..], depth, columns) };
            let mut out = before.clone();
            let view = Out { start: Start::Output, to: To::F32(out.as_mut_ptr()), stride: columns };
            // SAFETY: the block covers exactly the output buffer, and the processor has these units.
            unsafe { block_on(units, view, left, right, 0..rows, 0..columns) };
            for (at, got) in out.iter().enumerate() {
                let (i, j) = (at / columns, at % columns);
                let want = sum(
                    units,
                    before[at],
                    depth,
                    |k| a[i * left.row_stride + k * left.column_stride].to_f32(),
                    |k| b[k * right.row_stride + j * right.column_stride].to_f32(),
                );
                let what =
                    format!("{units:?}, {rows}x{columns}x{depth}, transposed {left_t} {right_t}, element {i} {j}");
                assert_eq!(got.to_bits(), want.to_bits(), "{what}: {got:e} for {want:e}");
            }
        }
    }
}

#[test]
fn amx_sums_can_be_split_at_multiples_of_a_step() {
    if !Bf16Units::available().contains(&Bf16Units::Squares) {
        return eprintln!("skipped: this processor does not support AMX");
    }
    let (rows, columns, depth) = (40, 70, 256);
    let (a, b) = (rounded(&normal("a", rows * depth)), rounded(&normal("b", depth * columns)));
    let right = |first: usize, len: usize| Matrix::new(&b[first * columns..][..len * columns], len, columns);
    let want = new_product(Start::Zero, Matrix::new(&a[..], rows, depth), right(0, depth), 1);
    let mut got = vec![0.0; rows * columns];
    for first in (0..depth).step_by(64) {
        let left = Matrix::strided(&a[first..], rows, 64, depth);
        add_product(&mut got, left, right(first, 64), 2);
    }
    assert!(same(&got, &want));
}

#[test]
fn products_with_parts_of_packed_panels_give_the_defined_sums() {
    let (depth, columns, stride) = (70, 130, 140);
    let (a, b) = (normal("a", 8 * 100), normal("b", depth * columns));
    let mut panels = Panels::default();
    for (count, rows, part, turned) in [
        (8, 0..70, 0..130, false),
        (3, 5..6, 48..50, false),
        (1, 69..70, 96..130, true),
        (8, 8..8, 0..48, false),
        (7, 13..64, 48..96, true),
    ] {
        let matrix = if turned { Matrix::new(&b, columns, depth).t() } else { Matrix::new(&b, depth, columns) };
        panels.pack(Isa::current(), matrix);
        let (row, step) = if turned { (1, 9) } else { (100, 1) };
        let before = normal("out", count * stride);
        for add in [false, true] {
            let mut want = before.clone();
            for at in (0..count).flat_map(|i| part.clone().map(move |j| (i, j))) {
                let (i, j) = at;
                let right = |k: usize| if turned { b[j * depth + k] } else { b[k * columns + j] };
                let out = &mut want[i * stride + j - part.start];
                let start = if add { *out } else { 0.0 };
                *out = chain(start, rows.len(), |k| a[i * row + k * step], |k| right(rows.start + k));
            }
            let mut got = before.clone();
            let left = FewRows { data: &a, count, row, step };
            let to = Target { data: &mut got, row: stride, add };
            panels.product(Isa::current(), left, rows.clone(), part.clone(), to);
            assert!(same(&got, &want), "{count} rows, {rows:?}, {part:?}, turned {turned}, add {add}");
        }
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    for (rows, columns, depth) in [(1, 1, 5), (7, 31, 20), (13, 65, 9), (8, 48, 64), (6, 23, 0)] {
        let (a, b) = (normal("a", rows * depth), normal("b", depth * columns));
        let mut want: Option<Vec<f32>> = None;
        for isa in Isa::available() {
            let mut out = normal("noise", rows * columns);
            let view = Out { start: Start::Zero, to: To::F32(out.as_mut_ptr()), stride: columns };
            let (left, right) = (Matrix::new(&a, rows, depth), Matrix::new(&b, columns, depth).t());
            // SAFETY: the block covers exactly the output buffer.
            unsafe { block::<Wide>(isa, view, left, right, 0..rows, 0..columns) };
            let want = want.get_or_insert_with(|| out.clone());
            assert!(same(&out, want), "{isa:?} {rows}x{columns}x{depth}");
        }
    }
}

#[test]
fn threads_and_blocks_do_not_change_results() {
    // Large enough for more than one block in each dimension: the inner one, the columns and the packed rows.
    let (rows, columns, depth) = (300, 800, 1030);
    let (a, b) = (normal("a", rows * depth), normal("b", depth * columns));
    for left in [Matrix::new(&a, rows, depth), Matrix::new(&a, depth, rows).t()] {
        let right = Matrix::new(&b, depth, columns);
        let want = new_product(Start::Zero, left, right, 1);
        for threads in [2, 3, 4, 7] {
            assert!(same(&new_product(Start::Zero, left, right, threads), &want), "{threads} threads");
        }
        let at = |i: usize, k: usize| if left.column_stride == 1 { a[i * depth + k] } else { a[k * rows + i] };
        for (i, j) in [(0, 0), (299, 799), (255, 767), (256, 768), (8, 48)] {
            let want = chain(0.0, depth, |k| at(i, k), |k| b[k * columns + j]);
            assert_eq!(new_product(Start::Zero, left, right, 2)[i * columns + j].to_bits(), want.to_bits());
        }
    }
}
