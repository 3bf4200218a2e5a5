//! Gathering, releasing and refreshing parameters.

use std::ops::Range;

use candle_core::{CpuStorage, DType};
use half::{bf16, f16};
use zero_comm::{Buffer, Gathered, Pending};
use zero_pipeline::SegmentId;

use crate::disk::Stored;
use crate::error::ZeroError;
use crate::ledger::Category;
use crate::zero::Zero;

impl Zero {
    /// Whether there is one shard only, and it is not kept in memory: then a gather is that shard, as it came from the disk.
    fn is_whole(&self, id: SegmentId) -> bool {
        self.comm.size() == 1 && self.stored(id, Stored::Parameters)
    }

    /// Starts gathering a segment from all shards.
    ///
    /// # Errors
    /// If it is being gathered already.
    pub fn gather(&mut self, id: SegmentId) -> Result<(), ZeroError> {
        if self.is_whole(id) {
            return match self.segments[id].shard {
                Some(_) => Ok(()),
                None => Err(ZeroError::internal("gathered twice")),
            };
        }
        let segment = &self.layout.segments()[id];
        let (elements, counts) = (segment.elements(), segment.counts());
        let shard = self.segments[id].shard.take().ok_or_else(|| ZeroError::internal("gathered twice"))?;
        self.ledger.add(Category::Staging, elements, self.dtype.size_in_bytes());
        let output = buffer(self.blank(elements))?;
        self.segments[id].gathering = Some(self.comm.all_gather(buffer(shard)?, output, &counts));
        Ok(())
    }

    /// Waits for the gather and fills the segment's leaves.
    ///
    /// # Errors
    /// What the collective says.
    pub fn await_gather(&mut self, id: SegmentId) -> Result<(), ZeroError> {
        let not_started = || ZeroError::internal("no gather was started");
        if self.is_whole(id) {
            let shard = self.segments[id].shard.take().ok_or_else(not_started)?;
            return self.fill(id, buffer(shard)?).map(drop);
        }
        let pending = self.segments[id].gathering.take().ok_or_else(not_started)?;
        let Gathered { shard, output } = pending.wait()?;
        match self.stored(id, Stored::Parameters) {
            // What is on the disk is what it was.
            true => self.ledger.remove(Category::Staging, shard.len(), self.dtype.size_in_bytes()),
            false => self.segments[id].shard = Some(storage(shard)?),
        }
        if let Some(Buffer::F32(full)) = self.fill(id, output)? {
            self.pool.give(full);
        }
        Ok(())
    }

    /// Fills a segment's leaves with what was gathered. Of an only one it becomes the storage; what was copied comes back.
    fn fill(&mut self, id: SegmentId, output: Buffer) -> Result<Option<Buffer>, ZeroError> {
        if let Some(parameter) = self.layout.segments()[id].only_parameter() {
            let parameter = &self.model.parameters()[parameter];
            let given = parameter.fill(storage(output)?)?;
            return if parameter.is_on_gpu() { buffer(given).map(Some) } else { Ok(None) };
        }
        // While the leaves are filled, everything that was gathered is there twice.
        let width = self.dtype.size_in_bytes();
        self.ledger.add(Category::Staging, output.len(), width);
        self.ledger.remove(Category::Staging, output.len(), width);
        let segment = &self.layout.segments()[id];
        for piece in &segment.pieces {
            let values = match &output {
                Buffer::F32(full) => {
                    let mut values = self.pool.take(piece.range.len());
                    values.copy_from_slice(&full[piece.range.clone()]);
                    CpuStorage::F32(values)
                }
                Buffer::Bf16(full) => CpuStorage::BF16(full[piece.range.clone()].to_vec()),
                Buffer::F16(full) => CpuStorage::F16(full[piece.range.clone()].to_vec()),
                _ => return Err(not_floats()),
            };
            self.model.parameters()[piece.parameter].fill(values)?;
        }
        Ok(Some(output))
    }

    /// Gives up a segment's full parameters.
    ///
    /// # Errors
    /// If candle refuses.
    pub fn release(&mut self, id: SegmentId) -> Result<(), ZeroError> {
        let segment = &self.layout.segments()[id];
        self.ledger.remove(Category::Staging, segment.elements(), self.dtype.size_in_bytes());
        // What the disk made is not kept for the next time: it makes others.
        let is_kept = !(self.is_whole(id) && segment.only_parameter().is_some());
        for piece in &segment.pieces {
            if let CpuStorage::F32(values) = self.model.parameters()[piece.parameter].release()?
                && is_kept
            {
                self.pool.give(values);
            }
        }
        Ok(())
    }

    /// Starts gathering updated parameters that every rank keeps.
    ///
    /// # Errors
    /// If candle refuses to read them.
    pub fn refresh(&mut self, ids: &[SegmentId]) -> Result<(), ZeroError> {
        let mut started = Vec::with_capacity(ids.len());
        for &id in ids {
            started.push(self.start_refresh(id)?);
        }
        self.refreshing.push_back((ids.to_vec(), started));
        Ok(())
    }

    fn start_refresh(&mut self, id: SegmentId) -> Result<Pending<Gathered>, ZeroError> {
        let layout = self.layout.clone();
        let segment = &layout.segments()[id];
        let own = segment.shard(self.comm.rank());
        let mut shard = self.blank(own.len());
        for (parameter, inside, at) in segment.overlaps(own) {
            self.model.parameters()[parameter].read(|full| copy(full, inside, &mut shard, at))?;
        }
        let counts = segment.counts();
        self.ledger.add(Category::Staging, len(&shard), self.dtype.size_in_bytes());
        let output = match segment.only_parameter() {
            // Gathered where it is. Nobody reads the leaf meanwhile; who would is refused.
            Some(parameter) if !self.model.parameters()[parameter].is_on_gpu() => {
                self.model.parameters()[parameter].release()?
            }
            _ => {
                self.ledger.add(Category::Staging, segment.elements(), self.dtype.size_in_bytes());
                self.blank(segment.elements())
            }
        };
        Ok(self.comm.all_gather(buffer(shard)?, buffer(output)?, &counts))
    }

    /// Waits for the refresh and takes over what the others updated.
    ///
    /// # Errors
    /// What the collective says.
    pub fn await_refresh(&mut self, ids: &[SegmentId]) -> Result<(), ZeroError> {
        let position = self.refreshing.iter().position(|(segments, _)| segments == ids);
        let (_, started) = position
            .and_then(|position| self.refreshing.remove(position))
            .ok_or_else(|| ZeroError::internal("no such refresh was started"))?;
        for (&id, pending) in ids.iter().zip(started) {
            let Gathered { shard, output } = pending.wait()?;
            let (shard, output) = (storage(shard)?, storage(output)?);
            self.ledger.remove(Category::Staging, len(&shard), self.dtype.size_in_bytes());
            self.reuse(shard);
            self.take_over(id, output)?;
        }
        Ok(())
    }

    /// Puts a refreshed segment into its leaves.
    fn take_over(&mut self, id: SegmentId, output: CpuStorage) -> Result<(), ZeroError> {
        let layout = self.layout.clone();
        let segment = &layout.segments()[id];
        if let Some(parameter) = segment.only_parameter() {
            let parameter = &self.model.parameters()[parameter];
            let used = parameter.fill(output)?;
            if parameter.is_on_gpu() {
                self.ledger.remove(Category::Staging, segment.elements(), self.dtype.size_in_bytes());
                self.reuse(used);
            }
            return Ok(());
        }
        for piece in &segment.pieces {
            self.model.parameters()[piece.parameter]
                .update(|values| copy(&output, piece.range.clone(), values, 0..piece.range.len()))?;
        }
        self.ledger.remove(Category::Staging, segment.elements(), self.dtype.size_in_bytes());
        self.reuse(output);
        Ok(())
    }

    fn reuse(&mut self, used: CpuStorage) {
        if let CpuStorage::F32(used) = used {
            self.pool.give(used);
        }
    }

    /// A buffer of the working dtype to be overwritten.
    pub(crate) fn blank(&mut self, len: usize) -> CpuStorage {
        match self.dtype {
            DType::BF16 => CpuStorage::BF16(vec![bf16::ZERO; len]),
            DType::F16 => CpuStorage::F16(vec![f16::ZERO; len]),
            _ => CpuStorage::F32(self.pool.take(len)),
        }
    }
}

fn len(storage: &CpuStorage) -> usize {
    match storage {
        CpuStorage::F32(v) => v.len(),
        CpuStorage::BF16(v) => v.len(),
        CpuStorage::F16(v) => v.len(),
        _ => 0,
    }
}

/// Copies a range between storages of the same working dtype.
pub(crate) fn copy(
    from: &CpuStorage,
    source: Range<usize>,
    to: &mut CpuStorage,
    target: Range<usize>,
) -> candle_core::Result<()> {
    match (from, to) {
        (CpuStorage::F32(from), CpuStorage::F32(to)) => to[target].copy_from_slice(&from[source]),
        (CpuStorage::BF16(from), CpuStorage::BF16(to)) => to[target].copy_from_slice(&from[source]),
        (CpuStorage::F16(from), CpuStorage::F16(to)) => to[target].copy_from_slice(&from[source]),
        _ => candle_core::bail!("parameters of different dtypes, or a released one"),
    }
    Ok(())
}

pub(crate) fn buffer(storage: CpuStorage) -> Result<Buffer, ZeroError> {
    match storage {
        CpuStorage::F32(v) => Ok(Buffer::F32(v)),
        CpuStorage::BF16(v) => Ok(Buffer::Bf16(v)),
        CpuStorage::F16(v) => Ok(Buffer::F16(v)),
        _ => Err(not_floats()),
    }
}

pub(crate) fn storage(buffer: Buffer) -> Result<CpuStorage, ZeroError> {
    match buffer {
        Buffer::F32(v) => Ok(CpuStorage::F32(v)),
        Buffer::Bf16(v) => Ok(CpuStorage::BF16(v)),
        Buffer::F16(v) => Ok(CpuStorage::F16(v)),
        _ => Err(not_floats()),
    }
}

pub(crate) fn not_floats() -> ZeroError {
    ZeroError::internal("parameters are f32, bf16 or f16")
}
