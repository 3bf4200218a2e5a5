//! A fault ends in an error on every rank and never in a hang. The error names the faulty rank and the operation.

use std::sync::Arc;

use zero_comm::{Buffer, CommError, Communicator, Dtype, Exchanged, Operation, Options, ReduceOp};

use crate::world::{GivenUp, Kind, impatient, run, run_catching, run_with};

fn reduce(comm: &Arc<dyn Communicator>, length: usize) -> Result<Buffer, CommError> {
    comm.all_reduce(vec![1f32; length].into(), ReduceOp::Sum).wait()
}

#[track_caller]
fn assert_mismatch(error: CommError, first: (usize, &str), second: (usize, &str)) {
    let CommError::Mismatch { rank, here, peer, there } = &error else { panic!("not a mismatch: {error}") };
    let sides = [(*rank, here.as_str()), (*peer, there.as_str())];
    // For device buffers, the description has a suffix.
    let is = |side: (usize, &str), expected: (usize, &str)| side.0 == expected.0 && side.1.starts_with(expected.1);
    let are = |one, other| is(sides[0], one) && is(sides[1], other);
    assert!(are(first, second) || are(second, first), "{error}");
}

pub(crate) fn different_operations_are_reported_with_both_sides(kind: Kind) {
    let errors = run(kind, 2, |comm| {
        reduce(&comm, 100).expect("they agree at first");
        let error = match comm.rank() {
            0 => comm.reduce_scatter(vec![0f32; 8].into(), vec![0f32; 4].into(), &[4, 4], ReduceOp::Sum).wait().err(),
            _ => reduce(&comm, 4096).err(),
        };
        let later = reduce(&comm, 1).expect_err("the failure is final");
        assert!(matches!(later, CommError::Mismatch { .. }), "{later}");
        error.expect("they do not agree")
    });
    for error in errors {
        let text = error.to_string();
        for part in ["rank 0", "rank 1", "reduce_scatter #1 of 8 f32", "all_reduce #1 of 4096 f32"] {
            assert!(text.contains(part), "{part} is not in: {text}");
        }
    }
}

pub(crate) fn different_lengths_and_types_are_reported_with_both_sides(kind: Kind) {
    let errors = run(kind, 3, |comm| {
        let length = if comm.rank() == 2 { 11 } else { 10 };
        reduce(&comm, length).expect_err("lengths differ")
    });
    for error in errors {
        let CommError::Mismatch { rank, peer, .. } = &error else { panic!("not a mismatch: {error}") };
        assert!([*rank, *peer].contains(&2), "{error}");
    }
    let errors = run(kind, 2, |comm| {
        let buffer = Buffer::zeros(if comm.rank() == 0 { Dtype::F16 } else { Dtype::Bf16 }, 64);
        comm.broadcast(buffer, 0).wait().expect_err("types differ")
    });
    for error in errors {
        let (f16, bf16) =
            ("broadcast #0 of 64 f16 from rank 0 of the group", "broadcast #0 of 64 bf16 from rank 0 of the group");
        assert_mismatch(error, (0, f16), (1, bf16));
    }
    let errors = run(kind, 2, |comm| {
        // The total length is the same, but the counts differ.
        let counts = if comm.rank() == 0 { [4, 4] } else { [5, 3] };
        let shard = Buffer::zeros(Dtype::I64, counts[comm.rank()]);
        comm.all_gather(shard, Buffer::zeros(Dtype::I64, 8), &counts).wait().expect_err("counts differ")
    });
    assert!(errors.iter().all(|error| matches!(error, CommError::Mismatch { .. })), "{errors:?}");
}

pub(crate) fn a_message_of_another_length_is_a_mismatch(kind: Kind) {
    let errors = run(kind, 3, |comm| {
        let first = match comm.rank() {
            0 => comm.send(vec![1f32; 5].into(), 1).wait().err(),
            1 => comm.recv(vec![1f32; 6].into(), 0).wait().err(),
            _ => None,
        };
        // A small message may complete before the receiver has seen it; then the next operation fails.
        first.unwrap_or_else(|| comm.barrier().wait().expect_err("the job is over"))
    });
    for error in errors {
        assert_mismatch(error, (1, "recv #0 of 6 f32"), (0, "send #0 of 5 f32"));
    }
}

/// Starts an all_to_all of 1000 elements from each rank to each, except that rank 1 of a group sends `other` to rank 2.
fn exchange(comm: &Arc<dyn Communicator>, other: usize) -> Result<Exchanged, CommError> {
    let (rank, size) = (comm.rank(), comm.size());
    let (mut sent, received) = (vec![1000; size], vec![1000; size]);
    if rank == 1 && size > 2 {
        sent[2] = other;
    }
    let input = Buffer::zeros(Dtype::I64, sent.iter().sum());
    comm.all_to_all(input, Buffer::zeros(Dtype::I64, 1000 * size), &sent, &received).wait()
}

pub(crate) fn a_part_of_another_length_is_reported_with_both_sides(kind: Kind) {
    for size in [3, 4, 5] {
        for other in [0, 999, 1001] {
            let errors = run(kind, size, |comm| {
                // A late rank may learn of the fault while it still waits for the first operation, in which all agree.
                // A rank whose own parts match may have completed the second operation before the fault.
                let error = exchange(&comm, 1000).and_then(|_| exchange(&comm, other)).err();
                error.unwrap_or_else(|| comm.barrier().wait().expect_err("the failure is final"))
            });
            let first = format!("all_to_all #1 of {other} i64 to the other rank and 1000 from it");
            let second = "all_to_all #1 of 1000 i64 to the other rank and 1000 from it";
            for error in errors {
                assert_mismatch(error, (1, &first), (2, second));
            }
        }
    }
    let errors = run(kind, 4, |comm| match comm.rank() {
        // The ranks of one of two hosts call another operation.
        0 | 1 => reduce(&comm, 4000).expect_err("they do not agree"),
        _ => exchange(&comm, 1000).expect_err("they do not agree"),
    });
    for error in errors {
        let text = error.to_string();
        assert!(matches!(error, CommError::Mismatch { .. }), "{text}");
        assert!(text.contains("all_reduce #0 of 4000 f32 (sum)") && text.contains("all_to_all #0 of "), "{text}");
    }
}

pub(crate) fn an_all_to_all_without_all_ranks_names_the_missing_one(kind: Kind) {
    let errors = run(kind, 4, |comm| {
        exchange(&comm, 1000).expect("all are there");
        (comm.rank() != 3).then(|| exchange(&comm, 1000).expect_err("one has left"))
    });
    for (rank, error) in errors.into_iter().enumerate().take(3) {
        let Some(CommError::LostPeer { rank: own, peer, operation, sequence, .. }) = error else { panic!("{error:?}") };
        assert_eq!((own, peer, operation, sequence), (rank, 3, Operation::AllToAll, 1));
    }
    let given_up = GivenUp::default();
    let errors = run_with(kind, 4, &impatient(), |comm| {
        if comm.rank() == 3 {
            given_up.wait_for(3);
        }
        // The data of the others may already be in the late rank's sockets, so its operation may complete before it
        // learns of the failure.
        let error = exchange(&comm, 1000).err();
        let error = error.unwrap_or_else(|| comm.barrier().wait().expect_err("the failure is final"));
        given_up.add_one();
        error
    });
    for error in errors {
        let text = error.to_string();
        assert!(text.contains("for rank 3 in all_to_all #0"), "{text}");
    }
}

pub(crate) fn a_missing_rank_is_named(kind: Kind) {
    std::thread::scope(|scope| {
        scope.spawn(|| late_for_a_collective(kind, 2));
        scope.spawn(|| late_for_a_collective(kind, 4));
        scope.spawn(|| late_with_a_message(kind));
    });
}

fn late_for_a_collective(kind: Kind, size: usize) {
    let absent = size - 1;
    let given_up = GivenUp::default();
    let errors = run_with(kind, size, &impatient(), |comm| {
        reduce(&comm, 100).expect("all come");
        if comm.rank() == absent {
            given_up.wait_for(size - 1);
        }
        let error = reduce(&comm, 100_000).expect_err("one is late");
        given_up.add_one();
        error
    });
    let mut deadlines = 0;
    for (rank, error) in errors.iter().enumerate() {
        match error {
            CommError::Deadline { rank: own, peer, operation, sequence, timeout } => {
                let expected = (rank, absent, Operation::AllReduce, 1, impatient().timeout);
                assert_eq!((*own, *peer, *operation, *sequence, *timeout), expected);
                deadlines += 1;
            }
            CommError::Aborted { rank: own, reason, .. } => {
                assert_eq!(*own, rank);
                assert!(reason.contains(&format!("for rank {absent} in all_reduce #1")), "{reason}");
            }
            other => panic!("{other}"),
        }
    }
    assert!(deadlines >= 1, "{errors:?}");
}

fn late_with_a_message(kind: Kind) {
    let given_up = GivenUp::default();
    let errors = run_with(kind, 2, &impatient(), |comm| match comm.rank() {
        0 => {
            let error = comm.recv(vec![0u8; 1].into(), 1).wait().expect_err("nobody sends");
            given_up.add_one();
            error
        }
        _ => {
            given_up.wait_for(1);
            // The notice may still be in flight, and a buffered message counts as sent.
            let sent = comm.send(vec![0u8; 1].into(), 0).wait().err();
            sent.unwrap_or_else(|| comm.barrier().wait().expect_err("nobody waits any more"))
        }
    });
    let (peer, operation) = (1, Operation::Recv);
    let expected = CommError::Deadline { rank: 0, peer, operation, sequence: 0, timeout: impatient().timeout };
    assert_eq!(errors[0], expected);
}

pub(crate) fn a_rank_that_leaves_is_named(kind: Kind) {
    for size in [2, 5] {
        let errors = run(kind, size, |comm| {
            reduce(&comm, 1000).expect("all are there");
            if comm.rank() == 1 {
                return None;
            }
            Some(reduce(&comm, 1000).expect_err("one has left"))
        });
        for (rank, error) in errors.into_iter().enumerate().filter(|(rank, _)| *rank != 1) {
            let Some(CommError::LostPeer { rank: own, peer, operation, sequence, .. }) = error else {
                panic!("{error:?}")
            };
            assert_eq!((own, peer, operation, sequence), (rank, 1, Operation::AllReduce, 1));
        }
    }
}

pub(crate) fn an_abort_reaches_every_rank(kind: Kind) {
    let errors = run(kind, 4, |comm| {
        // Rank 2 never calls the barrier, and rank 3 never sends.
        let pending = (comm.rank() != 2).then(|| comm.barrier());
        let message = (comm.rank() == 0).then(|| comm.recv(vec![0u8; 4].into(), 3));
        if comm.rank() == 2 {
            comm.abort("disk full");
            comm.abort("only the first counts");
        }
        let results = [pending.map(|p| p.wait().err()), message.map(|p| p.wait().err())];
        let later = comm.broadcast(vec![0u8; 4].into(), 0).wait().expect_err("the job is over");
        results.into_iter().flatten().map(|error| error.expect("aborted")).chain([later]).collect::<Vec<_>>()
    });
    for (rank, error) in errors.into_iter().enumerate().flat_map(|(rank, all)| all.into_iter().map(move |e| (rank, e)))
    {
        let CommError::Aborted { rank: own, by, reason, .. } = &error else { panic!("{error}") };
        assert_eq!((*own, *by, reason.as_str()), (rank, 2, "disk full"));
    }
}

pub(crate) fn a_panic_reaches_every_rank(kind: Kind) {
    let results = run_catching(kind, 3, &Options::default(), |comm| {
        // Move the last reference into the closure, so that it drops while the thread panics.
        let comm = comm;
        assert!(comm.rank() != 0, "this rank panics, as intended");
        reduce(&comm, 10).expect_err("one has panicked")
    });
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Err(_) => assert_eq!(rank, 0),
            Ok(CommError::Aborted { by, reason, .. }) => assert_eq!((by, reason.as_str()), (0, "the rank panicked")),
            Ok(error) => panic!("{error}"),
        }
    }
}

pub(crate) fn a_failure_in_a_split_reaches_every_rank(kind: Kind) {
    let errors = run(kind, 4, |comm| {
        let half = comm.split(comm.rank() / 2, 0).expect("split");
        // A slow rank may learn of the abort before it has completed the first barrier.
        let everybody_has_its_half = comm.barrier().wait();
        if comm.rank() == 3 {
            half.abort("cosmic ray");
        }
        let error = everybody_has_its_half.and_then(|()| comm.barrier().wait()).expect_err("the job is over");
        assert!(half.barrier().wait().is_err());
        error
    });
    for error in errors {
        assert!(matches!(&error, CommError::Aborted { by: 3, reason, .. } if reason == "cosmic ray"), "{error}");
    }
}

pub(crate) fn contradicting_arguments_are_refused_without_effect(kind: Kind) {
    run(kind, 2, |comm| {
        let rank = comm.rank();
        let floats = |length: usize| Buffer::zeros(Dtype::F32, length);
        let refused = [
            comm.all_gather(floats(2), floats(4), &[2, 2, 0]).wait().err(),
            comm.all_gather(floats(2), floats(5), &[2, 2]).wait().err(),
            comm.all_gather(floats(3), floats(4), &[2, 2]).wait().err(),
            comm.all_gather(Buffer::zeros(Dtype::F16, 2), floats(4), &[2, 2]).wait().err(),
            comm.reduce_scatter(floats(4), floats(2), &[usize::MAX, 5], ReduceOp::Sum).wait().err(),
            comm.broadcast(floats(1), 2).wait().err(),
            comm.all_to_all(floats(4), floats(4), &[2, 2, 0], &[2, 2]).wait().err(),
            comm.all_to_all(floats(4), floats(4), &[2, 2], &[4]).wait().err(),
            comm.all_to_all(floats(4), floats(4), &[2, 3], &[2, 2]).wait().err(),
            comm.all_to_all(floats(4), floats(5), &[2, 2], &[2, 2]).wait().err(),
            comm.all_to_all(floats(4), floats(4), &[usize::MAX, 5], &[2, 2]).wait().err(),
            comm.all_to_all(floats(4), floats(4), &[1, 3], &[3, 1]).wait().err(),
            comm.all_to_all(floats(4), Buffer::zeros(Dtype::F16, 4), &[2, 2], &[2, 2]).wait().err(),
            comm.send(floats(1), rank).wait().err(),
            comm.send(floats(1), 2).wait().err(),
            comm.recv(floats(1), 9).wait().err(),
        ];
        for error in refused {
            assert!(matches!(error, Some(CommError::Invalid { .. })), "{error:?}");
        }
        reduce(&comm, 10).expect("refused calls have no effect");
    });
}

pub(crate) fn results_that_are_never_awaited(kind: Kind) {
    run(kind, 3, |comm| {
        for i in 0..30 {
            drop(comm.all_reduce(vec![1f32; 10_000 + i].into(), ReduceOp::Sum));
        }
        if comm.rank() == 0 {
            drop(comm.send(vec![7u8; 1 << 20].into(), 1));
        } else if comm.rank() == 1 {
            let received = comm.recv(vec![0u8; 1 << 20].into(), 0).wait().expect("received");
            assert!(received.as_u8().is_some_and(|bytes| bytes.iter().all(|byte| *byte == 7)));
        }
        // Dropping the communicator finishes the remaining operations.
    });
}
