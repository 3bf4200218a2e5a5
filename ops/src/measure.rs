//! Measures the time of a thread's operations, for the profile of a training step and for `zero-train bench ops`.
//!
//! Operations open a scope, which only checks a thread-local flag unless [`start`] has set it. If scopes are nested,
//! only the outermost counts: attention's own products count as attention. The work of other threads for an operation
//! is included in its caller's time. For comparison, this module also measures the peak speed of the hardware, with the
//! instructions that the operations use.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use candle_core::DType;

use crate::kernel::Isa;
#[cfg(target_arch = "x86_64")]
use crate::product::Bf16Units;
use zero_isa::Vectors;

/// The measured time of one kind of operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// The name of the operation; for a product, the layouts of its operands (`NT`: the right operand is transposed).
    pub operation: String,
    /// Rows, columns and inner dimension of a product.
    pub shape: Option<[usize; 3]>,
    /// Number of calls.
    pub calls: u64,
    /// Total time of all calls.
    pub time: Duration,
    /// Multiply-accumulates of all calls.
    pub macs: u64,
    /// Whether the operation belongs to the optimizer step, and not to a forward or a backward.
    pub is_update: bool,
}

impl Measured {
    /// Returns the floating-point operations of all calls, if this is a product or consists of products.
    #[must_use]
    pub fn flops(&self) -> Option<f64> {
        (self.shape.is_some() || self.is_update).then_some(2.0 * self.macs as f64)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Forward(&'static str),
    Backward(&'static str),
    /// Which operands are transposed; rows, columns and inner dimension.
    Product([bool; 2], [usize; 3]),
    /// Work of an optimizer on a matrix with these numbers of rows and columns.
    Update(&'static str, [usize; 2]),
}

impl Kind {
    fn measured(self, Sum { calls, time, macs }: Sum) -> Measured {
        let (operation, shape) = match self {
            Self::Forward(name) => (name.to_string(), None),
            Self::Backward(name) => (format!("{name} backward"), None),
            Self::Product(transposed, shape) => {
                let letters = transposed.map(|transposed| if transposed { 'T' } else { 'N' });
                (letters.iter().collect(), Some(shape))
            }
            Self::Update(name, [rows, columns]) => (format!("{name} {rows} x {columns}"), None),
        };
        Measured { operation, shape, calls, time, macs, is_update: matches!(self, Self::Update(..)) }
    }
}

/// The measurements of one kind of operation.
#[derive(Clone, Copy, Default)]
struct Sum {
    calls: u64,
    time: Duration,
    macs: u64,
}

thread_local! {
    static MACS: Cell<u64> = const { Cell::new(0) };
    static ON: Cell<bool> = const { Cell::new(false) };
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    static LOG: RefCell<BTreeMap<Kind, Sum>> = const { RefCell::new(BTreeMap::new()) };
}

/// Starts to measure the operations of this thread.
pub fn start() {
    LOG.with_borrow_mut(BTreeMap::clear);
    ON.set(true);
}

/// Stops measuring and returns the results, the longest time first.
pub fn finish() -> Vec<Measured> {
    ON.set(false);
    let mut all: Vec<Measured> = LOG.take().into_iter().map(|(kind, sum)| kind.measured(sum)).collect();
    all.sort_by_key(|one| std::cmp::Reverse(one.time));
    all
}

/// A running operation.
#[must_use = "a scope that is dropped at once measures nothing"]
pub(crate) struct Scope(Option<(Kind, Instant, u64)>);

/// Measures the forward of an operation until the scope is dropped.
pub(crate) fn forward(name: &'static str) -> Scope {
    open(Kind::Forward(name))
}

/// Measures the backward of an operation.
pub(crate) fn backward(name: &'static str) -> Scope {
    open(Kind::Backward(name))
}

/// Measures a product, given which of its operands are transposed.
pub(crate) fn product(transposed: [bool; 2], rows: usize, columns: usize, inner: usize) -> Scope {
    let scope = open(Kind::Product(transposed, [rows, columns, inner]));
    count_macs((rows * columns) as u64 * inner as u64);
    scope
}

/// Measures the work of an optimizer on a matrix.
pub(crate) fn update(name: &'static str, shape: [usize; 2]) -> Scope {
    open(Kind::Update(name, shape))
}

/// Returns the multiply-accumulates of the products in this thread's operations so far, including those launched on a
/// GPU and those inside other operations, whether [measured](start) or not. A product of m × k by k × n counts mnk;
/// attention counts only positions that are not masked.
#[must_use]
pub fn macs() -> u64 {
    MACS.get()
}

/// Adds the multiply-accumulates of an operation of this thread.
pub(crate) fn count_macs(macs: u64) {
    MACS.set(MACS.get().wrapping_add(macs));
}

fn open(kind: Kind) -> Scope {
    let counts = ON.get() && !INSIDE.replace(ON.get());
    Scope(counts.then(|| (kind, Instant::now(), macs())))
}

impl Drop for Scope {
    fn drop(&mut self) {
        if let Some((kind, started, before)) = self.0.take() {
            let (time, done) = (started.elapsed(), macs().wrapping_sub(before));
            INSIDE.set(false);
            LOG.with_borrow_mut(|log| {
                let Sum { calls, time: total, macs } = log.entry(kind).or_default();
                *calls += 1;
                *total += time;
                *macs += done;
            });
        }
    }
}

/// Measures the peak FLOP/s of one thread that only multiplies and adds in registers, with the instructions that
/// products of this dtype use. Takes some milliseconds.
#[must_use]
pub fn peak_flops(dtype: DType) -> f64 {
    let (runs, rounds) = (5, 40_000);
    let mut rates: Vec<f64> = (0..runs)
        .map(|_| {
            let started = Instant::now();
            register_flops(dtype, rounds) / started.elapsed().as_secs_f64()
        })
        .collect();
    rates.sort_by(f64::total_cmp);
    rates[runs / 2]
}

/// Independent chains of multiply-adds: more than are needed to hide the latency of each.
const CHAINS: usize = 12;

/// Runs multiply-adds in registers, with the instructions that products of this dtype use. Returns the number of
/// floating-point operations.
pub fn register_flops(dtype: DType, rounds: usize) -> f64 {
    let factor = std::hint::black_box(0.999_9);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = dtype;
    #[cfg(target_arch = "x86_64")]
    match Bf16Units::best() {
        Bf16Units::Squares if dtype == DType::BF16 => return crate::product::squares_in_registers(rounds),
        Bf16Units::Pairs if dtype == DType::BF16 => {
            // SAFETY: pairs are chosen only if the processor supports them.
            std::hint::black_box(unsafe { x86::chains_of_pairs(rounds, factor) });
            return 2.0 * (rounds * CHAINS * 32) as f64;
        }
        _ => {}
    }
    let (sum, lanes) = match Isa::current().vectors() {
        // SAFETY: an `Isa` with these vectors exists only after their features were detected.
        #[cfg(target_arch = "x86_64")]
        Vectors::Avx2 => (unsafe { x86::chains_of_8(rounds, factor) }, 8),
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Vectors::Avx512 => (unsafe { x86::chains_of_16(rounds, factor) }, 16),
        // SAFETY: NEON is in the baseline of aarch64.
        #[cfg(target_arch = "aarch64")]
        Vectors::Neon => (unsafe { neon_chains_of_4(rounds, factor) }, 4),
        Vectors::Baseline => (chains(rounds, factor), 1),
    };
    std::hint::black_box(sum);
    2.0 * (rounds * CHAINS * lanes) as f64
}

fn chains(rounds: usize, factor: f32) -> f32 {
    let mut sums = [1f32; CHAINS];
    for _ in 0..rounds {
        sums.iter_mut().for_each(|sum| *sum = *sum * factor + factor);
    }
    sums.iter().sum()
}

/// # Safety
/// The processor must have NEON.
#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
unsafe fn neon_chains_of_4(rounds: usize, factor: f32) -> f32 {
    use std::arch::aarch64::*;
    let factor = vdupq_n_f32(factor);
    let mut sums = [vdupq_n_f32(1.0); CHAINS];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = vfmaq_f32(factor, *sum, factor);
        }
    }
    sums.into_iter().map(|sum| vgetq_lane_f32::<0>(sum)).sum()
}

/// Uses intrinsics, because the compiler would otherwise keep this many sums in memory.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::CHAINS;
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2,fma")]
    pub(crate) fn chains_of_8(rounds: usize, factor: f32) -> f32 {
        let factor = _mm256_set1_ps(factor);
        let mut sums = [_mm256_set1_ps(1.0); CHAINS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, factor, factor);
            }
        }
        sums.into_iter().map(|sum| _mm256_cvtss_f32(sum)).sum()
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(crate) fn chains_of_pairs(rounds: usize, factor: f32) -> f32 {
        let factor = _mm512_cvtne2ps_pbh(_mm512_set1_ps(factor), _mm512_set1_ps(factor));
        let mut sums = [_mm512_set1_ps(1.0); CHAINS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, factor, factor);
            }
        }
        sums.into_iter().map(|sum| _mm512_cvtss_f32(sum)).sum()
    }

    #[target_feature(enable = "avx512f")]
    pub(crate) fn chains_of_16(rounds: usize, factor: f32) -> f32 {
        let factor = _mm512_set1_ps(factor);
        let mut sums = [_mm512_set1_ps(1.0); CHAINS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, factor, factor);
            }
        }
        sums.into_iter().map(|sum| _mm512_cvtss_f32(sum)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_only_outermost_scopes_while_measuring() {
        drop(forward("before"));
        start();
        for _ in 0..3 {
            let _outer = backward("outer");
            drop(product([false, true], 1, 2, 3));
        }
        drop(product([false, true], 4, 5, 6));
        std::thread::spawn(|| drop(forward("another thread"))).join().expect("the thread does not panic");
        let mut all = finish();
        drop(forward("after"));
        all.sort_by_key(|one| one.calls);
        let seen: Vec<_> = all.iter().map(|one| (one.operation.as_str(), one.calls, one.flops())).collect();
        assert_eq!(seen, [("NT", 1, Some(240.0)), ("outer backward", 3, None)]);
        start();
        assert_eq!(finish(), []);
    }

    #[test]
    fn multiply_accumulates_inside_operations_count() {
        let before = macs();
        drop(product([false, true], 4, 5, 6));
        let outer = forward("outer");
        drop(product([false, true], 1, 2, 3));
        drop(outer);
        assert_eq!(macs() - before, 126);
    }

    #[test]
    fn flops_are_proportional_to_rounds() {
        for dtype in [DType::F32, DType::BF16] {
            let one = register_flops(dtype, 1);
            assert!(one >= 24.0 && register_flops(dtype, 10) == 10.0 * one);
        }
    }
}
