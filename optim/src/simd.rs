//! Compiles one source for several instruction sets.
//!
//! A [`Kernel`] is ordinary scalar Rust. [`run`] inlines it into functions compiled with AVX-512 or with AVX2 and FMA,
//! where the compiler vectorizes the loop. The compiler may neither reassociate nor contract floating-point operations,
//! and addition, multiplication, fused multiply-add, division and square root are correctly rounded at every vector
//! width. So all versions are bit-identical by construction, and there are no intrinsics to keep in sync. The benchmark
//! `bench optimizers` shows whether the compiler vectorized the loops.
//!
//! This module holds all `unsafe` code of the crate: calls of functions whose features have been detected, and a
//! prefetch.

#![allow(unsafe_code)]

use zero_isa::Isa;

/// Work that is compiled once per instruction set. `run` and all functions that its loops call must be
/// `#[inline(always)]`; otherwise they are compiled without the features.
pub(crate) trait Kernel {
    type Output;
    fn run(self) -> Self::Output;
}

/// Runs a kernel on an instruction set.
#[inline]
pub(crate) fn run<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    match isa.vectors() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` with these vectors exists only after their features were detected.
        zero_isa::Vectors::Avx2 => unsafe { run_avx2(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        zero_isa::Vectors::Avx512 => unsafe { run_avx512(kernel) },
        // aarch64's baseline includes NEON.
        _ => kernel.run(),
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

/// Prefetches the line that starts `ahead` elements after this one. This is only a hint: beyond the end of the slice it
/// has no effect.
#[inline(always)]
pub(crate) fn prefetch<T>(line: &[T; LINE], ahead: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads no memory and faults at no address; SSE is in x86-64's baseline.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().wrapping_add(ahead).cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (line, ahead);
}
