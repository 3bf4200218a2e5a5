//! The cases of the suite, to be run on a kind of world.

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
    };
}
