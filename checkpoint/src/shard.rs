//! Writes one rank's shard.

use std::path::Path;

use zero_partition::ShardedState;

use crate::error::CheckpointError;
use crate::failpoint;
use crate::layout::{Shard, ShardTensor};
use crate::writer::TensorWriter;

/// Size and checksums of a shard that has been synced to disk.
#[derive(Debug, Clone)]
pub(crate) struct Written {
    pub(crate) bytes: u64,
    pub(crate) crc32: u32,
    /// CRC-32 of each tensor, in file order.
    pub(crate) tensors: Vec<u32>,
}

/// A source of tensor values. Tensors are requested in file order.
pub(crate) trait Values {
    /// Returns the bytes of the next tensor's values.
    fn next(&mut self, tensor: &ShardTensor) -> Result<&[u8], CheckpointError>;
}

/// Reads values from a rank's state, one tensor at a time.
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
    fn next(&mut self, tensor: &ShardTensor) -> Result<&[u8], CheckpointError> {
        self.tensor.resize(tensor.words(), 0.0);
        tensor.read(self.zero, &mut self.tensor)
    }
}

/// Writes a shard into `folder` and syncs it. Reserves its space first, so that a full disk fails immediately.
pub(crate) fn write(folder: &Path, shard: &Shard, values: &mut impl Values) -> Result<Written, CheckpointError> {
    let path = folder.join(&shard.file);
    let tensors = shard.tensors.iter().map(|t| (t.name.clone(), t.dtype, vec![t.range.elements.len()]));
    let mut writer = TensorWriter::create(&path, tensors, None)?;
    failpoint::at("save::shard-begun", &path)?;
    let mut checksums = Vec::with_capacity(shard.tensors.len());
    for tensor in &shard.tensors {
        checksums.push(writer.write(values.next(tensor)?)?);
    }
    failpoint::at("save::shard-written", &path)?;
    let (bytes, crc32) = writer.finish()?;
    failpoint::at("save::shard-synced", &path)?;
    Ok(Written { bytes, crc32, tensors: checksums })
}
