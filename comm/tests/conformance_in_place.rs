//! The suite of `conformance.rs` in a program that has the shared allocator: ranks with shared memory reach into each other's
//! buffers, those with TCP do not.

#[path = "conformance/suite.rs"]
#[macro_use]
mod suite;
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

/// Sums are over the tree of ranks, to the bit.
pub(crate) const TREE: bool = true;

/// Threads and processes are everywhere.
pub(crate) fn ready() -> bool {
    true
}

/// What is tested is what `connect` and `threads` give.
pub(crate) fn tested(comm: std::sync::Arc<dyn zero_comm::Communicator>) -> std::sync::Arc<dyn zero_comm::Communicator> {
    comm
}

/// Large vectors between processes of one host stay where they are here.
pub(crate) const IN_PLACE: bool = true;

#[global_allocator]
static ALLOCATOR: zero_comm::SharedAllocator = zero_comm::SharedAllocator;

mod shared_memory {
    suite!(SharedMemory);
}

mod others {
    mod threads {
        cases! { Threads: in_place: large_vectors_are_reached_where_they_lie; }
    }
    mod two_hosts {
        cases! {
            Hosts:
            collectives:
                every_operation_gives_what_its_definition_says,
                vectors_of_many_chunks,
                large_vectors;
            in_place: large_vectors_are_reached_where_they_lie;
        }
    }
    mod tcp {
        cases! { Tcp: in_place: large_vectors_are_reached_where_they_lie; }
    }
}
