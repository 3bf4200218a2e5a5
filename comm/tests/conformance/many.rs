//! Small operations of many ranks. If a network connects the ranks, these operations use a tree of ranks.

use zero_comm::{Buffer, CommError, Dtype, Operation, ReduceOp};

use crate::collectives::{COLLECTIVES, check};
use crate::world::{GivenUp, Kind, impatient, run, run_with};

/// Number of ranks over TCP: more than a power of two, so that the tree is not full.
const MANY: usize = 19;

pub(crate) fn small_operations_of_many_ranks_match_their_definitions(kind: Kind) {
    // 34 ranks are 17 hosts with two ranks each. 35 ranks are 18 hosts, and the last one has one rank.
    let sizes = if kind == Kind::Pairs { &[34, 35][..] } else { &[MANY] };
    for &size in sizes {
        run(kind, size, |comm| {
            let mut seed = 0;
            for dtype in Dtype::ALL {
                for length in [0, 1, size - 1, size, 90] {
                    for operation in COLLECTIVES {
                        seed += 1;
                        check(&*comm, operation, dtype, length, seed).expect("the operation succeeds");
                    }
                }
            }
            // Elements of several types in one operation, and an operation that is not small.
            let vectors = || vec![Buffer::U8(vec![1; 3]), vec![1f32; 5].into(), vec![1i64; 2].into()];
            let sums = comm.all_reduce_coalesced(vectors(), ReduceOp::Sum).wait().expect("reduced");
            let many = size as i64;
            assert_eq!(sums, [Buffer::U8(vec![many as u8; 3]), vec![many as f32; 5].into(), vec![many; 2].into()]);
            check(&*comm, Operation::AllReduce, Dtype::F32, 100_000, 3).expect("the operation succeeds");
        });
    }
}

pub(crate) fn a_small_sum_travels_up_and_down_the_tree(kind: Kind) {
    const BYTES: usize = 4;
    let sent = run(kind, MANY, |comm| {
        comm.all_reduce(vec![1f32].into(), ReduceOp::Sum).wait().expect("reduced");
        comm.stats()[Operation::AllReduce].network_bytes as usize
    });
    // On the way up the tree, a contribution is sent once for each set bit of its rank. On the way down, each rank
    // except the root receives the sum once.
    let up: usize = (0..MANY).map(|rank| rank.count_ones() as usize).sum();
    assert_eq!(sent.iter().sum::<usize>(), BYTES * (up + MANY - 1));
}

/// Rank 12 has ranks above and below it in the tree; rank 18 is the last one.
pub(crate) fn different_operations_of_many_ranks_are_reported(kind: Kind) {
    for (odd, length) in [(12, 11), (18, 11), (12, 1 << 20), (0, 1 << 20)] {
        let errors = run(kind, MANY, |comm| {
            let length = if comm.rank() == odd { length } else { 10 };
            comm.all_reduce(vec![1f32; length].into(), ReduceOp::Sum).wait().expect_err("lengths differ")
        });
        for error in errors {
            let CommError::Mismatch { rank, peer, .. } = &error else { panic!("not a mismatch: {error}") };
            assert!([*rank, *peer].contains(&odd), "{error}");
        }
    }
}

pub(crate) fn a_missing_rank_of_many_is_named(kind: Kind) {
    for absent in [0, 12, 18] {
        let given_up = GivenUp::default();
        let errors = run_with(kind, MANY, &impatient(), |comm| {
            comm.barrier().wait().expect("all come");
            if comm.rank() == absent {
                given_up.wait_for(MANY - 1);
            }
            // The messages of the others may already be in the late rank's sockets, so its barrier may complete before it
            // learns of the failure. On all other ranks, the barrier itself must fail.
            let error = comm.barrier().wait().err();
            assert!(error.is_some() || comm.rank() == absent, "one is late");
            let error = error.unwrap_or_else(|| comm.barrier().wait().expect_err("the failure is final"));
            given_up.add_one();
            error
        });
        let mut deadlines = 0;
        for error in errors {
            match error {
                CommError::Deadline { peer, operation, sequence, .. } => {
                    assert_eq!((peer, operation, sequence), (absent, Operation::Barrier, 1));
                    deadlines += 1;
                }
                CommError::Aborted { reason, .. } => {
                    assert!(reason.contains(&format!("for rank {absent} in barrier #1")), "{reason}");
                }
                other => panic!("{other}"),
            }
        }
        assert!(deadlines > 0);
    }
}
