//! The emulator detects each kind of fault in kernels. Skipped without a C++ compiler.
#![allow(unsafe_code)]

use std::path::Path;

use zero_emulator::{Compiled, How, Memory, ORDERS};
use zero_kernels::{Dtype, Launch, Source};

/// A launch of a kernel of `faulty.cu`.
fn faulty<A>(entry: &str, args: A) -> Launch<A> {
    let (source, entry) = (Source::Norm, format!("faulty_{entry}"));
    Launch { source, entry, grid: [1, 1, 1], threads: 64, shared_bytes: 64 * 4, args }
}

#[test]
fn the_emulator_detects_faults() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/faults/faulty.cu");
    let Some(kernels) = Compiled::new(&file).unwrap() else { return };
    let numbers = || Memory::floats(Dtype::F32, &[1.0; 64]);
    // SAFETY: the kernels of this file access at most 64 floats. Kernels that access more either run watched or reach
    // no further than the sentinels.
    let run = |launch: &Launch<u64>, order, how| unsafe { kernels.run(launch, order, how) };
    let alone = |entry, how| run(&faulty(entry, numbers().address()), 0, how);

    // A race between threads or blocks gives different results if the threads run in a different order.
    for (entry, blocks) in [("race", 1), ("blocks", 4), ("turns", 4)] {
        let results = ORDERS.map(|order| {
            let mut out = Memory::floats(Dtype::F32, &[0.0; 64]);
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
        ("divergence", "a mask names a lane that never arrives"),
        ("absent", "a mask names a lane that never arrives"),
        ("unnamed", "a lane calls with a mask that does not name it"),
        ("crossed", "lanes of a warp wait at different operations"),
        ("ended", "an operation on matrices needs all 32 lanes of a warp"),
        ("hasty", "a thread ends before its asynchronous copies have arrived"),
        ("odd", "a row of a matrix at an address that is not a multiple of 16"),
    ];
    for (entry, found) in ends {
        for (order, how) in ORDERS.map(|order| (order, How::Plain)).into_iter().chain([(0, How::Watched)]) {
            let mut memory = numbers();
            let ended = run(&faulty(entry, memory.address()), order, how);
            assert_eq!(ended, Err(format!("faulty_{entry}: {found}")), "{order} {how:?}");
        }
    }
    assert_eq!(alone("overrun", How::Plain), Err("faulty_overrun: a write beyond the shared memory".into()));
    let askew = "an access of 16 bytes at an address that is not a multiple of 16";
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
