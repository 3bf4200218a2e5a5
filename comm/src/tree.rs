//! Reductions over a fixed binary tree of the ranks.
//!
//! Floating-point sums depend on their order, so there is one order, for every transport and every cut of the vector: level
//! by level neighbours are combined, (0,1), (2,3), …, and an odd one out passes up unchanged. The same tree comes out of
//! adding ranks one after another like bits in a binary counter, which needs one partial sum per level: after rank i has
//! been added, the partial sums are those subtrees that are complete, as the set bits of i+1.
//!
//! 16-bit floats are widened to f32 on the way in and rounded once at the end.

use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::buffer::Dtype;
use crate::communicator::ReduceOp;
use crate::copy::LARGE;

/// Reduces one range in place. `own` holds this rank's contribution and receives the result; `peers` are the others', in
/// rank order without this rank; `rank` is this rank's place among them. All have the same length in bytes.
pub(crate) fn reduce(dtype: Dtype, op: ReduceOp, rank: usize, own: &mut [u8], peers: &[&[u8]]) {
    debug_assert!(peers.iter().all(|peer| peer.len() == own.len()) && rank <= peers.len());
    match dtype {
        Dtype::F32 => typed::<f32>(op, rank, own, peers),
        Dtype::Bf16 => typed::<bf16>(op, rank, own, peers),
        Dtype::F16 => typed::<f16>(op, rank, own, peers),
        Dtype::I64 => typed::<i64>(op, rank, own, peers),
        Dtype::U8 => typed::<u8>(op, rank, own, peers),
    }
}

/// Reduces a range of `own` and `peers` into `target`, which is a part of a vector of `whole` bytes. `own` stays as it is.
pub(crate) fn reduce_into(
    dtype: Dtype,
    op: ReduceOp,
    rank: usize,
    own: &[u8],
    peers: &[&[u8]],
    target: &mut [u8],
    whole: usize,
) {
    #[cfg(target_arch = "x86_64")]
    if let (Dtype::F32, [peer], true) = (dtype, peers, whole >= LARGE && is_x86_feature_detected!("avx2")) {
        let (left, right) = if rank == 0 { (own, *peer) } else { (*peer, own) };
        let (left, right): (&[f32], &[f32]) = (bytemuck::cast_slice(left), bytemuck::cast_slice(right));
        let target = bytemuck::cast_slice_mut(target);
        #[allow(unsafe_code)]
        // SAFETY: AVX2 was just found on this machine.
        unsafe {
            match op {
                ReduceOp::Sum => avx2::stream(left, right, target, <f32 as Element>::sum),
                ReduceOp::Max => avx2::stream(left, right, target, <f32 as Element>::max),
            }
        }
        return;
    }
    target.copy_from_slice(own);
    reduce(dtype, op, rank, target, peers);
}

fn typed<T: Element>(op: ReduceOp, rank: usize, own: &mut [u8], peers: &[&[u8]]) {
    let own: &mut [T] = bytemuck::cast_slice_mut(own);
    let peers: Vec<&[T]> = peers.iter().map(|peer| bytemuck::cast_slice(peer)).collect();
    match op {
        ReduceOp::Sum => dispatch(rank, own, &peers, T::sum),
        ReduceOp::Max => dispatch(rank, own, &peers, T::max),
    }
}

fn dispatch<T: Element>(rank: usize, own: &mut [T], peers: &[&[T]], combine: impl Fn(T::Wide, T::Wide) -> T::Wide) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        #[allow(unsafe_code)]
        // SAFETY: AVX2 was just found on this machine.
        unsafe {
            avx2::fold(rank, own, peers, combine);
        }
        return;
    }
    fold(rank, own, peers, combine);
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::{_mm_sfence, _mm256_loadu_ps, _mm256_stream_ps};

    use super::Element;

    /// The portable loop, compiled with 32-byte vectors. Additions stay in their order, so the bits are the same.
    #[target_feature(enable = "avx2")]
    pub(super) fn fold<T: Element>(
        rank: usize,
        own: &mut [T],
        peers: &[&[T]],
        combine: impl Fn(T::Wide, T::Wide) -> T::Wide,
    ) {
        super::fold(rank, own, peers, combine);
    }

    /// Elements of a cache line.
    const LINE: usize = 16;

    /// Two ranks' f32 into memory that neither has read: past the cache, for the reasons that `copy` gives. Summing into the cache
    /// and copying from there would take half as long again, as nothing is read while it is written.
    #[target_feature(enable = "avx2")]
    pub(super) fn stream(left: &[f32], right: &[f32], target: &mut [f32], combine: impl Fn(f32, f32) -> f32) {
        assert!(left.len() == target.len() && right.len() == target.len());
        let plain = |left: &[f32], right: &[f32], target: &mut [f32]| {
            for ((left, right), target) in left.iter().zip(right).zip(target) {
                *target = combine(*left, *right);
            }
        };
        let head = target.as_ptr().align_offset(64).min(target.len());
        let (first, target) = target.split_at_mut(head);
        plain(&left[..head], &right[..head], first);
        let (left, last_left) = left[head..].as_chunks::<LINE>();
        let (right, last_right) = right[head..].as_chunks::<LINE>();
        let (target, last) = target.as_chunks_mut::<LINE>();
        for ((left, right), target) in left.iter().zip(right).zip(target) {
            let result: [f32; LINE] = std::array::from_fn(|i| combine(left[i], right[i]));
            let (from, to) = (result.as_ptr(), target.as_mut_ptr());
            #[allow(unsafe_code)]
            // SAFETY: each is a line of 16 floats, `to` an aligned one.
            unsafe {
                _mm256_stream_ps(to, _mm256_loadu_ps(from));
                _mm256_stream_ps(to.add(LINE / 2), _mm256_loadu_ps(from.add(LINE / 2)));
            }
        }
        plain(last_left, last_right, last);
        // Streaming stores are not ordered with those that tell others that this is done.
        _mm_sfence();
    }
}

/// Elements that are taken through the whole tree at a time: small enough for the partial sums to stay in the first-level cache.
const BLOCK: usize = 512;

#[inline(always)]
fn fold<T: Element>(rank: usize, own: &mut [T], peers: &[&[T]], combine: impl Fn(T::Wide, T::Wide) -> T::Wide) {
    if let [peer] = peers {
        return T::pair(own, peer, rank == 0, combine);
    }
    let size = peers.len() + 1;
    let levels = (usize::BITS - size.leading_zeros()) as usize;
    // partial[level] is a complete subtree of 2^level ranks when that bit of the number of ranks added so far is set.
    let mut partial = vec![[T::Wide::default(); BLOCK]; levels + 1];
    for start in (0..own.len()).step_by(BLOCK) {
        let end = own.len().min(start + BLOCK);
        let len = end - start;
        for source in 0..size {
            let (complete, rest) = partial.split_at_mut(source.trailing_ones() as usize);
            let carry = &mut rest[0][..len];
            match source.cmp(&rank) {
                std::cmp::Ordering::Less => T::widen(&peers[source][start..end], carry),
                std::cmp::Ordering::Equal => T::widen(&own[start..end], carry),
                std::cmp::Ordering::Greater => T::widen(&peers[source - 1][start..end], carry),
            }
            for subtree in complete.iter() {
                join::<T>(&subtree[..len], carry, &combine);
            }
        }
        let mut set = (0..=levels).filter(|level| size >> level & 1 == 1);
        let lowest = set.next().unwrap_or(0);
        let mut top = lowest;
        for level in set {
            let (lower, higher) = partial.split_at_mut(level);
            // The higher subtree holds the lower ranks: it is the left operand.
            for (left, right) in higher[0][..len].iter_mut().zip(&lower[top][..len]) {
                *left = combine(*left, *right);
            }
            top = level;
        }
        T::narrow(&partial[top][..len], &mut own[start..end]);
    }
}

/// `carry = left + carry`
#[inline(always)]
fn join<T: Element>(left: &[T::Wide], carry: &mut [T::Wide], combine: &impl Fn(T::Wide, T::Wide) -> T::Wide) {
    for (left, carry) in left.iter().zip(carry) {
        *carry = combine(*left, *carry);
    }
}

/// An element type and the type that its sums are formed in.
trait Element: Pod {
    type Wide: Copy + Default;
    /// Two ranks, the most frequent case: `own` becomes own + peer, or peer + own.
    fn pair(own: &mut [Self], peer: &[Self], own_first: bool, combine: impl Fn(Self::Wide, Self::Wide) -> Self::Wide);
    fn widen(from: &[Self], to: &mut [Self::Wide]);
    fn narrow(from: &[Self::Wide], to: &mut [Self]);
    fn sum(left: Self::Wide, right: Self::Wide) -> Self::Wide;
    fn max(left: Self::Wide, right: Self::Wide) -> Self::Wide;
}

macro_rules! element {
    ($type:ty, $sum:expr, $max:expr) => {
        impl Element for $type {
            type Wide = $type;
            #[inline(always)]
            fn pair(own: &mut [Self], peer: &[Self], own_first: bool, combine: impl Fn(Self, Self) -> Self) {
                if own_first {
                    own.iter_mut().zip(peer).for_each(|(own, peer)| *own = combine(*own, *peer));
                } else {
                    own.iter_mut().zip(peer).for_each(|(own, peer)| *own = combine(*peer, *own));
                }
            }
            #[inline(always)]
            fn widen(from: &[Self], to: &mut [Self]) {
                to.copy_from_slice(from);
            }
            #[inline(always)]
            fn narrow(from: &[Self], to: &mut [Self]) {
                to.copy_from_slice(from);
            }
            #[inline(always)]
            fn sum(left: Self, right: Self) -> Self {
                $sum(left, right)
            }
            #[inline(always)]
            fn max(left: Self, right: Self) -> Self {
                $max(left, right)
            }
        }
    };
}

element!(f32, |left, right| left + right, float_max);
element!(i64, i64::wrapping_add, Ord::max);
element!(u8, u8::wrapping_add, Ord::max);

macro_rules! half_element {
    ($type:ty, $widen:expr, $narrow:expr) => {
        impl Element for $type {
            type Wide = f32;
            #[inline(always)]
            fn pair(own: &mut [Self], peer: &[Self], own_first: bool, combine: impl Fn(f32, f32) -> f32) {
                let (mut left, mut right) = ([0.0; BLOCK], [0.0; BLOCK]);
                for (own, peer) in own.chunks_mut(BLOCK).zip(peer.chunks(BLOCK)) {
                    let (left, right) = (&mut left[..own.len()], &mut right[..own.len()]);
                    Self::widen(if own_first { own } else { peer }, left);
                    Self::widen(if own_first { peer } else { own }, right);
                    join::<Self>(left, right, &combine);
                    Self::narrow(right, own);
                }
            }
            #[inline(always)]
            fn widen(from: &[Self], to: &mut [f32]) {
                $widen(from, to);
            }
            #[inline(always)]
            fn narrow(from: &[f32], to: &mut [Self]) {
                $narrow(from, to);
            }
            #[inline(always)]
            fn sum(left: f32, right: f32) -> f32 {
                left + right
            }
            #[inline(always)]
            fn max(left: f32, right: f32) -> f32 {
                float_max(left, right)
            }
        }
    };
}

half_element!(bf16, widen_bf16, narrow_bf16);
half_element!(f16, |from: &[f16], to: &mut [f32]| from.convert_to_f32_slice(to), |from: &[f32], to: &mut [f16]| to
    .convert_from_f32_slice(from));

// `half` converts f16 with the processor's instruction but bf16 one at a time; these two loops become vector code.

#[inline(always)]
fn widen_bf16(from: &[bf16], to: &mut [f32]) {
    for (from, to) in from.iter().zip(to) {
        *to = f32::from_bits(u32::from(from.to_bits()) << 16);
    }
}

/// Rounds to nearest, ties to even; a NaN stays one.
#[inline(always)]
fn narrow_bf16(from: &[f32], to: &mut [bf16]) {
    for (from, to) in from.iter().zip(to) {
        let bits = from.to_bits();
        // A tie goes up only from an odd kept part. What carries into the exponent is right: the next power, or infinity.
        let rounded = (bits.wrapping_add(0x7FFF + (bits >> 16 & 1))) >> 16;
        let quiet = bits >> 16 | 0x40;
        *to = bf16::from_bits(if bits & 0x7FFF_FFFF > 0x7F80_0000 { quiet } else { rounded } as u16);
    }
}

/// The larger value, the right one if they are equal; NaN if either is NaN.
#[inline(always)]
fn float_max(left: f32, right: f32) -> f32 {
    if left > right || left.is_nan() { left } else { right }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition, read aloud: pair up neighbours until one value is left.
    fn oracle<W: Copy>(mut level: Vec<W>, combine: fn(W, W) -> W) -> W {
        while level.len() > 1 {
            level = level.chunks(2).map(|pair| if let [l, r] = pair { combine(*l, *r) } else { pair[0] }).collect();
        }
        level[0]
    }

    fn check(op: ReduceOp, ranks: &[Vec<f32>], combine: fn(f32, f32) -> f32) {
        let expected: Vec<u32> = (0..ranks[0].len())
            .map(|i| oracle(ranks.iter().map(|rank| rank[i]).collect(), combine).to_bits())
            .collect();
        for own in 0..ranks.len() {
            let mut result = ranks[own].clone();
            let others = ranks.iter().enumerate().filter(|(rank, _)| *rank != own);
            let peers: Vec<&[u8]> = others.map(|(_, values)| bytemuck::cast_slice(values)).collect();
            reduce(Dtype::F32, op, own, bytemuck::cast_slice_mut(&mut result), &peers);
            let bits: Vec<u32> = result.iter().map(|value| value.to_bits()).collect();
            assert_eq!(bits, expected, "rank {own} of {}", ranks.len());
            let mut portable = ranks[own].clone();
            let peers: Vec<&[f32]> = peers.iter().map(|peer| bytemuck::cast_slice(peer)).collect();
            fold::<f32>(own, &mut portable, &peers, combine);
            assert_eq!(portable.iter().map(|value| value.to_bits()).collect::<Vec<_>>(), expected, "portable loop");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn sums_follow_the_tree(size in 1usize..17, length in 0usize..1300, seed in any::<u32>()) {
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
    fn a_reduction_into_other_memory_has_the_same_bits() {
        let ranks: Vec<Vec<f32>> =
            (0..3).map(|rank| (0..1000).map(|i| (i * 7 + rank) as f32 / 3.0).collect()).collect();
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        for (size, op) in [(2, ReduceOp::Sum), (2, ReduceOp::Max), (3, ReduceOp::Sum)] {
            for (start, length) in [(0, 0), (0, 8), (6, 20), (2, 900), (16, 984)] {
                for (own, whole) in (0..size).flat_map(|own| [(own, 0), (own, LARGE)]) {
                    let place = start..start + length;
                    let part = |rank: usize| -> &[u8] { bytemuck::cast_slice(&ranks[rank][place.clone()]) };
                    let peers: Vec<&[u8]> = (0..size).filter(|rank| *rank != own).map(part).collect();
                    let mut expected = ranks[own][place.clone()].to_vec();
                    reduce(Dtype::F32, op, own, bytemuck::cast_slice_mut(&mut expected), &peers);
                    let mut target = vec![-1f32; 1000];
                    let bytes = bytemuck::cast_slice_mut(&mut target[place.clone()]);
                    reduce_into(Dtype::F32, op, own, part(own), &peers, bytes, whole);
                    assert_eq!(bits(&target[place.clone()]), bits(&expected));
                    assert!(target[..start].iter().chain(&target[start + length..]).all(|value| *value == -1.0));
                }
            }
        }
    }

    #[test]
    fn half_precision_is_rounded_once() {
        // In f16 steps, 2048 + 1 is 2048 again; in f32 the four ones arrive.
        let ranks = [2048.0, 1.0, 1.0, 1.0, 1.0].map(|value| vec![f16::from_f32(value); 3]);
        let mut own = ranks[0].clone();
        let peers: Vec<&[u8]> = ranks[1..].iter().map(|rank| bytemuck::cast_slice(rank)).collect();
        reduce(Dtype::F16, ReduceOp::Sum, 0, bytemuck::cast_slice_mut(&mut own), &peers);
        assert_eq!(own, vec![f16::from_f32(2052.0); 3]);
    }

    #[test]
    fn bf16_is_rounded_as_by_half() {
        // Every bf16 and what lies around the middle to the next one: all classes of values, ties both ways.
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
    fn integers_wrap_and_nan_wins() {
        let mut own = [250u8];
        reduce(Dtype::U8, ReduceOp::Sum, 0, &mut own, &[&[10]]);
        assert_eq!(own, [4]);
        let mut own = [i64::MAX];
        reduce(Dtype::I64, ReduceOp::Sum, 0, bytemuck::cast_slice_mut(&mut own), &[bytemuck::cast_slice(&[1i64])]);
        assert_eq!(own, [i64::MIN]);
        for rank in 0..3 {
            let mut own = [if rank == 1 { f32::NAN } else { 5.0 }];
            let peers = [[3.0f32], [if rank == 1 { 7.0 } else { f32::NAN }]];
            let peers: Vec<&[u8]> = peers.iter().map(|peer| bytemuck::cast_slice(peer)).collect();
            reduce(Dtype::F32, ReduceOp::Max, rank, bytemuck::cast_slice_mut(&mut own), &peers);
            assert!(own[0].is_nan());
        }
    }
}
