//! Reads and writes offloaded values outside of a step: initial values, checkpoints and values set by the user.

use std::ops::Range;

use candle_core::{CpuStorage, DType};
use zero_pipeline::{SegmentId, Tier};
use zero_tier::{AlignedBuffer, align};

use crate::disk::{Disk, FileLayout};
use crate::error::ZeroError;
use crate::rank::Rank;
use crate::rounding::{round_bytes, widen_bytes, working};

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
        self.place_of(id).is_some_and(|place| match stored {
            Stored::State(kind) => place.tiers.optimizer == Tier::Nvme && kind < place.kinds,
            Stored::Parameters => place.tiers.parameters == Tier::Nvme,
        })
    }

    /// Reads `values.len()` elements of this rank's part, from element `start` on.
    pub(crate) fn read(
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
    pub(crate) fn write(
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

    /// Reads a part of this rank's bytes of a quantized segment, from byte `start` on.
    pub(crate) fn read_bytes(&self, id: SegmentId, start: usize, out: &mut [u8]) -> Result<(), ZeroError> {
        let place = self.place(id)?;
        let mut rest = out;
        for (index, part) in parts(&place, start..start + rest.len()) {
            let bytes = self.read_tile(&place, Stored::Parameters, index)?;
            let (now, later) = rest.split_at_mut(part.len());
            rest = later;
            now.copy_from_slice(&bytes.as_bytes()[part]);
        }
        Ok(())
    }

    /// Overwrites a part of this rank's bytes of a quantized segment.
    pub(crate) fn write_bytes(&self, id: SegmentId, start: usize, values: &[u8]) -> Result<(), ZeroError> {
        let place = self.place(id)?;
        let mut rest = values;
        for (index, part) in parts(&place, start..start + values.len()) {
            let (now, later) = rest.split_at(part.len());
            rest = later;
            let mut bytes = self.read_tile(&place, Stored::Parameters, index)?;
            bytes.as_bytes_mut()[part].copy_from_slice(now);
            let (at, len) = (offset(&place, Stored::Parameters, index), bytes.len());
            self.file(Stored::Parameters)?.write(at, bytes, len).wait()?;
        }
        Ok(())
    }

    /// Reads this rank's shard of the parameters.
    pub(crate) fn read_shard(&self, id: SegmentId, dtype: DType) -> Result<CpuStorage, ZeroError> {
        let mut values = vec![0.0; self.place(id)?.elements];
        self.read(id, Stored::Parameters, 0, &mut values, dtype)?;
        Ok(working(values, dtype))
    }

    /// Writes the initial values of a segment, one tile at a time. Optimizer states are already zero.
    pub(crate) fn initialise(&self, rank: &Rank, id: SegmentId, seed: u64) -> Result<(), ZeroError> {
        let Some(place) = self.place_of(id) else { return Ok(()) };
        let kinds = [Stored::State(rank.states(id)), Stored::Parameters];
        let wanted: Vec<Stored> = kinds.into_iter().filter(|&stored| self.has(id, stored)).collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let own = rank.own_range(id);
        if rank.is_quantized(id) {
            return self.write_bytes(id, 0, &rank.initial_bytes(id, own, seed)?);
        }
        for index in 0..place.tiles() {
            let part = place.range(index);
            let values = rank.initial_values(id, own.start + part.start..own.start + part.end, seed);
            for &stored in &wanted {
                self.write(id, stored, part.start, &values, rank.dtype)?;
            }
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
