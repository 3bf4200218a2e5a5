//! The suite of `conformance/main.rs` in a program of its own, whose allocator is the shared one: ranks with shared
//! memory access each other's buffers in place, and ranks with TCP do not.

#[path = "conformance/suite.rs"]
#[macro_use]
mod suite;
#[path = "conformance/coalesced.rs"]
mod coalesced;
#[path = "conformance/collectives.rs"]
mod collectives;
#[path = "conformance/faults.rs"]
mod faults;
#[path = "conformance/groups.rs"]
mod groups;
#[path = "conformance/in_place.rs"]
mod in_place;
#[path = "conformance/mesh.rs"]
mod mesh;
#[path = "conformance/messages.rs"]
mod messages;
#[path = "conformance/oracle.rs"]
mod oracle;
#[path = "conformance/world.rs"]
mod world;

/// Sums follow the tree of ranks and are compared bit for bit.
pub(crate) const TREE: bool = true;

/// Returns true, because threads and processes are always available.
pub(crate) fn ready() -> bool {
    true
}

/// Tests the communicators of `connect` and `threads` unchanged.
pub(crate) fn tested(comm: std::sync::Arc<dyn zero_comm::Communicator>) -> std::sync::Arc<dyn zero_comm::Communicator> {
    comm
}

/// In this program, the processes of one host access each other's large vectors in place.
pub(crate) const IN_PLACE: bool = true;

#[global_allocator]
static ALLOCATOR: zero_comm::SharedAllocator = zero_comm::SharedAllocator;

mod shared_memory {
    suite!(SharedMemory);
}

mod others {
    mod threads {
        cases! { Threads: in_place: large_vectors_are_accessed_in_place; }
    }
    mod two_hosts {
        cases! {
            Hosts:
            collectives:
                every_operation_matches_its_definition,
                vectors_of_many_chunks,
                large_vectors;
            in_place: large_vectors_are_accessed_in_place;
        }
    }
    mod tcp {
        cases! { Tcp: in_place: large_vectors_are_accessed_in_place; }
    }
}
