//! Kernels that are compiled for each instruction set, and sums whose order does not depend on it.

use std::hint::black_box;

/// Declares a kernel. The body is compiled once for each instruction set, and the caller passes an [`Isa`] first.
macro_rules! vectorised {
    ($(#[$attr:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$attr])*
        // Kernels take their slices as separate arguments; a struct would only repeat their names.
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

/// Number of elements of one AVX-512 register, or two of AVX2.
pub(crate) const LANES: usize = 16;

/// Computes `Σ term(row, x)` over the elements of each of `R` rows of equal length. Element `i` is added to lane `i
/// mod 16` of its row, and the lanes are added in a tree.
///
/// Several rows are summed at a time, because within one row each addition to a lane waits for the previous one.
macro_rules! sums_over {
    ($name:ident, $($slice:ident),+) => {
        #[inline(always)]
        pub(crate) fn $name<const R: usize>(
            $($slice: [&[f32]; R],)+
            term: impl Fn(usize, $(sums_over!(@f32 $slice)),+) -> f32,
        ) -> [f32; R] {
            let len = [$($slice[0].len()),+].into_iter().min().unwrap_or(0);
            $(let $slice = $slice.map(|row| row[..len].as_chunks::<LANES>());)+
            let mut lanes = [[0.0; LANES]; R];
            for at in 0..len / LANES {
                for row in 0..R {
                    for lane in 0..LANES {
                        lanes[row][lane] += term(row, $($slice[row].0[at][lane]),+);
                    }
                }
            }
            let mut totals = [0.0; R];
            for row in 0..R {
                if len % LANES > 0 {
                    let mut rest = [0.0; LANES];
                    for lane in 0..len % LANES {
                        rest[lane] = term(row, $($slice[row].1[lane]),+);
                    }
                    for lane in 0..LANES {
                        lanes[row][lane] += rest[lane];
                    }
                }
                totals[row] = tree(lanes[row], |a, b| a + b);
            }
            totals
        }
    };
    (@f32 $slice:ident) => { f32 };
}
sums_over!(sums1, a);
sums_over!(sums2, a, b);
sums_over!(sums3, a, b, c);

/// Returns the larger of two numbers; `a` if one is NaN.
#[inline(always)]
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// Returns the largest element. NaN is skipped, and an empty slice gives −∞.
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

/// Combines all lanes: repeatedly combines the upper half with the lower half, until one lane is left. Each of these
/// steps has its own loop: if a variable indexed the lanes, the compiler would keep them in memory.
#[inline(always)]
pub(crate) fn tree(lanes: [f32; LANES], combine: impl Fn(f32, f32) -> f32) -> f32 {
    tree_of_eight(upper_onto_lower(lanes, &combine), combine)
}

/// Does the same as [`tree`] in half as many instructions, for kernels that spend much of their time on the trees of
/// short rows. `black_box` keeps eight lanes together. Otherwise the compiler computes every step in registers of two
/// lanes.
#[inline(always)]
pub(crate) fn short_tree(lanes: [f32; LANES], combine: impl Fn(f32, f32) -> f32) -> f32 {
    tree_of_eight(black_box(upper_onto_lower(lanes, &combine)), combine)
}

#[inline(always)]
fn upper_onto_lower(lanes: [f32; LANES], combine: impl Fn(f32, f32) -> f32) -> [f32; 8] {
    let mut eight = [0f32; 8];
    for lane in 0..8 {
        eight[lane] = combine(lanes[lane], lanes[lane + 8]);
    }
    eight
}

#[inline(always)]
fn tree_of_eight(eight: [f32; 8], combine: impl Fn(f32, f32) -> f32) -> f32 {
    let mut four = [0f32; 4];
    for lane in 0..4 {
        four[lane] = combine(eight[lane], eight[lane + 4]);
    }
    combine(combine(four[0], four[2]), combine(four[1], four[3]))
}
