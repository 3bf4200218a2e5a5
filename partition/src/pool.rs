//! Reuses the large temporary buffers of a step, so that no page is faulted in twice.

use std::collections::HashMap;

/// Free `f32` buffers by length. What comes out holds old numbers; whoever takes one overwrites it.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    free: HashMap<usize, Vec<Vec<f32>>>,
}

impl Pool {
    pub(crate) fn take(&mut self, len: usize) -> Vec<f32> {
        self.free.get_mut(&len).and_then(Vec::pop).unwrap_or_else(|| vec![0.0; len])
    }

    pub(crate) fn give(&mut self, buffer: Vec<f32>) {
        if !buffer.is_empty() {
            self.free.entry(buffer.len()).or_default().push(buffer);
        }
    }
}
