//! The cases of the suite, instantiated for one kind of transport.

macro_rules! cases {
    ($kind:ident: $($module:ident: $($case:ident),+;)+) => {
        $($(#[test] fn $case() {
            if crate::ready() {
                crate::$module::$case(crate::world::Kind::$kind);
            }
        })+)+
    };
}

macro_rules! suite {
    ($kind:ident) => {
        cases! {
            $kind:
            collectives:
                every_operation_matches_its_definition,
                vectors_of_many_chunks,
                large_vectors,
                results_may_be_awaited_in_any_order,
                many_all_to_alls_in_flight,
                payload_follows_the_closed_forms,
                an_all_to_all_sends_all_parts_but_its_own,
                random_programs;
            coalesced:
                coalesced_operations_match_separate_ones,
                coalesced_vectors_of_many_chunks,
                a_coalesced_operation_counts_as_one_call,
                different_vectors_are_reported_with_both_sides,
                contradicting_vectors_are_refused_without_effect,
                a_rank_missing_from_a_coalesced_operation_is_named;
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
                pipe_and_data_groups_run_concurrently,
                a_rank_that_leaves_is_named_by_ranks_that_do_not_talk_to_it,
                a_rank_that_stops_is_named_by_ranks_that_do_not_talk_to_it;
            in_place:
                large_vectors_are_accessed_in_place,
                an_input_may_be_changed_once_it_is_returned,
                buffers_that_a_late_rank_may_still_use_are_not_reused;
            faults:
                different_operations_are_reported_with_both_sides,
                different_lengths_and_types_are_reported_with_both_sides,
                a_message_of_another_length_is_a_mismatch,
                a_part_of_another_length_is_reported_with_both_sides,
                an_all_to_all_without_all_ranks_names_the_missing_one,
                a_missing_rank_is_named,
                a_rank_that_leaves_is_named,
                an_abort_reaches_every_rank,
                a_panic_reaches_every_rank,
                a_failure_in_a_split_reaches_every_rank,
                contradicting_arguments_are_refused_without_effect,
                results_that_are_never_awaited;
        }
    };
}
