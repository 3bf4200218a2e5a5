//! The leaves of a segment's parameters: fills them with gathered values, and frees them.

use candle_core::{CpuStorage, Storage};
use zero_pipeline::SegmentId;

use crate::accounting::ledger::Category;
use crate::accounting::memory::Memory;
use crate::disk::{Disk, Stored};
use crate::error::ZeroError;
use crate::rank::Rank;
use crate::storage::{copy, overwrite};

/// Returns whether a gather needs no copy: this rank holds the only shard, reads it from the disk, and sends no codes.
pub(crate) fn is_whole(rank: &Rank, disk: &Disk, id: SegmentId) -> bool {
    rank.shards().size() == 1 && disk.has(id, Stored::Parameters) && rank.gathered_as(id).is_none()
}

/// Fills a segment's leaves with the gathered values. Recycles the buffer of the values unless a leaf has taken it as
/// its storage.
pub(crate) fn fill_and_give(rank: &Rank, memory: &mut Memory, id: SegmentId, output: Storage) -> Result<(), ZeroError> {
    if let Some(Storage::Cpu(CpuStorage::F32(full))) = fill(rank, memory, id, output)? {
        memory.give(full);
    }
    Ok(())
}

/// Fills a segment's leaves with the gathered values. A single parameter takes `output` as its storage; otherwise the
/// values are copied and `output` is returned.
pub(crate) fn fill(
    rank: &Rank,
    memory: &mut Memory,
    id: SegmentId,
    output: Storage,
) -> Result<Option<Storage>, ZeroError> {
    let segment = rank.segment(id);
    let comes_to_gpu = matches!(output, Storage::Cpu(_)) && rank.is_on_gpu();
    if let Some(parameter) = segment.only_parameter() {
        let parameter = &rank.model.parameters()[parameter];
        if comes_to_gpu {
            parameter.put(memory.upload(&output)?)?;
            return Ok(Some(output));
        }
        parameter.put(output)?;
        return Ok(None);
    }
    // While the leaves are filled, the gathered values are in memory twice. This records the peak.
    memory.count(Category::Staging, segment.elements(), rank.width(id));
    memory.uncount(Category::Staging, segment.elements(), rank.width(id));
    let on_gpu = matches!(output, Storage::Cuda(_));
    fill_pieces(rank, memory, id, &output, on_gpu)?;
    Ok(Some(output))
}

/// Fills a segment's leaves with copies of the values. The copies are made on the GPU if `on_gpu`, and on the host
/// otherwise.
pub(crate) fn fill_pieces(
    rank: &Rank,
    memory: &mut Memory,
    id: SegmentId,
    values: &Storage,
    on_gpu: bool,
) -> Result<(), ZeroError> {
    for piece in &rank.segment(id).pieces {
        let parameter = &rank.model.parameters()[piece.parameter];
        let mut copied = memory.blank(rank.dtype, piece.range.len(), on_gpu)?;
        copy(values, piece.range.clone(), &mut copied, 0..piece.range.len())?;
        if on_gpu || !rank.is_on_gpu() {
            parameter.put(copied)?;
            continue;
        }
        parameter.put(memory.upload(&copied)?)?;
        if let Storage::Cpu(copied) = copied {
            memory.reuse(copied);
        }
    }
    Ok(())
}

/// Frees a segment's gathered parameters.
pub(crate) fn release(rank: &Rank, memory: &mut Memory, disk: &Disk, id: SegmentId) -> Result<(), ZeroError> {
    let segment = rank.segment(id);
    memory.uncount(Category::Staging, segment.elements(), rank.width(id));
    // Do not pool memory from a disk read, since each read allocates new memory.
    let is_kept = !(is_whole(rank, disk, id) && segment.only_parameter().is_some());
    for piece in &segment.pieces {
        if let CpuStorage::F32(values) = rank.model.parameters()[piece.parameter].release()?
            && is_kept
        {
            memory.give(values);
        }
    }
    memory.released_on_gpu();
    Ok(())
}

/// Stores a refreshed segment in its leaves.
pub(crate) fn take_over(rank: &Rank, memory: &mut Memory, id: SegmentId, output: Storage) -> Result<(), ZeroError> {
    let segment = rank.segment(id);
    match segment.only_parameter().map(|parameter| &rank.model.parameters()[parameter]) {
        Some(parameter) if matches!(output, Storage::Cpu(_)) && rank.is_on_gpu() => {
            parameter.put(memory.upload(&output)?)?;
        }
        Some(parameter) => return Ok(parameter.put(output).map(drop)?),
        None => {
            for piece in &segment.pieces {
                let parameter = &rank.model.parameters()[piece.parameter];
                overwrite(parameter, 0..piece.range.len(), &output, piece.range.clone())?;
            }
        }
    }
    memory.uncount(Category::Staging, segment.elements(), rank.width(id));
    if let Storage::Cpu(used) = output {
        memory.reuse(used);
    }
    Ok(())
}
