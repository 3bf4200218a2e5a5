//! A mesh of pipe and data groups, as used by a pipeline with ZeRO: each rank is in one group of each kind and has
//! operations of both in flight.

use std::sync::Arc;
use std::time::Duration;

use zero_comm::{Buffer, CommError, Communicator, Dtype, Operation, Options, ReduceOp};

use crate::oracle::{assert_same, reduced, vector};
use crate::world::{GivenUp, Kind, impatient, run_with};

struct Mesh {
    pipe: Arc<dyn Communicator>,
    data: Arc<dyn Communicator>,
}

/// Splits off the groups of this rank: rank `stage * width + column` is in the pipe of its column and the data group of
/// its stage.
fn mesh(comm: &dyn Communicator, width: usize) -> Mesh {
    let (stage, column) = (comm.rank() / width, comm.rank() % width);
    let pipe = comm.split(column, stage).expect("split");
    let data = comm.split(stage, column).expect("split");
    assert_eq!((pipe.rank(), data.rank()), (stage, column));
    Mesh { pipe, data }
}

const MICRO_BATCHES: usize = 6;

/// Elements of a micro-batch's activations: from less than a chunk to more than any ring or socket buffer.
fn length(micro_batch: usize) -> usize {
    [100, 70_000, 25_001, 2 << 20, 0, 150_000][micro_batch]
}

/// Returns the message from a stage to the next (`down`) or to the previous one.
fn message(down: bool, micro_batch: usize, stage: usize, column: usize) -> Buffer {
    vector(Dtype::F32, (2 * micro_batch + usize::from(down)) as u64, 10 * stage + column, length(micro_batch))
}

pub(crate) fn pipe_and_data_groups_run_concurrently(kind: Kind) {
    for (stages, width) in [(2, 2), (4, 1), (3, 2)] {
        // A long deadline, because this test shares its cores with all the others.
        let options = Options { timeout: Duration::from_secs(60), ..Options::default() };
        run_with(kind, stages * width, &options, |comm| {
            let Mesh { pipe, data } = mesh(&*comm, width);
            let (stage, column) = (pipe.rank(), data.rank());
            let receives = |peer: Option<usize>, down: bool| {
                let peer = peer.filter(|peer| *peer < stages);
                let receive =
                    move |peer, i| (i, message(down, i, peer, column), Buffer::zeros(Dtype::F32, length(i)), peer);
                peer.into_iter().flat_map(move |peer| (0..MICRO_BATCHES).map(move |i| receive(peer, i)))
            };
            // All receives are posted ahead, in both directions, and every rank sends before it has received any
            // message.
            let post = |(i, expected, buffer, peer)| (i, expected, pipe.recv(buffer, peer));
            let from_above: Vec<_> = receives(stage.checked_sub(1), true).map(post).collect();
            let from_below: Vec<_> = receives(Some(stage + 1), false).map(post).collect();
            let mut sends = Vec::new();
            let mut sums = Vec::new();
            for i in 0..MICRO_BATCHES {
                // Some ranks use the data group first, some the pipe.
                let sum = || data.all_reduce(vector(Dtype::F32, i as u64, column, 3000 + length(i)), ReduceOp::Sum);
                if (stage + column).is_multiple_of(2) {
                    sums.push(sum());
                }
                if stage + 1 < stages {
                    sends.push(pipe.send(message(true, i, stage, column), stage + 1));
                }
                if stage > 0 {
                    sends.push(pipe.send(message(false, i, stage, column), stage - 1));
                }
                if !(stage + column).is_multiple_of(2) {
                    sums.push(sum());
                }
            }
            for (i, sum) in sums.into_iter().enumerate() {
                let all: Vec<_> =
                    (0..width).map(|column| vector(Dtype::F32, i as u64, column, 3000 + length(i))).collect();
                assert_same(&sum.wait().expect("reduced"), &reduced(&all, ReduceOp::Sum), "in the data group");
            }
            for (_, expected, receive) in from_below.into_iter().chain(from_above) {
                assert_same(&receive.wait().expect("received"), &expected, "in the pipe");
            }
            for send in sends {
                send.wait().expect("sent");
            }
        });
    }
}

/// Runs two stages of two ranks in which only rank 1 waits for rank 3, in its pipe. Rank 0 waits for rank 1 in its data
/// group and rank 2 for rank 0 in its pipe. The ranks also post receives ahead, for which no thread waits.
fn waits_for_rank_3(comm: &dyn Communicator, Mesh { pipe, data }: &Mesh) -> Result<(), CommError> {
    let message = || Buffer::from(vec![0f32; 100]);
    match comm.rank() {
        0 => {
            let ahead = pipe.recv(message(), 1);
            data.all_reduce(message(), ReduceOp::Sum).wait()?;
            ahead.wait()?;
        }
        // Starts later than the others, so that their deadlines pass first.
        1 => {
            std::thread::sleep(Duration::from_millis(200));
            pipe.recv(message(), 1).wait()?;
        }
        _ => {
            pipe.recv(message(), 0).wait()?;
        }
    }
    Ok(())
}

pub(crate) fn a_rank_that_leaves_is_named_by_ranks_that_do_not_talk_to_it(kind: Kind) {
    // Longer than the test may take, so that the ranks learn of the loss from something other than the deadline.
    let options = Options { timeout: Duration::from_secs(600), ..Options::default() };
    let errors = run_with(kind, 4, &options, |comm| {
        let mesh = mesh(&*comm, 2);
        comm.barrier().wait().expect("all have their groups");
        (comm.rank() != 3).then(|| waits_for_rank_3(&*comm, &mesh).expect_err("one has left"))
    });
    for (rank, error) in errors.into_iter().enumerate().take(3) {
        let Some(CommError::LostPeer { rank: own, peer, .. }) = error else { panic!("{error:?}") };
        assert_eq!((own, peer), (rank, 3));
    }
}

pub(crate) fn a_rank_that_stops_is_named_by_ranks_that_do_not_talk_to_it(kind: Kind) {
    let given_up = GivenUp::default();
    let errors = run_with(kind, 4, &impatient(), |comm| {
        let mesh = mesh(&*comm, 2);
        comm.barrier().wait().expect("all have their groups");
        if comm.rank() == 3 {
            // Rank 3 is busy until the others have given up. It has posted a receive ahead as well.
            let ahead = mesh.pipe.recv(Buffer::zeros(Dtype::F32, 100), 0);
            given_up.wait_for(3);
            return ahead.wait().expect_err("the others have given up");
        }
        let error = waits_for_rank_3(&*comm, &mesh).expect_err("one has stopped");
        given_up.add_one();
        error
    });
    for error in errors.into_iter().take(3) {
        match &error {
            CommError::Deadline { peer, .. } => assert_eq!(*peer, 3, "{error}"),
            CommError::Aborted { reason, operation, .. } => {
                assert!(reason.contains("for rank 3 in "), "{error}");
                assert!(matches!(operation, Operation::Recv | Operation::AllReduce), "{error}");
            }
            other => panic!("{other}"),
        }
    }
}
