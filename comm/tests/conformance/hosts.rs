//! Checks which bytes groups on several hosts send through sockets. The other cases show that their results are
//! bit-identical to those on one host.

use zero_comm::{Buffer, Communicator, Counter, Dtype, Operation, ReduceOp};

use crate::world::{Kind, first_host, run};

/// Returns the bytes that the ranks of each of two hosts write to sockets for an operation.
fn between(kind: Kind, size: usize, operation: impl Fn(&dyn Communicator) -> Counter + Sync) -> [u64; 2] {
    let counters = run(kind, size, |comm| operation(&*comm));
    assert!(counters.iter().all(|counter| counter.calls == 1));
    let bytes = |ranks: &[Counter]| ranks.iter().map(|counter| counter.network_bytes).sum();
    let (first, second) = counters.split_at(first_host(size));
    [bytes(first), bytes(second)]
}

pub(crate) fn data_between_hosts_is_sent_once_per_host(kind: Kind) {
    // The hosts have equal or different sizes. Each host is one node of the tree of ranks.
    for size in [4, 7, 8] {
        let length = 840 * size;
        let counts = vec![840; size];
        let first = (4 * 840 * first_host(size)) as u64;
        let whole = 4 * length as u64;
        let all_reduce = |dtype| {
            between(kind, size, move |comm| {
                comm.all_reduce(Buffer::zeros(dtype, length), ReduceOp::Sum).wait().expect("reduced");
                comm.stats()[Operation::AllReduce]
            })
        };
        // Each host sends half of its partial sum, receives half of the other host's, and sends the half that it has
        // completed.
        assert_eq!(all_reduce(Dtype::F32), [whole; 2], "{size} ranks");
        // Partial sums of 16-bit floats are sent as f32.
        assert_eq!(all_reduce(Dtype::Bf16), [whole; 2], "{size} ranks");
        let scattered = between(kind, size, |comm| {
            let (input, shard) = (Buffer::zeros(Dtype::F32, length), Buffer::zeros(Dtype::F32, 840));
            comm.reduce_scatter(input, shard, &counts, ReduceOp::Sum).wait().expect("scattered");
            comm.stats()[Operation::ReduceScatter]
        });
        assert_eq!(scattered, [whole - first, first], "{size} ranks: each host sends what the other's ranks get");
        let gathered = between(kind, size, |comm| {
            let (shard, output) = (Buffer::zeros(Dtype::F32, 840), Buffer::zeros(Dtype::F32, length));
            comm.all_gather(shard, output, &counts).wait().expect("gathered");
            comm.stats()[Operation::AllGather]
        });
        assert_eq!(gathered, [first, whole - first], "{size} ranks: each host sends what its own ranks have");
        let broadcast = between(kind, size, |comm| {
            comm.broadcast(Buffer::zeros(Dtype::F32, length), size - 1).wait().expect("sent");
            comm.stats()[Operation::Broadcast]
        });
        assert_eq!(broadcast, [0, whole], "{size} ranks: the root is on the second host");
    }
}

pub(crate) fn parts_between_hosts_are_sent_once(kind: Kind) {
    // A cell is a run of ranks on one host that is one node of the tree. Each host is one cell, but with 6 ranks, each
    // host has two cells.
    for size in [4, 6, 7, 8] {
        // Rank i sends 10 (i + 1) + j elements to rank j.
        let count = |from: usize, to: usize| 10 * (from + 1) + to;
        let sent = between(kind, size, |comm| {
            let rank = comm.rank();
            let sent: Vec<usize> = (0..size).map(|to| count(rank, to)).collect();
            let received: Vec<usize> = (0..size).map(|from| count(from, rank)).collect();
            let buffer = |counts: &[usize]| Buffer::zeros(Dtype::F32, counts.iter().sum());
            let pending = comm.all_to_all(buffer(&sent), buffer(&received), &sent, &received);
            pending.wait().expect("exchanged");
            comm.stats()[Operation::AllToAll]
        });
        // With 6 ranks, the cells are ranks 0–1, 2, 3 and 4–5.
        let cell = |rank: usize| if size == 6 { [0, 0, 1, 2, 3, 3][rank] } else { rank / first_host(size) };
        let across = |from: std::ops::Range<usize>| -> u64 {
            let pairs = from.flat_map(|from| (0..size).map(move |to| (from, to)));
            pairs.filter(|(from, to)| cell(*from) != cell(*to)).map(|(from, to)| 4 * count(from, to) as u64).sum()
        };
        assert_eq!(sent, [across(0..first_host(size)), across(first_host(size)..size)], "{size} ranks");
    }
}

pub(crate) fn ranks_of_a_host_share_memory_for_messages(kind: Kind) {
    let bytes = run(kind, 4, |comm| {
        assert_eq!(comm.transport(), "shared memory and tcp");
        let rank = comm.rank();
        let others = || (0..4).filter(|other| *other != rank);
        let sends: Vec<_> = others().map(|to| comm.send(vec![rank as u8; 100].into(), to)).collect();
        for from in others() {
            let received = comm.recv(vec![0u8; 100].into(), from).wait().expect("received");
            assert_eq!(received, Buffer::from(vec![from as u8; 100]));
        }
        for send in sends {
            send.wait().expect("sent");
        }
        comm.stats()[Operation::Send].network_bytes
    });
    assert_eq!(bytes, [200; 4], "two of three peers are on the other host");
}
