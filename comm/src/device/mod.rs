//! Buffers in the memory of devices, and what a way between devices must be able to do.
//!
//! This crate knows no device. Whoever does, such as `zero-nccl`, gives [`Communicator::with_devices`](crate::Communicator::with_devices) a
//! [`DeviceFabric`]. The group then carries out an operation on a [`DeviceBuffer`] in two parts: its ranks meet over their own transport
//! in the name of that operation, which finds who is missing and who wants something else; then each starts it on its device and waits until
//! the device is done, with the deadline of every other operation.
#![allow(unsafe_code)]

mod end;

use std::any::Any;
use std::fmt;

use crate::buffer::{Buffer, Dtype};
use crate::communicator::ReduceOp;

pub(crate) use end::DeviceEnd;

/// Values in the memory of a device.
///
/// # Safety
/// At `address` there must be `len` elements of `dtype` in the memory of the device, which nobody else uses as long as this lives:
/// devices read and write there by themselves.
pub unsafe trait DeviceMemory: Any + fmt::Debug + Send + Sync {
    /// The element type.
    fn dtype(&self) -> Dtype;

    /// Number of elements.
    fn len(&self) -> usize;

    /// Whether there are no elements.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of the device.
    fn device(&self) -> usize;

    /// Where the elements begin, for the device. Anything where there are none.
    fn address(&self) -> u64;

    /// The event, as the device's library has it (a `CUevent`), after which the elements are what they should be; `None` if they are already.
    /// It must live as long as this.
    fn written(&self) -> Option<u64>;

    /// A copy in the memory of the host.
    ///
    /// # Errors
    /// What the device says.
    fn to_host(&self) -> Result<Buffer, String>;

    /// A copy on the device.
    ///
    /// # Errors
    /// What the device says: that its memory does not suffice.
    fn duplicate(&self) -> Result<Box<dyn DeviceMemory>, String>;
}

/// The owner of values in the memory of a device.
pub struct DeviceBuffer(Box<dyn DeviceMemory>);

impl DeviceBuffer {
    /// Takes the values over.
    pub fn new(memory: impl DeviceMemory) -> DeviceBuffer {
        DeviceBuffer(Box::new(memory))
    }

    /// What is known of them.
    pub fn memory(&self) -> &dyn DeviceMemory {
        &*self.0
    }

    /// What was handed in, or the buffer if that was something else.
    ///
    /// # Errors
    /// The values are no `T`.
    pub fn downcast<T: DeviceMemory>(self) -> Result<T, DeviceBuffer> {
        if (&*self.0 as &dyn Any).is::<T>() {
            let memory: Box<dyn Any> = self.0;
            return Ok(*memory.downcast().unwrap_or_else(|_| unreachable!("it is a T")));
        }
        Err(self)
    }
}

/// On the device.
///
/// # Panics
/// If the memory of the device does not suffice, as a `Vec` does where that of the host does not.
impl Clone for DeviceBuffer {
    fn clone(&self) -> DeviceBuffer {
        DeviceBuffer(self.0.duplicate().unwrap_or_else(|error| panic!("no copy of {self:?}: {error}")))
    }
}

/// Element by element, on the host. What cannot be copied there equals nothing.
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

/// How the device of this rank reaches those of the others.
pub trait DeviceFabric: Send + Sync {
    /// What carries the bytes: `nccl`.
    fn transport(&self) -> &'static str;

    /// The number of the device whose memory it can use.
    fn device(&self) -> usize;

    /// One end of a new connection between devices. A group asks for one for its collectives, and for one for its messages with each peer in each
    /// direction, when they are first needed.
    ///
    /// # Errors
    /// What the device or its library says.
    fn lane(&self) -> Result<Box<dyn DeviceLane>, String>;
}

/// Bytes of an invitation to a connection.
pub const INVITATION: usize = 128;

/// One end of a connection between devices, which does one thing at a time. Called from any thread, one at a time.
pub trait DeviceLane: Send {
    /// What all who connect must know: the first of them makes it, the others are told.
    ///
    /// # Errors
    /// What the device or its library says.
    fn invitation(&mut self) -> Result<[u8; INVITATION], String>;

    /// Begins to connect `size` ends, of which this is number `rank`. Done when [`poll`](DeviceLane::poll) says so.
    ///
    /// # Errors
    /// What the device or its library says.
    fn connect(&mut self, invitation: &[u8; INVITATION], rank: usize, size: usize) -> Result<(), String>;

    /// Begins an operation. Its buffers live until `poll` says that it is done, or `abort` that nobody uses them any more.
    ///
    /// # Errors
    /// What the device or its library says.
    fn start(&mut self, work: &DeviceWork<'_>) -> Result<(), String>;

    /// Whether what was begun last is done. Does not block.
    ///
    /// # Errors
    /// What went wrong with it.
    fn poll(&mut self) -> Result<bool, String>;

    /// Ends what was begun, here and with the others. Whether the device has let go of the buffers; it must within some seconds. Nothing is begun
    /// afterwards.
    fn abort(&mut self) -> bool;

    /// Begins to leave; does not block. Nothing is begun afterwards. The drop waits for a while until the others have all that was sent to
    /// them: a rank with several connections begins to leave all before it waits for one.
    fn leave(&mut self);
}

/// An operation on the memory of a device. Ranks are those of the connection.
#[derive(Debug)]
pub enum DeviceWork<'a> {
    /// The reduction of all ranks' buffers, on all ranks.
    AllReduce {
        /// What is reduced, and where the result goes.
        buffer: &'a dyn DeviceMemory,
        /// How.
        op: ReduceOp,
    },
    /// All ranks' shards, one after another, on all ranks.
    AllGather {
        /// This rank's.
        shard: &'a dyn DeviceMemory,
        /// Where all go.
        output: &'a dyn DeviceMemory,
        /// Elements of each rank's shard.
        counts: &'a [usize],
    },
    /// Each rank's range of the reduction of all inputs.
    ReduceScatter {
        /// What is reduced, which stays as it is.
        input: &'a dyn DeviceMemory,
        /// Where this rank's range goes.
        shard: &'a dyn DeviceMemory,
        /// Elements of each rank's range.
        counts: &'a [usize],
        /// How.
        op: ReduceOp,
    },
    /// The buffer of one rank, on all ranks.
    Broadcast {
        /// What is sent, or where it goes.
        buffer: &'a dyn DeviceMemory,
        /// Whose.
        root: usize,
    },
    /// A message.
    Send {
        /// What is sent.
        buffer: &'a dyn DeviceMemory,
        /// To whom.
        to: usize,
    },
    /// A message.
    Recv {
        /// Where it goes.
        buffer: &'a dyn DeviceMemory,
        /// From whom.
        from: usize,
    },
}

impl DeviceWork<'_> {
    /// All buffers of the operation.
    pub fn buffers(&self) -> Vec<&dyn DeviceMemory> {
        match *self {
            DeviceWork::AllReduce { buffer, .. }
            | DeviceWork::Broadcast { buffer, .. }
            | DeviceWork::Send { buffer, .. }
            | DeviceWork::Recv { buffer, .. } => vec![buffer],
            DeviceWork::AllGather { shard, output, .. } => vec![shard, output],
            DeviceWork::ReduceScatter { input, shard, .. } => vec![input, shard],
        }
    }
}
