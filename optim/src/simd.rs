//! One source, several instruction sets.
//!
//! A [`Kernel`] is ordinary scalar Rust. [`Level::run`] inlines it into functions compiled with AVX-512 or with AVX2
//! and FMA, where the compiler vectorises the loop. It may neither reassociate nor contract floating point, and
//! addition, multiplication, fused multiply-add, division and square root are exactly rounded in every width, so the
//! three versions agree to the bit by construction, with no intrinsics to keep in step. The benchmark says whether the
//! vectors are there.
//!
//! The only `unsafe` of this crate is here: calling a function whose features were detected just before, and a
//! prefetch.

#![allow(unsafe_code)]

/// Work that is compiled once per instruction set. `run` must be `#[inline(always)]`, with all that it calls in its
/// loops, or it is compiled without the features.
pub(crate) trait Kernel {
    type Output;
    fn run(self) -> Self::Output;
}

/// An instruction set. Values other than `Scalar` come only from [`Level::available`], which has checked them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    /// What the target's baseline has. On x86-64 a fused multiply-add is then a call into the C library.
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2(Detected),
    #[cfg(target_arch = "x86_64")]
    Avx512(Detected),
}

/// Proof of detection: only this module makes one.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Detected(());

impl Level {
    /// The widest one that this processor has.
    pub(crate) fn detect() -> Level {
        Self::avx512().or_else(Self::avx2).unwrap_or(Level::Scalar)
    }

    /// All that this processor has.
    #[cfg(test)]
    pub(crate) fn available() -> Vec<Level> {
        [Some(Level::Scalar), Self::avx2(), Self::avx512()].into_iter().flatten().collect()
    }

    #[cfg(target_arch = "x86_64")]
    fn avx512() -> Option<Level> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("fma");
        found.then_some(Level::Avx512(Detected(())))
    }

    #[cfg(target_arch = "x86_64")]
    fn avx2() -> Option<Level> {
        let found = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        found.then_some(Level::Avx2(Detected(())))
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn avx512() -> Option<Level> {
        None
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn avx2() -> Option<Level> {
        None
    }

    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            Level::Scalar => kernel.run(),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `Detected` exists only after `avx2` found these features.
            Level::Avx2(_) => unsafe { run_avx2(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `Detected` exists only after `avx512` found these features.
            Level::Avx512(_) => unsafe { run_avx512(kernel) },
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}

/// f32 elements of a cache line, which is also one AVX-512 register.
pub(crate) const LINE: usize = 16;

/// Asks the memory for the line that starts `ahead` elements after this one. Only a hint: where that is beyond the
/// slice, nothing happens.
#[inline(always)]
pub(crate) fn prefetch(line: &[f32; LINE], ahead: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing and faults at no address; SSE is in x86-64's baseline.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().wrapping_add(ahead).cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (line, ahead);
}
