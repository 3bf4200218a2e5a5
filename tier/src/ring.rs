//! The io_uring backend: one thread per ring, with many blocks in flight.
//!
//! The thread sleeps in the kernel until the next completion. An eventfd, the bell, wakes it when new work arrives; the
//! ring polls the bell like any other request.

#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use io_uring::{IoUring, Probe, opcode, types};
use rustix::event::EventfdFlags;
use rustix::io::Errno;

use crate::bounce::Bounce;
use crate::error::DiskError;
use crate::file::Options;
use crate::queue::{Block, Queue, Watch};
use crate::schedule::Direction;

/// A ring with its bell. It exists only where the kernel permits every operation used here.
pub(crate) struct Ring {
    ring: IoUring,
    bell: OwnedFd,
    bounce: Bounce,
}

impl Ring {
    /// Creates a ring for `depth` blocks in flight. Blocks of vectors, up to `bounce` bytes each, go through huge
    /// pages. A trial request detects a refusal here (an old kernel, a seccomp filter, a sysctl).
    pub(crate) fn new(depth: usize, bounce: usize) -> Result<Ring, Errno> {
        let errno = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::NOSYS);
        // One extra entry for the bell.
        let mut ring = IoUring::new(depth as u32 + 1).map_err(errno)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe).map_err(errno)?;
        let needed = [opcode::Read::CODE, opcode::Write::CODE, opcode::PollAdd::CODE, opcode::Nop::CODE];
        if !needed.iter().all(|&code| probe.is_supported(code)) {
            return Err(Errno::NOSYS);
        }
        // SAFETY: a no-op refers to no memory.
        unsafe { ring.submission().push(&opcode::Nop::new().build()) }.map_err(|_| Errno::NOBUFS)?;
        ring.submit_and_wait(1).map_err(errno)?;
        ring.completion().for_each(drop);
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let bounce = Bounce::new(depth, bounce).ok_or(Errno::NOMEM)?;
        Ok(Ring { ring, bell, bounce })
    }

    /// Returns a handle to the eventfd that wakes the ring's thread.
    pub(crate) fn bell(&self) -> Result<OwnedFd, Errno> {
        self.bell.try_clone().map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::MFILE))
    }
}

/// Starts a thread for each ring, which serves the queue until it closes, and adds it to `threads`.
pub(crate) fn start(
    queue: &Arc<Queue>,
    rings: Vec<Ring>,
    options: &Options,
    threads: &mut Vec<JoinHandle<()>>,
) -> Result<(), DiskError> {
    for (index, ring) in rings.into_iter().enumerate() {
        let (serving, options) = (Arc::clone(queue), options.clone());
        let thread = std::thread::Builder::new().name(format!("disk {index}"));
        let thread = thread.spawn(move || serve(&serving, ring, &options));
        threads.push(thread.map_err(|error| DiskError::refused(&queue.folder, "start a thread", error))?);
    }
    Ok(())
}

/// The `user_data` of the bell. Blocks use the index of their slot.
const BELL: u64 = u64::MAX;

/// Blocks in flight by slot, and their bounce buffers.
struct UnderWay {
    slots: Vec<Option<Block>>,
    count: usize,
    bounce: ManuallyDrop<Bounce>,
}

impl UnderWay {
    fn is_full(&self) -> bool {
        self.count == self.slots.len()
    }

    /// Places a block in a free slot. Returns the slot, the block, and the memory for the kernel to use.
    fn put(&mut self, block: Block) -> Option<(usize, &Block, *mut u8)> {
        let index = self.slots.iter().position(Option::is_none)?;
        self.count += 1;
        let block = self.slots[index].insert(block);
        let memory = self.bounce.prepare(index, &mut block.part);
        Some((index, block, memory))
    }

    /// Takes the block out of a slot after the kernel has completed it. After a read, copies the bytes from the bounce
    /// buffer to the block's memory.
    fn take(&mut self, index: usize, outcome: Result<usize, Errno>) -> Option<Block> {
        let mut block = self.slots.get_mut(index)?.take()?;
        self.count -= 1;
        self.bounce.deliver(index, &mut block.part, outcome.unwrap_or(0));
        Some(block)
    }
}

impl Drop for UnderWay {
    /// Leaks the memory of blocks still in flight, because the kernel may use it. After an orderly end, no block is in
    /// flight.
    fn drop(&mut self) {
        if self.count == 0 {
            // SAFETY: the value is not used after this, and with no block in flight the kernel does not use its memory.
            unsafe { ManuallyDrop::drop(&mut self.bounce) };
        }
        self.slots.drain(..).for_each(std::mem::forget);
    }
}

fn serve(queue: &Queue, ring: Ring, options: &Options) {
    let _watch = Watch(queue);
    let Ring { mut ring, bell, bounce } = ring;
    let slots = (0..options.queue_depth).map(|_| None).collect();
    let mut under_way = UnderWay { slots, count: 0, bounce: ManuallyDrop::new(bounce) };
    if let Err(errno) = turn(queue, &mut ring, &bell, &mut under_way, options) {
        queue.abandon(&format!("io_uring failed: {errno}"));
    }
}

/// Submits blocks to the kernel and reports their results, until the queue is closed and no block is in flight.
fn turn(
    queue: &Queue,
    ring: &mut IoUring,
    bell: &OwnedFd,
    under_way: &mut UnderWay,
    options: &Options,
) -> Result<(), Errno> {
    let mut bell_is_set = false;
    // The remaining parts of blocks that were transferred only in part.
    let mut again: Vec<Block> = vec![];
    loop {
        if !bell_is_set {
            let poll = opcode::PollAdd::new(types::Fd(bell.as_raw_fd()), POLLIN).build().user_data(BELL);
            // SAFETY: a poll refers to no memory, and the bell lives as long as the ring.
            unsafe { ring.submission().push(&poll) }.map_err(|_| Errno::NOBUFS)?;
            bell_is_set = true;
        }
        let begin = options.overlap_events || under_way.count == 0;
        while begin && !under_way.is_full() {
            let Some(block) = again.pop().or_else(|| queue.try_next()) else { break };
            let Some((index, block, memory)) = under_way.put(block) else { break };
            let (file, len) = (types::Fd(queue.file.as_raw_fd()), u32::try_from(block.part.len()).unwrap_or(MOST));
            let entry = match block.direction {
                Direction::Read => opcode::Read::new(file, memory, len).offset(block.at).build(),
                Direction::Write => opcode::Write::new(file, memory, len).offset(block.at).build(),
            };
            // SAFETY: the block owns its memory and stays in its slot until the kernel has completed it, or is leaked.
            unsafe { ring.submission().push(&entry.user_data(index as u64)) }.map_err(|_| Errno::NOBUFS)?;
            if options.single_submit {
                submit(ring, 0)?;
            }
        }
        if under_way.count == 0 && queue.is_closed() {
            return Ok(());
        }
        submit(ring, 1)?;
        for completion in ring.completion() {
            if completion.user_data() == BELL {
                // Clear the bell before the queue is read again, so that no later signal is missed. The bell's counter
                // may already be zero.
                let _ = rustix::io::read(bell, &mut [0u8; 8]);
                bell_is_set = false;
                continue;
            }
            let (slot, result) = (completion.user_data() as usize, completion.result());
            let outcome = usize::try_from(result).map_err(|_| Errno::from_raw_os_error(-result));
            if let Some(block) = under_way.take(slot, outcome) {
                again.extend(queue.report(block, outcome));
            }
        }
    }
}

/// `POLLIN` of poll.h: data is ready to read.
const POLLIN: u32 = 1;

/// Maximum bytes of one request to the kernel, in whole pages. A longer block completes as a short transfer.
const MOST: u32 = u32::MAX - 4095;

/// Submits the pushed entries and sleeps until `wanted` completions are ready.
fn submit(ring: &IoUring, wanted: usize) -> Result<(), Errno> {
    match ring.submit_and_wait(wanted).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO)) {
        // INTR: a signal arrived. BUSY: completions must be consumed first.
        Ok(_) | Err(Errno::INTR | Errno::BUSY) => Ok(()),
        Err(errno) => Err(errno),
    }
}
