//! What ranks can do together, whatever carries the bytes.

use std::sync::Arc;
use std::time::Duration;

use crate::buffer::Buffer;
use crate::device::DeviceFabric;
use crate::error::CommError;
use crate::pending::Pending;
use crate::stats::{SizeCounter, Stats};

/// A group of ranks that act together.
///
/// Every rank of a group must call the same collectives (all but `send`, `recv` and `abort`) in the same order; what differs is
/// reported on every rank as [`CommError::Mismatch`]. Operations run on worker threads in the order of submission: all
/// collectives of a communicator on one, the messages to and from each peer on one each, so that they cannot block each
/// other. Any number may be outstanding, and they may be waited for in any order.
///
/// Reductions have the same bits in every transport and for every cut of the vector: each element is summed over a fixed
/// binary tree of the ranks, lowest bit first (level by level the pairs (0,1), (2,3), …; an odd one out passes up
/// unchanged), 16-bit floats in f32 with one rounding at the end, integers wrapping. `Max` propagates NaN.
///
/// Dropping a communicator finishes what was submitted (each within its deadline) and takes leave of the others.
pub trait Communicator: Send + Sync {
    /// This rank in the group, `0..size`.
    fn rank(&self) -> usize;

    /// Number of ranks in the group.
    fn size(&self) -> usize;

    /// The reduction of all ranks' buffers, on all ranks. Sends 2(N−1)/N of the buffer's bytes.
    fn all_reduce(&self, buffer: Buffer, op: ReduceOp) -> Pending<Buffer>;

    /// All ranks' shards one after another in rank order, on all ranks. `counts[r]` is the number of elements of rank r's
    /// shard (zero is fine); `output` has their sum. Sends (N−1) times the shard's bytes.
    fn all_gather(&self, shard: Buffer, output: Buffer, counts: &[usize]) -> Pending<Gathered>;

    /// Rank r gets the reduction of range r of all ranks' inputs; the ranges follow one another and have `counts[r]`
    /// elements. The input comes back unchanged. Sends the bytes of the others' ranges.
    fn reduce_scatter(&self, input: Buffer, shard: Buffer, counts: &[usize], op: ReduceOp) -> Pending<Scattered>;

    /// The buffer of rank `root` of the group, on all ranks. The root sends N−1 times its bytes.
    fn broadcast(&self, buffer: Buffer, root: usize) -> Pending<Buffer>;

    /// Sends the buffer to rank `to`; done, with the buffer back, when it may be reused. That may be before the receiver has
    /// it, or not before it receives: two ranks that both wait for a send before they receive wait for each other. Messages
    /// from one rank to another arrive in the order of their submission, which is that of the receives.
    fn send(&self, buffer: Buffer, to: usize) -> Pending<Buffer>;

    /// Fills the buffer with the next message from rank `from`, which must have the same element type and length.
    fn recv(&self, buffer: Buffer, from: usize) -> Pending<Buffer>;

    /// Done when every rank of the group has come to it.
    fn barrier(&self) -> Pending<()>;

    /// A new group of the ranks that give the same `color`, ordered by (`key`, rank). Collective over this group, also for
    /// ranks with a color of their own. A split and its parent fail together.
    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, CommError>;

    /// A new group of the same ranks in the same order that carries out operations on [`Buffer::Device`] as well, over `devices`; so do its
    /// splits. Collective over this group. A group without devices refuses such buffers with [`CommError::Invalid`], and so does every group
    /// those of one operation that are not all on the device.
    ///
    /// What is said of operations above holds for those on devices, but for the bits: the order of their sums is that of `devices`.
    fn with_devices(&self, devices: Arc<dyn DeviceFabric>) -> Result<Arc<dyn Communicator>, CommError>;

    /// Ends every pending and later operation of every rank of the world with [`CommError::Aborted`], which names this rank
    /// and the reason. Returns at once. The first abort or failure of a job wins.
    fn abort(&self, reason: &str);

    /// What this communicator did so far. Splits count on their own.
    fn stats(&self) -> Stats;

    /// The same calls and seconds by size of the vectors, by operation and then by size.
    fn sizes(&self) -> Vec<SizeCounter>;

    /// What carries the bytes: `threads`, `shared memory`, `tcp`, or `shared memory and tcp` in a group on several hosts;
    /// in a group with devices what carries theirs.
    fn transport(&self) -> &'static str;
}

/// How values of several ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Sum over the fixed tree of ranks.
    Sum,
    /// Largest value; NaN if any is NaN.
    Max,
}

/// What an `all_gather` gives back.
#[derive(Debug, Clone, PartialEq)]
pub struct Gathered {
    /// The shard as it was handed in.
    pub shard: Buffer,
    /// The shards of all ranks in rank order.
    pub output: Buffer,
}

/// What a `reduce_scatter` gives back.
#[derive(Debug, Clone, PartialEq)]
pub struct Scattered {
    /// The input as it was handed in.
    pub input: Buffer,
    /// This rank's range of the reduction.
    pub shard: Buffer,
}

/// What may be chosen about a communicator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// How long a thread may wait for an operation, from its start on the worker, before it fails with [`CommError::Deadline`].
    /// An operation that nobody waits for yet, such as a receive that is posted ahead, has all the time. Default 30 s.
    pub timeout: Duration,
    /// How long the ranks may take to meet. Default 120 s: schedulers start processes when they like.
    pub meeting_timeout: Duration,
    /// What carries the bytes between processes.
    pub transport: Transport,
    /// Name or address of the network interface that other hosts reach this rank by. `None`: loopback only.
    pub interface: Option<String>,
    /// A name for what counts as this rank's host, if that is less than the machine: ranks of different names share no memory.
    /// That is how several hosts are tried out on one.
    pub host: Option<String>,
    /// The secret of the job; each connection proves that it knows it. Without one only loopback is served, and anybody
    /// on the host who reaches the port can join.
    pub token: Option<String>,
    /// What the ranks must have in common, key by key, such as the program's version and its settings. Processes that differ do not
    /// connect, and each gets [`CommError::Disagreement`], which names the first key that differs.
    pub terms: Vec<(String, String)>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            timeout: Duration::from_secs(30),
            meeting_timeout: Duration::from_secs(120),
            transport: Transport::Auto,
            interface: None,
            host: None,
            token: None,
            terms: Vec::new(),
        }
    }
}

/// What carries the bytes between processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transport {
    /// Shared memory within a host, if it can be had, and TCP between hosts.
    #[default]
    Auto,
    /// Shared memory, or an error.
    SharedMemory,
    /// TCP.
    Tcp,
}
