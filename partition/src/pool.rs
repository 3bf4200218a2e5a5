//! Reuses the large temporary buffers of a step, so that each page is faulted in only once.

use std::collections::HashMap;

use zero_model::sink::FlatBuffer;

/// Idle `f32` buffers by length. A taken buffer holds old values that the caller must overwrite.
#[derive(Debug)]
pub(crate) struct Pool {
    free: HashMap<usize, Vec<Vec<f32>>>,
    /// Maximum elements of a buffer that is kept.
    longest: usize,
    /// Total elements of the idle buffers.
    idle: usize,
}

impl Default for Pool {
    fn default() -> Self {
        Self { free: HashMap::new(), longest: usize::MAX, idle: 0 }
    }
}

impl Pool {
    /// Creates a pool that keeps buffers of at most `elements` elements. Longer buffers return to the allocator, so
    /// other allocations can reuse their memory. This saves memory, but the system must clear the pages of each new
    /// buffer.
    pub(crate) fn of_at_most(elements: usize) -> Self {
        Self { longest: elements, ..Self::default() }
    }

    pub(crate) fn take(&mut self, len: usize) -> Vec<f32> {
        match self.free.get_mut(&len).and_then(Vec::pop) {
            Some(buffer) => {
                self.idle -= len;
                buffer
            }
            None => vec![0.0; len],
        }
    }

    /// Returns the total elements of the idle buffers.
    pub(crate) fn idle(&self) -> usize {
        self.idle
    }

    /// Keeps a host buffer for reuse. GPU buffers return to the driver's pool.
    pub(crate) fn give_back(&mut self, buffer: FlatBuffer) {
        if let Some(values) = buffer.if_on_host() {
            self.give(values);
        }
    }

    pub(crate) fn give(&mut self, buffer: Vec<f32>) {
        if !buffer.is_empty() && buffer.len() <= self.longest {
            self.idle += buffer.len();
            self.free.entry(buffer.len()).or_default().push(buffer);
        }
    }
}
