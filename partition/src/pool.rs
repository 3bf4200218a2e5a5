//! Reuses the large temporary buffers of a step, so that no page is faulted in twice.

use std::collections::HashMap;

use zero_model::sink::FlatBuffer;

/// Free `f32` buffers by length. What comes out holds old numbers; whoever takes one overwrites it.
#[derive(Debug)]
pub(crate) struct Pool {
    free: HashMap<usize, Vec<Vec<f32>>>,
    /// Elements of the longest buffer that is kept.
    longest: usize,
    /// Elements of all that wait.
    idle: usize,
}

impl Default for Pool {
    fn default() -> Self {
        Self { free: HashMap::new(), longest: usize::MAX, idle: 0 }
    }
}

impl Pool {
    /// One for which memory counts more than the time to clear it: longer buffers go back to the allocator, who can make others of
    /// them.
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

    /// Elements of all buffers that wait.
    pub(crate) fn idle(&self) -> usize {
        self.idle
    }

    /// Keeps one on the host for its next use. What is on a GPU the driver keeps.
    pub(crate) fn give_back(&mut self, buffer: FlatBuffer) {
        match buffer {
            FlatBuffer::Host(buffer) => self.give(buffer),
            #[cfg(feature = "cuda")]
            FlatBuffer::Device(_) => {}
        }
    }

    pub(crate) fn give(&mut self, buffer: Vec<f32>) {
        if !buffer.is_empty() && buffer.len() <= self.longest {
            self.idle += buffer.len();
            self.free.entry(buffer.len()).or_default().push(buffer);
        }
    }
}
