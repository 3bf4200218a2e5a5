//! The reduction loops of the tree, compiled for 32-byte vectors.

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch, _mm_sfence, _mm256_loadu_ps, _mm256_stream_ps};

use super::Element;
use crate::buffers::copy::AHEAD;

/// Runs the portable loop, compiled with 32-byte vectors. Additions keep their order, so the result is
/// bit-identical.
#[target_feature(enable = "avx2")]
pub(super) fn fold<T: Element>(
    weights: &[usize],
    rank: usize,
    own: &mut [T],
    peers: &[&[T]],
    combine: impl Fn(T::Wide, T::Wide) -> T::Wide,
) {
    super::fold(weights, rank, own, peers, combine);
}

/// Number of elements per cache line.
const LINE: usize = 16;

/// Prefetches the lines of both operands one page ahead, because `both` and `stream` read them from memory.
#[target_feature(enable = "avx2")]
fn prefetch(left: *const f32, right: *const f32) {
    _mm_prefetch::<_MM_HINT_T0>(left.cast::<i8>().wrapping_add(AHEAD));
    _mm_prefetch::<_MM_HINT_T0>(right.cast::<i8>().wrapping_add(AHEAD));
}

/// Reduces the f32 values of two ranks and writes the result to both, in one pass.
#[target_feature(enable = "avx2")]
pub(super) fn both(left: &mut [f32], right: &mut [f32], combine: impl Fn(f32, f32) -> f32) {
    assert_eq!(left.len(), right.len());
    let (lines, last) = left.as_chunks_mut::<LINE>();
    let (right_lines, right_last) = right.as_chunks_mut::<LINE>();
    for (left, right) in lines.iter_mut().zip(right_lines) {
        prefetch(left.as_ptr(), right.as_ptr());
        let result: [f32; LINE] = std::array::from_fn(|i| combine(left[i], right[i]));
        (*left, *right) = (result, result);
    }
    for (left, right) in last.iter_mut().zip(right_last) {
        *left = combine(*left, *right);
        *right = *left;
    }
}

/// Reduces the f32 values of two ranks into memory that is not cached. Uses streaming stores, for the reasons given in
/// `copy`. The alternative, to reduce into the cache and copy the result from there, takes 1.5 times as long, because
/// the writes of the copy do not overlap with reads.
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
        prefetch(left.as_ptr(), right.as_ptr());
        let result: [f32; LINE] = std::array::from_fn(|i| combine(left[i], right[i]));
        let (from, to) = (result.as_ptr(), target.as_mut_ptr());
        #[allow(unsafe_code)]
        // SAFETY: `from` and `to` each point to a line of 16 floats, and `to` is 64-byte aligned.
        unsafe {
            _mm256_stream_ps(to, _mm256_loadu_ps(from));
            _mm256_stream_ps(to.add(LINE / 2), _mm256_loadu_ps(from.add(LINE / 2)));
        }
    }
    plain(last_left, last_right, last);
    // Streaming stores are not ordered with the ordinary stores that tell other threads that the data is ready.
    _mm_sfence();
}
