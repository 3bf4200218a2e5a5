//! Compares the kernels with f64, or bit by bit with the CPU: on an emulated device, and with the feature `cuda`
//! through the driver on a card (`tests/card`). Skipped without a C++ compiler.
//!
//! A case is a closure for [`on_device`]: it creates [`Memory`], launches with [`Device::run`], and returns what the
//! kernels wrote, which must be the same in every run. Results go to [`Memory::unwritten`] memory and are compared
//! outside of the closure. Inputs are [`numbers`].
#![allow(unsafe_code)]

mod alignments;
mod attention;
mod block_codes;
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

use std::env;
use std::fmt::Debug;
use std::io::Write;
use std::path::Path;
use std::sync::OnceLock;

use memory::{Device, Memory};
use zero_kernels::emulated::{self, Compiled, Emulator, How, ORDERS};
use zero_kernels::{Dtype, Launch, Source};

/// Runs a case and returns its result. The result must be the same for every order of threads on the emulator, and in
/// every run on a card. With the mock, the emulator runs only the first order. The mock covers the others, as it uses
/// a different order at each launch. On a real GPU, the emulator does not run, since the machine may have no compiler.
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

/// Whether cases run on a real GPU.
fn is_gpu() -> bool {
    cfg!(feature = "cuda") && env::var_os("ZERO_TRAIN_CUDA_TESTS").is_some()
}

/// The value of `ZERO_TRAIN_TEST_SEED`, which varies the inputs of all tests. 0 if unset.
fn test_seed() -> u32 {
    static SEED: OnceLock<u32> = OnceLock::new();
    *SEED.get_or_init(|| {
        let Ok(text) = env::var("ZERO_TRAIN_TEST_SEED") else { return 0 };
        let seed = text.parse().unwrap_or_else(|_| panic!("ZERO_TRAIN_TEST_SEED: a number below 2³², not {text}"));
        // Written to stderr directly, so that the test harness does not capture it.
        writeln!(std::io::stderr(), "ZERO_TRAIN_TEST_SEED={seed}").expect("stderr can be written");
        seed
    })
}

/// Pseudorandom numbers in −1..1; they depend on `seed` and on the test seed.
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

/// Returns the numbers rounded to a type.
fn rounded(dtype: Dtype, values: &[f32]) -> Vec<f32> {
    emulated::Memory::floats(dtype, values).to_floats(dtype)
}

/// The relative unit in the last place of a type.
fn epsilon(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F32 => 2f64.powi(-23),
        Dtype::Bf16 => 2f64.powi(-8),
        Dtype::F16 => 2f64.powi(-11),
    }
}

/// Asserts that each error is at most `units` units in the last place of the expected number in `dtype`, plus `units`
/// f32 units in the last place of `scale`.
fn assert_near(what: &str, dtype: Dtype, got: &[f32], want: &[f64], units: f64, scale: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got) - want).abs();
        let bound = units * (epsilon(dtype) * want.abs() + epsilon(Dtype::F32) * scale);
        assert!(error <= bound, "{what} {dtype:?}[{i}]: {got} for {want}: {error:e} over {bound:e}");
    }
}

/// A card cannot access the emulator's memory, so cases must use `crate::Memory`.
#[test]
fn test_cases_use_the_memory_of_their_device() {
    if is_gpu() {
        return;
    }
    let mut paths = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels")];
    while let Some(path) = paths.pop() {
        if path.is_dir() {
            paths.extend(std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
        } else if !["main.rs", "memory.rs"].iter().any(|name| path.ends_with(name)) {
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(!text.contains("emulated::"), "{}: cases take crate::Memory", path.display());
        }
    }
}

/// A launch of a kernel of `tests/emulated/faulty.cu`.
fn faulty<A>(entry: &str, args: A) -> Launch<A> {
    let (source, entry) = (Source::Norm, format!("faulty_{entry}"));
    Launch { source, entry, grid: [1, 1, 1], threads: 64, shared_bytes: 64 * 4, args }
}

/// The emulator detects each kind of fault.
#[test]
fn the_emulator_detects_faults() {
    if is_gpu() {
        return;
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emulated/faulty.cu");
    let Some(kernels) = Compiled::new(&file).unwrap() else { return };
    let numbers = || emulated::Memory::floats(Dtype::F32, &[1.0; 64]);
    // SAFETY: the kernels of this file access at most 64 floats. Kernels that access more either run watched or reach
    // no further than the sentinels.
    let run = |launch: &Launch<u64>, order, how| unsafe { kernels.run(launch, order, how) };
    let alone = |entry, how| run(&faulty(entry, numbers().address()), 0, how);

    // A race between threads or blocks gives different results if the threads run in a different order.
    for (entry, blocks) in [("race", 1), ("blocks", 4), ("turns", 4)] {
        let results = ORDERS.map(|order| {
            let mut out = emulated::Memory::floats(Dtype::F32, &[0.0; 64]);
            run(&Launch { grid: [blocks, 1, 1], ..faulty(entry, out.address()) }, order, How::Plain).unwrap();
            out.to_floats(Dtype::F32).iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        });
        assert!(results.iter().any(|result| *result != results[0]), "the race of {entry} was not seen");
        if entry == "race" {
            // Unwritten memory is NaN: in the first order, the first thread reads a value before the second thread
            // writes it.
            assert!(f32::from_bits(results[0][0]).is_nan());
        }
    }
    let watched = [
        (
            "race",
            1,
            "thread 1 of block (0, 0, 0) writes byte 4 of shared memory that thread 0 reads, with no barrier between",
        ),
        ("blocks", 4, "thread 0 of block (1, 0, 0) reads byte 0 of memory that another block writes"),
        ("turns", 4, "thread 0 of block (1, 0, 0) writes byte 0 of memory that another block writes"),
        (
            "shuffled",
            1,
            "thread 0 of block (0, 0, 0) reads byte 4 of shared memory that thread 1 writes, with no barrier between",
        ),
        (
            "half_synced",
            1,
            "thread 0 of block (0, 0, 0) reads byte 8 of shared memory that thread 2 writes, with no barrier between",
        ),
        ("overrun", 1, "thread 63 of block (0, 0, 0) writes 4 bytes from byte 256 on of shared memory of 256 bytes"),
        ("beyond", 1, "thread 0 of block (0, 0, 0) writes 4 bytes from byte 256 on of memory of 256 bytes"),
        ("read_beyond", 1, "thread 63 of block (0, 0, 0) reads 4 bytes from byte 256 on of memory of 256 bytes"),
        (
            "overwritten",
            1,
            "thread 16 of block (0, 0, 0) writes byte 0 of shared memory that thread 0 writes, with no barrier between",
        ),
    ];
    for (entry, blocks, found) in watched {
        let mut memory = numbers();
        let launch = Launch { grid: [blocks, 1, 1], ..faulty(entry, memory.address()) };
        assert_eq!(run(&launch, 0, How::Watched), Err(format!("faulty_{entry}: {found}")));
    }
    for entry in ["synced", "atomic"] {
        assert_eq!(alone(entry, How::Watched), Ok(()), "{entry}");
    }

    // Faults that end a launch in every mode.
    let ends = [
        ("divergence", "a warp's mask names a lane that does not come"),
        ("absent", "a warp's mask names a lane that does not come"),
        ("unnamed", "a lane calls with a mask that does not name it"),
        ("crossed", "lanes of a warp meet for different operations"),
        ("ended", "matrices need all 32 lanes of a warp"),
        ("hasty", "a thread ends before its copies"),
        ("odd", "a row of a matrix that does not begin at a multiple of 16 bytes"),
    ];
    for (entry, found) in ends {
        for (order, how) in ORDERS.map(|order| (order, How::Plain)).into_iter().chain([(0, How::Watched)]) {
            let mut memory = numbers();
            let ended = run(&faulty(entry, memory.address()), order, how);
            assert_eq!(ended, Err(format!("faulty_{entry}: {found}")), "{order} {how:?}");
        }
    }
    assert_eq!(alone("overrun", How::Plain), Err("faulty_overrun: a write beyond the shared memory".into()));
    let askew = "an access of 16 bytes that does not begin at a multiple";
    for entry in ["read_askew", "written_askew"] {
        assert_eq!(alone(entry, How::Plain), Err(format!("faulty_{entry}: {askew}")));
    }

    // A mask may name a part of a warp. Lanes that have ended do not block the others.
    let mut memory = numbers();
    run(&faulty("halves", memory.address()), 0, How::Watched).unwrap();
    let halves: Vec<f32> = memory.to_floats(Dtype::F32)[..32].into();
    assert_eq!(halves[..16], [120.0; 16]);
    assert!(halves[16..].iter().all(|x| x.is_nan()), "a number of a lane that did not take part: {halves:?}");

    let mut memory = numbers();
    run(&faulty("early", memory.address()), 0, How::Plain).unwrap();
    assert!(memory.to_floats(Dtype::F32)[0].is_nan(), "a copy was there before it was waited for");
    let mut memory = numbers();
    run(&faulty("beyond", memory.address()), 0, How::Plain).unwrap();
    assert!(std::panic::catch_unwind(|| memory.bytes()).is_err(), "a write beyond the ends was not seen");

    let launch = faulty("beyond", 0u64);
    let error = run(&Launch { threads: 128, ..launch }, 0, How::Plain).unwrap_err();
    assert_eq!(error, "faulty_beyond: more threads than the kernel is compiled for");
    // SAFETY: the emulator rejects arguments of a different size and runs nothing.
    let error = unsafe { kernels.run(&faulty("beyond", 1u32), 0, How::Plain) }.unwrap_err();
    assert_eq!(error, "faulty_beyond: arguments of another size");
    for grid in [[1, 65_536, 1], [1, 1, 65_536], [1 << 31, 1, 1], [0, 1, 1]] {
        let error = run(&Launch { grid, ..faulty("beyond", memory.address()) }, 0, How::Plain).unwrap_err();
        assert!(error.ends_with("blocks; the maximum is 2147483647 × 65535 × 65535"), "{error}");
    }
}
