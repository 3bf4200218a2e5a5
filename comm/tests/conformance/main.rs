//! The conformance suite of all transports: the guarantees of a communicator, for jobs of 1 to 8 ranks. `many.rs` tests
//! more ranks, and `rendezvous.rs` tests how the ranks connect.
//!
//! The ranks are threads here, each of which calls `connect` as a process would; `processes/` uses real processes.

#[path = "../port/mod.rs"]
mod port;
#[macro_use]
mod suite;

mod coalesced;
mod collectives;
mod faults;
mod groups;
mod hosts;
mod in_place;
mod many;
mod mesh;
mod messages;
mod oracle;
mod rendezvous;
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

/// Large vectors between processes pass through rings in this program.
pub(crate) const IN_PLACE: bool = false;

mod threads {
    suite!(Threads);
}

mod shared_memory {
    suite!(SharedMemory);
}

mod tcp {
    suite!(Tcp);
    cases! {
        Tcp:
        many:
            small_operations_of_many_ranks_match_their_definitions,
            a_small_sum_travels_up_and_down_the_tree,
            different_operations_of_many_ranks_are_reported,
            a_missing_rank_of_many_is_named;
    }
}

mod many_hosts {
    cases! {
        Pairs:
        many:
            small_operations_of_many_ranks_match_their_definitions;
    }
}

mod two_hosts {
    suite!(Hosts);
    cases! {
        Hosts:
        hosts:
            data_between_hosts_is_sent_once_per_host,
            parts_between_hosts_are_sent_once,
            ranks_of_a_host_share_memory_for_messages;
    }
}
