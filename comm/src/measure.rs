//! Times collectives, for cost tables and benchmarks.

use std::time::{Duration, Instant};

use crate::buffers::buffer::Buffer;
use crate::buffers::dtype::Dtype;
use crate::collective::reduction::ReduceOp;
use crate::collective::signature::Operation;
use crate::communicator::Communicator;
use crate::error::CommError;
use crate::pending::Pending;

/// Number of runs before the timed ones: they fault in the buffers' pages and wake the ranks.
const WARM_UP: usize = 3;

/// Times `repeats` runs of an operation ([`start`]), each followed by a run of `between`. Returns the times of the
/// operation and those of `between`.
///
/// Every run starts after a barrier, and its time is that of the slowest rank. If `between` touches enough memory, it
/// evicts the vectors from the caches, and the operation reads them from memory. Every rank of the group must call
/// this.
///
/// # Errors
/// Returns the errors of the operation.
pub fn times(
    comm: &dyn Communicator,
    operation: Operation,
    bytes: usize,
    repeats: usize,
    mut between: impl FnMut(),
) -> Result<[Vec<Duration>; 2], CommError> {
    let (mut buffers, mut times) = (None, vec![]);
    for _ in 0..WARM_UP + repeats {
        comm.barrier().wait()?;
        let begun = Instant::now();
        buffers = Some(start(comm, operation, bytes, buffers).wait()?);
        times.push(begun.elapsed().as_nanos() as i64);
        comm.barrier().wait()?;
        let begun = Instant::now();
        between();
        times.push(begun.elapsed().as_nanos() as i64);
    }
    let times = comm.all_reduce(times.split_off(2 * WARM_UP).into(), ReduceOp::Max).wait()?.into_i64()?;
    let every_second =
        |first| times.iter().skip(first).step_by(2).map(|&time| Duration::from_nanos(time as u64)).collect();
    Ok([0, 1].map(every_second))
}

/// Starts an operation on `bytes` bytes of f32 zeros and returns its buffers. To reuse the buffers of an earlier
/// operation, pass them as `buffers`.
///
/// For an all_gather, `bytes` is the size of the gathered vector; for an all_to_all, the size of each rank's input. A
/// `Send` goes from rank 0 to the last rank, and other ranks take no part in it. A `Split` is a barrier.
pub fn start(
    comm: &dyn Communicator,
    operation: Operation,
    bytes: usize,
    buffers: Option<[Buffer; 2]>,
) -> Pending<[Buffer; 2]> {
    let (length, ranks, rank) = (bytes / Dtype::F32.size(), comm.size(), comm.rank());
    let counts: Vec<usize> = (0..ranks).map(|r| length / ranks + usize::from(r < length % ranks)).collect();
    let part = match operation {
        Operation::AllGather | Operation::ReduceScatter => counts[rank],
        Operation::AllToAll => ranks * counts[rank],
        _ => 0,
    };
    // The values are zeros, because their sums stay zero over any number of runs.
    let [whole, part] = buffers.unwrap_or_else(|| [length, part].map(|length| Buffer::from(vec![0f32; length])));
    match operation {
        Operation::AllReduce => comm.all_reduce(whole, ReduceOp::Sum).map(|whole| Ok([whole, part])),
        Operation::Broadcast => comm.broadcast(whole, 0).map(|whole| Ok([whole, part])),
        Operation::AllGather => comm.all_gather(part, whole, &counts).map(|done| Ok([done.output, done.shard])),
        Operation::ReduceScatter => {
            comm.reduce_scatter(whole, part, &counts, ReduceOp::Sum).map(|done| Ok([done.input, done.shard]))
        }
        Operation::AllToAll => {
            let received = vec![counts[rank]; ranks];
            comm.all_to_all(whole, part, &counts, &received).map(|done| Ok([done.input, done.output]))
        }
        Operation::Send | Operation::Recv if ranks > 1 && rank == 0 => {
            comm.send(whole, ranks - 1).map(|whole| Ok([whole, part]))
        }
        Operation::Send | Operation::Recv if ranks > 1 && rank + 1 == ranks => {
            comm.recv(whole, 0).map(|whole| Ok([whole, part]))
        }
        Operation::Send | Operation::Recv => Pending::ready(Ok([whole, part])),
        Operation::Barrier | Operation::Split => comm.barrier().map(|()| Ok([whole, part])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, threads};

    #[test]
    fn every_operation_is_timed_and_alternates_with_other_work() {
        let ranks = threads(2, &Options::default());
        std::thread::scope(|scope| {
            for comm in &ranks {
                scope.spawn(move || {
                    for operation in Operation::ALL {
                        for bytes in [0, 4, 20_000] {
                            let mut runs = 0;
                            let times = times(&**comm, operation, bytes, 3, || runs += 1).expect("times");
                            assert_eq!(times.map(|times| times.len()), [3, 3], "{operation}");
                            assert_eq!(runs, WARM_UP + 3, "{operation}");
                        }
                    }
                });
            }
        });
    }
}
