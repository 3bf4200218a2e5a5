//! Times collectives and their floors alternately, for `zero-train bench comm` and this crate's example.
//!
//! The floor of an operation is the time of its memory traffic alone on this machine. To measure it, all ranks run a
//! loop at the same time, without communication. Each loop reads and writes the rank's own memory, with the number of
//! bytes that the operation must read and write per rank. For N ranks and a vector of S bytes per rank:
//!
//! | operation | reads | writes | loop |
//! |---|---|---|---|
//! | `all_reduce` | S | S | the sum of N arrays of S/N, written to all N |
//! | `reduce_scatter` | S | S/N | the sum of N arrays of S/N, written to another array |
//! | `all_gather` | S/N | S | an array of S/N, copied to N others: each rank gets all shards, including its own |
//! | `all_to_all` | S | S | a copy of S: each rank gets N parts of S/N, including its own |
//! | `broadcast`, `send` | (N−1)/N S | (N−1)/N S | a copy of what N−1 ranks must receive, divided among all N |

use std::time::{Duration, Instant};

use crate::buffers::buffer::Buffer;
use crate::buffers::copy::copy;
use crate::buffers::dtype::Dtype;
use crate::collective::reduction::{ReduceOp, Reduction};
use crate::collective::signature::Operation;
use crate::communicator::Communicator;
use crate::error::CommError;
use crate::tree;

/// Times of an operation and of its floor, measured alternately. Each time is the time of the slowest rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Comparison {
    /// Minimum number of bytes that each rank reads and writes.
    pub traffic: usize,
    /// The times of the operation.
    pub subject: Vec<Duration>,
    /// The times of the floor.
    pub floor: Vec<Duration>,
}

/// Returns the ratio of the subject's time to the floor's time for each run, in ascending order.
pub fn ratios(subject: &[Duration], floor: &[Duration]) -> Vec<f64> {
    let ratio = |(subject, floor): (&Duration, &Duration)| subject.as_secs_f64() / floor.as_secs_f64().max(1e-9);
    let mut ratios: Vec<f64> = subject.iter().zip(floor).map(ratio).collect();
    ratios.sort_by(f64::total_cmp);
    ratios
}

/// Number of runs before the timed ones: they fault in the buffers' pages and wake the ranks.
const WARM_UP: usize = 3;

/// Times `repeats` operations on f32 vectors of `bytes` bytes, and `repeats` runs of the floor. Each starts after a
/// barrier.
///
/// For an all_gather, `bytes` is the size of the gathered vector; for an all_to_all, the size of each rank's input.
/// Every rank of the group must call this. A `Send` goes from rank 0 to the last rank; a `Split` is not timed.
///
/// # Errors
/// Returns the errors of the operation.
pub fn compare(
    comm: &dyn Communicator,
    operation: Operation,
    bytes: usize,
    repeats: usize,
) -> Result<Comparison, CommError> {
    let mut subject = Subject::new(comm, operation, bytes);
    let mut floor = Floor::new(operation, bytes, comm.size());
    let mut times = vec![];
    for _ in 0..WARM_UP + repeats {
        times.push(timed(comm, || subject.run(comm, operation))?);
        times.push(timed(comm, || {
            floor.run();
            Ok(())
        })?);
    }
    let times = comm.all_reduce(times.split_off(2 * WARM_UP).into(), ReduceOp::Max).wait()?.into_i64()?;
    let every_second = |offset: usize| times[offset..].iter().step_by(2).map(|time| Duration::from_nanos(*time as u64));
    let (subject, floors) = (every_second(0).collect(), every_second(1.min(times.len())).collect());
    Ok(Comparison { traffic: floor.traffic, subject, floor: floors })
}

/// Returns the median; zero for an empty slice.
pub fn median(times: &[Duration]) -> Duration {
    let mut times = times.to_vec();
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// Returns the nanoseconds that `work` takes after a barrier.
fn timed(comm: &dyn Communicator, work: impl FnOnce() -> Result<(), CommError>) -> Result<i64, CommError> {
    comm.barrier().wait()?;
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_nanos() as i64)
}

/// The buffers of the timed operation. Each run takes them and puts them back.
struct Subject {
    whole: Buffer,
    shard: Buffer,
    counts: Vec<usize>,
    /// The output of an all_to_all; empty for other operations.
    parts: Buffer,
}

impl Subject {
    fn new(comm: &dyn Communicator, operation: Operation, bytes: usize) -> Subject {
        let (length, size) = (bytes / Dtype::F32.size(), comm.size());
        let counts: Vec<usize> = (0..size).map(|r| length / size + usize::from(r < length % size)).collect();
        // The values are zeros, because their sums stay zero over any number of runs.
        let shard = Buffer::from(vec![0f32; counts[comm.rank()]]);
        let received = if operation == Operation::AllToAll { size * counts[comm.rank()] } else { 0 };
        Subject { whole: Buffer::from(vec![0f32; length]), shard, counts, parts: Buffer::from(vec![0f32; received]) }
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

/// The memory traffic of one rank.
struct Floor {
    traffic: usize,
    work: MemoryTraffic,
}

enum MemoryTraffic {
    /// The sum of arrays, written to all of them.
    SumToAll(Vec<Vec<f32>>),
    /// The sum of arrays, written to another array.
    SumTo(Vec<Vec<f32>>, Vec<f32>),
    /// An array, copied to several other arrays.
    CopyTo(Vec<f32>, Vec<Vec<f32>>),
    Nothing,
}

impl Floor {
    fn new(operation: Operation, bytes: usize, size: usize) -> Floor {
        let length = bytes / Dtype::F32.size();
        let part = length / size;
        let parts = || (0..size).map(|_| vec![0f32; part]).collect::<Vec<_>>();
        let (work, elements) = match operation {
            Operation::AllReduce => (MemoryTraffic::SumToAll(parts()), 2 * size * part),
            Operation::ReduceScatter => (MemoryTraffic::SumTo(parts(), vec![0f32; part]), (size + 1) * part),
            Operation::AllGather => (MemoryTraffic::CopyTo(vec![0f32; part], parts()), (size + 1) * part),
            Operation::AllToAll => (MemoryTraffic::CopyTo(vec![0f32; length], vec![vec![0f32; length]]), 2 * length),
            Operation::Broadcast | Operation::Send | Operation::Recv => {
                let others = (size - 1) * part;
                (MemoryTraffic::CopyTo(vec![0f32; others], vec![vec![0f32; others]]), 2 * others)
            }
            Operation::Barrier | Operation::Split => (MemoryTraffic::Nothing, 0),
        };
        Floor { traffic: elements * Dtype::F32.size(), work }
    }

    fn run(&mut self) {
        match &mut self.work {
            MemoryTraffic::SumToAll(arrays) => sum_to_all(arrays),
            MemoryTraffic::SumTo(arrays, target) => {
                let whole = size_of_val(&target[..]);
                let arrays: Vec<&[u8]> = arrays.iter().map(|array| bytemuck::cast_slice(array)).collect();
                let target = bytemuck::cast_slice_mut(target);
                tree::reduce_into(SUM, &vec![1; arrays.len()], 0, arrays[0], &arrays[1..], target, whole);
            }
            MemoryTraffic::CopyTo(source, targets) => copy_to(source, targets),
            MemoryTraffic::Nothing => {}
        }
        std::hint::black_box(&mut self.work);
    }
}

fn sum_to_all(arrays: &mut [Vec<f32>]) {
    /// Number of elements per block: the arrays' blocks fit in the L1 cache.
    const BLOCK: usize = 4096;
    let weights = vec![1; arrays.len()];
    let Some((first, others)) = arrays.split_first_mut() else { return };
    for start in (0..first.len()).step_by(BLOCK) {
        let block = start..first.len().min(start + BLOCK);
        let sum: &mut [u8] = bytemuck::cast_slice_mut(&mut first[block.clone()]);
        let others = others.iter_mut().map(|array| bytemuck::cast_slice_mut(&mut array[block.clone()]));
        tree::reduce_everywhere(SUM, &weights, 0, sum, &mut others.collect::<Vec<_>>());
    }
}

fn copy_to(source: &[f32], targets: &mut [Vec<f32>]) {
    /// Elements per block: a block that is copied to several arrays stays in the L2 cache from one copy to the next.
    const BLOCK: usize = 16 * 1024;
    let whole = size_of_val(source) * targets.len();
    for start in (0..source.len()).step_by(BLOCK) {
        let block = start..source.len().min(start + BLOCK);
        for target in targets.iter_mut() {
            let target = bytemuck::cast_slice_mut(&mut target[block.clone()]);
            copy(bytemuck::cast_slice(&source[block.clone()]), target, whole);
        }
    }
}

const SUM: Reduction = Reduction { op: ReduceOp::Sum, dtype: Dtype::F32 };

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, threads};

    #[test]
    fn every_operation_is_timed_alternately_with_its_floor() {
        let ranks = threads(2, &Options::default());
        std::thread::scope(|scope| {
            for comm in &ranks {
                scope.spawn(move || {
                    for operation in Operation::ALL {
                        for bytes in [0, 4, 20_000] {
                            let Comparison { traffic, subject, floor } =
                                compare(&**comm, operation, bytes, 3).expect("times");
                            assert_eq!((subject.len(), floor.len()), (3, 3));
                            assert!(median(&subject) <= *subject.iter().max().expect("three times"));
                            let expected = match operation {
                                Operation::AllReduce | Operation::AllToAll => 2 * bytes,
                                Operation::ReduceScatter | Operation::AllGather => bytes * 3 / 2,
                                Operation::Broadcast | Operation::Send | Operation::Recv => bytes,
                                Operation::Barrier | Operation::Split => 0,
                            };
                            assert!(traffic.abs_diff(expected) <= 8, "{operation}: {traffic} bytes, not {expected}");
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn ratios_compare_paired_runs() {
        let ms = |times: [u64; 3]| times.map(Duration::from_millis);
        assert_eq!(ratios(&ms([10, 30, 2]), &ms([10, 10, 4])), [0.5, 1.0, 3.0]);
        assert_eq!((median(&ms([10, 30, 2])), median(&[])), (Duration::from_millis(10), Duration::ZERO));
    }
}
