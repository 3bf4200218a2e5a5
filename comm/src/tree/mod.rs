//! Reductions over a fixed binary tree of the ranks.
//!
//! Floating-point sums depend on their order, so every transport and every partition of the vector uses the same order.
//! Neighbours are combined level by level, (0,1), (2,3), …, and an unpaired node passes up unchanged. To need only one
//! partial sum per level, ranks are added one after another as in a binary counter, which gives the same tree. After
//! rank i has been added, there is one partial sum for each set bit of i+1: the sum of a complete subtree.
//!
//! An input may itself be a sum, for example over the ranks of one host. Such inputs are complete subtrees and enter
//! the counter at their level. Only the last input may be an incomplete subtree, because the tree ends with it.
//!
//! 16-bit floats are widened to f32 on input and rounded once at the end.

#[cfg(target_arch = "x86_64")]
mod avx2;

use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

#[cfg(any(test, target_arch = "x86_64"))]
use crate::buffers::copy::LARGE;
use crate::buffers::dtype::Dtype;
use crate::collective::reduction::{ReduceOp, Reduction};

/// Reduces one range in place. `own` holds this rank's contribution and receives the result. `peers` are the
/// contributions of the other ranks in rank order, and `rank` is the position at which `own` belongs among them.
/// Contribution r is the sum over `weights[r]` ranks. All slices have the same length in bytes.
pub(crate) fn reduce(reduction: Reduction, weights: &[usize], rank: usize, own: &mut [u8], peers: &[&[u8]]) {
    debug_assert!(peers.iter().all(|peer| peer.len() == own.len()) && rank <= peers.len());
    assert_eq!(weights.len(), peers.len() + 1);
    let Reduction { op, dtype } = reduction;
    match dtype {
        Dtype::F32 => typed::<f32>(op, weights, rank, own, peers),
        Dtype::Bf16 => typed::<bf16>(op, weights, rank, own, peers),
        Dtype::F16 => typed::<f16>(op, weights, rank, own, peers),
        Dtype::I64 => typed::<i64>(op, weights, rank, own, peers),
        Dtype::U8 => typed::<u8>(op, weights, rank, own, peers),
    }
}

/// Widens 16-bit floats to f32. Panics for other types.
pub(crate) fn widened(dtype: Dtype, narrow: &[u8]) -> Vec<f32> {
    let mut wide = vec![0.0; narrow.len() / dtype.size()];
    match dtype {
        Dtype::Bf16 => <bf16 as Element>::widen(bytemuck::cast_slice(narrow), &mut wide),
        Dtype::F16 => <f16 as Element>::widen(bytemuck::cast_slice(narrow), &mut wide),
        Dtype::F32 | Dtype::I64 | Dtype::U8 => unreachable!("{dtype} is not a 16-bit float"),
    }
    wide
}

/// Rounds f32 to 16-bit floats. Panics for other types.
pub(crate) fn narrow(dtype: Dtype, wide: &[f32], narrow: &mut [u8]) {
    match dtype {
        Dtype::Bf16 => <bf16 as Element>::narrow(wide, bytemuck::cast_slice_mut(narrow)),
        Dtype::F16 => <f16 as Element>::narrow(wide, bytemuck::cast_slice_mut(narrow)),
        Dtype::F32 | Dtype::I64 | Dtype::U8 => unreachable!("{dtype} is not a 16-bit float"),
    }
}

/// Reduces a range of `own` and `peers` into `target`, which is part of a vector of `whole` bytes. `own` stays
/// unchanged. `own` is the contribution at position `rank`, and contribution r is the sum over `weights[r]` ranks.
///
/// # Panics
/// Panics if the slices differ in length, or if there is not one weight for each contribution.
pub fn reduce_into(
    reduction: Reduction,
    weights: &[usize],
    rank: usize,
    own: &[u8],
    peers: &[&[u8]],
    target: &mut [u8],
    whole: usize,
) {
    #[cfg(target_arch = "x86_64")]
    if let (Dtype::F32, [peer], true) = (reduction.dtype, peers, whole >= LARGE && is_x86_feature_detected!("avx2")) {
        let (left, right) = if rank == 0 { (own, *peer) } else { (*peer, own) };
        let (left, right): (&[f32], &[f32]) = (bytemuck::cast_slice(left), bytemuck::cast_slice(right));
        let target = bytemuck::cast_slice_mut(target);
        #[allow(unsafe_code)]
        // SAFETY: the check above found AVX2 on this machine.
        unsafe {
            match reduction.op {
                ReduceOp::Sum => avx2::stream(left, right, target, <f32 as Element>::sum),
                ReduceOp::Max => avx2::stream(left, right, target, <f32 as Element>::max),
            }
        }
        return;
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = whole;
    target.copy_from_slice(own);
    reduce(reduction, weights, rank, target, peers);
}

/// Reduces a range of all ranks' vectors and writes the result to each of them. See [`reduce_into`].
///
/// # Panics
/// Panics if the slices differ in length, or if there is not one weight for each contribution.
pub fn reduce_everywhere(
    reduction: Reduction,
    weights: &[usize],
    rank: usize,
    own: &mut [u8],
    peers: &mut [&mut [u8]],
) {
    #[cfg(target_arch = "x86_64")]
    if let (Dtype::F32, [peer], true) = (reduction.dtype, &mut *peers, is_x86_feature_detected!("avx2")) {
        let (left, right) = if rank == 0 { (own, &mut **peer) } else { (&mut **peer, own) };
        let (left, right) = (bytemuck::cast_slice_mut(left), bytemuck::cast_slice_mut(right));
        #[allow(unsafe_code)]
        // SAFETY: the check above found AVX2 on this machine.
        unsafe {
            match reduction.op {
                ReduceOp::Sum => avx2::both(left, right, <f32 as Element>::sum),
                ReduceOp::Max => avx2::both(left, right, <f32 as Element>::max),
            }
        }
        return;
    }
    let contributions: Vec<&[u8]> = peers.iter().map(|peer| &**peer).collect();
    reduce(reduction, weights, rank, own, &contributions);
    for peer in peers {
        peer.copy_from_slice(own);
    }
}

fn typed<T: Element>(op: ReduceOp, weights: &[usize], rank: usize, own: &mut [u8], peers: &[&[u8]]) {
    let own: &mut [T] = bytemuck::cast_slice_mut(own);
    let peers: Vec<&[T]> = peers.iter().map(|peer| bytemuck::cast_slice(peer)).collect();
    match op {
        ReduceOp::Sum => dispatch(weights, rank, own, &peers, T::sum),
        ReduceOp::Max => dispatch(weights, rank, own, &peers, T::max),
    }
}

fn dispatch<T: Element>(
    weights: &[usize],
    rank: usize,
    own: &mut [T],
    peers: &[&[T]],
    combine: impl Fn(T::Wide, T::Wide) -> T::Wide,
) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        #[allow(unsafe_code)]
        // SAFETY: the check above found AVX2 on this machine.
        unsafe {
            avx2::fold(weights, rank, own, peers, combine);
        }
        return;
    }
    fold(weights, rank, own, peers, combine);
}

/// Number of elements that pass through the whole tree at a time: small enough that the partial sums stay in the L1
/// cache.
const BLOCK: usize = 512;

#[inline(always)]
fn fold<T: Element>(
    weights: &[usize],
    rank: usize,
    own: &mut [T],
    peers: &[&[T]],
    combine: impl Fn(T::Wide, T::Wide) -> T::Wide,
) {
    if let [peer] = peers {
        return T::pair(own, peer, rank == 0, combine);
    }
    let levels = (usize::BITS - weights.iter().sum::<usize>().leading_zeros()) as usize;
    // partial[level] is the sum of a subtree of 2^level ranks, if bit `level` of the number of ranks added so far is
    // set.
    let mut partial = vec![[T::Wide::default(); BLOCK]; levels + 1];
    for start in (0..own.len()).step_by(BLOCK) {
        let end = own.len().min(start + BLOCK);
        let len = end - start;
        let mut added = 0usize;
        for (source, weight) in weights.iter().enumerate() {
            let level = weight.ilog2() as usize;
            let merged = (added >> level).trailing_ones() as usize;
            let (complete, rest) = partial.split_at_mut(level + merged);
            let carry = &mut rest[0][..len];
            match source.cmp(&rank) {
                std::cmp::Ordering::Less => T::widen(&peers[source][start..end], carry),
                std::cmp::Ordering::Equal => T::widen(&own[start..end], carry),
                std::cmp::Ordering::Greater => T::widen(&peers[source - 1][start..end], carry),
            }
            for subtree in &complete[level..] {
                join::<T>(&subtree[..len], carry, &combine);
            }
            added += 1 << level;
        }
        let mut set = (0..=levels).filter(|level| added >> level & 1 == 1);
        let lowest = set.next().unwrap_or(0);
        let mut top = lowest;
        for level in set {
            let (lower, higher) = partial.split_at_mut(level);
            // The subtree of the higher level contains the lower ranks, so it is the left operand.
            for (left, right) in higher[0][..len].iter_mut().zip(&lower[top][..len]) {
                *left = combine(*left, *right);
            }
            top = level;
        }
        T::narrow(&partial[top][..len], &mut own[start..end]);
    }
}

/// Computes `carry = left + carry`.
#[inline(always)]
fn join<T: Element>(left: &[T::Wide], carry: &mut [T::Wide], combine: &impl Fn(T::Wide, T::Wide) -> T::Wide) {
    for (left, carry) in left.iter().zip(carry) {
        *carry = combine(*left, *carry);
    }
}

/// An element type, with the type in which its sums are computed.
trait Element: Pod {
    type Wide: Copy + Default;
    /// Combines two ranks, the most frequent case: `own` becomes own + peer, or peer + own.
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

// `half` converts f16 with the processor's instruction but bf16 one element at a time; the compiler vectorizes these
// two loops.

#[inline(always)]
fn widen_bf16(from: &[bf16], to: &mut [f32]) {
    for (from, to) in from.iter().zip(to) {
        *to = f32::from_bits(u32::from(from.to_bits()) << 16);
    }
}

/// Rounds to nearest, ties to even; a NaN stays a NaN.
#[inline(always)]
fn narrow_bf16(from: &[f32], to: &mut [bf16]) {
    for (from, to) in from.iter().zip(to) {
        let bits = from.to_bits();
        // A tie rounds up only if the kept half is odd. A carry from the mantissa into the exponent gives the correct
        // result: the next power of two, or infinity.
        let rounded = (bits.wrapping_add(0x7FFF + (bits >> 16 & 1))) >> 16;
        let quiet = bits >> 16 | 0x40;
        *to = bf16::from_bits(if bits & 0x7FFF_FFFF > 0x7F80_0000 { quiet } else { rounded } as u16);
    }
}

/// Returns the larger value, `right` if both are equal, and NaN if either is NaN.
#[inline(always)]
fn float_max(left: f32, right: f32) -> f32 {
    if left > right || left.is_nan() { left } else { right }
}

#[cfg(test)]
mod tests;
