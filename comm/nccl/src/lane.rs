//! One connection of NCCL's: a raw `ncclComm_t` with a stream of its own, never blocking.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUevent;
use cudarc::nccl::sys::{self, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId};
use zero_comm::{DeviceLane, DeviceMemory, DeviceWork, Dtype, INVITATION, ReduceOp};
use zero_cuda::{Begun, CudaError, Device, Event, Recorder, Stream, Transfer};

/// One end of a connection.
pub(crate) struct Lane {
    device: Arc<Device>,
    stream: Stream,
    done: Event,
    recorder: Option<Arc<Recorder>>,
    /// What is being recorded.
    begun: Option<Begun>,
    /// Null until it connects, and after an abort.
    comm: ncclComm_t,
    rank: usize,
    state: State,
    /// When it began to leave, and whether it could.
    left: Option<(Instant, Result<(), String>)>,
}

// SAFETY: NCCL lets any thread call, one at a time, which `&mut self` sees to.
unsafe impl Send for Lane {}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing was begun, or it is done.
    Idle,
    /// NCCL connects.
    Connecting,
    /// NCCL has not put all on the stream yet.
    Launching,
    /// It is on the stream, and the event behind it.
    Running,
}

/// How long a rank that leaves waits for the others to have all that it sent. Then it goes anyway.
const LEAVE: Duration = Duration::from_secs(2);
/// How long the device may take to let go of what an abort has ended.
const LET_GO: Duration = Duration::from_secs(5);
const NAP: Duration = Duration::from_micros(200);

impl Lane {
    pub(crate) fn new(device: &Arc<Device>, recorder: Option<Arc<Recorder>>) -> Result<Lane, CudaError> {
        let (stream, done) = (Stream::urgent(device)?, Event::new(device)?);
        let (device, comm) = (Arc::clone(device), std::ptr::null_mut());
        Ok(Lane { device, stream, done, recorder, begun: None, comm, rank: 0, state: State::Idle, left: None })
    }

    /// Puts an event of the recorder's in front of an operation.
    fn begin(&mut self, work: &DeviceWork<'_>) -> Result<(), CudaError> {
        let Some(recorder) = &self.recorder else { return Ok(()) };
        let kind = match work {
            DeviceWork::AllReduce { .. } => Transfer::AllReduce,
            DeviceWork::Broadcast { .. } => Transfer::Broadcast,
            DeviceWork::AllGather { .. } => Transfer::AllGather,
            DeviceWork::ReduceScatter { .. } => Transfer::ReduceScatter,
            DeviceWork::Send { .. } => Transfer::Send,
            DeviceWork::Recv { .. } => Transfer::Receive,
        };
        let bytes = work.buffers().iter().map(|buffer| buffer.len() * buffer.dtype().size()).max().unwrap_or(0);
        self.begun = recorder.begin_transfer(&self.stream, kind, bytes)?;
        Ok(())
    }

    /// And behind it.
    fn end(&mut self) -> Result<(), CudaError> {
        if let Some(recorder) = &self.recorder {
            recorder.end(&self.stream, self.begun.take())?;
        }
        self.stream.record(&self.done)
    }

    /// What a call of NCCL's gave. In progress is fine: `poll` looks after it.
    fn check(&self, call: &str, result: ncclResult_t) -> Result<(), String> {
        match result {
            ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress => Ok(()),
            result => Err(self.describe(call, result)),
        }
    }

    fn describe(&self, call: &str, result: ncclResult_t) -> String {
        // SAFETY: both give text that outlives the call, or null; a null communicator is allowed.
        let (words, more) = unsafe { (text(sys::ncclGetErrorString(result)), text(sys::ncclGetLastError(self.comm))) };
        let more = if more.is_empty() { more } else { format!(" ({})", more.trim()) };
        format!("{call}: {words}{more}")
    }

    /// Whether NCCL is done with what it does by itself, on the host.
    fn settled(&self) -> Result<bool, String> {
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: the communicator lives; writes one value.
        let asked = unsafe { sys::ncclCommGetAsyncError(self.comm, &raw mut state) };
        self.check("ncclCommGetAsyncError", asked)?;
        match state {
            ncclResult_t::ncclSuccess => Ok(true),
            ncclResult_t::ncclInProgress => Ok(false),
            error => Err(self.describe("asynchronous error", error)),
        }
    }

    fn make_current(&self) -> Result<(), String> {
        self.device.make_current().map_err(|error| error.to_string())
    }

    /// All calls of an operation, between the start and the end of a group.
    fn launch(&self, work: &DeviceWork<'_>) -> Result<(), String> {
        let (comm, stream) = (self.comm, self.stream.raw().cast());
        match *work {
            DeviceWork::AllReduce { buffer, op } => {
                let (at, count, dtype) = place(buffer);
                // SAFETY: here and below: the buffers have as many elements of that type, on this lane's device, and live until the stream is
                // done with them; communicator and stream live.
                let result = unsafe { sys::ncclAllReduce(at, at, count, dtype, reduction(op), comm, stream) };
                self.check("ncclAllReduce", result)
            }
            DeviceWork::Broadcast { buffer, root } => {
                let (at, count, dtype) = place(buffer);
                // SAFETY: see above.
                let result = unsafe { sys::ncclBroadcast(at, at, count, dtype, root as c_int, comm, stream) };
                self.check("ncclBroadcast", result)
            }
            DeviceWork::AllGather { shard, output, counts } => {
                let ((from, count, dtype), (to, ..)) = (place(shard), place(output));
                if let Some(count) = even(counts) {
                    // SAFETY: see above.
                    let result = unsafe { sys::ncclAllGather(from, to, count, dtype, comm, stream) };
                    return self.check("ncclAllGather", result);
                }
                for (root, range) in ranges(counts).filter(|(_, (_, count))| *count > 0) {
                    let (to, elements) = (offset(to, range.0, shard.dtype()), range.1);
                    // Others' calls do not read what they would send.
                    let from = if root == self.rank { from } else { to };
                    debug_assert!(root != self.rank || elements == count);
                    // SAFETY: see above; the ranges lie in the output.
                    let result = unsafe { sys::ncclBroadcast(from, to, elements, dtype, root as c_int, comm, stream) };
                    self.check("ncclBroadcast", result)?;
                }
                Ok(())
            }
            DeviceWork::ReduceScatter { input, shard, counts, op } => {
                let ((from, _, dtype), (to, ..), op) = (place(input), place(shard), reduction(op));
                if let Some(count) = even(counts) {
                    // SAFETY: see above.
                    let result = unsafe { sys::ncclReduceScatter(from, to, count, dtype, op, comm, stream) };
                    return self.check("ncclReduceScatter", result);
                }
                for (root, (start, count)) in ranges(counts).filter(|(_, (_, count))| *count > 0) {
                    let from = offset(from, start, input.dtype());
                    // SAFETY: see above; the ranges lie in the input, and NCCL writes to the root's shard alone.
                    let result = unsafe { sys::ncclReduce(from, to, count, dtype, op, root as c_int, comm, stream) };
                    self.check("ncclReduce", result)?;
                }
                Ok(())
            }
            DeviceWork::Send { buffer, to } => {
                let (at, count, dtype) = place(buffer);
                // SAFETY: see above.
                self.check("ncclSend", unsafe { sys::ncclSend(at, count, dtype, to as c_int, comm, stream) })
            }
            DeviceWork::Recv { buffer, from } => {
                let (at, count, dtype) = place(buffer);
                // SAFETY: see above.
                self.check("ncclRecv", unsafe { sys::ncclRecv(at, count, dtype, from as c_int, comm, stream) })
            }
        }
    }
}

impl DeviceLane for Lane {
    fn invitation(&mut self) -> Result<[u8; INVITATION], String> {
        self.make_current()?;
        let mut id = ncclUniqueId { internal: [0; INVITATION] };
        // SAFETY: writes one value.
        let result = unsafe { sys::ncclGetUniqueId(&raw mut id) };
        self.check("ncclGetUniqueId", result)?;
        Ok(id.internal.map(|byte| byte as u8))
    }

    fn connect(&mut self, invitation: &[u8; INVITATION], rank: usize, size: usize) -> Result<(), String> {
        self.make_current()?;
        let id = ncclUniqueId { internal: invitation.map(|byte| byte as c_char) };
        let mut config = config();
        // SAFETY: the communicator's place lives as long as the lane, and NCCL writes to it during the call; the others are read in it.
        let result = unsafe {
            sys::ncclCommInitRankConfig(&raw mut self.comm, size as c_int, id, rank as c_int, &raw mut config)
        };
        self.rank = rank;
        self.check("ncclCommInitRankConfig", result)?;
        self.state = State::Connecting;
        Ok(())
    }

    fn start(&mut self, work: &DeviceWork<'_>) -> Result<(), String> {
        self.make_current()?;
        for buffer in work.buffers() {
            if let Some(written) = buffer.written() {
                // SAFETY: who implements the trait promises an event that lives as long as the buffer.
                let waits = unsafe { self.stream.wait_for_raw(written as usize as CUevent) };
                waits.map_err(|error| error.to_string())?;
            }
        }
        self.begin(work).map_err(|error| error.to_string())?;
        // SAFETY: a group may be begun at any time, and is ended below whatever happened in it.
        self.check("ncclGroupStart", unsafe { sys::ncclGroupStart() })?;
        let launched = self.launch(work);
        // SAFETY: ends the group that was begun above, on the same thread.
        let ended = unsafe { sys::ncclGroupEnd() };
        launched?;
        self.check("ncclGroupEnd", ended)?;
        self.state = State::Launching;
        Ok(())
    }

    fn poll(&mut self) -> Result<bool, String> {
        if self.state == State::Idle {
            return Ok(true);
        }
        let settled = self.settled()?;
        match self.state {
            State::Connecting if settled => self.state = State::Idle,
            State::Launching if settled => {
                // Not before: NCCL puts its kernels on the stream from a thread of its own.
                self.end().map_err(|error| error.to_string())?;
                self.state = State::Running;
            }
            State::Running if self.done.is_done().map_err(|error| error.to_string())? => self.state = State::Idle,
            _ => {}
        }
        Ok(self.state == State::Idle)
    }

    fn abort(&mut self) -> bool {
        let comm = std::mem::replace(&mut self.comm, std::ptr::null_mut());
        self.state = State::Idle;
        self.begun = None;
        if self.make_current().is_err() {
            return false;
        }
        if !comm.is_null() {
            // SAFETY: the communicator lives, and nobody has it any more. Whatever this gives, there is no way to try again.
            unsafe { sys::ncclCommAbort(comm) };
        }
        let until = Instant::now() + LET_GO;
        loop {
            match self.stream.is_done() {
                Ok(true) => return true,
                Ok(false) if Instant::now() < until => sleep(NAP),
                // A device that reports an error has stopped, and with it all that ran on it.
                other => return other.is_err(),
            }
        }
    }

    fn leave(&mut self) {
        if self.comm.is_null() || self.left.is_some() || self.make_current().is_err() {
            return;
        }
        // What this rank has sent may not have come to the others yet: they say when it has.
        // SAFETY: the communicator lives.
        let begun = self.check("ncclCommFinalize", unsafe { sys::ncclCommFinalize(self.comm) });
        self.left = Some((Instant::now(), begun));
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.leave();
        if self.comm.is_null() || self.make_current().is_err() {
            return;
        }
        let Some((since, mut finished)) = self.left.take() else { return };
        while finished.is_ok() {
            match self.settled() {
                Ok(true) => break,
                Ok(false) if since.elapsed() < LEAVE => sleep(NAP),
                Ok(false) => finished = Err("the others do not leave".into()),
                Err(error) => finished = Err(error),
            }
        }
        // SAFETY: the communicator lives, and nobody has it any more.
        unsafe { if finished.is_ok() { sys::ncclCommDestroy(self.comm) } else { sys::ncclCommAbort(self.comm) } };
    }
}

/// `NCCL_CONFIG_INITIALIZER`, and no call that blocks.
fn config() -> ncclConfig_t {
    const UNDEFINED: c_int = c_int::MIN;
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: 0xcafe_beef,
        // The release that the bindings were made from; a newer NCCL takes the fields that there are.
        version: 22_800,
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: std::ptr::null(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: std::ptr::null(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
        nChannelsPerNetPeer: UNDEFINED,
        nvlinkCentricSched: UNDEFINED,
    }
}

fn dtype(dtype: Dtype) -> ncclDataType_t {
    match dtype {
        Dtype::F32 => ncclDataType_t::ncclFloat32,
        Dtype::Bf16 => ncclDataType_t::ncclBfloat16,
        Dtype::F16 => ncclDataType_t::ncclFloat16,
        Dtype::I64 => ncclDataType_t::ncclInt64,
        Dtype::U8 => ncclDataType_t::ncclUint8,
    }
}

fn reduction(op: ReduceOp) -> ncclRedOp_t {
    match op {
        ReduceOp::Sum => ncclRedOp_t::ncclSum,
        ReduceOp::Max => ncclRedOp_t::ncclMax,
    }
}

/// Where a buffer is, and how much of what.
fn place(buffer: &dyn DeviceMemory) -> (*mut c_void, usize, ncclDataType_t) {
    (buffer.address() as usize as *mut c_void, buffer.len(), dtype(buffer.dtype()))
}

fn offset(start: *mut c_void, elements: usize, dtype: Dtype) -> *mut c_void {
    start.wrapping_byte_add(elements * dtype.size())
}

/// The count that all have, if they have one.
fn even(counts: &[usize]) -> Option<usize> {
    let first = *counts.first()?;
    counts.iter().all(|count| *count == first).then_some(first)
}

/// Each rank with where its range begins and how many elements it has.
fn ranges(counts: &[usize]) -> impl Iterator<Item = (usize, (usize, usize))> {
    let mut end = 0;
    counts.iter().enumerate().map(move |(rank, count)| {
        end += count;
        (rank, (end - count, *count))
    })
}

/// # Safety
/// `words` must be null or text.
unsafe fn text(words: *const c_char) -> String {
    if words.is_null() {
        return String::new();
    }
    // SAFETY: as the caller says.
    unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned()
}
