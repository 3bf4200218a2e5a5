//! Reductions that send codes (qgZ), in one or two all-to-alls. Each rank decodes the codes that it receives and sums
//! the values in f32, in the order of the ranks.

use std::ops::Range;
use std::sync::Arc;

use candle_core::DType;
use zero_comm::{Buffer, Communicator, Exchanged, Pending};
use zero_model::sink::FlatBuffer;
use zero_pipeline::SegmentId;

use crate::coded::{self, CodedLevel, decode, encode};
use crate::error::ZeroError;
use crate::gpu;
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
    let firsts = if level == 0 { ranges.iter().map(|range| range.start).collect() } else { consecutive(&ranges) };
    let places = (&ranges[..], &firsts[..]);
    let by_gpu = rank.options.on_gpu.sums && values.host().is_none();
    let sent = match values.host() {
        Some(Grads::F32(values)) => {
            let mut sent = vec![0; counts.iter().sum()];
            encode(segment, codes, places, &mut sent, |at, bytes| codes.quantize(&values[at], bytes))?;
            Buffer::U8(sent)
        }
        Some(Grads::Bf16(values)) => {
            let mut sent = vec![0; counts.iter().sum()];
            encode(segment, codes, places, &mut sent, |at, bytes| codes.quantize_half(&values[at], bytes))?;
            Buffer::U8(sent)
        }
        None => {
            let values = gpu::values_of(values.f32()?)?;
            gpu::quantized(codes, values, &coded::places(segment, &ranges, &firsts), by_gpu)?
        }
    };
    memory.count(Category::Staging, of.bytes(segment), 1);
    memory.uncount(Category::Staging, values.len(), 4);
    memory.give_kept_back(values);
    let (own, ranks) = (counts[of.own], counts.len());
    let received = memory.room_for_codes(own * ranks, by_gpu)?;
    Ok(communicator(rank, level).all_to_all(sent, received, &counts, &vec![own; ranks]))
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
    let (codes, ranges, elements) = (of.codes, of.summed(), of.elements());
    memory.count(Category::Staging, elements, 4);
    memory.uncount(Category::Staging, of.bytes(segment), 1);
    if rank.is_resident(id) {
        let (places, senders) = (coded::places(segment, ranges, &consecutive(ranges)), of.ranges.len());
        let sum = memory.gpu()?.dequantized(codes, exchanged.output, senders, &places, (DType::F32, elements))?;
        return gpu::gradient_of(sum, elements);
    }
    let (bytes, mut sum) = (exchanged.output.into_u8()?, memory.take(elements));
    let of_each = of.counts(segment)[of.own];
    for (index, bytes) in bytes.chunks_exact(of_each.max(1)).enumerate() {
        match index {
            0 => decode(segment, codes, ranges, (bytes, &mut sum), |bytes, sum| codes.dequantize(bytes, sum))?,
            _ => decode(segment, codes, ranges, (bytes, &mut sum), |bytes, sum| codes.add(bytes, sum))?,
        }
    }
    Ok(FlatBuffer::Host(sum))
}

/// Returns the positions of the first values of ranges whose values follow each other.
fn consecutive(ranges: &[Range<usize>]) -> Vec<usize> {
    let first = |next: &mut usize, range: &Range<usize>| Some(std::mem::replace(next, *next + range.len()));
    ranges.iter().scan(0, first).collect()
}

/// Returns the communicator of a level. In a divided shard group, level 0 is the near group, and level 1 is the ranks
/// at the same position in all near groups. In an undivided shard group, level 0 is the whole group.
fn communicator(rank: &Rank, level: usize) -> &Arc<dyn Communicator> {
    let of_level = if level == 0 { rank.groups.near() } else { rank.groups.across() };
    of_level.unwrap_or_else(|| rank.shards())
}
