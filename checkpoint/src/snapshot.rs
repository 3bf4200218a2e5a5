//! A copy of a rank's state, which is written to a checkpoint while training continues.

use zero_partition::ShardedState;

use crate::error::CheckpointError;
use crate::layout::{Shard, ShardTensor, entries};
use crate::shard::Values;
use crate::writer::BUFFER;

/// A copy of a rank's shard: its parameters and optimizer state in f32, and quantized parameters. The memory is reused
/// by later saves.
#[derive(Debug, Default)]
pub struct Snapshot {
    values: Vec<f32>,
}

impl Snapshot {
    /// Returns the size of everything that a rank saves, in f32 elements.
    #[must_use]
    pub fn elements(zero: &ShardedState) -> usize {
        if zero.outer().is_some() {
            let groups = (zero.groups().rank(), zero.groups().rank() + 1);
            return Shard::of(zero, &entries(zero), groups).words();
        }
        zero.layout().saved_elements(zero.stages(), zero.groups().at(), &zero.widths())
    }

    /// Allocates memory for a copy of a rank's state. The memory is not touched, so it is not yet resident.
    #[must_use]
    pub fn of(zero: &ShardedState) -> Self {
        Self { values: vec![0.0; Self::elements(zero)] }
    }

    /// Returns the peak bytes of a background save: the copy of `elements` elements, and the write buffer.
    #[must_use]
    pub fn planned_bytes(elements: usize) -> u64 {
        (elements * size_of::<f32>() + BUFFER) as u64
    }

    /// Returns the size of the copy in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(self.values.as_slice())
    }

    /// Copies the values of the rank's shard.
    pub(crate) fn take(&mut self, zero: &ShardedState, shard: &Shard) -> Result<(), CheckpointError> {
        self.values.resize(shard.words(), 0.0);
        let mut rest = self.values.as_mut_slice();
        for tensor in &shard.tensors {
            let (own, after) = rest.split_at_mut(tensor.words());
            tensor.read(zero, own)?;
            rest = after;
        }
        Ok(())
    }

    /// Returns the copied values, tensor by tensor.
    pub(crate) fn values(&self) -> Copied<'_> {
        Copied(&self.values)
    }
}

/// The part of a copy that has not been written yet.
pub(crate) struct Copied<'a>(&'a [f32]);

impl Values for Copied<'_> {
    fn next(&mut self, tensor: &ShardTensor) -> Result<&[u8], CheckpointError> {
        let (own, after) = self.0.split_at(tensor.words());
        self.0 = after;
        let bytes = tensor.range.elements.len() * tensor.dtype.bitsize() / 8;
        Ok(&bytemuck::cast_slice(own)[..bytes])
    }
}
