//! The floor of a collective: the time of its memory traffic alone on this machine.
//!
//! All ranks run a loop at the same time, without communication. Each loop reads and writes the rank's own memory, with
//! the number of bytes that the operation must read and write per rank. For N ranks and a vector of S bytes per rank:
//!
//! | operation | reads | writes | loop |
//! |---|---|---|---|
//! | `all_reduce` | S | S | the sum of N arrays of S/N, written to all N |
//! | `reduce_scatter` | S | S/N | the sum of N arrays of S/N, written to another array |
//! | `all_gather` | S/N | S | an array of S/N, copied to N others: each rank gets all shards, including its own |
//! | `all_to_all` | S | S | a copy of S: each rank gets N parts of S/N, including its own |
//! | `broadcast`, `send` | (N−1)/N S | (N−1)/N S | a copy of what N−1 ranks must receive, divided among all N |

use bytemuck::{cast_slice, cast_slice_mut};
use zero_comm::copy::copy;
use zero_comm::{Dtype, Operation, ReduceOp, Reduction, reduce_everywhere, reduce_into};

const SUM: Reduction = Reduction { op: ReduceOp::Sum, dtype: Dtype::F32 };

/// The memory traffic of one rank.
pub(crate) enum Floor {
    /// The sum of arrays, written to all of them.
    SumToAll(Vec<Vec<f32>>),
    /// The sum of arrays, written to another array.
    SumTo(Vec<Vec<f32>>, Vec<f32>),
    /// An array, copied to several other arrays.
    CopyTo(Vec<f32>, Vec<Vec<f32>>),
}

impl Floor {
    /// Allocates the arrays for one of `size` ranks and a vector of `bytes` bytes.
    pub(crate) fn new(operation: Operation, bytes: usize, size: usize) -> Floor {
        let length = bytes / size_of::<f32>();
        let part = length / size;
        let array = |length| vec![0f32; length];
        let parts = || (0..size).map(|_| array(part)).collect();
        match operation {
            Operation::AllReduce => Floor::SumToAll(parts()),
            Operation::ReduceScatter => Floor::SumTo(parts(), array(part)),
            Operation::AllGather => Floor::CopyTo(array(part), parts()),
            Operation::AllToAll => Floor::CopyTo(array(length), vec![array(length)]),
            Operation::Broadcast | Operation::Send | Operation::Recv => {
                let others = (size - 1) * part;
                Floor::CopyTo(array(others), vec![array(others)])
            }
            Operation::Barrier | Operation::Split => Floor::SumToAll(vec![]),
        }
    }

    /// Runs the loop.
    pub(crate) fn run(&mut self) {
        match self {
            Floor::SumToAll(arrays) => sum_to_all(arrays),
            Floor::SumTo(arrays, target) => {
                let whole = size_of_val(&target[..]);
                let arrays: Vec<&[u8]> = arrays.iter().map(|array| cast_slice(array)).collect();
                reduce_into(SUM, &vec![1; arrays.len()], 0, arrays[0], &arrays[1..], cast_slice_mut(target), whole);
            }
            Floor::CopyTo(source, targets) => copy_to(source, targets),
        }
        std::hint::black_box(self);
    }
}

fn sum_to_all(arrays: &mut [Vec<f32>]) {
    /// Number of elements per block: the arrays' blocks fit in the L1 cache.
    const BLOCK: usize = 4096;
    let weights = vec![1; arrays.len()];
    let Some((first, others)) = arrays.split_first_mut() else { return };
    for start in (0..first.len()).step_by(BLOCK) {
        let block = start..first.len().min(start + BLOCK);
        let sum: &mut [u8] = cast_slice_mut(&mut first[block.clone()]);
        let others = others.iter_mut().map(|array| cast_slice_mut(&mut array[block.clone()]));
        reduce_everywhere(SUM, &weights, 0, sum, &mut others.collect::<Vec<_>>());
    }
}

fn copy_to(source: &[f32], targets: &mut [Vec<f32>]) {
    /// Elements per block: a block that is copied to several arrays stays in the L2 cache from one copy to the next.
    const BLOCK: usize = 16 * 1024;
    let whole = size_of_val(source) * targets.len();
    for start in (0..source.len()).step_by(BLOCK) {
        let block = start..source.len().min(start + BLOCK);
        for target in targets.iter_mut() {
            let target = cast_slice_mut(&mut target[block.clone()]);
            copy(cast_slice(&source[block.clone()]), target, whole);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loops_move_the_bytes_of_the_operations() {
        for operation in Operation::ALL {
            for bytes in [0, 4, 20_000] {
                let mut floor = Floor::new(operation, bytes, 2);
                floor.run();
                let bytes_of = |arrays: &[Vec<f32>]| arrays.iter().map(|array| size_of_val(&array[..])).sum::<usize>();
                let traffic = match &floor {
                    Floor::SumToAll(arrays) => 2 * bytes_of(arrays),
                    Floor::SumTo(arrays, target) => bytes_of(arrays) + size_of_val(&target[..]),
                    Floor::CopyTo(source, targets) => size_of_val(&source[..]) + bytes_of(targets),
                };
                let expected = match operation {
                    Operation::AllReduce | Operation::AllToAll => 2 * bytes,
                    Operation::ReduceScatter | Operation::AllGather => bytes * 3 / 2,
                    Operation::Broadcast | Operation::Send | Operation::Recv => bytes,
                    Operation::Barrier | Operation::Split => 0,
                };
                assert!(traffic.abs_diff(expected) <= 8, "{operation}: {traffic} bytes, not {expected}");
            }
        }
    }
}
