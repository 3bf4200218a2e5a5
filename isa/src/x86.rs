//! Detects instruction sets on x86-64.

#![allow(unsafe_code)]

use std::sync::LazyLock;

pub(crate) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

pub(crate) fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

/// Whether this process may use AMX's bf16 tiles: the processor supports them, and the operating system granted
/// permission to use their registers.
pub(crate) fn has_amx() -> bool {
    static GRANTED: LazyLock<bool> = LazyLock::new(|| {
        use std::arch::x86_64::{__cpuid, __cpuid_count};
        const BF16: u32 = 1 << 22;
        const TILES: u32 = 1 << 24;
        __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & (BF16 | TILES) == BF16 | TILES && granted()
    });
    *GRANTED
}

#[cfg(target_os = "linux")]
fn granted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: the call asks the kernel to save a larger register state for this process's threads, and changes nothing
    // else.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn granted() -> bool {
    false
}
