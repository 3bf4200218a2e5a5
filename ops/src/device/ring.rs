//! Memory of the host that is pinned, for copies to and from a GPU: what a copy reads is taken again when its event has happened.

use std::collections::VecDeque;
use std::sync::Arc;

use zero_cuda::{CudaError, Device, Event, Pinned};

/// Memory that waits for its next use, and memory that copies to the device read.
pub(super) struct Ring {
    of: Arc<Device>,
    /// Bytes that copies may read at a time.
    most: usize,
    idle: Vec<Pinned>,
    leaving: VecDeque<(Event, Pinned)>,
}

impl Ring {
    /// Without memory; copies may read `most` bytes at a time.
    pub(super) fn new(of: &Arc<Device>, most: usize) -> Self {
        Self { of: Arc::clone(of), most, idle: vec![], leaving: VecDeque::new() }
    }

    /// Memory of at least `bytes` bytes: idle memory of less than twice the size, or new memory.
    pub(super) fn take(&mut self, bytes: usize) -> Result<Pinned, CudaError> {
        let fits = |pinned: &Pinned| pinned.len() >= bytes && pinned.len() <= 2 * bytes.max(4096);
        match self.idle.iter().position(fits) {
            Some(index) => Ok(self.idle.swap_remove(index)),
            None => Pinned::new(&self.of, bytes),
        }
    }

    /// The same for a copy to the device. Waits for the oldest copies where all together would read too much.
    pub(super) fn take_to_leave(&mut self, bytes: usize) -> Result<Pinned, CudaError> {
        let mut held: usize = self.leaving.iter().map(|(_, pinned)| pinned.len()).sum();
        while let Some((there, pinned)) = self.leaving.pop_front() {
            if held + bytes <= self.most && !there.is_done()? {
                self.leaving.push_front((there, pinned));
                break;
            }
            there.wait()?;
            held -= pinned.len();
            self.idle.push(pinned);
        }
        self.take(bytes)
    }

    /// Nobody uses the memory any more.
    pub(super) fn give(&mut self, pinned: Pinned) {
        self.idle.push(pinned);
    }

    /// A copy reads the memory until an event.
    pub(super) fn leave(&mut self, there: Event, pinned: Pinned) {
        self.leaving.push_back((there, pinned));
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        for (there, _) in &self.leaving {
            // The device still reads it.
            let _ = there.wait();
        }
    }
}
