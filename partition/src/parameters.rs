//! Gathering, releasing and refreshing parameters.

use std::ops::Range;

use candle_core::{CpuStorage, Storage};
use zero_comm::{Buffer, Gathered, Pending};
use zero_model::Parameter;
use zero_pipeline::SegmentId;

use crate::disk::Stored;
use crate::error::ZeroError;
use crate::ledger::Category;
use crate::rounding::working;
use crate::transfer::{incoming, on_host, outgoing};
use crate::zero::ShardedState;

/// A gather that is under way.
pub(crate) struct Gathering {
    pending: Pending<Gathered>,
    /// The shard, where a copy of it travels.
    kept: Option<Storage>,
}

/// A refresh that is under way.
pub(crate) struct PendingRefresh {
    segments: Vec<SegmentId>,
    /// Of each; `None` where this rank has updated all of it.
    started: Vec<Option<Pending<Gathered>>>,
}

impl ShardedState {
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
        let on_gpu = self.options.on_gpu;
        if on_gpu.parameters && counts.len() == 1 {
            // A rank alone: the copy is all that there is to do, and is made when it is awaited.
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
    /// What the collective says.
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
            // What is on the disk is what it was.
            true => self.ledger.remove(Category::Staging, shard.len(), self.dtype.size_in_bytes()),
            false => self.segments[id].shard = Some(kept.map_or_else(|| incoming(shard), Ok)?),
        }
        if let Some(Storage::Cpu(CpuStorage::F32(full))) = self.fill(id, incoming(output)?)? {
            self.pool.give(full);
        }
        Ok(())
    }

    /// Fills a segment's leaves with what was gathered. Of an only one it becomes the storage; what was copied comes back.
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
        // While the leaves are filled, everything that was gathered is there twice.
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

    /// Fills a segment's leaves with copies of the only shard, which stays.
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
        self.released_on_gpu();
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
        self.refreshing.push_back(PendingRefresh { segments: ids.to_vec(), started });
        Ok(())
    }

    fn start_refresh(&mut self, id: SegmentId) -> Result<Option<Pending<Gathered>>, ZeroError> {
        let layout = self.layout.clone();
        let segment = &layout.segments()[id];
        let (own, counts) = (segment.shard(self.comm.rank()), segment.counts());
        let is_on_gpu = self.model.device().is_cuda();
        if is_on_gpu && counts.len() == 1 {
            // A rank alone has updated all of it.
            return Ok(None);
        }
        let (elements, by_gpu) = (own.len(), is_on_gpu && self.options.on_gpu.gathers);
        let master = self.segments[id].master.host().filter(|master| is_on_gpu && !master.is_empty());
        let shard = match master {
            Some(master) => {
                // What was just updated: it need not come back from where it goes to.
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
            // Gathered where it is. Nobody reads the leaf meanwhile; who would is refused.
            Some(parameter) if by_gpu || !is_on_gpu => self.model.parameters()[parameter].take()?,
            _ => {
                self.ledger.add(Category::Staging, segment.elements(), self.dtype.size_in_bytes());
                self.blank(segment.elements(), by_gpu)?
            }
        };
        let (shard, output) = (outgoing(shard, elements, by_gpu)?, outgoing(output, segment.elements(), by_gpu)?);
        Ok(Some(self.comm.all_gather(shard, output, &counts)))
    }

    /// Waits for the refresh and takes over what the others updated.
    ///
    /// # Errors
    /// What the collective says.
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

    /// Puts a refreshed segment into its leaves.
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

    /// Values of the host on the GPU.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, clippy::unused_self))]
    fn on_gpu(&mut self, values: &Storage) -> Result<Storage, ZeroError> {
        #[cfg(feature = "cuda")]
        if let Storage::Cpu(values) = values {
            return self.uploaded(values);
        }
        Err(ZeroError::internal("values that go to no GPU"))
    }

    fn reuse(&mut self, used: CpuStorage) {
        if let CpuStorage::F32(used) = used {
            self.pool.give(used);
        }
    }
}

/// Copies values, wherever they are, over a range of a parameter.
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

/// Copies a range between storages of the same working dtype, wherever they are.
pub(crate) fn copy(
    from: &Storage,
    source: Range<usize>,
    to: &mut Storage,
    target: Range<usize>,
) -> Result<(), ZeroError> {
    match (from, to) {
        (Storage::Cpu(from), Storage::Cpu(to)) => copy_on_host(from, source, to, target)?,
        #[cfg(feature = "cuda")]
        (Storage::Cuda(from), Storage::Cuda(to)) => zero_model::device::copy(from, source, to, target)?,
        #[cfg(feature = "cuda")]
        (Storage::Cuda(from), Storage::Cpu(to)) => {
            let values = zero_model::device::download(from, source)?;
            copy_on_host(&values, 0..target.len(), to, target)?;
        }
        #[cfg(feature = "cuda")]
        (Storage::Cpu(from), Storage::Cuda(to)) => {
            let len = source.len();
            let mut part = working(vec![0.0; len], candle_core::backend::BackendStorage::dtype(to));
            copy_on_host(from, source, &mut part, 0..len)?;
            let part = zero_model::device::upload(&to.device, &part)?;
            zero_model::device::copy(&part, 0..len, to, target)?;
        }
        _ => return Err(ZeroError::internal("parameters on devices that are not known here")),
    }
    Ok(())
}

fn copy_on_host(
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
