//! Times collectives, for cost tables and benchmarks.

use std::time::{Duration, Instant};

use crate::buffers::buffer::Buffer;
use crate::buffers::dtype::Dtype;
use crate::collective::reduction::ReduceOp;
use crate::collective::signature::Operation;
use crate::communicator::Communicator;
use crate::error::CommError;

/// Number of runs before the timed ones: they fault in the buffers' pages and wake the ranks.
const WARM_UP: usize = 3;

/// Times `repeats` runs of an operation on f32 vectors of `bytes` bytes, each followed by a run of `between`. Returns
/// the times of the operation and those of `between`.
///
/// Every run starts after a barrier, and its time is that of the slowest rank. If `between` touches enough memory, it
/// evicts the vectors from the caches, and the operation reads them from memory.
///
/// For an all_gather, `bytes` is the size of the gathered vector; for an all_to_all, the size of each rank's input.
/// Every rank of the group must call this. A `Send` goes from rank 0 to the last rank; a `Split` is not timed.
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
    let mut buffers = Buffers::new(comm, operation, bytes);
    let mut times = vec![];
    for _ in 0..WARM_UP + repeats {
        comm.barrier().wait()?;
        let start = Instant::now();
        buffers.run(comm, operation)?;
        times.push(start.elapsed().as_nanos() as i64);
        comm.barrier().wait()?;
        let start = Instant::now();
        between();
        times.push(start.elapsed().as_nanos() as i64);
    }
    let times = comm.all_reduce(times.split_off(2 * WARM_UP).into(), ReduceOp::Max).wait()?.into_i64()?;
    let every_second =
        |first| times.iter().skip(first).step_by(2).map(|&time| Duration::from_nanos(time as u64)).collect();
    Ok([0, 1].map(every_second))
}

/// The buffers of the timed operation. Each run takes them and puts them back.
struct Buffers {
    whole: Buffer,
    shard: Buffer,
    counts: Vec<usize>,
    /// The output of an all_to_all; empty for other operations.
    parts: Buffer,
}

impl Buffers {
    fn new(comm: &dyn Communicator, operation: Operation, bytes: usize) -> Buffers {
        let (length, size) = (bytes / Dtype::F32.size(), comm.size());
        let counts: Vec<usize> = (0..size).map(|r| length / size + usize::from(r < length % size)).collect();
        // The values are zeros, because their sums stay zero over any number of runs.
        let shard = Buffer::from(vec![0f32; counts[comm.rank()]]);
        let received = if operation == Operation::AllToAll { size * counts[comm.rank()] } else { 0 };
        Buffers { whole: Buffer::from(vec![0f32; length]), shard, counts, parts: Buffer::from(vec![0f32; received]) }
    }

    fn run(&mut self, comm: &dyn Communicator, operation: Operation) -> Result<(), CommError> {
        let (rank, last) = (comm.rank(), comm.size() - 1);
        let take = |buffer: &mut Buffer| std::mem::replace(buffer, Buffer::U8(Vec::new()));
        match operation {
            Operation::AllReduce => self.whole = comm.all_reduce(take(&mut self.whole), ReduceOp::Sum).wait()?,
            Operation::AllGather => {
                let (shard, whole) = (take(&mut self.shard), take(&mut self.whole));
                let gathered = comm.all_gather(shard, whole, &self.counts).wait()?;
                (self.shard, self.whole) = (gathered.shard, gathered.output);
            }
            Operation::ReduceScatter => {
                let (whole, shard) = (take(&mut self.whole), take(&mut self.shard));
                let scattered = comm.reduce_scatter(whole, shard, &self.counts, ReduceOp::Sum).wait()?;
                (self.shard, self.whole) = (scattered.shard, scattered.input);
            }
            Operation::AllToAll => {
                let (input, output) = (take(&mut self.whole), take(&mut self.parts));
                let received = vec![self.counts[rank]; self.counts.len()];
                let exchanged = comm.all_to_all(input, output, &self.counts, &received).wait()?;
                (self.whole, self.parts) = (exchanged.input, exchanged.output);
            }
            Operation::Broadcast => self.whole = comm.broadcast(take(&mut self.whole), 0).wait()?,
            Operation::Barrier => comm.barrier().wait()?,
            Operation::Send | Operation::Recv if last > 0 && rank == 0 => {
                self.whole = comm.send(take(&mut self.whole), last).wait()?;
            }
            Operation::Send | Operation::Recv if last > 0 && rank == last => {
                self.whole = comm.recv(take(&mut self.whole), 0).wait()?;
            }
            Operation::Send | Operation::Recv | Operation::Split => {}
        }
        Ok(())
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
