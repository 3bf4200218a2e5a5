//! Compares every reduction with a simple reference implementation of the reduction tree.

use super::*;
use proptest::prelude::*;

/// The definition of the tree: combines neighbours until one value is left.
fn oracle<W: Copy>(mut level: Vec<W>, combine: fn(W, W) -> W) -> W {
    while level.len() > 1 {
        level = level.chunks(2).map(|pair| if let [l, r] = pair { combine(*l, *r) } else { pair[0] }).collect();
    }
    level[0]
}

fn sum(dtype: Dtype) -> Reduction {
    Reduction { op: ReduceOp::Sum, dtype }
}

#[test]
fn cell_sums_are_bit_identical_to_the_flat_tree() {
    const LENGTH: usize = 700;
    for size in 1usize..24 {
        let value =
            |rank: usize, i: usize| ((rank * 7919 + i * 31) % 1000) as f32 * 2f32.powi((rank * i) as i32 % 30 - 15);
        let ranks: Vec<Vec<f32>> = (0..size).map(|rank| (0..LENGTH).map(|i| value(rank, i)).collect()).collect();
        let total = |ranks: &[Vec<f32>], weights: &[usize]| {
            let mut own = ranks[0].clone();
            let peers: Vec<&[u8]> = ranks[1..].iter().map(|rank| bytemuck::cast_slice(rank)).collect();
            reduce(sum(Dtype::F32), weights, 0, bytemuck::cast_slice_mut(&mut own), &peers);
            own
        };
        let flat = total(&ranks, &vec![1; size]);
        for split in 0..=size {
            let hosts: Vec<&str> = (0..size).map(|rank| if rank < split { "a" } else { "b" }).collect();
            let cells = crate::hierarchy::cells(&hosts);
            let weights: Vec<usize> = cells.iter().map(ExactSizeIterator::len).collect();
            let sums: Vec<Vec<f32>> =
                cells.into_iter().map(|cell| total(&ranks[cell.clone()], &vec![1; cell.len()])).collect();
            let same = total(&sums, &weights).iter().zip(&flat).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{size} ranks, {split} on the first host");
        }
    }
}

fn check(op: ReduceOp, ranks: &[Vec<f32>], combine: fn(f32, f32) -> f32) {
    let expected: Vec<u32> =
        (0..ranks[0].len()).map(|i| oracle(ranks.iter().map(|rank| rank[i]).collect(), combine).to_bits()).collect();
    for own in 0..ranks.len() {
        let mut result = ranks[own].clone();
        let others = ranks.iter().enumerate().filter(|(rank, _)| *rank != own);
        let peers: Vec<&[u8]> = others.map(|(_, values)| bytemuck::cast_slice(values)).collect();
        let ones = vec![1; ranks.len()];
        let reduction = Reduction { op, dtype: Dtype::F32 };
        reduce(reduction, &ones, own, bytemuck::cast_slice_mut(&mut result), &peers);
        let bits: Vec<u32> = result.iter().map(|value| value.to_bits()).collect();
        assert_eq!(bits, expected, "rank {own} of {}", ranks.len());
        let mut portable = ranks[own].clone();
        let peers: Vec<&[f32]> = peers.iter().map(|peer| bytemuck::cast_slice(peer)).collect();
        fold::<f32>(&ones, own, &mut portable, &peers, combine);
        let mut everywhere = ranks.to_vec();
        let mut first = everywhere.remove(own);
        let mut others: Vec<&mut [u8]> = everywhere.iter_mut().map(|rank| bytemuck::cast_slice_mut(rank)).collect();
        reduce_everywhere(reduction, &ones, own, bytemuck::cast_slice_mut(&mut first), &mut others);
        for rank in everywhere.iter().chain([&first]) {
            assert_eq!(rank.iter().map(|value| value.to_bits()).collect::<Vec<_>>(), expected, "everywhere");
        }
        assert_eq!(portable.iter().map(|value| value.to_bits()).collect::<Vec<_>>(), expected, "portable loop");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn sums_follow_the_reduction_tree(size in 1usize..17, length in 0usize..1300, seed in any::<u32>()) {
        let value = |rank: usize, i: usize| {
            let hash = (seed ^ (rank * 65_537 + i) as u32).wrapping_mul(2_654_435_761);
            (hash as f32 - 2e9) * 2f32.powi((hash >> 7) as i32 % 20 - 30)
        };
        let ranks: Vec<Vec<f32>> = (0..size).map(|rank| (0..length).map(|i| value(rank, i)).collect()).collect();
        check(ReduceOp::Sum, &ranks, |left, right| left + right);
        check(ReduceOp::Max, &ranks, float_max);
    }
}

#[test]
fn reduce_into_is_bit_identical_to_reduce() {
    let ranks: Vec<Vec<f32>> = (0..3).map(|rank| (0..1000).map(|i| (i * 7 + rank) as f32 / 3.0).collect()).collect();
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    for (size, op) in [(2, ReduceOp::Sum), (2, ReduceOp::Max), (3, ReduceOp::Sum)] {
        for (start, length) in [(0, 0), (0, 8), (6, 20), (2, 900), (16, 984)] {
            for (own, whole) in (0..size).flat_map(|own| [(own, 0), (own, LARGE)]) {
                let place = start..start + length;
                let part = |rank: usize| -> &[u8] { bytemuck::cast_slice(&ranks[rank][place.clone()]) };
                let peers: Vec<&[u8]> = (0..size).filter(|rank| *rank != own).map(part).collect();
                let mut expected = ranks[own][place.clone()].to_vec();
                let (reduction, ones) = (Reduction { op, dtype: Dtype::F32 }, vec![1; size]);
                reduce(reduction, &ones, own, bytemuck::cast_slice_mut(&mut expected), &peers);
                let mut target = vec![-1f32; 1000];
                let bytes = bytemuck::cast_slice_mut(&mut target[place.clone()]);
                reduce_into(reduction, &ones, own, part(own), &peers, bytes, whole);
                assert_eq!(bits(&target[place.clone()]), bits(&expected));
                assert!(target[..start].iter().chain(&target[start + length..]).all(|value| *value == -1.0));
            }
        }
    }
}

#[test]
fn half_precision_sums_are_rounded_once() {
    // In f16, 2048 + 1 is rounded to 2048. A sum in f32 counts all four ones.
    let ranks = [2048.0, 1.0, 1.0, 1.0, 1.0].map(|value| vec![f16::from_f32(value); 3]);
    let mut own = ranks[0].clone();
    let peers: Vec<&[u8]> = ranks[1..].iter().map(|rank| bytemuck::cast_slice(rank)).collect();
    reduce(sum(Dtype::F16), &[1; 5], 0, bytemuck::cast_slice_mut(&mut own), &peers);
    assert_eq!(own, vec![f16::from_f32(2052.0); 3]);
}

#[test]
fn bf16_rounding_matches_the_half_crate() {
    // Takes every bf16 value as the upper half of an f32, with lower halves around the midpoint to the next bf16 value.
    // This covers all classes of values, and ties in both directions.
    for high in 0..=u16::MAX {
        let wide: Vec<f32> =
            [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF].map(|low| f32::from_bits(u32::from(high) << 16 | low)).to_vec();
        let mut narrow = vec![bf16::ZERO; wide.len()];
        narrow_bf16(&wide, &mut narrow);
        for (wide, narrow) in wide.iter().zip(narrow) {
            assert_eq!(narrow.to_bits(), bf16::from_f32(*wide).to_bits(), "{:08x}", wide.to_bits());
        }
    }
}

#[test]
fn integer_sums_wrap_and_nan_propagates() {
    let mut own = [250u8];
    reduce(sum(Dtype::U8), &[1, 1], 0, &mut own, &[&[10]]);
    assert_eq!(own, [4]);
    let mut own = [i64::MAX];
    reduce(sum(Dtype::I64), &[1, 1], 0, bytemuck::cast_slice_mut(&mut own), &[bytemuck::cast_slice(&[1i64])]);
    assert_eq!(own, [i64::MIN]);
    for rank in 0..3 {
        let mut own = [if rank == 1 { f32::NAN } else { 5.0 }];
        let peers = [[3.0f32], [if rank == 1 { 7.0 } else { f32::NAN }]];
        let peers: Vec<&[u8]> = peers.iter().map(|peer| bytemuck::cast_slice(peer)).collect();
        let max = Reduction { op: ReduceOp::Max, dtype: Dtype::F32 };
        reduce(max, &[1; 3], rank, bytemuck::cast_slice_mut(&mut own), &peers);
        assert!(own[0].is_nan());
    }
}
