//! Copies of what is larger than a cache: past the cache, as the rest of the vector will drive it out anyway.
//!
//! An ordinary store reads the line that it is about to overwrite; a streaming store does not, which saves a third of the
//! traffic. What it writes must come from memory again, though, so small vectors are better off with ordinary ones: copying and
//! then reading a vector once, the two are equal at 1 MiB, and at 4 MiB the streaming copy takes 0.85 of the time.
#![allow(unsafe_code)]

/// Vectors of at least so many bytes are written past the cache.
#[cfg(any(test, target_arch = "x86_64"))]
pub(crate) const LARGE: usize = 2 << 20;

/// How far ahead to ask for what is read, in bytes: a page, because the processor's own prefetching ends with each.
#[cfg(target_arch = "x86_64")]
pub(crate) const AHEAD: usize = 4096;

/// Copies `from` to `to`, as a part of writing a vector of `whole` bytes.
///
/// # Panics
/// If they differ in length.
pub fn copy(from: &[u8], to: &mut [u8], whole: usize) {
    #[cfg(target_arch = "x86_64")]
    if whole >= LARGE && is_x86_feature_detected!("avx") {
        // SAFETY: AVX was just found on this machine.
        return unsafe { avx::copy(from, to) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = whole;
    to.copy_from_slice(from);
}

#[cfg(target_arch = "x86_64")]
mod avx {
    use std::arch::x86_64::{__m256i, _MM_HINT_T0, _mm_prefetch, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};

    use super::AHEAD;

    /// A cache line, which is written as a whole or costs double.
    const LINE: usize = 64;
    #[target_feature(enable = "avx")]
    pub(super) fn copy(from: &[u8], to: &mut [u8]) {
        assert_eq!(from.len(), to.len());
        let head = to.as_ptr().align_offset(LINE).min(to.len());
        let (first, to) = to.split_at_mut(head);
        first.copy_from_slice(&from[..head]);
        let (from, last_from) = from[head..].as_chunks::<LINE>();
        let (to, last_to) = to.as_chunks_mut::<LINE>();
        for (from, to) in from.iter().zip(to) {
            let (from, to) = (from.as_ptr().cast::<__m256i>(), to.as_mut_ptr().cast::<__m256i>());
            // SAFETY: each is a line of 64 bytes, `to` an aligned one. A prefetch may have any address.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(from.cast::<i8>().wrapping_add(AHEAD));
                let (low, high) = (_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1)));
                _mm256_stream_si256(to, low);
                _mm256_stream_si256(to.add(1), high);
            }
        }
        last_to.copy_from_slice(last_from);
        // Streaming stores are not ordered with those that tell others that this is done.
        _mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_length_at_any_alignment_arrives_and_nothing_else_changes() {
        let source: Vec<u8> = (0..1000u32).map(|i| (i * 7 + i / 256) as u8).collect();
        for whole in [0, LARGE] {
            for length in (0..200).chain([500, 700]) {
                for (from, to) in [(0, 0), (1, 0), (0, 1), (33, 31), (64, 63)] {
                    let mut target = vec![255; 1000];
                    copy(&source[from..from + length], &mut target[to..to + length], whole);
                    assert_eq!(target[to..to + length], source[from..from + length]);
                    let mut around = target[..to].iter().chain(&target[to + length..]);
                    assert!(around.all(|byte| *byte == 255));
                }
            }
        }
    }
}
