//! Compares collectives with their definitions.

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use zero_comm::{Buffer, CommError, Communicator, Dtype, Operation, ReduceOp};

use crate::oracle::{assert_same, concatenated, exchanged, part, parts_of, reduced, uneven, vector};
use crate::world::{Kind, run};

/// Runs one collective and compares it with the oracle.
pub(crate) fn check(
    comm: &dyn Communicator,
    operation: Operation,
    dtype: Dtype,
    length: usize,
    seed: u64,
) -> Result<(), CommError> {
    let (rank, size) = (comm.rank(), comm.size());
    let op = if seed.is_multiple_of(4) { ReduceOp::Max } else { ReduceOp::Sum };
    let mine = vector(dtype, seed, rank, length);
    let all = || (0..size).map(|rank| vector(dtype, seed, rank, length)).collect::<Vec<_>>();
    let counts = uneven(length, size, seed as usize);
    let start: usize = counts[..rank].iter().sum();
    let what = format!("{operation} of {length} {dtype}, rank {rank} of {size} over {}", comm.transport());
    match operation {
        Operation::AllReduce => assert_same(&comm.all_reduce(mine, op).wait()?, &reduced(&all(), op), &what),
        Operation::AllGather => {
            let shard = part(&mine, start, counts[rank]);
            let result = comm.all_gather(shard.clone(), Buffer::zeros(dtype, length), &counts).wait()?;
            let mut begin = 0;
            let wholes = all();
            let shards = wholes.iter().zip(&counts).map(|(whole, count)| {
                begin += count;
                part(whole, begin - count, *count)
            });
            assert_same(&result.output, &concatenated(&shards.collect::<Vec<_>>()), &what);
            assert_same(&result.shard, &shard, &what);
        }
        Operation::ReduceScatter => {
            let shard = Buffer::zeros(dtype, counts[rank]);
            let result = comm.reduce_scatter(mine.clone(), shard, &counts, op).wait()?;
            assert_same(&result.shard, &part(&reduced(&all(), op), start, counts[rank]), &what);
            assert_same(&result.input, &mine, &what);
        }
        Operation::Broadcast => {
            let root = seed as usize % size;
            assert_same(&comm.broadcast(mine, root).wait()?, &vector(dtype, seed, root, length), &what);
        }
        Operation::AllToAll => {
            let (input, sent) = parts_of(dtype, seed, rank, size, length);
            let (expected, received) = exchanged(dtype, seed, rank, size, length);
            let output = Buffer::zeros(dtype, expected.len());
            let result = comm.all_to_all(input.clone(), output, &sent, &received).wait()?;
            assert_same(&result.output, &expected, &what);
            assert_same(&result.input, &input, &what);
        }
        _ => comm.barrier().wait()?,
    }
    Ok(())
}

pub(crate) const COLLECTIVES: [Operation; 6] = [
    Operation::AllReduce,
    Operation::AllGather,
    Operation::ReduceScatter,
    Operation::Broadcast,
    Operation::AllToAll,
    Operation::Barrier,
];

pub(crate) fn every_operation_matches_its_definition(kind: Kind) {
    for size in 1..=8 {
        run(kind, size, |comm| {
            let mut seed = 0;
            for dtype in Dtype::ALL {
                for length in [0, 1, size - 1, size, 3001] {
                    for operation in COLLECTIVES {
                        seed += 1;
                        check(&*comm, operation, dtype, length, seed).expect("the operation succeeds");
                    }
                }
            }
        });
    }
}

pub(crate) fn vectors_of_many_chunks(kind: Kind) {
    // Each owner has more than one chunk on every transport, and the last chunk is short.
    for (size, length) in [(2, 150_001), (3, 220_009), (5, 340_007)] {
        run(kind, size, |comm| {
            for (seed, dtype) in [Dtype::F32, Dtype::F16].into_iter().enumerate() {
                for operation in COLLECTIVES {
                    check(&*comm, operation, dtype, length, 1 + seed as u64).expect("the operation succeeds");
                }
            }
        });
    }
}

pub(crate) fn large_vectors(kind: Kind) {
    // 64 MiB, larger than every internal buffer; the expected values are cheap to compute.
    const LENGTH: usize = 16 << 20;
    run(kind, 2, |comm| {
        let rank = comm.rank();
        let value = |rank: usize, i: usize| ((i * 31 + rank) % 1024) as f32;
        let mine: Vec<f32> = (0..LENGTH).map(|i| value(rank, i)).collect();
        let sum = comm.all_reduce(mine.into(), ReduceOp::Sum).wait().expect("reduced");
        let sum = sum.into_f32().expect("f32");
        assert!((0..LENGTH).all(|i| sum[i] == value(0, i) + value(1, i)));
        let counts = [LENGTH - 12_345, 12_345];
        let shard = vec![rank as f32 + 0.5; counts[rank]];
        let all = comm.all_gather(shard.into(), sum.into(), &counts).wait().expect("gathered");
        let all = all.output.into_f32().expect("f32");
        assert!((0..LENGTH).all(|i| all[i] == if i < counts[0] { 0.5 } else { 1.5 }));
        let result = comm.reduce_scatter(all.into(), vec![0f32; counts[rank]].into(), &counts, ReduceOp::Max).wait();
        let shard = result.expect("scattered").shard.into_f32().expect("f32");
        assert!(shard.iter().all(|value| *value == rank as f32 + 0.5));
        // Most of rank 0's input goes to rank 1, and most of rank 1's stays there.
        let (sent, received) = ([12_345, LENGTH - 12_345], [[12_345; 2], [LENGTH - 12_345; 2]][rank]);
        let mine: Vec<f32> = (0..LENGTH).map(|i| value(rank, i)).collect();
        let output = vec![0f32; received.iter().sum()];
        let result = comm.all_to_all(mine.into(), output.into(), &sent, &received).wait();
        let output = result.expect("exchanged").output.into_f32().expect("f32");
        let first = rank * sent[0];
        for (source, part) in output.chunks(received[0]).enumerate() {
            assert!(part.iter().enumerate().all(|(i, found)| *found == value(source, first + i)));
        }
    });
}

pub(crate) fn many_all_to_alls_in_flight(kind: Kind) {
    for size in [2, 3, 5] {
        run(kind, size, |comm| {
            let rank = comm.rank();
            let start = |i: u64| {
                let length = 10 + 499 * i as usize;
                let (input, sent) = parts_of(Dtype::F32, i, rank, size, length);
                let (expected, received) = exchanged(Dtype::F32, i, rank, size, length);
                let output = Buffer::zeros(Dtype::F32, expected.len());
                (expected, comm.all_to_all(input, output, &sent, &received))
            };
            let mut pending: Vec<_> = (0..40).map(start).collect();
            // Messages between the same ranks do not interfere with the collectives.
            let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
            let send = comm.send(vector(Dtype::F32, 99, rank, 70_000), next);
            let message = comm.recv(Buffer::zeros(Dtype::F32, 70_000), previous).wait().expect("received");
            assert_same(&message, &vector(Dtype::F32, 99, previous, 70_000), "a message");
            send.wait().expect("sent");
            // Every rank waits in a different order.
            pending.rotate_left(7 * rank);
            for (expected, pending) in pending.into_iter().rev() {
                assert_same(&pending.wait().expect("exchanged").output, &expected, "awaited out of order");
            }
        });
    }
}

pub(crate) fn results_may_be_awaited_in_any_order(kind: Kind) {
    for size in [2, 3, 5] {
        run(kind, size, |comm| {
            let pending: Vec<_> = (0..40u64)
                .map(|i| comm.all_reduce(vector(Dtype::F32, i, comm.rank(), 10 + 997 * i as usize), ReduceOp::Sum))
                .collect();
            let last = comm.barrier();
            last.wait().expect("the barrier comes after all of them");
            assert!(pending.iter().all(|pending| pending.is_done()));
            // Every rank waits in a different order.
            let mut order: Vec<usize> = (0..pending.len()).collect();
            order.rotate_left(7 * comm.rank());
            order.reverse();
            let mut pending: Vec<_> = pending.into_iter().map(Some).collect();
            for i in order {
                let found = pending[i].take().expect("each result is taken once").wait().expect("reduced");
                let ranks: Vec<_> = (0..size).map(|rank| vector(Dtype::F32, i as u64, rank, 10 + 997 * i)).collect();
                assert_same(&found, &reduced(&ranks, ReduceOp::Sum), "awaited out of order");
            }
        });
    }
}

pub(crate) fn payload_follows_the_closed_forms(kind: Kind) {
    for size in 1..=5 {
        let bytes = 4 * 60 * 7; // divisible by 1..=5
        let sent = run(kind, size, |comm| {
            let whole = || Buffer::from(vec![1f32; bytes / 4]);
            let shard = || Buffer::from(vec![1f32; bytes / 4 / size]);
            let counts = vec![bytes / 4 / size; size];
            comm.all_reduce(whole(), ReduceOp::Sum).wait().expect("reduced");
            comm.all_gather(shard(), whole(), &counts).wait().expect("gathered");
            comm.reduce_scatter(whole(), shard(), &counts, ReduceOp::Sum).wait().expect("scattered");
            comm.all_to_all(whole(), whole(), &counts, &counts).wait().expect("exchanged");
            let before = comm.stats();
            comm.broadcast(whole(), 0).wait().expect("broadcast");
            comm.barrier().wait().expect("barrier");
            if size > 1 && comm.rank() == 0 {
                comm.send(whole(), 1).wait().expect("sent");
            } else if comm.rank() == 1 {
                comm.recv(whole(), 0).wait().expect("received");
            }
            let stats = comm.stats();
            assert_eq!((stats - before)[Operation::AllReduce].calls, 0);
            assert!(stats.iter().all(|(_, counter)| counter.calls <= 1 && counter.seconds >= 0.0));
            stats
        });
        for (rank, stats) in sent.iter().enumerate() {
            let part = (bytes * (size - 1) / size) as u64;
            assert_eq!(stats[Operation::AllReduce].sent_bytes, 2 * part, "2(N−1)/N");
            assert_eq!(stats[Operation::AllGather].sent_bytes, part, "(N−1)/N");
            assert_eq!(stats[Operation::ReduceScatter].sent_bytes, part, "(N−1)/N");
            assert_eq!(stats[Operation::AllToAll].sent_bytes, part, "(N−1)/N");
            let root = if rank == 0 { bytes as u64 } else { 0 };
            assert_eq!(stats[Operation::Broadcast].sent_bytes, (size as u64 - 1) * root);
            assert_eq!(stats[Operation::Barrier].sent_bytes, 0);
            assert_eq!(stats[Operation::Send].sent_bytes, if size > 1 { root } else { 0 });
            assert_eq!(stats[Operation::Recv].sent_bytes, 0);
        }
    }
}

pub(crate) fn an_all_to_all_sends_all_parts_but_its_own(kind: Kind) {
    for size in 1..=5 {
        run(kind, size, |comm| {
            let rank = comm.rank();
            let (input, sent) = parts_of(Dtype::Bf16, 3, rank, size, 1000);
            let (expected, received) = exchanged(Dtype::Bf16, 3, rank, size, 1000);
            let bytes = 2 * (input.len() - sent[rank]) as u64;
            let whole = input.size_bytes() as u64;
            comm.all_to_all(input, Buffer::zeros(Dtype::Bf16, expected.len()), &sent, &received).wait().expect("done");
            assert_eq!(comm.stats()[Operation::AllToAll].sent_bytes, bytes);
            let sizes = comm.sizes();
            let counter = sizes.iter().find(|counter| counter.operation == Operation::AllToAll).expect("counted");
            assert_eq!((counter.calls, counter.bytes, counter.ranks), (1, whole, size));
        });
    }
}

pub(crate) fn random_programs(kind: Kind) {
    let step = (0..COLLECTIVES.len(), 0..Dtype::ALL.len(), 0usize..5000, any::<u32>());
    let programs = (1usize..=4, prop::collection::vec(step, 1..12));
    let mut runner = TestRunner::new(ProptestConfig { cases: 12, failure_persistence: None, ..Default::default() });
    let outcome = runner.run(&programs, |(size, program)| {
        run(kind, size, |comm| {
            for (operation, dtype, length, seed) in &program {
                check(&*comm, COLLECTIVES[*operation], Dtype::ALL[*dtype], *length, u64::from(*seed))
                    .expect("the step succeeds");
            }
        });
        Ok(())
    });
    outcome.expect("every program succeeds");
}
