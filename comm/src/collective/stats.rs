//! Counters of a communicator: calls, payload bytes and time by kind of operation.
//!
//! Payload is the data that the algorithm must move, counted at the sender: the bytes that this rank contributes to
//! other ranks' ranges. They count equally whether a peer reads them from memory or they are sent over a socket.
//! Headers do not count. The numbers in the documentation of each operation (2(N−1)/N of the bytes for an all_reduce,
//! …) are therefore exact on every transport. The payload of an all_to_all is the input without the part that the rank
//! keeps: (N−1)/N of the bytes if all parts are equal.

use std::collections::BTreeMap;
use std::ops::{Add, Index, Sub};

use crate::collective::carried::Carried;
use crate::collective::signature::Operation;

/// Counters by kind of operation. To count an interval, subtract an earlier snapshot. To count several groups together,
/// add their counters.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Stats {
    counters: [Counter; Operation::ALL.len()],
}

/// Counters of one kind of operation on this rank.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Counter {
    /// Operations that succeeded. A coalesced operation counts once.
    pub calls: u64,
    /// Calls in which ranks accessed each other's buffers directly. A coalesced call counts if this is true of at least
    /// one buffer. Between threads, ranks do this in all collectives and messages. Between processes of one host that
    /// use the [`SharedAllocator`](crate::SharedAllocator), they do it if the vectors are large. Messages and the parts
    /// of an all_to_all are counted at the sender.
    pub in_place: u64,
    /// Calls on device buffers that ran ahead: the host neither met the other ranks nor waited for the device.
    pub ahead: u64,
    /// Payload bytes that this rank sent.
    pub sent_bytes: u64,
    /// Payload bytes that this rank wrote to sockets. Data for another host is sent once per cell of that host (usually
    /// one: [`cells`](crate::cells())), and each part of an all_to_all is sent once.
    pub network_bytes: u64,
    /// Like `sent_bytes`, but 16-bit values count as f32 where they are sent as f32: in sums between hosts with several
    /// ranks. Summed over all ranks, `moved_bytes - network_bytes` is exchanged through the memory of hosts.
    pub moved_bytes: u64,
    /// Seconds that the worker spent on these operations, including waiting for peers.
    pub seconds: f64,
}

impl Stats {
    /// Iterates over all kinds of operation with their counters, in a fixed order.
    pub fn iter(&self) -> impl Iterator<Item = (Operation, Counter)> + '_ {
        Operation::ALL.into_iter().map(|operation| (operation, self[operation]))
    }

    /// Returns the payload bytes sent by all operations.
    pub fn sent_bytes(&self) -> u64 {
        self.counters.iter().map(|counter| counter.sent_bytes).sum()
    }

    fn count(&mut self, operation: Operation, sent: Sent, seconds: f64) {
        let counter = &mut self.counters[operation as usize];
        counter.calls += 1;
        counter.in_place += u64::from(sent.carried.in_place);
        counter.ahead += u64::from(sent.carried.ahead);
        counter.sent_bytes += sent.bytes as u64;
        counter.network_bytes += sent.carried.network_bytes as u64;
        counter.moved_bytes += (sent.bytes + sent.carried.widening) as u64;
        counter.seconds += seconds;
    }
}

/// Counters of one kind of operation on vectors of one size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SizeCounter {
    /// The kind of operation.
    pub operation: Operation,
    /// Size in bytes of the whole vector, with the ranges of all ranks. For a coalesced operation, the total size of
    /// its vectors. For an all_to_all, the size of this rank's input.
    pub bytes: u64,
    /// Number of ranks in the group.
    pub ranks: usize,
    /// Operations that succeeded.
    pub calls: u64,
    /// Seconds that the worker spent on these operations, including waiting for peers.
    pub seconds: f64,
}

/// Counters by kind of operation, and by kind and size.
#[derive(Debug, Default)]
pub(crate) struct Log {
    pub(crate) stats: Stats,
    /// Calls and seconds, by operation code and bytes.
    sizes: BTreeMap<(u8, u64), (u64, f64)>,
}

impl Log {
    pub(crate) fn count(&mut self, operation: Operation, bytes: u64, sent: Sent, seconds: f64) {
        self.stats.count(operation, sent, seconds);
        let (calls, sum) = self.sizes.entry((operation as u8, bytes)).or_default();
        *calls += 1;
        *sum += seconds;
    }

    /// Returns the counters by operation and size, for a group of `ranks` ranks.
    pub(crate) fn sizes(&self, ranks: usize) -> Vec<SizeCounter> {
        let counter = |(&(operation, bytes), &(calls, seconds)): (&(u8, u64), &(u64, f64))| {
            let operation = Operation::ALL[usize::from(operation)];
            SizeCounter { operation, bytes, ranks, calls, seconds }
        };
        self.sizes.iter().map(counter).collect()
    }
}

/// The data that an operation sent from this rank.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sent {
    /// Payload bytes.
    pub(crate) bytes: usize,
    pub(crate) carried: Carried,
}

impl Index<Operation> for Stats {
    type Output = Counter;
    fn index(&self, operation: Operation) -> &Counter {
        &self.counters[operation as usize]
    }
}

impl Stats {
    /// Combines the counters of `self` and `other`, field by field.
    fn with(self, other: Stats, count: fn(u64, u64) -> u64, seconds: fn(f64, f64) -> f64) -> Stats {
        let both = |i: usize| {
            let (a, b) = (self.counters[i], other.counters[i]);
            Counter {
                calls: count(a.calls, b.calls),
                in_place: count(a.in_place, b.in_place),
                ahead: count(a.ahead, b.ahead),
                sent_bytes: count(a.sent_bytes, b.sent_bytes),
                network_bytes: count(a.network_bytes, b.network_bytes),
                moved_bytes: count(a.moved_bytes, b.moved_bytes),
                seconds: seconds(a.seconds, b.seconds),
            }
        };
        Stats { counters: std::array::from_fn(both) }
    }
}

impl Add for Stats {
    type Output = Stats;
    fn add(self, other: Stats) -> Stats {
        self.with(other, u64::add, f64::add)
    }
}

impl Sub for Stats {
    type Output = Stats;
    fn sub(self, earlier: Stats) -> Stats {
        self.with(earlier, u64::saturating_sub, f64::sub)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_counted_separately() {
        let mut log = Log::default();
        let sent = Sent { bytes: 1, carried: Carried::IN_PLACE };
        for (operation, bytes, seconds) in [
            (Operation::Send, 8, 1.0),
            (Operation::AllReduce, 64, 0.5),
            (Operation::AllReduce, 8, 0.25),
            (Operation::AllReduce, 64, 0.5),
        ] {
            log.count(operation, bytes, sent, seconds);
        }
        let of = |operation, bytes, calls, seconds| SizeCounter { operation, bytes, ranks: 3, calls, seconds };
        assert_eq!(
            log.sizes(3),
            [
                of(Operation::AllReduce, 8, 1, 0.25),
                of(Operation::AllReduce, 64, 2, 1.0),
                of(Operation::Send, 8, 1, 1.0)
            ]
        );
        assert_eq!(log.stats[Operation::AllReduce].calls, 3);
    }

    #[test]
    fn a_difference_of_snapshots_counts_an_interval() {
        let mut stats = Stats::default();
        let sent = |bytes, carried| Sent { bytes, carried };
        stats.count(Operation::AllReduce, sent(100, Carried::IN_PLACE), 0.5);
        let before = stats;
        stats.count(Operation::AllReduce, sent(60, Carried::IN_PLACE), 0.25);
        stats.count(Operation::Send, sent(4, Carried::streamed(3)), 0.125);
        let interval = stats - before;
        assert_eq!(
            interval[Operation::AllReduce],
            Counter { calls: 1, in_place: 1, sent_bytes: 60, moved_bytes: 60, seconds: 0.25, ..Counter::default() }
        );
        assert_eq!(interval[Operation::Send].network_bytes, 3);
        assert_eq!((interval.sent_bytes(), stats.sent_bytes()), (64, 164));
        assert_eq!(interval + before, stats);
        assert_eq!(interval.iter().map(|(_, counter)| counter.calls).sum::<u64>(), 2);
    }
}
