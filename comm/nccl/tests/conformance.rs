//! The suite of all transports (`comm/tests/conformance`) over NCCL: every buffer goes to the device, is worked on there, and comes back.
//!
//! Here NCCL and the driver are a mock that works on the memory of the host; with `ZERO_TRAIN_CUDA_TESTS=1` they are this machine's.
//! Values are such that every order gives the same sum.
#![cfg(feature = "cuda")]

#[path = "../../tests/conformance/suite.rs"]
#[macro_use]
mod suite;
#[path = "../../tests/conformance/collectives.rs"]
mod collectives;
#[path = "../../tests/conformance/faults.rs"]
mod faults;
#[path = "../../tests/conformance/groups.rs"]
mod groups;
#[path = "../../tests/conformance/in_place.rs"]
mod in_place;
#[path = "../../tests/conformance/mesh.rs"]
mod mesh;
#[path = "../../tests/conformance/messages.rs"]
mod messages;
#[path = "../../../cuda/tests/mock/mod.rs"]
mod mock;
#[path = "../../tests/conformance/oracle.rs"]
mod oracle;
mod staged;
#[path = "../../tests/conformance/world.rs"]
mod world;

/// Whether there are devices for all ranks of the suite, or NCCL lets ranks share one.
pub(crate) fn ready() -> bool {
    mock::connects(8)
}

/// NCCL has its own order.
pub(crate) const TREE: bool = false;

/// No rings here, but those of the meetings.
pub(crate) const IN_PLACE: bool = false;

/// What is tested is NCCL, over what `connect` and `threads` give.
pub(crate) fn tested(host: std::sync::Arc<dyn zero_comm::Communicator>) -> std::sync::Arc<dyn zero_comm::Communicator> {
    let comm = staged::staged(&*host);
    assert_eq!(comm.transport(), "nccl");
    comm
}

/// Ranks that are threads, and meet as such.
mod threads {
    suite!(Threads);
}

/// Ranks that meet as processes of one host do.
mod shared_memory {
    cases! {
        SharedMemory:
        collectives:
            every_operation_gives_what_its_definition_says,
            results_may_be_waited_for_in_any_order,
            random_programs;
        messages:
            everybody_sends_to_everybody_before_receiving,
            messages_keep_their_order;
        faults:
            other_lengths_and_types_are_shown_from_both_sides,
            a_rank_that_does_not_come_is_named,
            a_rank_that_leaves_is_named,
            an_abort_reaches_everybody;
    }
}

/// Ranks that meet as processes of several hosts do.
mod tcp {
    cases! {
        Tcp:
        collectives:
            every_operation_gives_what_its_definition_says,
            random_programs;
        messages:
            everybody_sends_to_everybody_before_receiving,
            messages_keep_their_order,
            large_and_empty_messages;
        groups:
            splits_of_splits;
        faults:
            other_lengths_and_types_are_shown_from_both_sides,
            a_rank_that_does_not_come_is_named,
            a_rank_that_leaves_is_named,
            an_abort_reaches_everybody,
            a_panic_reaches_everybody;
    }
}
