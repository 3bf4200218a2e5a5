//! Reads and writes offloaded values outside of a step: initial values, checkpoints and values set by the user.

use std::ops::Range;

use candle_core::CpuStorage;
use zero_pipeline::{SegmentId, Tier};
use zero_tier::{AlignedBuffer, align};

use crate::disk::{Disk, FileLayout};
use crate::error::{ZeroError, missing};
use crate::narrow::Values;
use crate::rank::Rank;
use crate::rounding::{round_bytes, widen_bytes, working};

/// Kind of offloaded value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stored {
    /// The optimizer state with this index. The master follows the last state.
    State(usize),
    /// The working parameters.
    Parameters,
    /// The copy of the weights that is kept while the averages of a schedule-free optimizer replace them.
    Kept,
}

impl Disk {
    /// Returns whether the segment's values of this kind are on disk.
    pub(crate) fn has(&self, id: SegmentId, stored: Stored) -> bool {
        self.place_of(id).is_some_and(|place| match stored {
            Stored::State(kind) => place.tiers.optimizer == Tier::Nvme && kind < place.columns.len(),
            Stored::Parameters => place.tiers.parameters == Tier::Nvme,
            Stored::Kept => place.tiers.optimizer == Tier::Nvme && place.has_kept,
        })
    }

    /// Reads values of this rank's part, starting at index `start`. A range of 8-bit states must consist of whole
    /// blocks.
    pub(crate) fn read(
        &self,
        rank: &Rank,
        id: SegmentId,
        stored: Stored,
        start: usize,
        values: &mut [f32],
    ) -> Result<(), ZeroError> {
        let place = self.place(id)?;
        let mut rest = values;
        for (index, part) in parts(place, stored, start, rest.len())? {
            let mut bytes = self.read_tile(place, stored, index)?;
            let (now, later) = rest.split_at_mut(part.len());
            rest = later;
            match stored {
                Stored::State(kind) => {
                    in_tile(rank, id, place, (kind, index), &mut bytes).read(part.start, now)?;
                }
                Stored::Parameters => widen_bytes(bytes.as_bytes(), part, rank.dtype, now)?,
                Stored::Kept => now.copy_from_slice(&bytes.as_f32()[part]),
            }
        }
        Ok(())
    }

    /// Overwrites values of this rank's part, rounded to the type in which they are stored. A range of 8-bit states
    /// must consist of whole blocks.
    pub(crate) fn write(
        &self,
        rank: &Rank,
        id: SegmentId,
        stored: Stored,
        start: usize,
        values: &[f32],
    ) -> Result<(), ZeroError> {
        let place = self.place(id)?;
        let mut rest = values;
        for (index, part) in parts(place, stored, start, values.len())? {
            let (now, later) = rest.split_at(part.len());
            rest = later;
            // Read the tile first, to preserve its other values.
            let mut bytes = self.read_tile(place, stored, index)?;
            match stored {
                Stored::State(kind) => {
                    in_tile(rank, id, place, (kind, index), &mut bytes).write(part.start, now)?;
                }
                Stored::Parameters => round_bytes(now, rank.dtype, bytes.as_bytes_mut(), part)?,
                Stored::Kept => bytes.as_f32_mut()[part].copy_from_slice(now),
            }
            let ((at, _), len) = (offset(place, stored, index), bytes.len());
            let file = self.file(stored)?;
            file.write(at, bytes, len).wait()?;
        }
        Ok(())
    }

    /// Reads a part of this rank's bytes of a quantized segment, starting at byte `start`.
    pub(crate) fn read_bytes(&self, id: SegmentId, start: usize, out: &mut [u8]) -> Result<(), ZeroError> {
        let place = self.place(id)?;
        let mut rest = out;
        for (index, part) in parts(place, Stored::Parameters, start, rest.len())? {
            let bytes = self.read_tile(place, Stored::Parameters, index)?;
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
        for (index, part) in parts(place, Stored::Parameters, start, values.len())? {
            let (now, later) = rest.split_at(part.len());
            rest = later;
            let mut bytes = self.read_tile(place, Stored::Parameters, index)?;
            bytes.as_bytes_mut()[part].copy_from_slice(now);
            let ((at, _), len) = (offset(place, Stored::Parameters, index), bytes.len());
            self.file(Stored::Parameters)?.write(at, bytes, len).wait()?;
        }
        Ok(())
    }

    /// Reads this rank's shard of the parameters.
    pub(crate) fn read_shard(&self, rank: &Rank, id: SegmentId) -> Result<CpuStorage, ZeroError> {
        let mut values = vec![0.0; self.place(id)?.elements];
        self.read(rank, id, Stored::Parameters, 0, &mut values)?;
        Ok(working(values, rank.dtype))
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
                self.write(rank, id, stored, part.start, &values)?;
            }
        }
        Ok(())
    }

    fn read_tile(&self, place: &FileLayout, stored: Stored, index: usize) -> Result<AlignedBuffer, ZeroError> {
        let (at, len) = offset(place, stored, index);
        // Do not take the buffer from the pool: the next step needs buffers of different sizes, so this one would stay
        // idle there.
        let buffer = AlignedBuffer::zeroed(len)?;
        Ok(self.file(stored)?.read(at, buffer, len).wait()?)
    }

    fn file(&self, stored: Stored) -> Result<&zero_tier::SwapFile, ZeroError> {
        match stored {
            Stored::State(_) | Stored::Kept => self.optimizer(),
            Stored::Parameters => self.parameters(),
        }
    }
}

/// Returns the offset of a tile's values of this kind, and their bytes in whole pages.
fn offset(place: &FileLayout, stored: Stored, index: usize) -> (u64, usize) {
    match stored {
        Stored::State(kind) => place.column_at(index, kind),
        Stored::Parameters => {
            let bytes = place.range(index).len() * place.width;
            (place.parameters_at(index), align(bytes as u64) as usize)
        }
        Stored::Kept => {
            let range = place.range(index);
            (place.kept_at + (range.start * 4) as u64, align((range.len() * 4) as u64) as usize)
        }
    }
}

/// Borrows state `kind` of tile `index` from the tile's bytes.
fn in_tile<'a>(
    rank: &Rank,
    id: SegmentId,
    place: &FileLayout,
    (kind, index): (usize, usize),
    bytes: &'a mut AlignedBuffer,
) -> Values<'a> {
    let name = rank.state_names(id).get(kind).copied().unwrap_or_default();
    place.columns[kind].in_bytes(name, place.range(index).len(), bytes.as_bytes_mut())
}

/// Returns the tiles that contain the `len` values starting at index `start`, each with the range within the tile.
fn parts(
    place: &FileLayout,
    stored: Stored,
    start: usize,
    len: usize,
) -> Result<Vec<(usize, Range<usize>)>, ZeroError> {
    let values = |elements: usize| match stored {
        Stored::State(kind) => place.columns[kind].values(elements),
        Stored::Parameters | Stored::Kept => elements,
    };
    let end = start.checked_add(len).filter(|&end| end <= values(place.elements)).ok_or_else(missing)?;
    if len == 0 {
        return Ok(vec![]);
    }
    // A matrix whose number of values differs from its number of elements is one tile.
    let size = values(place.tile).max(1);
    let of_tile = |index: usize| {
        let tile = index * size..(index + 1) * size;
        (index, start.max(tile.start) - tile.start..end.min(tile.end) - tile.start)
    };
    Ok((start / size..(end - 1) / size + 1).map(of_tile).collect())
}
