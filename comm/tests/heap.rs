//! Tests the counter of allocated bytes, and uses it to check how much operations allocate. Runs in a program of its
//! own, so that no other code allocates.

#[allow(dead_code, reason = "the conformance suite uses all of it")]
#[path = "conformance/world.rs"]
mod world;

use zero_comm::{Buffer, SharedAllocator, heap};

use world::{Kind, run};

#[global_allocator]
static ALLOCATOR: heap::Counted<SharedAllocator> = heap::Counted(SharedAllocator);

const MIB: usize = 1 << 20;

/// Tests the communicators of `connect` and `threads` unchanged.
pub(crate) fn tested(comm: std::sync::Arc<dyn zero_comm::Communicator>) -> std::sync::Arc<dyn zero_comm::Communicator> {
    comm
}

/// One test function, because allocations of a concurrent test would be counted too.
#[test]
fn allocations_are_counted_and_operations_allocate_little() {
    allocations_are_counted();
    for kind in [Kind::Threads, Kind::SharedMemory, Kind::Tcp, Kind::Hosts] {
        an_all_to_all_allocates_no_vectors(kind);
    }
}

/// Exchanges 3 MiB between every two of four ranks.
fn an_all_to_all_allocates_no_vectors(kind: Kind) {
    run(kind, 4, |comm| {
        let counts = vec![3 * MIB; 4];
        let buffer = || Buffer::from(vec![comm.rank() as u8; 12 * MIB]);
        let (input, output) = (buffer(), buffer());
        comm.barrier().wait().expect("all have their buffers");
        heap::reset_peak();
        let before = heap::now();
        comm.barrier().wait().expect("no rank has begun");
        let exchanged = comm.all_to_all(input, output, &counts, &counts).wait().expect("exchanged");
        comm.barrier().wait().expect("all are done");
        let more = heap::peak() - before;
        assert!(more < MIB / 4, "{kind:?}: {more} bytes");
        comm.barrier().wait().expect("all have looked");
        drop(exchanged);
    });
}

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

    // The buffer grows and shrinks across the smallest counted size, and moves between the two allocators.
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
