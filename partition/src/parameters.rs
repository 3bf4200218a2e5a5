//! Holds this rank's part of the parameters; gathers, releases and refreshes them, and exchanges tied parameters.

use std::collections::VecDeque;

use candle_core::{DType, Storage};
use zero_comm::{Buffer, Dtype, Gathered, Pending, ToGather};
use zero_model::sink::FlatBuffer;
use zero_pipeline::SegmentId;

use crate::accounting::ledger::Category;
use crate::accounting::memory::Memory;
use crate::coded;
use crate::disk::{Disk, Stored};
use crate::error::ZeroError;
use crate::leaves::{fill, fill_and_give, fill_pieces, is_whole, take_over};
use crate::rank::Rank;
use crate::rounding::{to_f32, working};
use crate::secondary::SecondaryShards;
use crate::storage::{buffer, copy, incoming, on_host, outgoing, overwrite, storage};

/// The parameters of one rank. Replicated ones are in the leaves of the model.
#[derive(Default)]
pub(crate) struct ParameterState {
    /// Each segment's shard of the working parameters. `None` if they are not sharded, and while a gather reads the
    /// shard.
    shards: Vec<Option<Storage>>,
    gathering: InFlight<Gathering>,
    /// `None` if this rank has updated the whole segments itself.
    refreshing: InFlight<Option<Pending<Vec<Gathered>>>>,
}

/// A gather in flight.
struct Gathering {
    /// `None` if this rank holds all values.
    pending: Option<Pending<Vec<Gathered>>>,
    /// The segments that the collective gathers. Each comes with its shard if the collective sends a copy of the shard.
    kept: Vec<(SegmentId, Option<Storage>)>,
}

/// Collectives in flight, each with the segments that it works on.
pub(crate) struct InFlight<T>(VecDeque<(Vec<SegmentId>, T)>);

impl<T> Default for InFlight<T> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<T> InFlight<T> {
    pub(crate) fn start(&mut self, ids: &[SegmentId], collective: T) {
        self.0.push_back((ids.to_vec(), collective));
    }

    /// Takes the collective that was started for these segments.
    pub(crate) fn take(&mut self, ids: &[SegmentId]) -> Result<T, ZeroError> {
        let position = self.0.iter().position(|(of, _)| of == ids);
        let found = position.and_then(|position| self.0.remove(position));
        found.map(|(_, collective)| collective).ok_or_else(|| ZeroError::internal("no such collective was started"))
    }
}

/// Prepares the gather of a segment whose shards have `counts` elements; this rank's shard has `own` elements. Also
/// returns the shard if the gather sends a copy of the shard.
pub(crate) fn to_gather(
    rank: &Rank,
    memory: &mut Memory,
    id: SegmentId,
    shard: Storage,
    (own, counts): (usize, Vec<usize>),
) -> Result<(ToGather, Option<Storage>), ZeroError> {
    let by_gpu = rank.options.on_gpu.gathers;
    let (sent, kept) = match shard {
        shard @ Storage::Cuda(_) if !by_gpu => (on_host(&shard, own)?, Some(shard)),
        shard => (outgoing(shard, own, by_gpu)?, None),
    };
    let by_gpu = sent.is_on_device();
    let elements = rank.segment(id).elements();
    let output = outgoing(memory.blank(rank.stored_as(id), elements, by_gpu)?, elements, by_gpu)?;
    Ok((ToGather { shard: sent, output, counts }, kept))
}

impl ParameterState {
    /// Adds the next segment, with the shard of its parameters if they are sharded and in memory.
    pub(crate) fn push(&mut self, shard: Option<Storage>) {
        self.shards.push(shard);
    }

    pub(crate) fn shard(&self, id: SegmentId) -> Option<&Storage> {
        self.shards[id].as_ref()
    }

    pub(crate) fn shard_mut(&mut self, id: SegmentId) -> Option<&mut Storage> {
        self.shards[id].as_mut()
    }

    /// Returns the shards of all segments.
    pub(crate) fn shards_mut(&mut self) -> &mut [Option<Storage>] {
        &mut self.shards
    }

    /// Stores a shard that was read from the disk.
    pub(crate) fn set_shard(&mut self, id: SegmentId, shard: Storage) {
        self.shards[id] = Some(shard);
    }

    /// Starts gathering segments from all shards.
    pub(crate) fn gather(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        disk: &Disk,
        ids: &[SegmentId],
    ) -> Result<(), ZeroError> {
        let (mut vectors, mut kept) = (vec![], vec![]);
        for &id in ids {
            if let Some((vector, shard)) = self.take_to_gather(rank, memory, disk, id)? {
                vectors.push(vector);
                kept.push((id, shard));
            }
        }
        let pending = (!vectors.is_empty()).then(|| rank.shards().all_gather_coalesced(vectors));
        self.gathering.start(ids, Gathering { pending, kept });
        Ok(())
    }

    /// Takes the buffers that a gather sends and receives, and the shard if the gather sends a copy. Returns `None` if
    /// this rank holds all values; `await_gather` then copies them.
    fn take_to_gather(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        disk: &Disk,
        id: SegmentId,
    ) -> Result<Option<(ToGather, Option<Storage>)>, ZeroError> {
        let gathered_twice = || ZeroError::internal("the segment was gathered twice");
        if is_whole(rank, disk, id) {
            return self.shards[id].as_ref().map(|_| None).ok_or_else(gathered_twice);
        }
        let (elements, counts) = (rank.segment(id).elements(), rank.segment(id).counts());
        let shard = self.shards[id].take().ok_or_else(gathered_twice)?;
        if let Some(codes) = rank.gathered_as(id) {
            return Ok(Some((coded::to_gather(rank, memory, id, codes, &shard)?, Some(shard))));
        }
        memory.count(Category::Staging, elements, rank.width(id));
        let on_gpu = rank.options.on_gpu;
        if on_gpu.parameters && counts.len() == 1 {
            self.shards[id] = Some(shard);
            return Ok(None);
        }
        let own = counts[rank.shards().rank()];
        to_gather(rank, memory, id, shard, (own, counts)).map(Some)
    }

    /// Waits for the gather. Fills the segments' leaves, and the secondary shards if there are any.
    pub(crate) fn await_gather(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        disk: &Disk,
        secondary: &mut SecondaryShards,
        ids: &[SegmentId],
    ) -> Result<(), ZeroError> {
        let Gathering { pending, kept } = self.gathering.take(ids)?;
        let gathered = pending.map_or(Ok(vec![]), Pending::wait)?;
        let mut gathered = kept.into_iter().zip(gathered).peekable();
        for &id in ids {
            match gathered.next_if(|((of, _), _)| *of == id) {
                Some(((_, kept), gathered)) => {
                    let output = self.put_shard_back(rank, memory, disk, id, (kept, gathered))?;
                    secondary.fill(rank, id, &output)?;
                    fill_and_give(rank, memory, id, output)?;
                }
                None => self.fill_alone(rank, memory, disk, id)?,
            }
        }
        Ok(())
    }

    /// Puts back the shard that a gather has read, and returns the gathered values.
    fn put_shard_back(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        disk: &Disk,
        id: SegmentId,
        (kept, gathered): (Option<Storage>, Gathered),
    ) -> Result<Storage, ZeroError> {
        let (kept, output) = match rank.gathered_as(id) {
            Some(codes) => (kept, coded::gathered(rank, memory, id, codes, gathered)?),
            None => {
                let Gathered { shard, output } = gathered;
                (Some(kept.map_or_else(|| incoming(shard), Ok)?), incoming(output)?)
            }
        };
        match disk.has(id, Stored::Parameters) {
            // The shard on the disk is unchanged, so drop the copy in memory.
            true => memory.uncount(Category::Staging, rank.shard(id).len(), rank.width(id)),
            false => self.shards[id] = kept,
        }
        Ok(output)
    }

    /// Fills the leaves of a segment whose values only this rank holds.
    fn fill_alone(&mut self, rank: &Rank, memory: &mut Memory, disk: &Disk, id: SegmentId) -> Result<(), ZeroError> {
        let missing = || ZeroError::internal("a segment is gathered while its shard is not in memory");
        if is_whole(rank, disk, id) {
            let shard = self.shards[id].take().ok_or_else(missing)?;
            return fill(rank, memory, id, shard).map(drop);
        }
        fill_pieces(rank, memory, id, self.shards[id].as_ref().ok_or_else(missing)?, true)
    }

    /// Starts gathering updated replicated parameters. `master_of` returns the master of this rank's part of a segment.
    pub(crate) fn refresh<'a>(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        master_of: impl Fn(SegmentId) -> &'a FlatBuffer,
        ids: &[SegmentId],
    ) -> Result<(), ZeroError> {
        // With one rank, the rank has updated the whole segments.
        if rank.is_on_gpu() && rank.shards().size() == 1 {
            self.refreshing.start(ids, None);
            return Ok(());
        }
        let vectors = ids.iter().map(|&id| to_refresh(rank, memory, master_of(id), id)).collect::<Result<_, _>>()?;
        self.refreshing.start(ids, Some(rank.shards().all_gather_coalesced(vectors)));
        Ok(())
    }

    /// Waits for the refresh and stores the parameters updated by other ranks.
    pub(crate) fn await_refresh(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        ids: &[SegmentId],
    ) -> Result<(), ZeroError> {
        let Some(pending) = self.refreshing.take(ids)? else { return Ok(()) };
        for (&id, Gathered { shard, output }) in ids.iter().zip(pending.wait()?) {
            memory.uncount(Category::Staging, shard.len(), rank.width(id));
            if let Buffer::F32(shard) = shard {
                memory.give(shard);
            }
            take_over(rank, memory, id, incoming(output)?)?;
            memory.released_on_gpu();
        }
        Ok(())
    }

    /// Copies this rank's part of a tied segment's updated parameters, to send it.
    pub(crate) fn tied(
        &self,
        rank: &Rank,
        memory: &mut Memory,
        disk: &Disk,
        id: SegmentId,
    ) -> Result<Buffer, ZeroError> {
        if disk.has(id, Stored::Parameters) {
            let values = buffer(disk.read_shard(rank, id)?)?;
            memory.count(Category::Staging, values.len(), rank.width(id));
            return Ok(values);
        }
        let own = match &self.shards[id] {
            Some(_) => rank.shard(id).len(),
            None => rank.segment(id).elements(),
        };
        let mut values = memory.blank(rank.dtype, own, false)?;
        match &self.shards[id] {
            Some(shard) => copy(shard, 0..own, &mut values, 0..own)?,
            None => {
                for piece in &rank.segment(id).pieces {
                    let (full, _) = rank.model.parameters()[piece.parameter].leaf().storage_and_layout();
                    copy(&full, 0..piece.range.len(), &mut values, piece.range.clone())?;
                }
            }
        }
        memory.count(Category::Staging, own, rank.width(id));
        outgoing(values, own, false)
    }

    /// Stores the parameters of a tied segment that its owner has updated.
    pub(crate) fn set_tied(
        &mut self,
        rank: &Rank,
        memory: &mut Memory,
        disk: &Disk,
        id: SegmentId,
        values: Buffer,
    ) -> Result<(), ZeroError> {
        let values = storage(values)?;
        if disk.has(id, Stored::Parameters) {
            disk.write(rank, id, Stored::Parameters, 0, &to_f32(&values)?)?;
            give_tied_back(rank, memory, buffer(values)?);
            return Ok(());
        }
        let mut values = Storage::Cpu(values);
        match &mut self.shards[id] {
            // Swap, so that the old shard's memory is recycled.
            Some(shard @ Storage::Cpu(_)) => std::mem::swap(shard, &mut values),
            Some(shard) => {
                let own = rank.shard(id).len();
                copy(&values, 0..own, shard, 0..own)?;
            }
            None => {
                for piece in &rank.segment(id).pieces {
                    let parameter = &rank.model.parameters()[piece.parameter];
                    overwrite(parameter, 0..piece.range.len(), &values, piece.range.clone())?;
                }
            }
        }
        if let Storage::Cpu(values) = values {
            give_tied_back(rank, memory, buffer(values)?);
        }
        Ok(())
    }
}

/// Returns the buffers that the refresh of a segment sends and receives. `master` is the master of this rank's part.
fn to_refresh(rank: &Rank, memory: &mut Memory, master: &FlatBuffer, id: SegmentId) -> Result<ToGather, ZeroError> {
    let segment = rank.segment(id);
    let (own, counts) = (rank.shard(id), segment.counts());
    let is_on_gpu = rank.is_on_gpu();
    let (elements, by_gpu) = (own.len(), is_on_gpu && rank.options.on_gpu.gathers);
    let shard = match master.host().filter(|master| is_on_gpu && !master.is_empty()) {
        Some(master) => {
            // Send the master on the host, which was just updated, instead of downloading the parameters.
            match by_gpu {
                true => memory.gpu()?.upload_rounded(master, rank.dtype)?,
                false => Storage::Cpu(working(master, rank.dtype)),
            }
        }
        None => {
            let mut shard = memory.blank(rank.dtype, elements, by_gpu)?;
            for (parameter, inside, at) in segment.overlaps(own) {
                let (full, _) = rank.model.parameters()[parameter].leaf().storage_and_layout();
                copy(&full, inside, &mut shard, at)?;
            }
            shard
        }
    };
    memory.count(Category::Staging, elements, rank.width(id));
    let output = match segment.only_parameter() {
        // Gather in place. The gather takes the leaf's storage, so reading the leaf fails until the gather ends.
        Some(parameter) if by_gpu || !is_on_gpu => rank.model.parameters()[parameter].take()?,
        _ => {
            memory.count(Category::Staging, segment.elements(), rank.width(id));
            memory.blank(rank.dtype, segment.elements(), by_gpu)?
        }
    };
    let (shard, output) = (outgoing(shard, elements, by_gpu)?, outgoing(output, segment.elements(), by_gpu)?);
    Ok(ToGather { shard, output, counts })
}

/// Recycles a buffer of parameters after it was sent or stored.
pub(crate) fn give_tied_back(rank: &Rank, memory: &mut Memory, sent: Buffer) {
    memory.uncount(Category::Staging, sent.len(), rank.dtype.size_in_bytes());
    if let Buffer::F32(values) = sent {
        memory.give(values);
    }
}

/// Allocates a buffer to receive parameters. It counts as staging until they are stored.
pub(crate) fn room_for_tied(rank: &Rank, memory: &mut Memory, id: SegmentId) -> Buffer {
    let elements = rank.segment(id).held(rank.placements(id).parameters, rank.groups.at().shard).len();
    memory.count(Category::Staging, elements, rank.width(id));
    match rank.dtype {
        DType::BF16 => Buffer::zeros(Dtype::Bf16, elements),
        DType::F16 => Buffer::zeros(Dtype::F16, elements),
        _ => Buffer::F32(memory.take(elements)),
    }
}
