//! The [`Communicator`] trait: the operations of a group of ranks, independent of the transport.

use std::sync::Arc;
use std::time::Duration;

use crate::buffers::buffer::Buffer;
use crate::collective::reduction::ReduceOp;
use crate::collective::stats::{SizeCounter, Stats};
use crate::device::DeviceFabric;
use crate::error::CommError;
use crate::pending::Pending;

/// A group of ranks that communicate with each other.
///
/// Every rank of a group must call the same collectives (all methods except `send`, `recv` and `abort`) in the same
/// order. If the calls differ, every rank gets [`CommError::Mismatch`].
///
/// Operations run on worker threads in the order of submission. One worker runs all collectives of a communicator. For
/// each peer, one worker sends messages and another receives them. Collectives, sends and receives therefore cannot
/// block each other. Any number of operations may be in flight, and they may be awaited in any order.
///
/// Each method states how many bytes a rank sends to the others. Small collectives over TCP can send other amounts: in
/// groups of at least 16 ranks (at least 16 hosts if a host has several ranks) they use a tree, with fewer and larger
/// messages. [`Stats`] counts the bytes written to sockets as `network_bytes`.
///
/// Reductions are bit-identical on every transport and for every partition of the vector: each element is summed over a
/// fixed binary tree of the ranks. The tree combines the pairs (0,1), (2,3), … level by level; an unpaired node passes
/// up unchanged. 16-bit floats are summed in f32 and rounded once at the end, integers wrap, and `Max` propagates NaN.
///
/// Dropping a communicator first finishes the submitted operations, each within its deadline. It then tells the other
/// ranks that this rank has left.
pub trait Communicator: Send + Sync {
    /// Returns this rank's index in the group, in `0..size`.
    fn rank(&self) -> usize;

    /// Returns the number of ranks in the group.
    fn size(&self) -> usize;

    /// Reduces the buffers of all ranks and returns the result on all ranks. Each rank sends 2(N−1)/N of the buffer's
    /// bytes.
    fn all_reduce(&self, buffer: Buffer, op: ReduceOp) -> Pending<Buffer> {
        self.all_reduce_coalesced(vec![buffer], op).map(only)
    }

    /// Concatenates the shards of all ranks in rank order, on all ranks.
    ///
    /// `counts[r]` is the number of elements of rank r's shard and may be zero. The length of `output` must be the sum
    /// of the counts. Each rank sends N−1 times its shard's bytes.
    fn all_gather(&self, shard: Buffer, output: Buffer, counts: &[usize]) -> Pending<Gathered> {
        self.all_gather_coalesced(vec![ToGather { shard, output, counts: counts.to_vec() }]).map(only)
    }

    /// Reduces the inputs of all ranks and returns range r of the result on rank r.
    ///
    /// The result is divided into consecutive ranges, of which range r has `counts[r]` elements. The input is returned
    /// unchanged. Each rank sends the bytes of the other ranks' ranges.
    fn reduce_scatter(&self, input: Buffer, shard: Buffer, counts: &[usize], op: ReduceOp) -> Pending<Scattered> {
        self.reduce_scatter_coalesced(vec![ToScatter { input, shard, counts: counts.to_vec() }], op).map(only)
    }

    /// Runs [`all_reduce`](Communicator::all_reduce) on several buffers as one operation, as PyTorch's
    /// `all_reduce_coalesced` does.
    ///
    /// A coalesced operation takes at least one buffer. Its buffers are either all on the host or all on the device,
    /// and their element types may differ. The results are those of separate operations, in the order of the buffers,
    /// and no buffer is copied. The ranks synchronize once and exchange one header, and [`Stats`] counts one call.
    fn all_reduce_coalesced(&self, buffers: Vec<Buffer>, op: ReduceOp) -> Pending<Vec<Buffer>>;

    /// Runs [`all_gather`](Communicator::all_gather) on several vectors as one operation, as PyTorch's
    /// `all_gather_into_tensor_coalesced` does; see [`all_reduce_coalesced`](Communicator::all_reduce_coalesced).
    fn all_gather_coalesced(&self, vectors: Vec<ToGather>) -> Pending<Vec<Gathered>>;

    /// Runs [`reduce_scatter`](Communicator::reduce_scatter) on several vectors as one operation, as PyTorch's
    /// `reduce_scatter_tensor_coalesced` does; see [`all_reduce_coalesced`](Communicator::all_reduce_coalesced).
    fn reduce_scatter_coalesced(&self, vectors: Vec<ToScatter>, op: ReduceOp) -> Pending<Vec<Scattered>>;

    /// Copies the buffer of rank `root` of the group to all ranks. The root sends N−1 times the buffer's bytes.
    fn broadcast(&self, buffer: Buffer, root: usize) -> Pending<Buffer>;

    /// Sends a part of `input` to each rank and receives a part from each, as `MPI_Alltoallv` and PyTorch's
    /// `all_to_all_single` do.
    ///
    /// `input` consists of the parts for all ranks in rank order, and the part for rank r has `send_counts[r]`
    /// elements. `output` receives the parts from all ranks in rank order, and the part from rank r has
    /// `receive_counts[r]` elements. Counts may be zero, and the lengths of the buffers may differ between ranks.
    /// `send_counts[j]` on rank i must equal `receive_counts[i]` on rank j, and i and j report a difference before any
    /// data is used. The input is returned unchanged. Each rank sends the bytes of its input, without the part for
    /// itself.
    fn all_to_all(
        &self,
        input: Buffer,
        output: Buffer,
        send_counts: &[usize],
        receive_counts: &[usize],
    ) -> Pending<Exchanged>;

    /// Sends the buffer to rank `to`, and returns it once it may be reused.
    ///
    /// The operation may complete before the receiver has the data, or only when the receiver calls `recv`. Two ranks
    /// that both wait for a `send` before they call `recv` may therefore block each other until the deadline. Messages
    /// from one rank to another are received in the order in which they were sent.
    fn send(&self, buffer: Buffer, to: usize) -> Pending<Buffer>;

    /// Fills the buffer with the next message from rank `from`. The message must have the element type and length of
    /// the buffer.
    fn recv(&self, buffer: Buffer, from: usize) -> Pending<Buffer>;

    /// Completes when every rank of the group has called `barrier`.
    fn barrier(&self) -> Pending<()>;

    /// Creates a new group of the ranks that pass the same `color`, ordered by (`key`, rank).
    ///
    /// This is a collective of the whole group: a rank whose color is unique must also call it. A failure in a group
    /// ends the job, so its splits and its parent fail as well.
    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>, CommError>;

    /// Creates a group of the same ranks in the same order. This group and its splits also run operations on
    /// [`Buffer::Device`], over `devices`.
    ///
    /// This is a collective of the whole group. A group without devices refuses device buffers with
    /// [`CommError::Invalid`]; every group refuses an operation whose buffers are partly on the device and partly on
    /// the host.
    ///
    /// Operations on devices behave as described above, except that `devices` determines the order of the additions in
    /// a sum. The last bits of a sum can therefore differ from those of a host operation.
    fn with_devices(&self, devices: Arc<dyn DeviceFabric>) -> Result<Arc<dyn Communicator>, CommError>;

    /// Lets later operations on [`Buffer::Device`], of this group and of its splits, run ahead of the host: the result
    /// of an operation is returned as soon as the device has the operation in its queue, and the ranks no longer meet
    /// on the host before a collective. The two ranks of a message still do. Work of the device that uses the buffers
    /// must wait for the operation ([`DeviceMemory::used_until`](crate::DeviceMemory::used_until)). The first
    /// collective of each group, and the first message in each direction between two ranks, never run ahead.
    ///
    /// Every rank must call this function while no operation is in flight, once all of them have compared the
    /// collectives that they will run: if ranks run different collectives, the error no longer shows both calls and
    /// comes only at the deadline. An error of an operation is returned by a later one. The times in
    /// [`stats`](Communicator::stats) end when the device has the operation in its queue. A group without devices
    /// ignores the call; a wrapper of a group must pass it on.
    fn run_ahead(&self) {}

    /// Makes every pending and later operation on every rank of the job fail with [`CommError::Aborted`], which names
    /// this rank and the reason. Returns immediately. If a job aborts or fails several times, every rank reports the
    /// first cause.
    fn abort(&self, reason: &str);

    /// Returns the counters of this communicator. Each split has its own counters.
    fn stats(&self) -> Stats;

    /// Returns calls and seconds by vector size, ordered by operation and then by size.
    fn sizes(&self) -> Vec<SizeCounter>;

    /// Returns the name of the transport: `threads`, `shared memory`, `tcp`, or `shared memory and tcp` for a group on
    /// several hosts. A group with devices returns the name of the device transport.
    fn transport(&self) -> &'static str;
}

/// A vector to gather.
#[derive(Debug, Clone, PartialEq)]
pub struct ToGather {
    /// This rank's shard.
    pub shard: Buffer,
    /// Destination of the shards of all ranks.
    pub output: Buffer,
    /// Elements of each rank's shard.
    pub counts: Vec<usize>,
}

/// A vector to reduce and scatter: each rank gets one range of the result.
#[derive(Debug, Clone, PartialEq)]
pub struct ToScatter {
    /// This rank's values.
    pub input: Buffer,
    /// Destination of this rank's range of the reduction.
    pub shard: Buffer,
    /// Elements of each rank's range.
    pub counts: Vec<usize>,
}

/// Returns the only result of a coalesced operation on one buffer.
fn only<T>(results: Vec<T>) -> Result<T, CommError> {
    Ok(results.into_iter().next().expect("an operation returns a result for each buffer"))
}

/// The result of an `all_gather`.
#[derive(Debug, Clone, PartialEq)]
pub struct Gathered {
    /// The shard that was passed in.
    pub shard: Buffer,
    /// The shards of all ranks in rank order.
    pub output: Buffer,
}

/// The result of a `reduce_scatter`.
#[derive(Debug, Clone, PartialEq)]
pub struct Scattered {
    /// The input that was passed in, unchanged.
    pub input: Buffer,
    /// This rank's range of the reduction.
    pub shard: Buffer,
}

/// The result of an `all_to_all`.
#[derive(Debug, Clone, PartialEq)]
pub struct Exchanged {
    /// The input that was passed in, unchanged.
    pub input: Buffer,
    /// The parts from all ranks in rank order.
    pub output: Buffer,
}

/// Options of a communicator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// How long a thread may wait for an operation. After that, the operation fails with [`CommError::Deadline`]. The
    /// clock starts when the worker starts the operation. It stands still while no thread waits for the operation, as
    /// with a receive that was posted ahead. Default: 30 s.
    pub timeout: Duration,
    /// How long the rendezvous of the ranks may take. Default: 120 s, because a scheduler may start the processes at
    /// different times.
    pub meeting_timeout: Duration,
    /// The transport between processes.
    pub transport: ProcessTransport,
    /// Name or address of the network interface through which other hosts reach this rank. With `None`, this rank is
    /// reachable over loopback only.
    pub interface: Option<String>,
    /// A host name that divides one machine into several hosts: ranks with different names share no memory. This lets
    /// you test a multi-host job on one machine.
    pub host: Option<String>,
    /// The job's secret token; both ends of each connection prove that they know it. Without a token, ranks listen on
    /// loopback only, and any process on the host that reaches the port can join.
    pub token: Option<String>,
    /// Key–value pairs that must be equal on all ranks, such as the program's version and its settings. If they differ,
    /// the processes do not connect, and each gets [`CommError::Disagreement`], which names the first key that differs.
    pub terms: Vec<(String, String)>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            timeout: Duration::from_secs(30),
            meeting_timeout: Duration::from_secs(120),
            transport: ProcessTransport::Auto,
            interface: None,
            host: None,
            token: None,
            terms: Vec::new(),
        }
    }
}

/// The transport between processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ProcessTransport {
    /// Shared memory within a host, if available, and TCP between hosts.
    #[default]
    Auto,
    /// Shared memory; an error if it is not available.
    SharedMemory,
    /// TCP.
    Tcp,
}
