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
use zero_emulator::{Emulator, ORDERS};
use zero_kernels::Dtype;

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
    zero_emulator::Memory::floats(dtype, values).to_floats(dtype)
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
            assert!(!text.contains("zero_emulator::"), "{}: cases take crate::Memory", path.display());
        }
    }
}
