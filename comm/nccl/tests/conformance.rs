//! The conformance suite of all transports (`comm/tests/conformance`) over NCCL: every buffer is copied to the device,
//! used there, and copied back.
//!
//! By default, NCCL and the driver are mocks that use host memory; with `ZERO_TRAIN_CUDA_TESTS=1` they are those of
//! this machine. The values are chosen so that sums in every order are equal.

#[path = "../../tests/conformance/suite.rs"]
#[macro_use]
mod suite;
#[path = "../../tests/conformance/coalesced.rs"]
mod coalesced;
#[path = "../../tests/conformance/collectives.rs"]
mod collectives;
#[path = "../../tests/delegate/mod.rs"]
mod delegate;
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
#[path = "../../../cuda/emulator/mock/mod.rs"]
mod mock;
#[path = "../../tests/conformance/oracle.rs"]
mod oracle;
mod staged;
#[path = "../../tests/conformance/world.rs"]
mod world;

/// Returns whether all ranks of the suite have a device, or NCCL lets ranks share one.
pub(crate) fn ready() -> bool {
    mock::connects(8)
}

/// NCCL chooses its own order of summation.
pub(crate) const TREE: bool = false;

/// Host buffers are not accessed in place, because the host transport only synchronizes the ranks.
pub(crate) const IN_PLACE: bool = false;

/// Wraps a host communicator from `connect` or `threads` in NCCL.
pub(crate) fn tested(host: std::sync::Arc<dyn zero_comm::Communicator>) -> std::sync::Arc<dyn zero_comm::Communicator> {
    let comm = staged::staged(&*host);
    assert_eq!(comm.transport(), "nccl");
    comm
}

/// Ranks synchronize through the `threads` transport.
mod threads {
    suite!(Threads);
}

/// Operations run ahead of the host. The cases with mismatched calls are left out, because the ranks do not compare
/// their calls.
mod ahead {
    cases! {
        Ahead:
        collectives:
            every_operation_matches_its_definition,
            vectors_of_many_chunks,
            results_may_be_awaited_in_any_order,
            many_all_to_alls_in_flight,
            payload_follows_the_closed_forms,
            random_programs;
        coalesced:
            coalesced_operations_match_separate_ones,
            coalesced_vectors_of_many_chunks,
            a_coalesced_operation_counts_as_one_call,
            contradicting_vectors_are_refused_without_effect;
        messages:
            every_rank_sends_to_every_other_before_receiving,
            receives_may_be_posted_ahead_of_collectives,
            operations_that_are_not_awaited_do_not_time_out,
            messages_keep_their_order,
            large_and_empty_messages;
        groups:
            splits_are_independent_groups,
            splits_of_splits;
        mesh:
            pipe_and_data_groups_run_concurrently;
        in_place:
            an_input_may_be_changed_once_it_is_returned;
        faults:
            contradicting_arguments_are_refused_without_effect;
    }
}

/// Ranks synchronize like processes of one host.
mod shared_memory {
    cases! {
        SharedMemory:
        collectives:
            every_operation_matches_its_definition,
            results_may_be_awaited_in_any_order,
            random_programs;
        coalesced:
            coalesced_operations_match_separate_ones,
            different_vectors_are_reported_with_both_sides;
        messages:
            every_rank_sends_to_every_other_before_receiving,
            messages_keep_their_order;
        faults:
            different_lengths_and_types_are_reported_with_both_sides,
            a_missing_rank_is_named,
            a_rank_that_leaves_is_named,
            an_abort_reaches_every_rank;
    }
}

/// Ranks synchronize like processes of several hosts.
mod tcp {
    cases! {
        Tcp:
        collectives:
            every_operation_matches_its_definition,
            random_programs;
        coalesced:
            coalesced_operations_match_separate_ones,
            different_vectors_are_reported_with_both_sides;
        messages:
            every_rank_sends_to_every_other_before_receiving,
            messages_keep_their_order,
            large_and_empty_messages;
        groups:
            splits_of_splits;
        faults:
            different_lengths_and_types_are_reported_with_both_sides,
            a_part_of_another_length_is_reported_with_both_sides,
            a_missing_rank_is_named,
            a_rank_that_leaves_is_named,
            an_abort_reaches_every_rank,
            a_panic_reaches_every_rank;
    }
}
