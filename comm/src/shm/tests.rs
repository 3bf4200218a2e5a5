//! Tests groups in which some ranks have buffers that their peers cannot access. In a real program, all ranks have the
//! allocator or none does. In this test, each thread chooses its allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use super::SharedAllocator;
use crate::collective::reduction::ReduceOp;
use crate::collective::signature::Operation;
use crate::communicator::{Options, ProcessTransport};
use crate::connect::connect;
use crate::launcher_environment::LauncherEnvironment;
use crate::store::StoreServer;

struct Choice;

#[global_allocator]
static ALLOCATOR: Choice = Choice;

thread_local! {
    static SHARED: Cell<bool> = const { Cell::new(false) };
}

// SAFETY: both allocators are valid, and the shared allocator passes blocks that are not its own to `System` to free
// them.
unsafe impl GlobalAlloc for Choice {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let shared = SHARED.try_with(Cell::get).unwrap_or(false);
        // SAFETY: the caller upholds the contract of both allocators, which is the same.
        unsafe { if shared { SharedAllocator.alloc(layout) } else { System.alloc(layout) } }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        // SAFETY: the shared allocator knows from the address which allocator the block came from.
        unsafe { SharedAllocator.dealloc(address, layout) }
    }
}

#[test]
fn one_inaccessible_buffer_makes_all_ranks_use_rings() {
    const LENGTH: usize = 150_001;
    const SIZE: usize = 3;
    let token = Some("token".to_string());
    let store = StoreServer::bind(("127.0.0.1", 0), token.as_deref()).expect("a port");
    let port = store.address().port();
    let options = Options { transport: ProcessTransport::SharedMemory, token, ..Options::default() };
    let place = |rank| LauncherEnvironment {
        rank,
        world_size: SIZE,
        local_world_size: SIZE,
        master_port: port,
        ..LauncherEnvironment::alone()
    };
    let rank = |rank: usize| {
        SHARED.set(true);
        let comm = connect(&place(rank), &options).expect("the ranks meet");
        // In each step, a different rank has its buffer outside of the arena; in the last step, no rank does. This runs
        // twice.
        for outsider in (0..=SIZE).chain(0..=SIZE) {
            let before = comm.stats();
            SHARED.set(rank != outsider);
            let buffer = vec![rank as i64; LENGTH];
            let sum = comm.all_reduce(buffer.into(), ReduceOp::Sum).wait().expect("reduced");
            assert!(sum.as_i64().is_some_and(|all| all.iter().all(|value| *value == 3)));
            let done = (comm.stats() - before)[Operation::AllReduce];
            assert_eq!((done.calls, done.in_place), (1, u64::from(outsider == SIZE)));
            // In an all_to_all, only the rank outside of the arena sends chunks; the inputs of the other ranks are
            // accessed in place.
            let input: Vec<i64> = (0..SIZE).flat_map(|to| vec![(10 * rank + to) as i64; LENGTH]).collect();
            let counts = [LENGTH; SIZE];
            let output = vec![0i64; SIZE * LENGTH];
            let exchanged = comm.all_to_all(input.into(), output.into(), &counts, &counts).wait().expect("exchanged");
            let output = exchanged.output.into_i64().expect("i64");
            for (from, part) in output.chunks(LENGTH).enumerate() {
                assert!(part.iter().all(|value| *value == (10 * from + rank) as i64));
            }
            let done = (comm.stats() - before)[Operation::AllToAll];
            assert_eq!((done.calls, done.in_place), (1, u64::from(rank != outsider)));
        }
    };
    std::thread::scope(|scope| {
        for number in 0..SIZE {
            scope.spawn(move || rank(number));
        }
    });
}
