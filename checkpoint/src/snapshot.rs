//! A copy of what a rank writes into a checkpoint, from which it is written while training goes on.

use zero_partition::ShardedState;

use crate::error::CheckpointError;
use crate::layout::{Shard, ShardTensor};
use crate::shard::Values;
use crate::writer::BUFFER;

/// Memory for a copy of a rank's shard: its parameters and optimizer state in f32. It is kept from one save to the next.
#[derive(Debug, Default)]
pub struct Snapshot {
    values: Vec<f32>,
}

impl Snapshot {
    /// Elements that a rank saves, of all kinds together.
    #[must_use]
    pub fn elements(zero: &ShardedState) -> usize {
        zero.layout().saved_elements(zero.stages(), zero.groups().at()) * zero.kinds().len()
    }

    /// Memory for the copy of a rank's state. It is not touched yet.
    #[must_use]
    pub fn of(zero: &ShardedState) -> Self {
        Self { values: vec![0.0; Self::elements(zero)] }
    }

    /// Bytes of memory that saves in the background take on a rank that saves so many elements of each of so many kinds: the copy, and what
    /// writing it takes.
    #[must_use]
    pub fn planned_bytes(elements: usize, kinds: usize) -> u64 {
        (elements * kinds * size_of::<f32>() + BUFFER) as u64
    }

    /// Bytes that it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(self.values.as_slice())
    }

    /// Copies what the rank's shard is to be.
    pub(crate) fn take(&mut self, zero: &ShardedState, shard: &Shard) -> Result<(), CheckpointError> {
        self.values.resize(shard.elements(), 0.0);
        let mut rest = self.values.as_mut_slice();
        for tensor in &shard.tensors {
            let (own, after) = rest.split_at_mut(tensor.range.elements.len());
            zero.read_into(tensor.kind, &tensor.range, own)?;
            rest = after;
        }
        Ok(())
    }

    /// The copied values, tensor by tensor.
    pub(crate) fn values(&self) -> Copied<'_> {
        Copied(&self.values)
    }
}

/// What is still to be written of a copy.
pub(crate) struct Copied<'a>(&'a [f32]);

impl Values for Copied<'_> {
    fn next(&mut self, tensor: &ShardTensor) -> Result<&[f32], CheckpointError> {
        let (own, after) = self.0.split_at(tensor.range.elements.len());
        self.0 = after;
        Ok(own)
    }
}
