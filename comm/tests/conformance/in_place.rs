//! Operations that access the buffers of peers in place: when they do, when they do not, and what happens to the buffer
//! of a failed operation.

use zero_comm::{Buffer, CommError, Communicator, Operation, Pending, ReduceOp};

use crate::IN_PLACE;
use crate::world::{GivenUp, Kind, impatient, run, run_with};

/// Elements of a vector that is large enough for in-place access. It has several blocks, and the last one is short.
const LENGTH: usize = 150_001;

pub(crate) fn large_vectors_are_accessed_in_place(kind: Kind) {
    for size in [1, 2, 3, 5] {
        run(kind, size, |comm| {
            let small = comm.all_reduce(vec![1f32; 100].into(), ReduceOp::Sum).wait().expect("reduced");
            assert_eq!(small.as_f32(), Some(&[size as f32; 100][..]));
            let mut counts = vec![0; size];
            counts[0] = LENGTH - size + 1;
            counts[1..].fill(1);
            let whole = Buffer::from(vec![1f32; LENGTH]);
            let whole = comm.all_reduce(whole, ReduceOp::Sum).wait().expect("reduced");
            assert!(whole.as_f32().is_some_and(|all| all.iter().all(|value| *value == size as f32)));
            let shard = Buffer::from(vec![0f32; counts[comm.rank()]]);
            let scattered = comm.reduce_scatter(whole, shard, &counts, ReduceOp::Sum).wait().expect("scattered");
            let square = (size * size) as f32;
            assert!(scattered.input.as_f32().is_some_and(|all| all.iter().all(|value| *value == size as f32)));
            assert!(scattered.shard.as_f32().is_some_and(|all| all.iter().all(|value| *value == square)));
            let gathered = comm.all_gather(scattered.shard, scattered.input, &counts).wait().expect("gathered");
            assert!(gathered.output.as_f32().is_some_and(|all| all.iter().all(|value| *value == square)));
            // Almost all elements go to the next rank.
            let (sent, received) = ring(comm.rank(), size);
            let (input, output) = (vec![comm.rank() as f32; LENGTH], vec![0f32; received.iter().sum()]);
            let exchanged = comm.all_to_all(input.into(), output.into(), &sent, &received).wait().expect("exchanged");
            let output = exchanged.output.into_f32().expect("f32");
            let mut rest = &output[..];
            for (source, count) in received.iter().enumerate() {
                let (part, tail) = rest.split_at(*count);
                assert!(part.iter().all(|value| *value == source as f32));
                rest = tail;
            }
            let root = size - 1;
            let letter = vec![if comm.rank() == root { 7f32 } else { 0.0 }; LENGTH];
            let letter = comm.broadcast(letter.into(), root).wait().expect("sent");
            assert!(letter.as_f32().is_some_and(|all| all.iter().all(|value| *value == 7.0)));

            // Every rank sends a large and a small message to the next rank before it receives any.
            let next = (comm.rank() + 1) % size;
            let sends: Vec<_> = (0..2 * usize::from(size > 1))
                .map(|i| comm.send(vec![(comm.rank() + i) as f32; [LENGTH, 100][i]].into(), next))
                .collect();
            for i in 0..sends.len() {
                let from = (comm.rank() + size - 1) % size;
                let received = comm.recv(vec![0f32; [LENGTH, 100][i]].into(), from).wait().expect("received");
                let expected = (from + i) as f32;
                assert!(received.as_f32().is_some_and(|all| all.iter().all(|value| *value == expected)));
            }
            for send in sends {
                send.wait().expect("sent");
            }

            let stats = comm.stats();
            let in_place = |operation| (stats[operation].calls, stats[operation].in_place);
            let threads = kind == Kind::Threads || size == 1;
            let reached = u64::from(threads || (IN_PLACE && kind == Kind::SharedMemory));
            assert_eq!(in_place(Operation::AllReduce), (2, reached + u64::from(threads)));
            for operation in [Operation::ReduceScatter, Operation::AllGather, Operation::AllToAll, Operation::Broadcast]
            {
                assert_eq!(in_place(operation), (1, reached), "{operation}");
            }
            // With two hosts, this depends on whether the next rank is on the same host.
            if size > 1 && kind != Kind::Hosts {
                assert_eq!(in_place(Operation::Send), (2, reached + u64::from(threads)));
            }
        });
    }
}

/// Returns the numbers of elements that a rank of a ring sends to each rank and receives from each rank. A rank sends
/// most elements to the next rank, and one element to every other rank.
fn ring(rank: usize, size: usize) -> (Vec<usize>, Vec<usize>) {
    let count = |from: usize, to: usize| if to == (from + 1) % size { LENGTH - (size - 1) } else { 1 };
    ((0..size).map(|to| count(rank, to)).collect(), (0..size).map(|from| count(from, rank)).collect())
}

pub(crate) fn an_input_may_be_changed_once_it_is_returned(kind: Kind) {
    const LENGTH: usize = 4 << 20;
    run(kind, 2, |comm| {
        for round in 0..5 {
            // Only rank 1 receives, so rank 0 has nothing else to wait for.
            let (sent, received) = if comm.rank() == 0 { ([0, LENGTH], [0, 0]) } else { ([0, 0], [LENGTH, 0]) };
            let input = vec![round as f32; sent[1]].into();
            let exchanged = comm.all_to_all(input, vec![0f32; received[0]].into(), &sent, &received).wait();
            let exchanged = exchanged.expect("exchanged");
            exchanged.input.into_f32().expect("f32").fill(-1.0);
            assert!(exchanged.output.as_f32().is_some_and(|all| all.iter().all(|value| *value == round as f32)));
        }
    });
}

pub(crate) fn buffers_that_a_late_rank_may_still_use_are_not_reused(kind: Kind) {
    not_reused(kind, |comm, buffer| comm.all_reduce(buffer, ReduceOp::Sum));
    not_reused(kind, |comm, buffer| {
        let output = Buffer::from(vec![0f32; LENGTH]);
        comm.all_to_all(buffer, output, &[1, LENGTH - 1], &[1, LENGTH - 1]).map(|exchanged| Ok(exchanged.input))
    });
    if kind != Kind::Tcp {
        // Between threads and in shared memory, a send completes only when the message is received.
        not_reused(kind, |comm, buffer| comm.send(buffer, 1));
    }
}

fn not_reused(kind: Kind, operation: impl Fn(&dyn Communicator, Buffer) -> Pending<Buffer> + Sync) {
    let given_up = GivenUp::default();
    run_with(kind, 2, &impatient(), |comm| {
        if comm.rank() == 1 {
            return given_up.wait_for(1);
        }
        let buffer = vec![1f32; LENGTH];
        let address = buffer.as_ptr() as usize;
        let result = operation(&*comm, buffer.into()).wait();
        given_up.add_one();
        // Data written to a socket may count as sent although no rank receives it.
        if kind != Kind::Hosts {
            let error = result.expect_err("nobody comes");
            assert!(matches!(error, CommError::Deadline { peer: 1, .. }), "{error}");
        }
        if IN_PLACE && kind == Kind::SharedMemory {
            let later: Vec<Vec<f32>> = (0..50).map(|_| vec![0f32; LENGTH]).collect();
            assert!(later.iter().all(|vector| vector.as_ptr() as usize != address));
        }
    });
}
