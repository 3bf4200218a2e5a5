//! Pinned host memory for copies to and from a GPU. Memory that a copy reads is reused once the copy's event has
//! completed.

use std::collections::VecDeque;
use std::sync::Arc;

use zero_cuda::{CudaError, Device, Event, Pinned};

/// Idle memory, and memory that copies to the device are reading.
pub(super) struct Ring {
    of: Arc<Device>,
    /// Limit in bytes on the memory that copies in flight read.
    most: usize,
    idle: Vec<Pinned>,
    leaving: VecDeque<(Event, Pinned)>,
}

impl Ring {
    /// Creates an empty ring with a limit of `most` bytes for the copies in flight.
    pub(super) fn new(of: &Arc<Device>, most: usize) -> Self {
        Self { of: Arc::clone(of), most, idle: vec![], leaving: VecDeque::new() }
    }

    /// Returns at least `bytes` bytes: idle memory of at most twice that size, or new memory.
    pub(super) fn take(&mut self, bytes: usize) -> Result<Pinned, CudaError> {
        let fits = |pinned: &Pinned| pinned.len() >= bytes && pinned.len() <= 2 * bytes.max(4096);
        match self.idle.iter().position(fits) {
            Some(index) => Ok(self.idle.swap_remove(index)),
            None => Pinned::new(&self.of, bytes),
        }
    }

    /// Returns memory for a copy to the device. Waits for the oldest copies in flight if the limit would be exceeded.
    pub(super) fn take_to_leave(&mut self, bytes: usize) -> Result<Pinned, CudaError> {
        let mut held: usize = self.leaving.iter().map(|(_, pinned)| pinned.len()).sum();
        while let Some((event, pinned)) = self.leaving.pop_front() {
            if held + bytes <= self.most && !event.is_done()? {
                self.leaving.push_front((event, pinned));
                break;
            }
            event.wait()?;
            held -= pinned.len();
            self.idle.push(pinned);
        }
        self.take(bytes)
    }

    /// Takes back memory that is no longer in use.
    pub(super) fn give(&mut self, pinned: Pinned) {
        self.idle.push(pinned);
    }

    /// Takes back memory that a copy reads until `event` completes.
    pub(super) fn leave(&mut self, event: Event, pinned: Pinned) {
        self.leaving.push_back((event, pinned));
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        for (event, _) in &self.leaving {
            // The device may still be reading the memory.
            let _ = event.wait();
        }
    }
}
