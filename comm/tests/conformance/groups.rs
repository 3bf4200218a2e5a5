//! Groups created by `split`.

use zero_comm::{Buffer, Communicator, ReduceOp};

use crate::world::{Kind, run};

fn sum(comm: &dyn Communicator, value: i64) -> i64 {
    let sum = comm.all_reduce(vec![value].into(), ReduceOp::Sum).wait().expect("reduced");
    sum.into_i64().expect("i64")[0]
}

pub(crate) fn splits_are_independent_groups(kind: Kind) {
    for size in [1, 3, 8] {
        let names = run(kind, size, |comm| {
            let rank = comm.rank();
            // Even and odd ranks, in descending order.
            let group = comm.split(rank % 2, size - rank).expect("split");
            let members: Vec<usize> = (0..size).filter(|other| other % 2 == rank % 2).rev().collect();
            assert_eq!((group.size(), members[group.rank()]), (members.len(), rank));
            let expected = members.iter().map(|member| *member as i64).sum();
            // Use the group and its parent at the same time.
            let whole = comm.all_reduce(vec![rank as i64].into(), ReduceOp::Sum);
            assert_eq!(sum(&*group, rank as i64), expected);
            let from_root = group.broadcast(vec![rank as i64].into(), 0).wait().expect("broadcast");
            assert_eq!(from_root, Buffer::from(vec![members[0] as i64]));
            assert_eq!(whole.wait().expect("reduced"), Buffer::from(vec![(size * (size - 1) / 2) as i64]));
            if group.size() > 1 {
                let (next, previous) =
                    ((group.rank() + 1) % group.size(), (group.rank() + group.size() - 1) % group.size());
                let send = group.send(vec![rank as i64].into(), next);
                let received = group.recv(vec![0i64].into(), previous).wait().expect("received");
                assert_eq!(received, Buffer::from(vec![members[previous] as i64]));
                send.wait().expect("sent");
            }
            comm.barrier().wait().expect("the parent goes on");
            (comm.transport(), group.transport())
        });
        // A group within one host uses no sockets.
        assert!(kind == Kind::Hosts || names.iter().all(|(parent, child)| parent == child), "{names:?}");
    }
}

pub(crate) fn splits_of_splits(kind: Kind) {
    // A mesh of 2 × 2 × 2, with groups that outlive their parent.
    let sums = run(kind, 8, |comm| {
        let rank = comm.rank();
        let half = comm.split(rank / 4, 0).expect("split");
        let quarter = half.split(half.rank() / 2, 0).expect("split");
        let column = comm.split(rank % 4, rank).expect("split");
        drop((comm, half));
        (sum(&*quarter, 1 << rank), sum(&*column, 1 << rank))
    });
    let expected = |rank: usize| (0b11 << (rank / 2 * 2), 0b1_0001 << (rank % 4));
    assert_eq!(sums, (0..8).map(expected).collect::<Vec<(i64, i64)>>());
}
