//! Counting what a program has been given: alone in this program, so that nobody else allocates.

use zero_comm::{SharedAllocator, heap};

#[global_allocator]
static ALLOCATOR: heap::Counted<SharedAllocator> = heap::Counted(SharedAllocator);

const MIB: usize = 1 << 20;

/// One test: what another one allocates meanwhile would be counted too.
#[test]
fn what_is_allocated_is_counted() {
    assert!(heap::counted());
    // Lines of small and large allocations: System's and the arena's.
    for size in [heap::SMALL, 100_000, MIB] {
        let before = heap::now();
        heap::reset_peak();
        let first = vec![1u8; size];
        assert_eq!(heap::now() - before, size);
        let zeroed = vec![0u8; 2 * size];
        assert_eq!(heap::now() - before, 3 * size);
        drop(first);
        assert_eq!(heap::now() - before, 2 * size);
        assert_eq!(heap::peak() - before, 3 * size);
        heap::reset_peak();
        assert_eq!(heap::peak(), heap::now());
        assert!(zeroed.iter().all(|&byte| byte == 0));
        drop(zeroed);
        assert_eq!(heap::now(), before);
    }

    // Growing and shrinking, across what is counted and from one allocator to the other.
    let before = heap::now();
    let mut buffer = Vec::<u8>::with_capacity(heap::SMALL - 1);
    assert_eq!(heap::now(), before);
    for capacity in [heap::SMALL, 300_000, MIB, 3 * MIB] {
        buffer.reserve_exact(capacity - buffer.len());
        assert_eq!(heap::now() - before, capacity);
    }
    for capacity in [2 * MIB, 300_000, 5000] {
        buffer.shrink_to(capacity);
        assert_eq!(heap::now() - before, capacity);
    }
    buffer.shrink_to(10);
    assert_eq!(heap::now(), before);

    // Other threads count into the same sum, and what one has taken another may give back.
    heap::reset_peak();
    let threads: Vec<_> = (0..4).map(|i| std::thread::spawn(move || vec![i as u8; MIB])).collect();
    let buffers: Vec<Vec<u8>> = threads.into_iter().map(|thread| thread.join().expect("no panic")).collect();
    assert!(heap::now() >= before + 4 * MIB && heap::peak() >= before + 4 * MIB);
    drop(buffers);
    // Threads leave a little behind them.
    assert!(heap::now() < before + MIB, "{} bytes are left", heap::now() - before);
}
