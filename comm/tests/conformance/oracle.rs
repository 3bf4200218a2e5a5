//! Computes the expected result of reductions, element by element, from the definition.

use half::{bf16, f16};
use zero_comm::{Buffer, Dtype, ReduceOp};

/// Returns pseudo-random numbers for a seed and a rank. Every rank can compute them. Floats have both signs and very
/// different magnitudes, or are small integers if sums must not depend on their order.
pub(crate) fn vector(dtype: Dtype, seed: u64, rank: usize, length: usize) -> Buffer {
    let bits = |i: usize| {
        let mut x = seed ^ ((rank as u64) << 40) ^ i as u64;
        for multiplier in [0x9E37_79B9_7F4A_7C15_u64, 0xBF58_476D_1CE4_E5B9] {
            x = (x ^ (x >> 29)).wrapping_mul(multiplier);
        }
        x ^ (x >> 32)
    };
    let float = |i: usize| {
        let bits = bits(i);
        if !crate::TREE {
            // Sums of eight such values are exact in every order and type.
            return (bits % 17) as f32 - 8.0;
        }
        // `powi` would take most of the time of these tests.
        const POWERS: [f32; 9] = [0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0];
        ((bits % 20_001) as f32 - 10_000.0) / 128.0 * POWERS[(bits >> 40) as usize % 9]
    };
    match dtype {
        Dtype::F32 => (0..length).map(float).collect::<Vec<_>>().into(),
        Dtype::Bf16 => (0..length).map(|i| bf16::from_f32(float(i))).collect::<Vec<_>>().into(),
        Dtype::F16 => (0..length).map(|i| f16::from_f32(float(i))).collect::<Vec<_>>().into(),
        Dtype::I64 => (0..length).map(|i| bits(i) as i64).collect::<Vec<_>>().into(),
        Dtype::U8 => (0..length).map(|i| bits(i) as u8).collect::<Vec<_>>().into(),
    }
}

/// Combines neighbours level by level; an unpaired node passes up unchanged.
fn columns<T: Copy, W: Copy>(ranks: &[&[T]], widen: fn(T) -> W, combine: fn(W, W) -> W) -> Vec<W> {
    let mut level: Vec<Vec<W>> = ranks.iter().map(|rank| rank.iter().map(|value| widen(*value)).collect()).collect();
    while level.len() > 1 {
        let join = |pair: &[Vec<W>]| match pair {
            [left, right] => left.iter().zip(right).map(|(left, right)| combine(*left, *right)).collect(),
            odd => odd[0].clone(),
        };
        level = level.chunks(2).map(join).collect();
    }
    level.remove(0)
}

fn add(left: f32, right: f32) -> f32 {
    left + right
}

fn larger(left: f32, right: f32) -> f32 {
    if left > right { left } else { right }
}

/// Returns the reduction of all ranks' vectors.
pub(crate) fn reduced(ranks: &[Buffer], op: ReduceOp) -> Buffer {
    let float = if op == ReduceOp::Sum { add } else { larger };
    let sum = op == ReduceOp::Sum;
    match ranks[0].dtype() {
        Dtype::F32 => columns(&slices(ranks, Buffer::as_f32), |x| x, float).into(),
        Dtype::Bf16 => {
            let wide = columns(&slices(ranks, Buffer::as_bf16), bf16::to_f32, float);
            wide.into_iter().map(bf16::from_f32).collect::<Vec<_>>().into()
        }
        Dtype::F16 => {
            let wide = columns(&slices(ranks, Buffer::as_f16), f16::to_f32, float);
            wide.into_iter().map(f16::from_f32).collect::<Vec<_>>().into()
        }
        Dtype::I64 => {
            columns(&slices(ranks, Buffer::as_i64), |x| x, if sum { i64::wrapping_add } else { i64::max }).into()
        }
        Dtype::U8 => columns(&slices(ranks, Buffer::as_u8), |x| x, if sum { u8::wrapping_add } else { u8::max }).into(),
    }
}

fn slices<T>(ranks: &[Buffer], slice: fn(&Buffer) -> Option<&[T]>) -> Vec<&[T]> {
    ranks.iter().map(|rank| slice(rank).expect("one dtype")).collect()
}

/// Concatenates buffers.
pub(crate) fn concatenated(parts: &[Buffer]) -> Buffer {
    let mut whole = Buffer::zeros(parts[0].dtype(), parts.iter().map(Buffer::len).sum());
    let mut rest = whole.as_bytes_mut();
    for part in parts {
        let (place, tail) = rest.split_at_mut(part.size_bytes());
        place.copy_from_slice(part.as_bytes());
        rest = tail;
    }
    whole
}

/// Returns elements `start..start + length` of a buffer.
pub(crate) fn part(whole: &Buffer, start: usize, length: usize) -> Buffer {
    let mut part = Buffer::zeros(whole.dtype(), length);
    let size = whole.dtype().size();
    part.as_bytes_mut().copy_from_slice(&whole.as_bytes()[start * size..(start + length) * size]);
    part
}

/// Returns uneven counts, some of them zero, that add up to `length`.
pub(crate) fn uneven(length: usize, size: usize, seed: usize) -> Vec<usize> {
    let mut counts = vec![0; size];
    let mut left = length;
    for (rank, count) in counts.iter_mut().enumerate().take(size - 1) {
        *count = if (rank + seed).is_multiple_of(3) { 0 } else { left / 2 };
        left -= *count;
    }
    counts[size - 1] = left;
    counts.rotate_right(seed % size);
    counts
}

/// Returns the input of rank `rank` in an all_to_all, and how many of its elements go to each rank. Inputs of different
/// ranks differ in length.
pub(crate) fn parts_of(dtype: Dtype, seed: u64, rank: usize, size: usize, length: usize) -> (Buffer, Vec<usize>) {
    let length = length * (1 + (rank + seed as usize) % 3);
    (vector(dtype, seed, rank, length), uneven(length, size, seed as usize + rank))
}

/// Returns the output of rank `rank` in the all_to_all of `parts_of`, and how many of its elements come from each rank.
pub(crate) fn exchanged(dtype: Dtype, seed: u64, rank: usize, size: usize, length: usize) -> (Buffer, Vec<usize>) {
    let from = |source: usize| {
        let (input, counts) = parts_of(dtype, seed, source, size, length);
        part(&input, counts[..rank].iter().sum(), counts[rank])
    };
    let parts: Vec<Buffer> = (0..size).map(from).collect();
    (concatenated(&parts), parts.iter().map(Buffer::len).collect())
}

/// Compares the bits, so that a NaN equals itself and 0 differs from −0.
#[track_caller]
pub(crate) fn assert_same(found: &Buffer, expected: &Buffer, what: &str) {
    assert_eq!((found.dtype(), found.len()), (expected.dtype(), expected.len()), "{what}");
    let differs = found.as_bytes().iter().zip(expected.as_bytes()).position(|(found, expected)| found != expected);
    assert_eq!(differs, None, "{what}: index of the first byte that differs");
}
