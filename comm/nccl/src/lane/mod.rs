//! One NCCL connection: a raw `ncclComm_t` with its own stream, used only with non-blocking calls.
#![allow(unsafe_code)]

mod calls;
mod flat;

use std::ffi::{CStr, c_char, c_int};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUevent;
use cudarc::nccl::sys::{self, ncclComm_t, ncclConfig_t, ncclResult_t, ncclUniqueId};
use zero_comm::{DeviceEvent, DeviceLane, DeviceWork, INVITATION};
use zero_cuda::{Begun, CudaError, Device, Event, Recorder, Stream, Transfer};

use flat::Flat;

/// One end of a connection.
pub(crate) struct Lane {
    device: Arc<Device>,
    stream: Stream,
    /// Recorded after the operation that was started last.
    done: Arc<Done>,
    /// Events of earlier operations. An event is reused when nothing refers to it any more.
    earlier: Vec<Arc<Done>>,
    /// The flat buffer of the operation that is being launched.
    flat: Option<Flat>,
    recorder: Option<Arc<Recorder>>,
    /// The start of the operation in flight, as the recorder has marked it; `None` if operations are not recorded.
    begun: Option<Begun>,
    /// Null before `connect` and after `abort`.
    comm: ncclComm_t,
    rank: usize,
    state: State,
    /// When this end called `ncclCommFinalize` in order to leave, and the result of that call.
    left: Option<(Instant, Result<(), String>)>,
}

/// The event after an operation.
struct Done(Event);

impl DeviceEvent for Done {
    fn raw(&self) -> u64 {
        self.0.raw() as u64
    }

    fn has_happened(&self) -> Result<bool, String> {
        self.0.is_done().map_err(|error| error.to_string())
    }
}

// SAFETY: NCCL allows calls from any thread, one at a time; `&mut self` rules out concurrent calls.
unsafe impl Send for Lane {}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// No operation was started, or the last one is complete.
    Idle,
    /// NCCL is connecting.
    Connecting,
    /// NCCL has not enqueued the whole operation on the stream yet.
    Launching,
    /// NCCL has enqueued the whole operation on the stream, and this lane has recorded the completion event after it.
    Running,
    /// The connection was aborted, perhaps by a watch on another thread. It runs no operation any more.
    Aborted,
}

/// How long a leaving rank waits for its peers to receive the data that it sent. After that, it leaves anyway.
const LEAVE: Duration = Duration::from_secs(2);
/// How long the device may take to stop using the buffers of an aborted operation.
const LET_GO: Duration = Duration::from_secs(5);
const NAP: Duration = Duration::from_micros(200);

impl Lane {
    pub(crate) fn new(device: &Arc<Device>, recorder: Option<Arc<Recorder>>) -> Result<Lane, CudaError> {
        let (stream, done) = (Stream::urgent(device)?, Arc::new(Done(Event::new(device)?)));
        let (device, comm, state) = (Arc::clone(device), std::ptr::null_mut(), State::Idle);
        let (earlier, flat, begun, left) = (vec![], None, None, None);
        Ok(Lane { device, stream, done, earlier, flat, recorder, begun, comm, rank: 0, state, left })
    }

    /// Records the recorder's event before an operation.
    fn begin(&mut self, work: &DeviceWork<'_>) -> Result<(), CudaError> {
        let Some(recorder) = &self.recorder else { return Ok(()) };
        let kind = match work {
            DeviceWork::AllReduce { .. } => Transfer::AllReduce,
            DeviceWork::Broadcast { .. } => Transfer::Broadcast,
            DeviceWork::AllGather { .. } => Transfer::AllGather,
            DeviceWork::ReduceScatter { .. } => Transfer::ReduceScatter,
            DeviceWork::AllToAll { .. } => Transfer::AllToAll,
            DeviceWork::Send { .. } => Transfer::Send,
            DeviceWork::Recv { .. } => Transfer::Receive,
        };
        self.begun = recorder.begin_transfer(&self.stream, kind, work.bytes())?;
        Ok(())
    }

    /// After an operation, copies the vectors out of the flat buffer, and records the recorder's event and the
    /// completion event.
    fn end(&mut self) -> Result<(), CudaError> {
        if let Some(flat) = self.flat.take() {
            flat.finish(&self.stream)?;
        }
        if let Some(recorder) = &self.recorder {
            recorder.end(&self.stream, self.begun.take())?;
        }
        if Arc::strong_count(&self.done) > 1 {
            let free = self.earlier.iter().position(|event| Arc::strong_count(event) == 1);
            let event = match free {
                Some(free) => self.earlier.swap_remove(free),
                None => Arc::new(Done(Event::new(&self.device)?)),
            };
            self.earlier.push(std::mem::replace(&mut self.done, event));
        }
        self.stream.record(&self.done.0)
    }

    /// Advances the state as far as the device and NCCL have come.
    fn advance(&mut self) -> Result<(), String> {
        self.is_open()?;
        if self.state == State::Idle {
            return Ok(());
        }
        let settled = self.settled()?;
        match self.state {
            State::Connecting if settled => self.state = State::Idle,
            State::Launching if settled => {
                // Record the event only now: up to this point, NCCL may still have been enqueuing kernels on the stream
                // from its own thread.
                self.end().map_err(|error| error.to_string())?;
                self.state = State::Running;
            }
            State::Running if self.done.has_happened()? => self.state = State::Idle,
            _ => {}
        }
        Ok(())
    }

    /// Checks the result of an NCCL call. "In progress" is not an error: `poll` waits for completion.
    fn check(&self, call: &str, result: ncclResult_t) -> Result<(), String> {
        match result {
            ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress => Ok(()),
            result => Err(self.describe(call, result)),
        }
    }

    fn describe(&self, call: &str, result: ncclResult_t) -> String {
        // SAFETY: both functions return null or a string that outlives the call; NCCL allows a null communicator here.
        let (words, more) = unsafe { (text(sys::ncclGetErrorString(result)), text(sys::ncclGetLastError(self.comm))) };
        let more = if more.is_empty() { more } else { format!(" ({})", more.trim()) };
        format!("{call}: {words}{more}")
    }

    /// Returns whether NCCL has finished its asynchronous work on the host.
    fn settled(&self) -> Result<bool, String> {
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: the communicator is valid, and the call writes one value to `state`.
        let asked = unsafe { sys::ncclCommGetAsyncError(self.comm, &raw mut state) };
        self.check("ncclCommGetAsyncError", asked)?;
        match state {
            ncclResult_t::ncclSuccess => Ok(true),
            ncclResult_t::ncclInProgress => Ok(false),
            error => Err(self.describe("asynchronous error", error)),
        }
    }

    fn is_open(&self) -> Result<(), String> {
        if self.state == State::Aborted { Err("the connection was aborted".into()) } else { Ok(()) }
    }

    fn make_current(&self) -> Result<(), String> {
        self.device.make_current().map_err(|error| error.to_string())
    }
}

impl DeviceLane for Lane {
    fn invitation(&mut self) -> Result<[u8; INVITATION], String> {
        self.make_current()?;
        let mut id = ncclUniqueId { internal: [0; INVITATION] };
        // SAFETY: the call writes one value to `id`.
        let result = unsafe { sys::ncclGetUniqueId(&raw mut id) };
        self.check("ncclGetUniqueId", result)?;
        Ok(id.internal.map(|byte| byte.to_ne_bytes()[0]))
    }

    fn connect(&mut self, invitation: &[u8; INVITATION], rank: usize, size: usize) -> Result<(), String> {
        self.make_current()?;
        let id = ncclUniqueId { internal: invitation.map(|byte| byte as c_char) };
        let mut config = config();
        // SAFETY: `self.comm` lives as long as the lane, and NCCL writes to it only during the call; the other
        // arguments are only read during the call.
        let result = unsafe {
            sys::ncclCommInitRankConfig(&raw mut self.comm, size as c_int, id, rank as c_int, &raw mut config)
        };
        self.rank = rank;
        self.check("ncclCommInitRankConfig", result)?;
        self.state = State::Connecting;
        Ok(())
    }

    fn start(&mut self, work: &DeviceWork<'_>) -> Result<(), String> {
        self.is_open()?;
        self.make_current()?;
        for buffer in work.buffers() {
            if let Some(written) = buffer.written() {
                // SAFETY: implementors of `DeviceMemory` promise that the event lives as long as the buffer.
                let waits = unsafe { self.stream.wait_for_raw(written as usize as CUevent) };
                waits.map_err(|error| error.to_string())?;
            }
        }
        self.begin(work).and_then(|()| self.flatten(work)).map_err(|error| error.to_string())?;
        // SAFETY: an NCCL group may be started at any time; it is ended below, even if a call in between fails.
        self.check("ncclGroupStart", unsafe { sys::ncclGroupStart() })?;
        let launched = self.launch(work);
        // SAFETY: ends the group that was started above on the same thread.
        let ended = unsafe { sys::ncclGroupEnd() };
        launched?;
        self.check("ncclGroupEnd", ended)?;
        self.state = State::Launching;
        Ok(())
    }

    fn poll(&mut self) -> Result<bool, String> {
        self.advance()?;
        Ok(self.state == State::Idle)
    }

    fn enqueued(&mut self) -> Result<Option<Arc<dyn DeviceEvent>>, String> {
        self.advance()?;
        let is_enqueued = matches!(self.state, State::Running | State::Idle);
        Ok(is_enqueued.then(|| Arc::clone(&self.done) as Arc<dyn DeviceEvent>))
    }

    fn abort(&mut self) -> bool {
        let comm = std::mem::replace(&mut self.comm, std::ptr::null_mut());
        self.state = State::Aborted;
        self.begun = None;
        if self.make_current().is_err() {
            return false;
        }
        if !comm.is_null() {
            // SAFETY: the communicator is valid, and `self.comm` no longer refers to it. The result is ignored because
            // an abort cannot be retried.
            unsafe { sys::ncclCommAbort(comm) };
        }
        let until = Instant::now() + LET_GO;
        loop {
            match self.stream.is_done() {
                Ok(true) => {
                    if let Some(flat) = self.flat.take() {
                        let _ = flat.discard(&self.stream);
                    }
                    return true;
                }
                Ok(false) if Instant::now() < until => sleep(NAP),
                // A device that reports an error has stopped, together with everything that ran on it.
                other => return other.is_err(),
            }
        }
    }

    fn leave(&mut self) {
        if self.comm.is_null() || self.left.is_some() || self.make_current().is_err() {
            return;
        }
        // Data that this rank sent may still be in flight to its peers. Finalization completes when the data has
        // arrived. SAFETY: the communicator is valid.
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
                Ok(false) => finished = Err("the other ranks did not close their NCCL communicators in time".into()),
                Err(error) => finished = Err(error),
            }
        }
        // SAFETY: the communicator is valid, and this lane, its only user, is being dropped.
        unsafe { if finished.is_ok() { sys::ncclCommDestroy(self.comm) } else { sys::ncclCommAbort(self.comm) } };
    }
}

/// Returns `NCCL_CONFIG_INITIALIZER` with non-blocking calls.
fn config() -> ncclConfig_t {
    const UNDEFINED: c_int = c_int::MIN;
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: 0xcafe_beef,
        // The NCCL release that the bindings were generated from. A newer NCCL uses only the fields of this release.
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

/// Copies a C string; null becomes the empty string.
///
/// # Safety
/// `words` must be null or point to a valid C string.
unsafe fn text(words: *const c_char) -> String {
    if words.is_null() {
        return String::new();
    }
    // SAFETY: not null, so by the caller's contract a valid C string.
    unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned()
}
