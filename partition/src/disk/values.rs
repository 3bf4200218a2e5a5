//! Reads and writes offloaded values outside of a step: initial values, checkpoints and values set by the user.

use std::ops::Range;

use candle_core::{CpuStorage, DType};
use zero_pipeline::{SegmentId, Tier};
use zero_tier::{AlignedBuffer, align};

use crate::disk::tiles::no_disk;
use crate::disk::{Disk, FileLayout};
use crate::error::ZeroError;
use crate::rounding::{round_bytes, widen_bytes, working};
use crate::zero::ShardedState;

/// Kind of offloaded value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stored {
    /// The optimizer state with this index. The master follows the last state.
    State(usize),
    /// The working parameters.
    Parameters,
}

impl Stored {
    /// Returns the dtype on the disk, given the working dtype.
    fn dtype(self, working: DType) -> DType {
        match self {
            Self::State(_) => DType::F32,
            Self::Parameters => working,
        }
    }
}

impl Disk {
    /// Returns whether a kind of a segment's values is offloaded.
    pub(crate) fn has(&self, id: SegmentId, stored: Stored) -> bool {
        self.places[id].is_some_and(|place| match stored {
            Stored::State(kind) => place.tiers.optimizer == Tier::Nvme && kind < place.kinds,
            Stored::Parameters => place.tiers.parameters == Tier::Nvme,
        })
    }

    /// Reads `values.len()` elements of this rank's part, from element `start` on.
    fn read(
        &self,
        id: SegmentId,
        stored: Stored,
        start: usize,
        values: &mut [f32],
        dtype: DType,
    ) -> Result<(), ZeroError> {
        let place = self.place(id)?;
        let range = start..start + values.len();
        let mut rest = values;
        for (index, part) in parts(&place, range) {
            let bytes = self.read_tile(&place, stored, index)?;
            let (now, later) = rest.split_at_mut(part.len());
            rest = later;
            widen_bytes(bytes.as_bytes(), part, stored.dtype(dtype), now)?;
        }
        Ok(())
    }

    /// Overwrites a range of this rank's part. Parameters are rounded to the working dtype.
    fn write(
        &self,
        id: SegmentId,
        stored: Stored,
        start: usize,
        values: &[f32],
        dtype: DType,
    ) -> Result<(), ZeroError> {
        let place = self.place(id)?;
        let mut rest = values;
        for (index, part) in parts(&place, start..start + values.len()) {
            let (now, later) = rest.split_at(part.len());
            rest = later;
            // Read the tile first, to preserve its other values.
            let mut bytes = self.read_tile(&place, stored, index)?;
            round_bytes(now, stored.dtype(dtype), bytes.as_bytes_mut(), part)?;
            let (at, len) = (offset(&place, stored, index), bytes.len());
            let file = self.file(stored)?;
            file.write(at, bytes, len).wait()?;
        }
        Ok(())
    }

    fn read_tile(&self, place: &FileLayout, stored: Stored, index: usize) -> Result<AlignedBuffer, ZeroError> {
        let len = match stored {
            Stored::State(_) => place.stride(index),
            Stored::Parameters => align((place.range(index).len() * place.width) as u64) as usize,
        };
        // Do not use the pool, where the buffer would stay idle through the next step, which needs other sizes.
        let buffer = AlignedBuffer::zeroed(len)?;
        Ok(self.file(stored)?.read(offset(place, stored, index), buffer, len).wait()?)
    }

    fn file(&self, stored: Stored) -> Result<&zero_tier::SwapFile, ZeroError> {
        match stored {
            Stored::State(_) => self.optimizer(),
            Stored::Parameters => self.parameters(),
        }
    }
}

fn offset(place: &FileLayout, stored: Stored, index: usize) -> u64 {
    match stored {
        Stored::State(kind) => place.state_at(index) + (kind * place.stride(index)) as u64,
        Stored::Parameters => place.parameters_at(index),
    }
}

/// Returns the tiles that a range overlaps, each with the range within it.
fn parts(place: &FileLayout, range: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
    let place = *place;
    let tiles = if range.is_empty() { 0..0 } else { range.start / place.tile..(range.end - 1) / place.tile + 1 };
    tiles.map(move |index| {
        let tile = place.range(index);
        (index, range.start.max(tile.start) - tile.start..range.end.min(tile.end) - tile.start)
    })
}

impl ShardedState {
    pub(crate) fn stored(&self, id: SegmentId, stored: Stored) -> bool {
        self.disk.as_ref().is_some_and(|disk| disk.has(id, stored))
    }

    pub(crate) fn read_stored(
        &self,
        id: SegmentId,
        stored: Stored,
        start: usize,
        values: &mut [f32],
    ) -> Result<(), ZeroError> {
        self.disk.as_ref().ok_or_else(no_disk)?.read(id, stored, start, values, self.dtype)
    }

    pub(crate) fn write_stored(
        &self,
        id: SegmentId,
        stored: Stored,
        start: usize,
        values: &[f32],
    ) -> Result<(), ZeroError> {
        self.disk.as_ref().ok_or_else(no_disk)?.write(id, stored, start, values, self.dtype)
    }

    /// Reads this rank's shard of the parameters from the disk.
    pub(crate) fn stored_shard(&self, id: SegmentId) -> Result<CpuStorage, ZeroError> {
        let elements = self.disk.as_ref().ok_or_else(no_disk)?.place(id)?.elements;
        let mut values = vec![0.0; elements];
        self.read_stored(id, Stored::Parameters, 0, &mut values)?;
        Ok(working(values, self.dtype))
    }

    /// Writes the initial values of offloaded state, one tile at a time. Optimizer states are already zero.
    pub(crate) fn initialise_stored(&mut self, id: SegmentId, seed: u64) -> Result<(), ZeroError> {
        let Some(place) = self.disk.as_ref().and_then(|disk| disk.places[id]) else { return Ok(()) };
        let master = Stored::State(self.options.optimizer.states().len());
        let wanted: Vec<Stored> =
            [master, Stored::Parameters].into_iter().filter(|&stored| self.stored(id, stored)).collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let segment = self.layout.segments()[id].clone();
        let own = self.own_range(id);
        for index in 0..place.tiles() {
            let part = place.range(index);
            let values = self.initial_values(&segment, own.start + part.start..own.start + part.end, seed);
            for &stored in &wanted {
                self.write_stored(id, stored, part.start, &values)?;
            }
        }
        Ok(())
    }
}
