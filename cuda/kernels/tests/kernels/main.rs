//! The kernels against the same in f64 or the CPU's bits: on an emulated device, and with feature `cuda` through the driver on a card
//! (`tests/card`). Skipped where there is no C++ compiler.
//!
//! A case is a closure for [`on_device`]: it makes [`Memory`], launches with [`Device::run`], and returns what the kernels wrote, which must
//! be the same in every run. Results go to memory that is [`Memory::unwritten`] before, and are compared outside of the closure. Inputs
//! are [`numbers`].
#![allow(unsafe_code)]

mod attention;
#[cfg(feature = "cuda")]
#[path = "../card/mod.rs"]
mod card;
mod cross_entropy;
mod elementwise;
mod embedding;
mod gradient_norm;
mod memory;
mod norm;
mod optimizer;
mod packs;

use std::env;
use std::fmt::Debug;
use std::io::Write;
use std::path::Path;
use std::sync::OnceLock;

use memory::{Device, Memory};
use zero_kernels::emulated::{self, Compiled, Emulator, ORDERS};
use zero_kernels::{Dtype, Launch, Source};

/// What a case gives, the same for every order of threads on the emulator, and each time on a card. With a card the emulator runs one order
/// and the mock, of which each launch has another, the rest; a GPU is asked alone, as it may have no compiler beside it.
fn on_device<R: PartialEq + Debug>(case: impl Fn(&Device) -> R) -> Option<R> {
    let mut results = vec![];
    if !is_gpu() {
        let emulator = Emulator::shared()?;
        let run = |order| (format!("order {order} of threads"), case(&Device::Emulated { emulator, order }));
        let orders = if cfg!(feature = "cuda") { &ORDERS[..1] } else { &ORDERS };
        results.extend(orders.iter().copied().map(run));
    }
    #[cfg(feature = "cuda")]
    if let Some(card) = card::Card::shared() {
        let run =
            |time| (format!("run {time} on the card"), memory::Seat::taken(card, |seat| case(&Device::Card(seat))));
        results.extend([1, 2].map(run));
    }
    let mut results = results.into_iter();
    let (first, result) = results.next()?;
    for (other, differing) in results {
        assert!(differing == result, "a race: {other} gives other results than {first}");
    }
    Some(result)
}

/// Whether cases run on a GPU.
fn is_gpu() -> bool {
    cfg!(feature = "cuda") && env::var_os("ZERO_TRAIN_CUDA_TESTS").is_some()
}

/// What `ZERO_TRAIN_TEST_SEED` says: other inputs for all tests. 0 if it is not set.
fn test_seed() -> u32 {
    static SEED: OnceLock<u32> = OnceLock::new();
    *SEED.get_or_init(|| {
        let Ok(text) = env::var("ZERO_TRAIN_TEST_SEED") else { return 0 };
        let seed = text.parse().unwrap_or_else(|_| panic!("ZERO_TRAIN_TEST_SEED: a number below 2³², not {text}"));
        // Whatever tests keep to themselves.
        writeln!(std::io::stderr(), "ZERO_TRAIN_TEST_SEED={seed}").expect("somebody reads it");
        seed
    })
}

/// Numbers without a pattern, in −1..1: others for each seed, and for each of the test's.
fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let seed = seed.wrapping_add(test_seed().wrapping_mul(0x9e37_79b9));
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
    emulated::Memory::floats(dtype, values).to_floats(dtype)
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

/// Memory of the emulator is none of a card's.
#[test]
fn cases_make_memory_where_they_run() {
    if is_gpu() {
        return;
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    for file in files.filter(|file| !["main.rs", "memory.rs"].iter().any(|name| file.ends_with(name))) {
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(!text.contains("emulated::"), "{}: cases take crate::Memory", file.display());
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
    if is_gpu() {
        return;
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emulated/faulty.cu");
    let Some(kernels) = Compiled::new(&file).unwrap() else { return };
    let results = ORDERS.map(|order| {
        let mut out = emulated::Memory::floats(Dtype::F32, &[0.0; 64]);
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
    let mut memory = emulated::Memory::floats(Dtype::F32, &[1.0; 64]);
    // SAFETY: the kernels read 64 floats, and write at most the first five.
    let [hasty, early, odd, read, written] = ["hasty", "early", "odd", "read_askew", "written_askew"]
        .map(|kernel| unsafe { kernels.run(&faulty(kernel, memory.address()), 0) });
    assert_eq!(hasty, Err("faulty_hasty: a thread ends before its copies".into()));
    assert_eq!(early, Ok(()));
    assert!(memory.to_floats(Dtype::F32)[0].is_nan(), "a copy was there before it was waited for");
    assert_eq!(odd, Err("faulty_odd: a row of a matrix that does not begin at a multiple of 16 bytes".into()));
    let askew = "an access of 16 bytes that does not begin at a multiple";
    assert_eq!([read, written], ["read", "written"].map(|what| Err(format!("faulty_{what}_askew: {askew}"))));
    let mut memory = emulated::Memory::floats(Dtype::F32, &[1.0]);
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
    for grid in [[1, 65_536, 1], [1, 1, 65_536], [1 << 31, 1, 1], [0, 1, 1]] {
        let error = refused(Launch { grid, ..faulty("beyond", memory.address()) });
        assert!(error.ends_with("blocks; a grid has 1 to 2147483647 × 65535 × 65535"), "{error}");
    }
}
