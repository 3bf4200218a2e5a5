//! One suite for all transports: what a communicator promises, for worlds of 1 to 8 ranks.
//!
//! Ranks of processes are threads here that each call `connect` as a process would; `processes.rs` has real ones.

#[path = "conformance/collectives.rs"]
mod collectives;
#[path = "conformance/faults.rs"]
mod faults;
#[path = "conformance/groups.rs"]
mod groups;
#[path = "conformance/messages.rs"]
mod messages;
#[path = "conformance/oracle.rs"]
mod oracle;
#[path = "conformance/world.rs"]
mod world;

macro_rules! for_every_transport {
    ($($module:ident: $($case:ident),+;)+) => {
        mod threads {
            $($(#[test] fn $case() { crate::$module::$case(crate::world::Kind::Threads) })+)+
        }
        mod shared_memory {
            $($(#[test] fn $case() { crate::$module::$case(crate::world::Kind::SharedMemory) })+)+
        }
        mod tcp {
            $($(#[test] fn $case() { crate::$module::$case(crate::world::Kind::Tcp) })+)+
        }
    };
}

for_every_transport! {
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
        messages_keep_their_order,
        large_and_empty_messages;
    groups:
        splits_are_groups_of_their_own,
        splits_of_splits;
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
