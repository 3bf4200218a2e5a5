//! Buffers in device memory, and the traits that a transport between devices implements.
//!
//! This crate has no device code. A crate that does, such as `zero-nccl`, passes a [`DeviceFabric`] to
//! [`Communicator::with_devices`](crate::Communicator::with_devices). The group then runs an operation on a
//! [`DeviceBuffer`] in two steps. First, its ranks synchronize over their host transport and compare the signatures of
//! their calls. This detects missing ranks and mismatched calls. Then each rank starts the operation on its device and
//! waits until the device is done. The same deadline applies as to other operations.
//!
//! A group can also run ahead ([`Communicator::run_ahead`](crate::Communicator::run_ahead)), once its ranks know that
//! they make the same calls: results are returned as soon as the device has the operation in its queue, and collectives
//! skip the first step. A thread watches these operations, and enforces their deadlines (`watch.rs`).
#![allow(unsafe_code)]

mod end;
mod watch;

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::buffers::buffer::Buffer;
use crate::buffers::dtype::Dtype;
use crate::collective::reduction::ReduceOp;

pub(crate) use end::DeviceEnd;

/// A point in the work of a device.
pub trait DeviceEvent: Send + Sync {
    /// Returns the event of the device's library (a `CUevent`), which lives as long as this value.
    fn raw(&self) -> u64;

    /// Returns whether all work before the event is complete.
    ///
    /// # Errors
    /// Returns the device's error.
    fn has_happened(&self) -> Result<bool, String>;
}

/// Values in the memory of a device.
///
/// # Safety
/// `address` must point to `len` elements of `dtype` in the memory of the device. No other code may use these elements
/// while this value lives, because devices read and write them asynchronously. After a call of [`used_until`], even
/// code that runs after the end of this value may use or free them only in device work that waits for the event.
///
/// [`used_until`]: DeviceMemory::used_until
pub unsafe trait DeviceMemory: Any + fmt::Debug + Send + Sync {
    /// Returns the element type.
    fn dtype(&self) -> Dtype;

    /// Returns the number of elements.
    fn len(&self) -> usize;

    /// Returns whether there are no elements.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the index of the device.
    fn device(&self) -> usize;

    /// Returns the device address of the first element. Without elements, the address is unspecified.
    fn address(&self) -> u64;

    /// Returns the event of the device's library (a `CUevent`) that is recorded after the elements' values are written.
    /// Returns `None` if the values are written already. The event must live as long as this value, or until the next
    /// call of `used_until`.
    fn written(&self) -> Option<u64>;

    /// Records that an operation reads or writes the elements until `event` happens. Their values count as written from
    /// then on.
    fn used_until(&self, event: Arc<dyn DeviceEvent>);

    /// Copies the values to host memory.
    ///
    /// # Errors
    /// Returns the device's error.
    fn to_host(&self) -> Result<Buffer, String>;

    /// Copies the values to new memory on the device.
    ///
    /// # Errors
    /// Returns the device's error, for example out of memory.
    fn duplicate(&self) -> Result<Box<dyn DeviceMemory>, String>;
}

/// Owns values in the memory of a device.
pub struct DeviceBuffer(Box<dyn DeviceMemory>);

impl DeviceBuffer {
    /// Takes ownership of the values.
    pub fn new(memory: impl DeviceMemory) -> DeviceBuffer {
        DeviceBuffer(Box::new(memory))
    }

    /// Returns the memory that holds the values.
    pub fn memory(&self) -> &dyn DeviceMemory {
        &*self.0
    }

    /// Returns the memory that was passed to [`new`](DeviceBuffer::new).
    ///
    /// # Errors
    /// Returns the buffer unchanged if the memory is not a `T`.
    pub fn downcast<T: DeviceMemory>(self) -> Result<T, DeviceBuffer> {
        if (&*self.0 as &dyn Any).is::<T>() {
            let memory: Box<dyn Any> = self.0;
            return Ok(*memory.downcast().unwrap_or_else(|_| unreachable!("it is a T")));
        }
        Err(self)
    }
}

/// Copies the values on the device.
///
/// # Panics
/// Panics if the device runs out of memory, as a `Vec` does when the host runs out.
impl Clone for DeviceBuffer {
    fn clone(&self) -> DeviceBuffer {
        DeviceBuffer(self.0.duplicate().unwrap_or_else(|error| panic!("cannot copy {self:?}: {error}")))
    }
}

/// Compares element by element on the host. Buffers that cannot be copied to the host are never equal.
impl PartialEq for DeviceBuffer {
    fn eq(&self, other: &DeviceBuffer) -> bool {
        matches!((self.0.to_host(), other.0.to_host()), (Ok(here), Ok(there)) if here == there)
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} on device {}", self.0.len(), self.0.dtype(), self.0.device())
    }
}

/// Connects the device of this rank to the devices of the other ranks.
pub trait DeviceFabric: Send + Sync {
    /// Returns the name of the transport: `nccl`.
    fn transport(&self) -> &'static str;

    /// Returns the index of the device whose memory this fabric can use.
    fn device(&self) -> usize;

    /// Creates one end of a new connection between devices. A group requests one connection for its collectives, and
    /// one per peer and direction for messages. It requests each on first use.
    ///
    /// # Errors
    /// Returns the error of the device or its library.
    fn lane(&self) -> Result<Box<dyn DeviceLane>, String>;
}

/// Size of an invitation to a connection in bytes.
pub const INVITATION: usize = 128;

/// One end of a connection between devices, which runs one operation at a time. Methods may be called from any thread,
/// but never concurrently.
pub trait DeviceLane: Send {
    /// Creates the data that every end needs in order to connect. The first end calls this; the group sends the result
    /// to the others.
    ///
    /// # Errors
    /// Returns the error of the device or its library.
    fn invitation(&mut self) -> Result<[u8; INVITATION], String>;

    /// Starts connecting this end, which is rank `rank` of `size`, with the others. The connection is ready when
    /// [`poll`](DeviceLane::poll) returns `true`.
    ///
    /// # Errors
    /// Returns the error of the device or its library.
    fn connect(&mut self, invitation: &[u8; INVITATION], rank: usize, size: usize) -> Result<(), String>;

    /// Starts an operation, after all operations that were started earlier. Its buffers stay alive until `poll` returns
    /// `true`, until the event of `enqueued` happens, or until `abort` reports that the device no longer uses them.
    ///
    /// # Errors
    /// Returns the error of the device or its library.
    fn start(&mut self, work: &DeviceWork<'_>) -> Result<(), String>;

    /// Returns whether the connection or operation that was started last is complete. Does not block.
    ///
    /// # Errors
    /// Returns the error that the connection or an operation ended with.
    fn poll(&mut self) -> Result<bool, String>;

    /// Returns the event that happens when the operation that was started last is complete; `None` if the device does
    /// not have the whole operation in its queue yet. Does not block.
    ///
    /// # Errors
    /// As [`poll`](DeviceLane::poll).
    fn enqueued(&mut self) -> Result<Option<Arc<dyn DeviceEvent>>, String>;

    /// Aborts the connection or the operations in flight, on this rank and its peers. Returns within seconds, and tells
    /// whether the device has stopped using the buffers. No operation is started afterwards.
    fn abort(&mut self) -> bool;

    /// Starts to leave the connection, without blocking. No operation is started afterwards. Dropping the lane waits a
    /// limited time until the peers have received the data that was sent to them. A rank with several connections
    /// therefore calls `leave` on all of them before it drops the first one.
    fn leave(&mut self);
}

/// An operation on device memory. Ranks are numbered within the connection.
#[derive(Debug)]
pub enum DeviceWork<'a> {
    /// Reduces the buffers of all ranks, in place on all ranks.
    AllReduce {
        /// The inputs and the results.
        buffers: Vec<&'a dyn DeviceMemory>,
        /// The reduction.
        op: ReduceOp,
    },
    /// Concatenates the shards of all ranks, on all ranks.
    AllGather {
        /// The outputs, each with this rank's shard.
        vectors: Vec<ShardedMemory<'a>>,
    },
    /// Reduces the inputs of all ranks; each rank gets its range of the result.
    ReduceScatter {
        /// The inputs, which stay unchanged, and this rank's ranges of the results.
        vectors: Vec<ShardedMemory<'a>>,
        /// The reduction.
        op: ReduceOp,
    },
    /// Copies the buffer of one rank to all ranks.
    Broadcast {
        /// The data to send on the root, the destination elsewhere.
        buffer: &'a dyn DeviceMemory,
        /// The rank whose buffer is copied.
        root: usize,
    },
    /// Sends a part of the input to each rank and receives a part from each. The ranks have agreed on the counts.
    AllToAll {
        /// The parts for all ranks, which stay unchanged.
        input: &'a dyn DeviceMemory,
        /// The parts from all ranks.
        output: &'a dyn DeviceMemory,
        /// Elements of the part for each rank.
        send_counts: &'a [usize],
        /// Elements of the part from each rank.
        receive_counts: &'a [usize],
    },
    /// Sends a message.
    Send {
        /// The data to send.
        buffer: &'a dyn DeviceMemory,
        /// The receiving rank.
        to: usize,
    },
    /// Receives a message.
    Recv {
        /// The destination.
        buffer: &'a dyn DeviceMemory,
        /// The sending rank.
        from: usize,
    },
}

/// A vector of an operation on device memory, and this rank's range of it.
#[derive(Debug, Clone, Copy)]
pub struct ShardedMemory<'a> {
    /// The values of all ranges.
    pub whole: &'a dyn DeviceMemory,
    /// This rank's range.
    pub shard: &'a dyn DeviceMemory,
    /// Elements of each rank's range.
    pub counts: &'a [usize],
}

/// Returns the number of bytes that a vector takes in each rank's block of a flat buffer, given its `counts` and the
/// `size` of an element in bytes. A transport whose collectives need ranges of equal length copies uneven vectors into
/// such a buffer, with one block per rank. Returns `None` if the ranges have equal lengths, or differ so much that the
/// buffer would be more than twice as large as the vector.
#[must_use]
pub fn flat_block(counts: &[usize], size: usize) -> Option<usize> {
    let (longest, sum) = (counts.iter().max().copied()?, counts.iter().sum::<usize>());
    let is_even = counts.iter().all(|&count| count == longest);
    (!is_even && longest * counts.len() <= 2 * sum).then(|| (longest * size).next_multiple_of(ALIGNMENT))
}

/// Alignment of a vector's place in a block of a flat buffer.
const ALIGNMENT: usize = 16;

impl DeviceWork<'_> {
    /// Returns all buffers of the operation.
    pub fn buffers(&self) -> Vec<&dyn DeviceMemory> {
        match self {
            DeviceWork::AllReduce { buffers, .. } => buffers.clone(),
            DeviceWork::AllGather { vectors } | DeviceWork::ReduceScatter { vectors, .. } => {
                vectors.iter().flat_map(|vector| [vector.whole, vector.shard]).collect()
            }
            DeviceWork::Broadcast { buffer, .. }
            | DeviceWork::Send { buffer, .. }
            | DeviceWork::Recv { buffer, .. } => vec![*buffer],
            DeviceWork::AllToAll { input, output, .. } => vec![*input, *output],
        }
    }

    /// Returns the total size of the whole vectors in bytes; for an all_to_all, the size of the larger buffer.
    pub fn bytes(&self) -> usize {
        let bytes = |buffer: &dyn DeviceMemory| buffer.len() * buffer.dtype().size();
        match self {
            DeviceWork::AllGather { vectors } | DeviceWork::ReduceScatter { vectors, .. } => {
                vectors.iter().map(|vector| bytes(vector.whole)).sum()
            }
            DeviceWork::AllToAll { input, output, .. } => bytes(*input).max(bytes(*output)),
            _ => self.buffers().into_iter().map(bytes).sum(),
        }
    }
}
