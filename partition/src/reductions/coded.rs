//! Reductions that send codes (qgZ), in one or two all-to-alls. Each rank decodes the codes that it receives and sums
//! the values in f32, in the order of the ranks.

use std::ops::Range;
use std::sync::Arc;

use zero_comm::{Buffer, Communicator, Exchanged, Pending};
use zero_model::sink::FlatBuffer;
use zero_pipeline::SegmentId;

use crate::coded::{CodedLevel, decode, encode};
use crate::error::ZeroError;
use crate::kept::{Grads, KeptGradient};
use crate::ledger::Category;
use crate::memory::Memory;
use crate::rank::Rank;

/// Returns the all-to-alls of a segment's reduction; none if it sends values.
pub(super) fn levels(rank: &Rank, id: SegmentId) -> Vec<CodedLevel> {
    rank.segment(id).reduced_as(rank.options.coded, rank.groups.mesh(), rank.groups.at())
}

/// Starts the all-to-all of a level. At the first level, `values` are the gradients of the whole segment; at the second
/// level, they are the sums of the first. In the staging count, the codes replace the values.
pub(super) fn exchange(
    rank: &Rank,
    memory: &mut Memory,
    id: SegmentId,
    level: usize,
    values: KeptGradient,
) -> Result<Pending<Exchanged>, ZeroError> {
    let (segment, of) = (rank.segment(id), &levels(rank, id)[level]);
    let (codes, counts) = (of.codes, of.counts(segment));
    let ranges: Vec<Range<usize>> = of.ranges.iter().flatten().cloned().collect();
    let mut next = 0;
    let first = |range: &Range<usize>| {
        let first = if level == 0 { range.start } else { next };
        next += range.len();
        first
    };
    let firsts: Vec<usize> = ranges.iter().map(first).collect();
    let places = (&ranges[..], &firsts[..]);
    let mut sent = vec![0; counts.iter().sum()];
    match values.host() {
        Some(Grads::F32(values)) => {
            encode(segment, codes, places, &mut sent, |at, bytes| codes.quantize(&values[at], bytes))?;
        }
        Some(Grads::Bf16(values)) => {
            encode(segment, codes, places, &mut sent, |at, bytes| codes.quantize_half(&values[at], bytes))?;
        }
        None => return Err(ZeroError::internal("gradients on a GPU are not sent as codes")),
    }
    memory.count(Category::Staging, of.bytes(segment), 1);
    memory.uncount(Category::Staging, values.len(), 4);
    memory.give_kept_back(values);
    let (own, ranks) = (counts[of.own], counts.len());
    let received = Buffer::U8(vec![0; own * ranks]);
    Ok(communicator(rank, level).all_to_all(Buffer::U8(sent), received, &counts, &vec![own; ranks]))
}

/// Decodes and sums the codes that a level has received, in the order of its ranks. The sum replaces the codes in the
/// staging count.
pub(super) fn sum(
    rank: &Rank,
    memory: &mut Memory,
    id: SegmentId,
    level: usize,
    exchanged: Exchanged,
) -> Result<FlatBuffer, ZeroError> {
    let (segment, of) = (rank.segment(id), &levels(rank, id)[level]);
    let (codes, ranges, bytes) = (of.codes, of.summed(), exchanged.output.into_u8()?);
    memory.count(Category::Staging, of.elements(), 4);
    let mut sum = memory.take(of.elements());
    let of_each = of.counts(segment)[of.own];
    for (index, bytes) in bytes.chunks_exact(of_each.max(1)).enumerate() {
        match index {
            0 => decode(segment, codes, ranges, (bytes, &mut sum), |bytes, sum| codes.dequantize(bytes, sum))?,
            _ => decode(segment, codes, ranges, (bytes, &mut sum), |bytes, sum| codes.add(bytes, sum))?,
        }
    }
    memory.uncount(Category::Staging, of.bytes(segment), 1);
    Ok(FlatBuffer::Host(sum))
}

/// Returns the communicator of a level. In a divided shard group, level 0 is the near group, and level 1 is the ranks
/// at the same position in all near groups. In an undivided shard group, level 0 is the whole group.
fn communicator(rank: &Rank, level: usize) -> &Arc<dyn Communicator> {
    let of_level = if level == 0 { rank.groups.near() } else { rank.groups.across() };
    of_level.unwrap_or_else(|| rank.shards())
}
