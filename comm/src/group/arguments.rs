//! Checks the arguments of a group's operations.

use super::Group;
use crate::buffers::buffer::Buffer;
use crate::collective::signature::Operation;
use crate::collective::step::Membership;
use crate::communicator::Communicator;
use crate::error::CommError;
use crate::pending::Pending;

/// Maximum number of buffers of a coalesced operation: the header has 16 bits for this number.
const MOST: usize = u16::MAX as usize;

/// The kind of memory that holds the buffers of an operation.
pub(super) enum BufferKind {
    Host,
    Device,
}

impl Group {
    pub(super) fn invalid<T>(&self, operation: Operation, detail: String) -> Pending<T> {
        Pending::ready(Err(CommError::Invalid { rank: self.context.health.rank, operation, detail }))
    }

    pub(super) fn check_counts(&self, whole: &Buffer, shard: &Buffer, counts: &[usize]) -> Result<(), String> {
        let Membership { rank, .. } = *self.membership();
        let size = self.size();
        if counts.len() != size {
            return Err(format!("expected one count per rank, {size}, but got {}", counts.len()));
        }
        let total = counts.iter().try_fold(0usize, |sum, count| sum.checked_add(*count));
        if total != Some(whole.len()) {
            return Err(format!("the counts {counts:?} do not sum to {} elements", whole.len()));
        }
        if counts[rank] != shard.len() {
            return Err(format!("the shard has {} elements, but the counts give it {}", shard.len(), counts[rank]));
        }
        if whole.dtype() != shard.dtype() {
            return Err(format!("the shard holds {}, but the whole buffer holds {}", shard.dtype(), whole.dtype()));
        }
        Ok(())
    }

    pub(super) fn check_peer(&self, peer: usize) -> Result<(), String> {
        let Membership { rank, .. } = *self.membership();
        match peer {
            _ if peer == rank => Err("a rank cannot send to itself".into()),
            _ if peer >= self.size() => Err(format!("rank {peer} does not exist in a group of {}", self.size())),
            _ => Ok(()),
        }
    }

    /// Returns which memory holds the buffers of a coalesced operation. The error says why these buffers cannot be
    /// coalesced.
    pub(super) fn place_all<'a>(&self, buffers: impl Iterator<Item = &'a Buffer>) -> Result<BufferKind, String> {
        let buffers: Vec<&Buffer> = buffers.collect();
        match buffers.len() {
            0 => Err("the operation has no buffers".into()),
            1..=MOST => self.place(&buffers),
            more => Err(format!("the operation has {more} buffers, more than {MOST}")),
        }
    }

    /// Returns which memory holds the buffers of an operation. The error says why the operation cannot use them.
    pub(super) fn place(&self, buffers: &[&Buffer]) -> Result<BufferKind, String> {
        let on_device = |buffer: &&Buffer| match buffer {
            Buffer::Device(buffer) => Some(buffer.memory().device()),
            _ => None,
        };
        let mut found = buffers.iter().filter_map(on_device).peekable();
        if found.peek().is_none() {
            return Ok(BufferKind::Host);
        }
        let Some(devices) = &self.devices else {
            return Err("the buffer is in device memory, but the group has no devices".into());
        };
        if let Some(stranger) = found.find(|device| *device != devices.device()) {
            return Err(format!("the buffer is on device {stranger}, but the group uses device {}", devices.device()));
        }
        match buffers.iter().all(|buffer| buffer.is_on_device()) {
            true => Ok(BufferKind::Device),
            false => Err("one buffer is in device memory and another in host memory".into()),
        }
    }
}
