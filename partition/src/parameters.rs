//! Gathers, releases and refreshes parameters.

use std::ops::Range;

use candle_core::{CpuStorage, Storage};
use zero_comm::{Buffer, Gathered, Pending};
use zero_model::Parameter;
use zero_pipeline::SegmentId;

use crate::disk::Stored;
use crate::error::ZeroError;
use crate::gpu;
use crate::ledger::Category;
use crate::rounding::working;
use crate::transfer::{incoming, on_host, outgoing};
use crate::zero::ShardedState;

/// A gather in flight.
pub(crate) struct Gathering {
    pending: Pending<Gathered>,
    /// The shard, if the gather sends a copy of it.
    kept: Option<Storage>,
}

/// A refresh in flight.
pub(crate) struct PendingRefresh {
    segments: Vec<SegmentId>,
    /// One gather per segment; `None` if this rank has updated the whole segment.
    started: Vec<Option<Pending<Gathered>>>,
}

impl ShardedState {
    /// Returns whether this rank holds the only shard and reads it from the disk. A gather then needs no copy.
    fn is_whole(&self, id: SegmentId) -> bool {
        self.comm.size() == 1 && self.stored(id, Stored::Parameters)
    }

    /// Starts gathering a segment from all shards.
    ///
    /// # Errors
    /// Fails if the segment is already being gathered.
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
        let on_gpu = self.options.on_gpu;
        if on_gpu.parameters && counts.len() == 1 {
            // With one rank, `await_gather` makes the copy and no collective is needed.
            self.segments[id].shard = Some(shard);
            return Ok(());
        }
        let own = counts[self.comm.rank()];
        let (sent, kept) = match shard {
            shard @ Storage::Cuda(_) if !on_gpu.gathers => {
                let copy = on_host(&shard, own)?;
                (copy, Some(shard))
            }
            shard => (outgoing(shard, own, on_gpu.gathers)?, None),
        };
        let by_gpu = sent.is_on_device();
        let output = outgoing(self.blank(elements, by_gpu)?, elements, by_gpu)?;
        self.segments[id].gathering = Some(Gathering { pending: self.comm.all_gather(sent, output, &counts), kept });
        Ok(())
    }

    /// Waits for the gather and fills the segment's leaves.
    ///
    /// # Errors
    /// Returns the error of the collective.
    pub fn await_gather(&mut self, id: SegmentId) -> Result<(), ZeroError> {
        let not_started = || ZeroError::internal("no gather was started");
        if self.is_whole(id) {
            let shard = self.segments[id].shard.take().ok_or_else(not_started)?;
            return self.fill(id, shard).map(drop);
        }
        if self.options.on_gpu.parameters && self.comm.size() == 1 {
            return self.fill_alone(id);
        }
        let Gathering { pending, kept } = self.segments[id].gathering.take().ok_or_else(not_started)?;
        let Gathered { shard, output } = pending.wait()?;
        match self.stored(id, Stored::Parameters) {
            // The shard on the disk is unchanged, so drop the copy in memory.
            true => self.ledger.remove(Category::Staging, shard.len(), self.dtype.size_in_bytes()),
            false => self.segments[id].shard = Some(kept.map_or_else(|| incoming(shard), Ok)?),
        }
        if let Some(Storage::Cpu(CpuStorage::F32(full))) = self.fill(id, incoming(output)?)? {
            self.pool.give(full);
        }
        Ok(())
    }

    /// Fills a segment's leaves with the gathered values. A single parameter takes `output` as its storage; otherwise
    /// the values are copied and `output` is returned.
    fn fill(&mut self, id: SegmentId, output: Storage) -> Result<Option<Storage>, ZeroError> {
        let layout = self.layout.clone();
        let segment = &layout.segments()[id];
        let model = self.model.clone();
        let comes_to_gpu = matches!(output, Storage::Cpu(_)) && model.device().is_cuda();
        if let Some(parameter) = segment.only_parameter() {
            let parameter = &model.parameters()[parameter];
            if comes_to_gpu {
                parameter.put(self.on_gpu(&output)?)?;
                return Ok(Some(output));
            }
            parameter.put(output)?;
            return Ok(None);
        }
        // While the leaves are filled, the gathered values are in memory twice. This records the peak.
        let width = self.dtype.size_in_bytes();
        self.ledger.add(Category::Staging, segment.elements(), width);
        self.ledger.remove(Category::Staging, segment.elements(), width);
        let on_gpu = matches!(output, Storage::Cuda(_));
        for piece in &segment.pieces {
            let mut values = self.blank(piece.range.len(), on_gpu)?;
            copy(&output, piece.range.clone(), &mut values, 0..piece.range.len())?;
            if !comes_to_gpu {
                model.parameters()[piece.parameter].put(values)?;
                continue;
            }
            model.parameters()[piece.parameter].put(self.on_gpu(&values)?)?;
            if let Storage::Cpu(values) = values {
                self.reuse(values);
            }
        }
        Ok(Some(output))
    }

    /// Fills a segment's leaves with copies of the only shard, which stays in place.
    fn fill_alone(&mut self, id: SegmentId) -> Result<(), ZeroError> {
        let layout = self.layout.clone();
        for piece in &layout.segments()[id].pieces {
            let mut values = self.blank(piece.range.len(), true)?;
            let shard = self.segments[id].shard.as_ref().ok_or_else(|| ZeroError::internal("no gather was started"))?;
            copy(shard, piece.range.clone(), &mut values, 0..piece.range.len())?;
            self.model.parameters()[piece.parameter].put(values)?;
        }
        Ok(())
    }

    /// Frees a segment's gathered parameters.
    ///
    /// # Errors
    /// Returns candle's error.
    pub fn release(&mut self, id: SegmentId) -> Result<(), ZeroError> {
        let segment = &self.layout.segments()[id];
        self.ledger.remove(Category::Staging, segment.elements(), self.dtype.size_in_bytes());
        // Do not pool memory allocated by the disk, which allocates new memory for each read.
        let is_kept = !(self.is_whole(id) && segment.only_parameter().is_some());
        for piece in &segment.pieces {
            if let CpuStorage::F32(values) = self.model.parameters()[piece.parameter].release()?
                && is_kept
            {
                self.pool.give(values);
            }
        }
        self.released_on_gpu();
        Ok(())
    }

    /// Starts gathering updated parameters that are replicated.
    ///
    /// # Errors
    /// Fails if candle cannot read them.
    pub fn refresh(&mut self, ids: &[SegmentId]) -> Result<(), ZeroError> {
        let mut started = Vec::with_capacity(ids.len());
        for &id in ids {
            started.push(self.start_refresh(id)?);
        }
        self.refreshing.push_back(PendingRefresh { segments: ids.to_vec(), started });
        Ok(())
    }

    fn start_refresh(&mut self, id: SegmentId) -> Result<Option<Pending<Gathered>>, ZeroError> {
        let layout = self.layout.clone();
        let segment = &layout.segments()[id];
        let (own, counts) = (segment.shard(self.comm.rank()), segment.counts());
        let is_on_gpu = self.model.device().is_cuda();
        if is_on_gpu && counts.len() == 1 {
            // With one rank, the rank has updated the whole segment.
            return Ok(None);
        }
        let (elements, by_gpu) = (own.len(), is_on_gpu && self.options.on_gpu.gathers);
        let master = self.segments[id].master.host().filter(|master| is_on_gpu && !master.is_empty());
        let shard = match master {
            Some(master) => {
                // Send the master on the host, which was just updated, instead of downloading the parameters.
                let values = Storage::Cpu(working(master.to_vec(), self.dtype));
                if by_gpu { self.on_gpu(&values)? } else { values }
            }
            None => {
                let mut shard = self.blank(elements, by_gpu)?;
                for (parameter, inside, at) in segment.overlaps(own) {
                    let (full, _) = self.model.parameters()[parameter].leaf().storage_and_layout();
                    copy(&full, inside, &mut shard, at)?;
                }
                shard
            }
        };
        self.ledger.add(Category::Staging, elements, self.dtype.size_in_bytes());
        let output = match segment.only_parameter() {
            // Gather in place. The leaf's storage is taken out meanwhile, so a read of the leaf fails.
            Some(parameter) if by_gpu || !is_on_gpu => self.model.parameters()[parameter].take()?,
            _ => {
                self.ledger.add(Category::Staging, segment.elements(), self.dtype.size_in_bytes());
                self.blank(segment.elements(), by_gpu)?
            }
        };
        let (shard, output) = (outgoing(shard, elements, by_gpu)?, outgoing(output, segment.elements(), by_gpu)?);
        Ok(Some(self.comm.all_gather(shard, output, &counts)))
    }

    /// Waits for the refresh and stores the parameters updated by other ranks.
    ///
    /// # Errors
    /// Returns the error of the collective.
    pub fn await_refresh(&mut self, ids: &[SegmentId]) -> Result<(), ZeroError> {
        let position = self.refreshing.iter().position(|pending| pending.segments == ids);
        let PendingRefresh { started, .. } = position
            .and_then(|position| self.refreshing.remove(position))
            .ok_or_else(|| ZeroError::internal("no such refresh was started"))?;
        for (&id, pending) in ids.iter().zip(started) {
            let Some(pending) = pending else { continue };
            let Gathered { shard, output } = pending.wait()?;
            self.ledger.remove(Category::Staging, shard.len(), self.dtype.size_in_bytes());
            if let Buffer::F32(shard) = shard {
                self.pool.give(shard);
            }
            self.take_over(id, incoming(output)?)?;
            self.released_on_gpu();
        }
        Ok(())
    }

    /// Stores a refreshed segment in its leaves.
    fn take_over(&mut self, id: SegmentId, output: Storage) -> Result<(), ZeroError> {
        let layout = self.layout.clone();
        let segment = &layout.segments()[id];
        let comes_to_gpu = matches!(output, Storage::Cpu(_)) && self.model.device().is_cuda();
        if let Some(parameter) = segment.only_parameter() {
            let model = self.model.clone();
            let parameter = &model.parameters()[parameter];
            if !comes_to_gpu {
                return Ok(parameter.put(output).map(drop)?);
            }
            parameter.put(self.on_gpu(&output)?)?;
            self.ledger.remove(Category::Staging, segment.elements(), self.dtype.size_in_bytes());
            if let Storage::Cpu(used) = output {
                self.reuse(used);
            }
            return Ok(());
        }
        for piece in &segment.pieces {
            let parameter = &self.model.parameters()[piece.parameter];
            overwrite(parameter, 0..piece.range.len(), &output, piece.range.clone())?;
        }
        self.ledger.remove(Category::Staging, segment.elements(), self.dtype.size_in_bytes());
        if let Storage::Cpu(used) = output {
            self.reuse(used);
        }
        Ok(())
    }

    /// Uploads host values to the GPU.
    fn on_gpu(&mut self, values: &Storage) -> Result<Storage, ZeroError> {
        match values {
            Storage::Cpu(values) => self.gpu_mut()?.upload_staged(values),
            _ => Err(ZeroError::internal("an upload of values that are on a GPU")),
        }
    }

    fn reuse(&mut self, used: CpuStorage) {
        if let CpuStorage::F32(used) = used {
            self.pool.give(used);
        }
    }
}

/// Copies values from any device over a range of a parameter.
pub(crate) fn overwrite(
    parameter: &Parameter,
    range: Range<usize>,
    from: &Storage,
    source: Range<usize>,
) -> Result<(), ZeroError> {
    let mut full = parameter.take()?;
    let copied = copy(from, source, &mut full, range);
    parameter.put(full)?;
    copied
}

/// Copies a range between storages of the same dtype, on any devices.
pub(crate) fn copy(
    from: &Storage,
    source: Range<usize>,
    to: &mut Storage,
    target: Range<usize>,
) -> Result<(), ZeroError> {
    match (from, to) {
        (Storage::Cpu(from), Storage::Cpu(to)) => Ok(copy_on_host(from, source, to, target)?),
        (from, to) => gpu::copy(from, source, to, target),
    }
}

pub(crate) fn copy_on_host(
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
