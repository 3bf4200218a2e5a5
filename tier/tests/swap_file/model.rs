//! Compares random sequences of reads and writes with an array in memory, on both backends and with all options.

use std::path::Path;

use proptest::collection::vec;
use proptest::prelude::*;
use zero_tier::{ALIGNMENT, AlignedBuffer, Backend, BufferPool, Options, Pending, SwapFile};

/// Pages of the file. There are few, so that requests overlap.
const PAGES: usize = 24;

#[derive(Debug, Clone)]
enum Step {
    /// First page, number of pages, and fill byte.
    Write(usize, usize, u8),
    Read(usize, usize),
    /// Waits for the oldest request not yet waited for.
    Wait,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let range = (0..PAGES).prop_flat_map(|from| (Just(from), 0..=PAGES - from));
    let step = prop_oneof![
        (range.clone(), any::<u8>()).prop_map(|((from, pages), fill)| Step::Write(from, pages, fill)),
        range.prop_map(|(from, pages)| Step::Read(from, pages)),
        Just(Step::Wait),
    ];
    vec(step, 1..60)
}

fn options() -> impl Strategy<Value = Options> {
    let sizes = (1..=PAGES, 1..=5usize, 1..=3usize);
    (sizes, any::<[bool; 5]>()).prop_map(|((pages, queue_depth, intra_op_parallelism), flags)| Options {
        block_size: pages * ALIGNMENT,
        queue_depth,
        intra_op_parallelism,
        single_submit: flags[0],
        overlap_events: flags[1],
        io_uring: flags[2],
        direct: flags[3],
        bounce: flags[4],
    })
}

/// Fills `buffer` with bytes that differ from page to page and from write to write.
fn pattern(buffer: &mut [u8], fill: u8) {
    for (index, byte) in buffer.iter_mut().enumerate() {
        *byte = fill ^ (index / ALIGNMENT) as u8 ^ index as u8;
    }
}

fn follows_the_model(folder: &Path, steps: &[Step], options: &Options) {
    let pool = BufferPool::new();
    let file = SwapFile::create(folder, (PAGES * ALIGNMENT) as u64, options).expect("a file");
    if !options.io_uring {
        assert_eq!(file.backend(), Backend::Positioned);
    }
    let mut model = vec![0u8; PAGES * ALIGNMENT];
    // Each request with the expected contents of its buffer.
    let mut under_way: Vec<(Pending, Vec<u8>)> = vec![];
    let settle = |(pending, expected): (Pending, Vec<u8>)| {
        let buffer = pending.wait().expect("the disk works");
        assert!(buffer.as_bytes() == expected, "a buffer differs from the model");
        pool.put(buffer);
    };
    let (mut read, mut written) = (0, 0);
    for step in steps {
        match *step {
            Step::Write(from, pages, fill) => {
                let (at, len) = (from * ALIGNMENT, pages * ALIGNMENT);
                let mut buffer = pool.take(len).expect("memory");
                pattern(buffer.as_bytes_mut(), fill);
                pattern(&mut model[at..at + len], fill);
                written += len;
                under_way.push((file.write(at as u64, buffer, len), model[at..at + len].to_vec()));
            }
            Step::Read(from, pages) => {
                let (at, len) = (from * ALIGNMENT, pages * ALIGNMENT);
                read += len;
                let pending = file.read(at as u64, pool.take(len).expect("memory"), len);
                under_way.push((pending, model[at..at + len].to_vec()));
            }
            Step::Wait if !under_way.is_empty() => settle(under_way.remove(0)),
            Step::Wait => {}
        }
    }
    // Newest first: completion must not depend on the order of waiting.
    while let Some(request) = under_way.pop() {
        settle(request);
    }
    let whole = AlignedBuffer::zeroed(PAGES * ALIGNMENT).expect("memory");
    let whole = file.read(0, whole, PAGES * ALIGNMENT).wait().expect("the disk works");
    assert!(whole.as_bytes() == model, "the file differs from the model");
    let statistics = file.statistics();
    assert_eq!(statistics.read_bytes, (read + model.len()) as u64);
    assert_eq!(statistics.written_bytes, written as u64);
    assert!(statistics.busy_seconds > 0.0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_reads_and_writes_match_an_array(steps in steps(), options in options()) {
        follows_the_model(&std::env::temp_dir(), &steps, &options);
    }
}
