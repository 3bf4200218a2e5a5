//! Tiles in AVX2, AVX-512 and AVX512_BF16 registers.

use super::{COLUMNS, MOST_ROWS, Tile, prefetch};
use std::arch::x86_64::*;

tile! {
    /// # Safety
    /// The requirements of [`Tile::compute`] apply.
    compute_avx2, avx2, "avx2,fma", ymm, rows: [6, 4, 2, 1], vectors: 1 | 2,
    |element, row, sum| _mm256_fmadd_ps(element, row, sum)
}

tile! {
    /// # Safety
    /// The requirements of [`Tile::compute`] apply.
    compute_avx512, avx512, "avx512f", zmm, rows: [8, 4, 2, 1], vectors: 1 2 | 3,
    |element, row, sum| _mm512_fmadd_ps(element, row, sum)
}

tile! {
    /// # Safety
    /// The requirements of [`Tile::compute_pairs`] apply.
    compute_avx512_bf16, avx512_bf16, "avx512f,avx512bf16", zmm, rows: [8, 4, 2, 1], vectors: 1 2 | 3,
    |element, row, sum| _mm512_dpbf16_ps(sum, pairs(element), pairs(row))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn pairs(words: __m512) -> __m512bh {
    // SAFETY: both types have 512 bits, and any bits are valid.
    unsafe { std::mem::transmute(words) }
}

/// Eight f32. A part of a register is its first elements.
mod ymm {
    use std::arch::x86_64::*;
    pub(super) use std::arch::x86_64::{
        _mm256_loadu_ps as load, _mm256_set1_ps as splat, _mm256_setzero_ps as zero, _mm256_storeu_ps as store,
    };

    pub(super) const LANES: usize = 8;
    pub(super) const STEPS: usize = 4;
    pub(super) const ADDRESSED: usize = 3;
    /// No prefetch is needed: the right operand is in the first-level cache.
    pub(super) const AHEAD: Option<usize> = None;

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn mask(count: usize) -> __m256i {
        _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
    }

    /// # Safety
    /// `count` elements must be readable.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn load_part(from: *const f32, count: usize) -> __m256 {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm256_maskload_ps(from, mask(count)) }
    }

    /// On some processors (AMD's Zen 2 and 3) this takes as long as ten stores of whole registers.
    ///
    /// # Safety
    /// `count` elements must be writable.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn store_part(to: *mut f32, count: usize, part: __m256) {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm256_maskstore_ps(to, mask(count), part) }
    }
}

/// Sixteen f32. A part of a register is its first elements.
mod zmm {
    use std::arch::x86_64::*;
    pub(super) use std::arch::x86_64::{
        _mm512_loadu_ps as load, _mm512_set1_ps as splat, _mm512_setzero_ps as zero, _mm512_storeu_ps as store,
    };

    pub(super) const LANES: usize = 16;
    pub(super) const STEPS: usize = 4;
    pub(super) const ADDRESSED: usize = 3;
    /// How many steps before its use a row of the right operand is prefetched from the second-level cache.
    pub(super) const AHEAD: Option<usize> = Some(8);

    /// # Safety
    /// `count` elements must be readable.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn load_part(from: *const f32, count: usize) -> __m512 {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm512_maskz_loadu_ps(0xffff >> (LANES - count), from) }
    }

    /// # Safety
    /// `count` elements must be writable.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn store_part(to: *mut f32, count: usize, part: __m512) {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm512_mask_storeu_ps(to, 0xffff >> (LANES - count), part) }
    }
}
