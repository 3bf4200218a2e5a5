//! Coalesced operations: they give the results of separate operations, but the ranks synchronize only once.

use zero_comm::{Buffer, CommError, Communicator, Dtype, Operation, ReduceOp, ToGather, ToScatter};

use crate::IN_PLACE;
use crate::oracle::{assert_same, concatenated, part, reduced, uneven, vector};
use crate::world::{GivenUp, Kind, impatient, run, run_with};

/// The vectors of an operation, equal on all ranks: (element type, elements).
type Vectors = [(Dtype, usize)];

/// Runs the coalesced operations on these vectors and compares them with the oracle.
fn check(comm: &dyn Communicator, vectors: &Vectors, seed: u64) -> Result<(), CommError> {
    let (rank, size) = (comm.rank(), comm.size());
    let op = if seed.is_multiple_of(3) { ReduceOp::Max } else { ReduceOp::Sum };
    let of_rank =
        |rank: usize, index: usize| vector(vectors[index].0, seed + 100 * index as u64, rank, vectors[index].1);
    let all = |index: usize| (0..size).map(|rank| of_rank(rank, index)).collect::<Vec<_>>();
    let counts = |index: usize| uneven(vectors[index].1, size, seed as usize + index);
    let own = |whole: &Buffer, index: usize, rank: usize| {
        let counts = counts(index);
        part(whole, counts[..rank].iter().sum(), counts[rank])
    };
    let what = |operation: Operation, index: usize| {
        format!("{operation} of {:?}, rank {rank} of {size} over {}", vectors[index], comm.transport())
    };
    let indices = 0..vectors.len();

    let found = comm.all_reduce_coalesced(indices.clone().map(|index| of_rank(rank, index)).collect(), op).wait()?;
    assert_eq!(found.len(), vectors.len());
    for (index, found) in found.iter().enumerate() {
        assert_same(found, &reduced(&all(index), op), &what(Operation::AllReduce, index));
    }

    let to_gather = |index: usize| {
        let (dtype, length) = vectors[index];
        let shard = own(&of_rank(rank, index), index, rank);
        ToGather { shard, output: Buffer::zeros(dtype, length), counts: counts(index) }
    };
    let gathered = comm.all_gather_coalesced(indices.clone().map(to_gather).collect()).wait()?;
    assert_eq!(gathered.len(), vectors.len());
    for (index, found) in gathered.iter().enumerate() {
        let shards: Vec<Buffer> = all(index).iter().enumerate().map(|(rank, whole)| own(whole, index, rank)).collect();
        assert_same(&found.output, &concatenated(&shards), &what(Operation::AllGather, index));
        assert_same(&found.shard, &shards[rank], &what(Operation::AllGather, index));
    }

    let to_scatter = |index: usize| {
        let counts = counts(index);
        ToScatter { input: of_rank(rank, index), shard: Buffer::zeros(vectors[index].0, counts[rank]), counts }
    };
    let scattered = comm.reduce_scatter_coalesced(indices.map(to_scatter).collect(), op).wait()?;
    assert_eq!(scattered.len(), vectors.len());
    for (index, found) in scattered.iter().enumerate() {
        let expected = own(&reduced(&all(index), op), index, rank);
        assert_same(&found.shard, &expected, &what(Operation::ReduceScatter, index));
        assert_same(&found.input, &of_rank(rank, index), &what(Operation::ReduceScatter, index));
    }
    Ok(())
}

pub(crate) fn coalesced_operations_match_separate_ones(kind: Kind) {
    for size in [1, 2, 3, 5, 8] {
        run(kind, size, |comm| {
            let mixed = [Dtype::Bf16, Dtype::F32, Dtype::U8, Dtype::F16, Dtype::I64];
            for (seed, lengths) in [[5, 0, size, 1001, 1], [0; 5], [3001; 5]].into_iter().enumerate() {
                let of_all_types: Vec<_> = mixed.into_iter().zip(lengths).collect();
                check(&*comm, &of_all_types, seed as u64).expect("the operations succeed");
                for dtype in Dtype::ALL {
                    let of_one_type = lengths.map(|length| (dtype, length));
                    check(&*comm, &of_one_type, 3 + seed as u64).expect("the operations succeed");
                }
                check(&*comm, &of_all_types[2..3], 9).expect("the operations succeed");
            }
        });
    }
}

pub(crate) fn coalesced_vectors_of_many_chunks(kind: Kind) {
    for size in [2, 3, 5] {
        run(kind, size, |comm| {
            // Large vectors, which ranks may access in place, and small ones, which they may not.
            let vectors =
                [(Dtype::F32, 220_009), (Dtype::Bf16, 77), (Dtype::F16, 340_007), (Dtype::F32, 3), (Dtype::U8, 0)];
            for seed in 0..3 {
                check(&*comm, &vectors, seed).expect("the operations succeed");
            }
            let stats = comm.stats();
            for operation in [Operation::AllReduce, Operation::AllGather, Operation::ReduceScatter] {
                let in_place = matches!(kind, Kind::Threads | Kind::Ahead) || (IN_PLACE && kind == Kind::SharedMemory);
                let expected = if in_place { 3 } else { 0 };
                assert_eq!((stats[operation].calls, stats[operation].in_place), (3, expected), "{operation}");
            }
        });
    }
}

pub(crate) fn a_coalesced_operation_counts_as_one_call(kind: Kind) {
    for size in 1..=4 {
        run(kind, size, |comm| {
            let (one, two) = ([(Dtype::F32, 120)], [(Dtype::F32, 120), (Dtype::Bf16, 1200)]);
            let separate = [&one[..], &two[1..]];
            for vectors in separate {
                check(&*comm, vectors, 1).expect("the operations succeed");
            }
            let before = comm.stats();
            check(&*comm, &two, 1).expect("the operations succeed");
            let after = comm.stats() - before;
            for operation in [Operation::AllReduce, Operation::AllGather, Operation::ReduceScatter] {
                assert_eq!((before[operation].calls, after[operation].calls), (2, 1), "{operation}");
                let whole = 4 * 120 + 2 * 1200;
                let size = comm.sizes().into_iter().find(|of| of.operation == operation && of.bytes == whole);
                assert_eq!(size.map(|size| size.calls), Some(1), "{operation}");
            }
            let all = |stats: zero_comm::Stats| stats[Operation::AllReduce].sent_bytes;
            assert_eq!(all(after), all(before), "an all_reduce sends the bytes of separate ones");
        });
    }
}

pub(crate) fn different_vectors_are_reported_with_both_sides(kind: Kind) {
    let gather = |comm: &dyn Communicator, vectors: &Vectors| {
        let size = comm.size();
        let to_gather = |(dtype, length): &(Dtype, usize)| ToGather {
            shard: Buffer::zeros(*dtype, *length),
            output: Buffer::zeros(*dtype, length * size),
            counts: vec![*length; size],
        };
        comm.all_gather_coalesced(vectors.iter().map(to_gather).collect()).wait()
    };
    let usual = [(Dtype::F32, 8), (Dtype::F32, 16)];
    let others = [
        // Another number of vectors with the same total length, other lengths, and another type with the same bytes.
        (&[(Dtype::F32, 24)][..], "all_gather #1 of 72 f32 (counts "),
        (&[(Dtype::F32, 16), (Dtype::F32, 8)], "all_gather #1 of 2 buffers with 72 f32 (counts "),
        (&[(Dtype::F32, 8), (Dtype::I64, 8)], "all_gather #1 of 2 buffers with 288 bytes (counts "),
    ];
    for (other, text) in others {
        let errors = run(kind, 3, |comm| {
            // A late rank may learn of the mismatch while it still waits for the first operation, in which all agree.
            let first = gather(&*comm, &usual);
            let second = |_| gather(&*comm, if comm.rank() == 1 { other } else { &usual });
            first.and_then(second).expect_err("they do not agree")
        });
        for error in errors {
            let CommError::Mismatch { rank, here, peer, there } = &error else { panic!("not a mismatch: {error}") };
            let (odd, even) = if *rank == 1 { (here, there) } else { (there, here) };
            assert!([*rank, *peer].contains(&1) && odd.starts_with(text), "{error}");
            assert!(even.starts_with("all_gather #1 of 2 buffers with 72 f32 (counts "), "{error}");
        }
    }
    let errors = run(kind, 2, |comm| {
        let lengths = if comm.rank() == 0 { [4, 6] } else { [5, 5] };
        let buffers = lengths.map(|length| Buffer::zeros(Dtype::F32, length)).to_vec();
        comm.all_reduce_coalesced(buffers, ReduceOp::Sum).wait().expect_err("lengths differ")
    });
    for error in errors {
        let text = error.to_string();
        assert!(text.contains("all_reduce #0 of 2 buffers with 10 f32 (sum) (lengths "), "{text}");
    }
}

pub(crate) fn contradicting_vectors_are_refused_without_effect(kind: Kind) {
    run(kind, 2, |comm| {
        let gather = |shard: usize| ToGather {
            shard: Buffer::zeros(Dtype::F32, shard),
            output: Buffer::zeros(Dtype::F32, 8),
            counts: vec![4, 4],
        };
        let refused = [
            comm.all_reduce_coalesced(vec![], ReduceOp::Sum).wait().map(drop),
            comm.all_gather_coalesced(vec![]).wait().map(drop),
            comm.reduce_scatter_coalesced(vec![], ReduceOp::Max).wait().map(drop),
            comm.all_gather_coalesced(vec![gather(4), gather(5)]).wait().map(drop),
        ];
        for result in refused {
            assert!(matches!(result, Err(CommError::Invalid { .. })), "{result:?}");
        }
        assert_eq!(comm.all_gather_coalesced(vec![gather(4); 3]).wait().expect("gathered").len(), 3);
        assert_eq!(comm.stats()[Operation::AllGather].calls, 1);
    });
}

pub(crate) fn a_rank_missing_from_a_coalesced_operation_is_named(kind: Kind) {
    let given_up = GivenUp::default();
    let errors = run_with(kind, 3, &impatient(), |comm| {
        check(&*comm, &[(Dtype::F32, 150_001), (Dtype::F32, 10)], 1).expect("all are there");
        if comm.rank() == 2 {
            given_up.wait_for(2);
            return None;
        }
        let buffers = [150_001, 10].map(|length| Buffer::zeros(Dtype::F32, length)).to_vec();
        let error = comm.all_reduce_coalesced(buffers, ReduceOp::Sum).wait().expect_err("one does not come");
        given_up.add_one();
        Some(error)
    });
    let late =
        |error: &&CommError| matches!(error, CommError::Deadline { peer: 2, operation: Operation::AllReduce, .. });
    assert!(errors.iter().flatten().any(|error| late(&error)), "{errors:?}");
}
