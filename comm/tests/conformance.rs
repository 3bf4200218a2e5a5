//! One suite for all transports: what a communicator promises, for worlds of 1 to 8 ranks.
//!
//! Ranks of processes are threads here that each call `connect` as a process would; `processes.rs` has real ones.

#[path = "conformance/suite.rs"]
#[macro_use]
mod suite;
#[path = "conformance/collectives.rs"]
mod collectives;
#[path = "conformance/faults.rs"]
mod faults;
#[path = "conformance/groups.rs"]
mod groups;
#[path = "conformance/hosts.rs"]
mod hosts;
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

/// Large vectors between processes go through rings here.
pub(crate) const IN_PLACE: bool = false;

mod threads {
    suite!(Threads);
}

mod shared_memory {
    suite!(SharedMemory);
}

mod tcp {
    suite!(Tcp);
}

mod two_hosts {
    suite!(Hosts);
    cases! {
        Hosts:
        hosts:
            what_goes_between_hosts_goes_once_a_host,
            ranks_of_a_host_share_memory_for_messages;
    }
}
