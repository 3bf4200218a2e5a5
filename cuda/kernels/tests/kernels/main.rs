//! The kernels on an emulated device, against the same in f64 or the CPU's bits. Skipped where there is no C++ compiler.
#![allow(unsafe_code)]

mod attention;
mod cross_entropy;
mod elementwise;
mod embedding;
mod norm;
mod optimizer;

use std::path::Path;

use zero_kernels::emulated::{Compiled, Emulator, Memory, ORDERS};
use zero_kernels::{Dtype, Launch, Source};

/// A device whose threads run in one order.
struct Device<'a> {
    emulator: &'a Emulator,
    order: u32,
}

impl Device<'_> {
    /// Runs a launch whose addresses are those of memory that the test holds.
    fn run<A>(&self, launch: &Launch<A>) {
        // SAFETY: every test makes the memory of its launches in front of them, in the sizes that the launch's documentation says.
        unsafe { self.emulator.run(launch, self.order) }.unwrap();
    }
}

/// What `test` gives on the device: the same for every order of threads.
fn on_device<R: PartialEq + std::fmt::Debug>(test: impl Fn(&Device<'_>) -> R) -> Option<R> {
    let emulator = Emulator::shared()?;
    let mut results = ORDERS.map(|order| test(&Device { emulator, order })).into_iter();
    let first = results.next().unwrap();
    for (order, other) in results.enumerate() {
        assert!(first == other, "a race: order {} of threads gives other results", order + 1);
    }
    Some(first)
}

/// Numbers without a pattern, in −1..1.
fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
    let mut next = || {
        state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
        let word = ((state >> ((state >> 28) + 4)) ^ state).wrapping_mul(277_803_737);
        ((word >> 22) ^ word) as f32 / 2f32.powi(31) - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// The numbers as they are after rounding to a type.
fn rounded(dtype: Dtype, values: &[f32]) -> Vec<f32> {
    Memory::floats(dtype, values).to_floats(dtype)
}

/// Units in the last place of a type, relative.
fn epsilon(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => 2f64.powi(-23),
        Dtype::Bf16 => 2f64.powi(-8),
        Dtype::F16 => 2f64.powi(-11),
    }
}

/// Every number within `units` of the type's, or of `scale`, of what is expected.
fn assert_near(what: &str, dtype: Dtype, got: &[f32], want: &[f64], units: f64, scale: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got) - want).abs();
        let bound = units * (epsilon(dtype) * want.abs() + epsilon(Dtype::F32) * scale);
        assert!(error <= bound, "{what} {dtype:?}[{i}]: {got} for {want}: {error:e} over {bound:e}");
    }
}

/// A launch of `tests/emulated/faulty.cu`.
fn faulty<A>(entry: &str, args: A) -> Launch<A> {
    let (source, entry) = (Source::Norm, format!("faulty_{entry}"));
    Launch { source, entry, grid: [1, 1, 1], threads: 64, shared_bytes: 64 * 4, args }
}

/// The emulator finds what it is there to find.
#[test]
fn faults_are_found() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emulated/faulty.cu");
    let Some(kernels) = Compiled::new(&file).unwrap() else { return };
    let results = ORDERS.map(|order| {
        let mut out = Memory::floats(Dtype::F32, &[0.0; 64]);
        // SAFETY: the kernels of this file write at most a float for each of their threads.
        let ended = ["race", "divergence", "overrun"].map(|kernel| unsafe {
            let launch = faulty(kernel, out.address());
            kernels.run(&launch, order)
        });
        assert_eq!(ended[0], Ok(()));
        assert_eq!(ended[1], Err("faulty_divergence: threads of a block wait for what cannot come".into()));
        assert_eq!(ended[2], Err("faulty_overrun: a write beyond the shared memory".into()));
        out.to_floats(Dtype::F32).iter().map(|x| x.to_bits()).collect::<Vec<_>>()
    });
    assert!(results.iter().any(|result| *result != results[0]), "the race was not seen");
    // What was never written is NaN: the first thread in the first order reads what the second one has yet to write.
    assert!(f32::from_bits(results[0][0]).is_nan());
    let mut memory = Memory::floats(Dtype::F32, &[1.0; 64]);
    // SAFETY: both kernels read 64 floats, and write at most the first.
    let [hasty, early, odd] =
        ["hasty", "early", "odd"].map(|kernel| unsafe { kernels.run(&faulty(kernel, memory.address()), 0) });
    assert_eq!(hasty, Err("faulty_hasty: a thread ends before its copies".into()));
    assert_eq!(early, Ok(()));
    assert!(memory.to_floats(Dtype::F32)[0].is_nan(), "a copy was there before it was waited for");
    assert_eq!(odd, Err("faulty_odd: a row of a matrix that does not begin at a multiple of 16 bytes".into()));
    let mut memory = Memory::floats(Dtype::F32, &[1.0]);
    let launch = faulty("beyond", memory.address());
    // SAFETY: the kernel writes into the sentinels behind the float.
    unsafe { kernels.run(&launch, 0) }.unwrap();
    assert!(std::panic::catch_unwind(|| memory.bytes()).is_err(), "a write beyond the ends was not seen");
    // SAFETY: nothing runs with arguments of another size, or more threads than the kernel is made for.
    let refused = |launch: Launch<u64>| unsafe { kernels.run(&launch, 0) }.unwrap_err();
    assert_eq!(
        refused(Launch { threads: 128, ..launch }),
        "faulty_beyond: more threads than the kernel is compiled for"
    );
    // SAFETY: as above.
    let error = unsafe { kernels.run(&faulty("beyond", 1u32), 0) }.unwrap_err();
    assert_eq!(error, "faulty_beyond: arguments of another size");
}
