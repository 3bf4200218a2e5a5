//! Tests the count of allocated bytes, in a program of its own so that no other code allocates.

use zero_comm::{SharedAllocator, heap};

#[global_allocator]
static ALLOCATOR: heap::Counted<SharedAllocator> = heap::Counted(SharedAllocator);

const MIB: usize = 1 << 20;

/// One test function, because allocations of a concurrent test would be counted too.
#[test]
fn allocations_are_counted() {
    assert!(heap::counted());
    // Small allocations come from System, large ones from the arena.
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

    // Grow and shrink across the counting threshold and from one allocator to the other.
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

    // Threads share one counter, and a thread may free what another has allocated.
    heap::reset_peak();
    let threads: Vec<_> = (0..4).map(|i| std::thread::spawn(move || vec![i as u8; MIB])).collect();
    let buffers: Vec<Vec<u8>> = threads.into_iter().map(|thread| thread.join().expect("no panic")).collect();
    assert!(heap::now() >= before + 4 * MIB && heap::peak() >= before + 4 * MIB);
    drop(buffers);
    // Threads leave small allocations behind.
    assert!(heap::now() < before + MIB, "{} bytes are left", heap::now() - before);
}
