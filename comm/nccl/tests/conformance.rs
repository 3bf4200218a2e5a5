//! The suite of all transports (`comm/tests/conformance`) over NCCL: every buffer goes to the device, is worked on there, and comes back.
//!
//! Here NCCL and the driver are a mock that works on the memory of the host; with `ZERO_TRAIN_CUDA_TESTS=1` they are this machine's.
//! Values are such that every order gives the same sum.
#![cfg(feature = "cuda")]

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

macro_rules! cases {
    ($kind:ident: $($module:ident: $($case:ident),+;)+) => {
        $($(#[test] fn $case() {
            if crate::mock::ready() {
                crate::$module::$case(crate::world::Kind::$kind);
            }
        })+)+
    };
}

/// Ranks that are threads, and meet as such.
mod threads {
    cases! {
        Threads:
        collectives:
            every_operation_gives_what_its_definition_says,
            vectors_of_many_chunks,
            large_vectors,
            results_may_be_waited_for_in_any_order,
            payload_follows_the_closed_forms,
            random_programs;
        messages:
            everybody_sends_to_everybody_before_receiving,
            receives_may_be_posted_ahead_of_collectives,
            what_nobody_waits_for_yet_has_all_the_time,
            messages_keep_their_order,
            large_and_empty_messages;
        groups:
            splits_are_groups_of_their_own,
            splits_of_splits;
        mesh:
            pipe_and_data_groups_are_under_way_at_once,
            a_rank_that_leaves_is_named_where_nobody_talks_to_it,
            a_rank_that_stops_is_named_where_nobody_talks_to_it;
        in_place:
            large_vectors_are_reached_where_they_lie,
            a_buffer_that_a_late_rank_may_still_use_is_not_reused;
        faults:
            other_operations_are_shown_from_both_sides,
            other_lengths_and_types_are_shown_from_both_sides,
            a_message_of_another_length_is_a_mismatch,
            a_rank_that_does_not_come_is_named,
            a_rank_that_leaves_is_named,
            an_abort_reaches_everybody,
            a_panic_reaches_everybody,
            a_failure_in_a_split_reaches_everybody,
            contradicting_arguments_harm_nobody,
            results_that_nobody_waits_for;
    }
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
