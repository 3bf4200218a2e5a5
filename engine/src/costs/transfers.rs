//! Measures the transfers of a cost table: collectives of groups of ranks, and their effect on compute.

use std::collections::VecDeque;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use zero_comm::measure::start;
use zero_comm::{Buffer, Communicator, Operation, Pending, ReduceOp};

use super::table::{Group, GroupTimes, Line, Point, Time, Transfers};
use crate::error::Error;

/// Bytes of the measured vectors. They range from the weights of a norm to a layer of a large model.
const SIZES: [usize; 4] = [16 << 10, 256 << 10, 2 << 20, 16 << 20];

/// Measures the transfers between the ranks of `comm`, for the groups into which a mesh can divide the ranks.
/// Collective. `None` with one rank.
///
/// # Errors
/// Returns the errors of communication.
pub(super) fn transfers(comm: &dyn Communicator) -> Result<Option<Transfers>, Error> {
    if comm.size() == 1 {
        return Ok(None);
    }
    let groups =
        Group::all(comm.size()).into_iter().map(|group| of_group(comm, group)).collect::<Result<_, Error>>()?;
    let [(computing, transferring), (_, sending)] = [beside(comm, gather)?, beside(comm, swap)?];
    Ok(Some(Transfers {
        groups,
        broadcast: line(comm, comm, Operation::Broadcast)?,
        send: line(comm, comm, Operation::Send)?,
        computing_beside: computing,
        transferring_beside: transferring,
        sending_beside: Some(sending),
    }))
}

/// Measures collectives by groups of ranks. All groups run at the same time.
fn of_group(world: &dyn Communicator, group: Group) -> Result<GroupTimes, Error> {
    let Group { ranks, apart } = group;
    let rank = world.rank();
    let split;
    let comm = match ranks == world.size() {
        true => world,
        false => {
            split = world.split(rank / (ranks * apart) * apart + rank % apart, rank / apart % ranks)?;
            &*split
        }
    };
    Ok(GroupTimes {
        group,
        all_gather: line(world, comm, Operation::AllGather)?,
        reduce_scatter: line(world, comm, Operation::ReduceScatter)?,
        all_reduce: line(world, comm, Operation::AllReduce)?,
        all_to_all: line(world, comm, Operation::AllToAll)?,
        send: if ranks == 2 { Some(line(world, comm, Operation::Send)?) } else { None },
    })
}

/// Measures an operation in the group `comm`, while the other groups do the same. All ranks of the world return the
/// same line, which is fitted to the times of the slowest group. Groups that share a link do not always get equal parts
/// of it, and a training step ends when the last group has ended.
fn line(world: &dyn Communicator, comm: &dyn Communicator, operation: Operation) -> Result<Line, Error> {
    let share = (comm.size() - 1) as f64 / comm.size() as f64;
    let sent = match operation {
        Operation::AllReduce => 2.0 * share,
        Operation::Send => 1.0,
        _ => share,
    };
    let mut points: Vec<Point> = vec![];
    for size in SIZES {
        let bytes = size as f64 * sent;
        let (number, mut spare) = (repeats(points.last(), bytes), vec![]);
        let runs = (0..RUNS).map(|_| back_to_back(world, comm, operation, size, number, &mut spare));
        let own = runs.collect::<Result<Vec<i64>, Error>>()?;
        let longest = world.all_reduce(Buffer::I64(own), ReduceOp::Max).wait()?.into_i64()?;
        let seconds = longest.into_iter().map(|nanoseconds| nanoseconds as f64 / 1e9 / number as f64).collect();
        points.push(Point { bytes, seconds: Time::of(seconds) });
    }
    Ok(Line::through(points))
}

/// Number of runs of a measured operation.
const RUNS: usize = 5;

/// Runs an operation, waits for all ranks of the world, and runs `number` more. As in a training step, each of them
/// starts while the previous operation is in flight. Returns the nanoseconds from the wait to the end of the last
/// operation. Without the wait, a group that ended the first operation early would already be in the next one, so that
/// the time of all groups would not cover all of their bytes.
fn back_to_back(
    world: &dyn Communicator,
    comm: &dyn Communicator,
    operation: Operation,
    size: usize,
    number: usize,
    spare: &mut Vec<[Buffer; 2]>,
) -> Result<i64, Error> {
    let first = start(comm, operation, size, spare.pop()).wait()?;
    spare.push(first);
    world.barrier().wait()?;
    let started = Instant::now();
    let mut before = start(comm, operation, size, spare.pop());
    for _ in 1..number {
        let next = start(comm, operation, size, spare.pop());
        spare.push(std::mem::replace(&mut before, next).wait()?);
    }
    spare.push(before.wait()?);
    Ok(started.elapsed().as_nanos() as i64)
}

/// Returns how many operations of `bytes` a run has: 32, or fewer (but at least 2) if the run would take more than a
/// second, judging by the previous size. All ranks have the same points, so they return the same number.
fn repeats(before: Option<&Point>, bytes: f64) -> usize {
    const MOST: usize = 32;
    const LEAST: usize = 2;
    let Some(before) = before.filter(|before| before.bytes > 0.0) else { return MOST };
    let each = before.seconds.median * bytes / before.bytes;
    ((1.0 / each.max(f64::MIN_POSITIVE)) as usize).clamp(LEAST, MOST)
}

/// Returns the means over the ranks, so that all ranks have the same table.
fn mean(comm: &dyn Communicator, values: Vec<f64>) -> Result<Vec<f64>, Error> {
    let parts = values.into_iter().map(|value| (value * 1e9) as i64).collect();
    let sum = comm.all_reduce(Buffer::I64(parts), ReduceOp::Sum).wait()?.into_i64()?;
    Ok(sum.into_iter().map(|sum| sum as f64 / 1e9 / comm.size() as f64).collect())
}

/// Starts an all-gather of 8 MiB, about the size of a layer. The time of a smaller all-gather would mostly be the time
/// in which the rank waits for a core.
fn gather(comm: &dyn Communicator, spare: Option<[Buffer; 2]>) -> Pending<[Buffer; 2]> {
    start(comm, Operation::AllGather, 8 << 20, spare)
}

/// Starts to send 2 MiB to the rank half a group ahead, and to receive 2 MiB from the rank half a group behind. Both
/// are on another host if the group spans several hosts.
fn swap(comm: &dyn Communicator, spare: Option<[Buffer; 2]>) -> Pending<[Buffer; 2]> {
    const ELEMENTS: usize = (2 << 20) / 4;
    let (rank, size) = (comm.rank(), comm.size());
    let [sent, received] = spare.unwrap_or_else(|| [ELEMENTS; 2].map(|elements| Buffer::from(vec![0f32; elements])));
    let sending = comm.send(sent, (rank + size / 2) % size);
    let receiving = comm.recv(received, (rank + size - size / 2) % size);
    receiving.map(|received| Ok([sending.wait()?, received]))
}

/// Measures the speeds of compute and of a transfer while they overlap, relative to their speeds alone. Like a rank in
/// a training step, the loop computes a product, then collects finished transfers and starts new ones. `start` starts a
/// transfer and may use the buffers of an earlier one.
fn beside(
    comm: &dyn Communicator,
    start: impl Fn(&dyn Communicator, Option<[Buffer; 2]>) -> Pending<[Buffer; 2]>,
) -> Result<(Time, Time), Error> {
    const RUNS: usize = 7;
    const PRODUCTS: usize = 64;
    /// A run has 16 transfers, or fewer (but at least 6) if they would take more than two seconds.
    const TRANSFERS: (usize, usize) = (6, 16);
    /// Number of transfers in flight, enough to keep the communication worker busy during one product.
    const IN_FLIGHT: usize = 4;
    let (x, w) =
        (Tensor::ones((128, 512), DType::F32, &Device::Cpu)?, Tensor::ones((512, 512), DType::F32, &Device::Cpu)?);
    let product = || x.matmul(&w).map(drop);
    let mut spare: Vec<[Buffer; 2]> = vec![];
    let (mut computing, mut transferring) = (vec![], vec![]);
    let started = Instant::now();
    spare.push(start(comm, None).wait()?);
    let own = Buffer::I64(vec![started.elapsed().as_nanos() as i64]);
    let slowest = comm.all_reduce(own, ReduceOp::Max).wait()?.into_i64()?[0];
    let transfers = ((2_000_000_000 / slowest.max(1)) as usize).clamp(TRANSFERS.0, TRANSFERS.1);
    for run in 0..=RUNS {
        comm.barrier().wait()?;
        // Use the mean, not the median time of a product: if several ranks share a core, most products run within a
        // time slice, and the few that wait for the next slice would not count.
        let started = Instant::now();
        (0..PRODUCTS).try_for_each(|_| product())?;
        let product_alone = started.elapsed().as_secs_f64() / PRODUCTS as f64;
        comm.barrier().wait()?;
        let started = Instant::now();
        for _ in 0..transfers {
            let done = start(comm, spare.pop()).wait()?;
            spare.push(done);
        }
        let transfer_alone = started.elapsed().as_secs_f64() / transfers as f64;
        comm.barrier().wait()?;
        let started = Instant::now();
        let mut in_flight: VecDeque<Pending<[Buffer; 2]>> = VecDeque::new();
        let (mut begun, mut ended, mut computed) = (0, 0, 0);
        while ended < transfers {
            while in_flight.front().is_some_and(Pending::is_done) {
                if let Some(done) = in_flight.pop_front() {
                    spare.push(done.wait()?);
                    ended += 1;
                }
            }
            while begun < transfers && in_flight.len() < IN_FLIGHT {
                in_flight.push_back(start(comm, spare.pop()));
                begun += 1;
            }
            product()?;
            computed += 1;
        }
        let seconds = started.elapsed().as_secs_f64();
        if run > 0 {
            computing.push((computed as f64 * product_alone / seconds).clamp(0.01, 1.0));
            transferring.push((transfers as f64 * transfer_alone / seconds).clamp(0.01, 1.0));
        }
    }
    Ok((Time::of(mean(comm, computing)?), Time::of(mean(comm, transferring)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_transfers_are_run_less_often() {
        let point = |bytes: f64, seconds: f64| Point { bytes, seconds: Time::of(vec![seconds]) };
        assert_eq!(repeats(None, 1e4), 32);
        // The next size has eight times the bytes, so an operation takes about 0.008, 0.2 and 8 seconds.
        for (seconds, expected) in [(0.001, 32), (0.025, 5), (1.0, 2)] {
            assert_eq!(repeats(Some(&point(1e6, seconds)), 8e6), expected);
        }
        assert_eq!(repeats(Some(&point(0.0, 0.0)), 0.0), 32);
        assert_eq!(repeats(Some(&point(1e6, 0.0)), 8e6), 32);
    }
}
