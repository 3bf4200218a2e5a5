//! Writing one rank's shard.

use std::path::Path;

use safetensors::tensor::Dtype;
use zero_partition::ShardedState;

use crate::error::CheckpointError;
use crate::failpoint;
use crate::layout::{Shard, ShardTensor};
use crate::writer::TensorWriter;

/// A shard that is on the disk.
#[derive(Debug, Clone)]
pub(crate) struct Written {
    pub(crate) bytes: u64,
    pub(crate) crc32: u32,
    /// Of each tensor, in the shard's order.
    pub(crate) tensors: Vec<u32>,
}

/// Where the values of a shard's tensors come from, which are asked for in the shard's order.
pub(crate) trait Values {
    /// Those of the next tensor.
    fn next(&mut self, tensor: &ShardTensor) -> Result<&[f32], CheckpointError>;
}

/// Values out of a rank's state, one tensor at a time.
pub(crate) struct State<'a> {
    zero: &'a ShardedState,
    tensor: Vec<f32>,
}

impl<'a> State<'a> {
    pub(crate) fn of(zero: &'a ShardedState) -> Self {
        Self { zero, tensor: vec![] }
    }
}

impl Values for State<'_> {
    fn next(&mut self, tensor: &ShardTensor) -> Result<&[f32], CheckpointError> {
        self.tensor.resize(tensor.range.elements.len(), 0.0);
        self.zero.read_into(tensor.kind, &tensor.range, &mut self.tensor)?;
        Ok(&self.tensor)
    }
}

/// Writes a shard into `folder`, and puts it on the disk. Its space is reserved first: a disk that is too full says so at once.
pub(crate) fn write(folder: &Path, shard: &Shard, values: &mut impl Values) -> Result<Written, CheckpointError> {
    let path = folder.join(&shard.file);
    let tensors = shard.tensors.iter().map(|t| (t.name.clone(), Dtype::F32, vec![t.range.elements.len()]));
    let mut writer = TensorWriter::create(&path, tensors, None)?;
    failpoint::at("save::shard-begun", &path)?;
    let mut checksums = Vec::with_capacity(shard.tensors.len());
    for tensor in &shard.tensors {
        checksums.push(writer.write(bytemuck::cast_slice(values.next(tensor)?))?);
    }
    failpoint::at("save::shard-written", &path)?;
    let (bytes, crc32) = writer.finish()?;
    failpoint::at("save::shard-synced", &path)?;
    Ok(Written { bytes, crc32, tensors: checksums })
}
