//! Messages between two ranks.

use std::time::Duration;

use zero_comm::{Buffer, Dtype, Options, ReduceOp};

use crate::oracle::{assert_same, vector};
use crate::world::{Kind, run, run_with};

pub(crate) fn every_rank_sends_to_every_other_before_receiving(kind: Kind) {
    for size in [2, 3, 8] {
        run(kind, size, |comm| {
            let rank = comm.rank();
            let others = || (0..size).filter(|other| *other != rank);
            // Two ranks send messages that are larger than any ring or socket buffer, so that no send completes before
            // its message is received.
            let length = if size == 2 { 3 << 20 } else { 50_000 };
            let message = |from: usize, to: usize| vector(Dtype::F32, to as u64, from, length);
            let sends: Vec<_> = others().map(|to| (to, comm.send(message(rank, to), to))).collect();
            for from in others() {
                let received = comm.recv(Buffer::zeros(Dtype::F32, length), from).wait().expect("received");
                assert_same(&received, &message(from, rank), "a message");
            }
            for (to, send) in sends {
                assert_same(&send.wait().expect("sent"), &message(rank, to), "the buffer comes back");
            }
        });
    }
}

pub(crate) fn receives_may_be_posted_ahead_of_collectives(kind: Kind) {
    run(kind, 3, |comm| {
        let (rank, size) = (comm.rank(), comm.size());
        let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
        let receives: Vec<_> = (0..10).map(|_| comm.recv(Buffer::zeros(Dtype::I64, 100), previous)).collect();
        let mut sum = Buffer::from(vec![1i64]);
        for i in 0..10 {
            sum = comm.all_reduce(sum, ReduceOp::Sum).wait().expect("reduced");
            comm.send(vector(Dtype::I64, i, rank, 100), next).wait().expect("sent");
        }
        assert_eq!(sum, Buffer::from(vec![3i64.pow(10)]));
        for (i, receive) in receives.into_iter().enumerate() {
            assert_same(&receive.wait().expect("received"), &vector(Dtype::I64, i as u64, previous, 100), "in order");
        }
    });
}

pub(crate) fn operations_that_are_not_awaited_do_not_time_out(kind: Kind) {
    let options = Options { timeout: Duration::from_secs(2), ..Options::default() };
    run_with(kind, 2, &options, |comm| {
        let length = 150_001;
        let message = || vector(Dtype::F32, 1, 0, length);
        if comm.rank() == 0 {
            std::thread::sleep(options.timeout + Duration::from_millis(700));
            let sum = comm.all_reduce(message(), ReduceOp::Max);
            comm.send(message(), 1).wait().expect("sent");
            sum.wait().expect("reduced");
        } else {
            let receive = comm.recv(Buffer::zeros(Dtype::F32, length), 0);
            let sum = comm.all_reduce(message(), ReduceOp::Max);
            // The rank is busy with other work.
            std::thread::sleep(options.timeout + Duration::from_millis(300));
            assert_same(&receive.wait().expect("received"), &message(), "posted long ago");
            assert_same(&sum.wait().expect("reduced"), &message(), "begun long ago");
        }
    });
}

pub(crate) fn messages_keep_their_order(kind: Kind) {
    run(kind, 2, |comm| {
        let peer = 1 - comm.rank();
        let lengths: Vec<usize> = (0..60).map(|i| (i * 7919) % 3000).collect();
        let sends: Vec<_> =
            lengths.iter().map(|length| comm.send(vector(Dtype::Bf16, 1, comm.rank(), *length), peer)).collect();
        let receives: Vec<_> =
            lengths.iter().map(|length| comm.recv(Buffer::zeros(Dtype::Bf16, *length), peer)).collect();
        for (receive, length) in receives.into_iter().zip(&lengths).rev() {
            assert_same(&receive.wait().expect("received"), &vector(Dtype::Bf16, 1, peer, *length), "in order");
        }
        for send in sends {
            send.wait().expect("sent");
        }
    });
}

pub(crate) fn large_and_empty_messages(kind: Kind) {
    run(kind, 2, |comm| {
        for length in [0, 1, 16 << 20, 0] {
            if comm.rank() == 0 {
                comm.send(vec![3u8; 4 * length].into(), 1).wait().expect("sent");
            } else {
                let received = comm.recv(vec![0u8; 4 * length].into(), 0).wait().expect("received");
                assert!(received.as_u8().is_some_and(|bytes| bytes.iter().all(|byte| *byte == 3)));
            }
        }
    });
}
