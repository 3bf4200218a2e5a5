//! Timing collectives, for `zero-train bench comm` and the example of this crate.

use std::time::{Duration, Instant};

use crate::buffer::{Buffer, Dtype};
use crate::communicator::{Communicator, ReduceOp};
use crate::error::CommError;
use crate::signature::Operation;

/// Times `repeats` operations of f32 over vectors of `bytes` bytes (the whole vector, also of an all_gather), each begun after
/// a barrier. To be called by every rank of the group. A `Send` goes from rank 0 to the last rank; `Split` times nothing.
pub fn run(
    comm: &dyn Communicator,
    operation: Operation,
    bytes: usize,
    repeats: usize,
) -> Result<Vec<Duration>, CommError> {
    let (rank, size) = (comm.rank(), comm.size());
    let length = bytes / Dtype::F32.size();
    let counts: Vec<usize> = (0..size).map(|r| length / size + usize::from(r < length % size)).collect();
    let mut whole = Buffer::from(vec![1.0f32; length]);
    let mut shard = Buffer::from(vec![1.0f32; counts[rank]]);
    let mut times = Vec::with_capacity(repeats);
    for _ in 0..repeats {
        comm.barrier().wait()?;
        let start = Instant::now();
        match operation {
            Operation::AllReduce => whole = comm.all_reduce(whole, ReduceOp::Sum).wait()?,
            Operation::AllGather => {
                let gathered = comm.all_gather(shard, whole, &counts).wait()?;
                (shard, whole) = (gathered.shard, gathered.output);
            }
            Operation::ReduceScatter => {
                let scattered = comm.reduce_scatter(whole, shard, &counts, ReduceOp::Sum).wait()?;
                (shard, whole) = (scattered.shard, scattered.input);
            }
            Operation::Broadcast => whole = comm.broadcast(whole, 0).wait()?,
            Operation::Barrier => comm.barrier().wait()?,
            Operation::Send | Operation::Recv if size > 1 && rank == 0 => whole = comm.send(whole, size - 1).wait()?,
            Operation::Send | Operation::Recv if size > 1 && rank == size - 1 => whole = comm.recv(whole, 0).wait()?,
            Operation::Send | Operation::Recv | Operation::Split => {}
        }
        times.push(start.elapsed());
    }
    Ok(times)
}

/// The middle value; zero for none.
pub fn median(times: &[Duration]) -> Duration {
    let mut times = times.to_vec();
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, threads};

    #[test]
    fn every_operation_can_be_timed() {
        let ranks = threads(2, &Options::default());
        std::thread::scope(|scope| {
            for comm in &ranks {
                scope.spawn(move || {
                    for operation in Operation::ALL {
                        let times = run(&**comm, operation, 1000, 3).expect("times");
                        assert_eq!(times.len(), 3);
                        assert!(median(&times) <= *times.iter().max().expect("three times"));
                    }
                });
            }
        });
    }
}
