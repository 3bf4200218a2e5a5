//! Kernels that are compiled for each instruction set, and sums whose order does not depend on the choice.

/// Declares a kernel: the body is compiled once for each instruction set, and the caller passes an [`Isa`] first.
macro_rules! vectorised {
    ($(#[$attr:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$attr])*
        // A kernel takes its slices one by one; a struct of them would only be a second list of names.
        #[allow(clippy::too_many_arguments)]
        pub(crate) fn $name(isa: zero_isa::Isa, $($arg: $ty),*) $(-> $ret)? {
                        #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn generic($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                generic($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn avx512($($arg: $ty),*) $(-> $ret)? {
                generic($($arg),*)
            }
            match isa.vectors() {
                // SAFETY: an `Isa` with these vectors exists only after their features were detected.
                #[cfg(target_arch = "x86_64")]
                zero_isa::Vectors::Avx2 => unsafe { avx2($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                zero_isa::Vectors::Avx512 => unsafe { avx512($($arg),*) },
                // NEON is in the baseline of aarch64.
                _ => generic($($arg),*),
            }
        }
    };
}
pub(crate) use vectorised;

/// One AVX-512 register, two of AVX2.
pub(crate) const LANES: usize = 16;

/// `Σ f(i)` over the elements of slices of one length: element `i` is added to lane `i mod 16`, and the lanes are
/// added in a tree.
macro_rules! sum_over {
    ($name:ident, $($slice:ident),+) => {
        #[inline(always)]
        pub(crate) fn $name($($slice: &[f32],)+ term: impl Fn($(sum_over!(@f32 $slice)),+) -> f32) -> f32 {
            let mut lanes = [0f32; LANES];
            let len = [$($slice.len()),+].into_iter().min().unwrap_or(0);
            let whole = len / LANES * LANES;
            let mut at = 0;
            while at < whole {
                $(let $slice = &$slice[at..at + LANES];)+
                for lane in 0..LANES {
                    lanes[lane] += term($($slice[lane]),+);
                }
                at += LANES;
            }
            let mut rest = [0f32; LANES];
            for lane in 0..len - whole {
                rest[lane] = term($($slice[whole + lane]),+);
            }
            for lane in 0..LANES {
                lanes[lane] += rest[lane];
            }
            tree(lanes, |a, b| a + b)
        }
    };
    (@f32 $slice:ident) => { f32 };
}
sum_over!(sum1, a);
sum_over!(sum2, a, b);
sum_over!(sum3, a, b, c);

/// The larger of two; `a` if one is NaN.
#[inline(always)]
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// The largest element; NaN is passed over, and an empty slice gives -∞.
#[inline(always)]
pub(crate) fn max(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (whole, tail) = values.as_chunks::<LANES>();
    for chunk in whole {
        for lane in 0..LANES {
            lanes[lane] = larger(lanes[lane], chunk[lane]);
        }
    }
    let mut rest = [f32::NEG_INFINITY; LANES];
    rest[..tail.len()].copy_from_slice(tail);
    for lane in 0..LANES {
        lanes[lane] = larger(lanes[lane], rest[lane]);
    }
    tree(lanes, larger)
}

/// All lanes as one: the upper half onto the lower, until one is left. What is indexed by a variable the compiler keeps in
/// memory, here as in the loops above, so each half is a loop of its own.
#[inline(always)]
pub(crate) fn tree(lanes: [f32; LANES], combine: impl Fn(f32, f32) -> f32) -> f32 {
    let mut eight = [0f32; 8];
    for lane in 0..8 {
        eight[lane] = combine(lanes[lane], lanes[lane + 8]);
    }
    let mut four = [0f32; 4];
    for lane in 0..4 {
        four[lane] = combine(eight[lane], eight[lane + 4]);
    }
    combine(combine(four[0], four[2]), combine(four[1], four[3]))
}
