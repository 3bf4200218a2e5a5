//! Reductions that send codes (qgZ), in one or two all-to-alls. Each rank decodes the codes that it receives and adds them
//! in f32 to its own values, in the order of the ranks.

use std::ops::Range;
use std::sync::Arc;

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
use crate::threads::widen;

/// Returns the all-to-alls of a segment's reduction; none if it sends values.
pub(super) fn levels(rank: &Rank, id: SegmentId) -> Vec<CodedLevel> {
    rank.segment(id).reduced_as(rank.options.coded, rank.groups.mesh(), rank.groups.at())
}

/// An all-to-all of codes in flight.
pub(super) struct Exchange {
    level: usize,
    /// This rank's own values of the ranges that it sums, which are not rounded.
    own: FlatBuffer,
    pending: Pending<Exchanged>,
}

impl Exchange {
    pub(super) fn level(&self) -> usize {
        self.level
    }

    pub(super) fn is_done(&self) -> bool {
        self.pending.is_done()
    }
}

/// Starts the all-to-all of a level. At the first level, `values` are the gradients of the whole segment; at the second
/// level, they are the sums of the first. In the staging count, the codes and this rank's own values replace the values.
pub(super) fn exchange(
    rank: &Rank,
    memory: &mut Memory,
    id: SegmentId,
    level: usize,
    values: KeptGradient,
) -> Result<Exchange, ZeroError> {
    let (segment, of) = (rank.segment(id), &levels(rank, id)[level]);
    let (codes, sent, received) = (of.codes, of.sent(segment), of.received(segment));
    memory.count(Category::Staging, of.bytes(segment), 1);
    // The ranges of all ranks, and the positions of their first values; then without those that stay here.
    let mut leaving: Vec<Range<usize>> = of.ranges.iter().flatten().cloned().collect();
    let mut starts = if level == 0 { leaving.iter().map(|range| range.start).collect() } else { consecutive(&leaving) };
    let before: usize = of.ranges[..of.own].iter().map(Vec::len).sum();
    let stay = before..before + of.summed().len();
    leaving.drain(stay.clone());
    let own_starts: Vec<usize> = starts.drain(stay).collect();
    let places = (&leaving[..], &starts[..]);
    memory.count(Category::Staging, of.elements(), 4);
    let own = own_values(rank, memory, id, of, (&values, &own_starts))?;
    let by_gpu = rank.options.on_gpu.sums && values.host().is_none();
    let buffer: Buffer = match values.host() {
        Some(Grads::F32(values)) => {
            encode(segment, codes, places, |at, bytes| codes.quantize(&values[at], bytes))?.into()
        }
        Some(Grads::Bf16(values)) => {
            encode(segment, codes, places, |at, bytes| codes.quantize_half(&values[at], bytes))?.into()
        }
        None => {
            gpu::quantized(codes, gpu::values_of(values.f32()?)?, &coded::places(segment, &leaving, &starts), by_gpu)?
        }
    };
    memory.uncount(Category::Staging, values.len(), 4);
    memory.give_kept_back(values);
    let room = memory.room_for_codes(received.iter().sum(), by_gpu)?;
    let pending = communicator(rank, level).all_to_all(buffer, room, &sent, &received);
    Ok(Exchange { level, own, pending })
}

/// Copies this rank's own values of the ranges that it sums. `firsts` are the positions of their first values.
fn own_values(
    rank: &Rank,
    memory: &mut Memory,
    id: SegmentId,
    of: &CodedLevel,
    (values, firsts): (&KeptGradient, &[usize]),
) -> Result<FlatBuffer, ZeroError> {
    let mut own = memory.room(rank, id, of.elements())?;
    let mut at = 0;
    for (range, &first) in of.summed().iter().zip(firsts) {
        let source = first..first + range.len();
        match (values, &mut own) {
            (KeptGradient::F32(values), own) => own.copy(at, values, source)?,
            (KeptGradient::Bf16(values), own) => {
                let own = own.host_mut().ok_or_else(|| ZeroError::internal("gradients in bf16 are on a GPU"))?;
                widen(&values[source], &mut own[at..at + range.len()])?;
            }
        }
        at += range.len();
    }
    Ok(own)
}

/// Waits for a level's codes, decodes them, and adds them to this rank's own values in the order of the ranks. The sum
/// stays in the staging count, without the codes.
pub(super) fn sum(
    rank: &Rank,
    memory: &mut Memory,
    id: SegmentId,
    exchange: Exchange,
) -> Result<FlatBuffer, ZeroError> {
    let Exchange { level, mut own, pending } = exchange;
    let (segment, of) = (rank.segment(id), &levels(rank, id)[level]);
    let (codes, ranges, received) = (of.codes, of.summed(), pending.wait()?.output);
    memory.uncount(Category::Staging, of.bytes(segment), 1);
    let senders = of.ranges.len() - 1;
    if let Some(sum) = own.host_mut() {
        let bytes = received.into_u8()?;
        for bytes in bytes.chunks_exact((bytes.len() / senders).max(1)) {
            decode(segment, codes, ranges, (bytes, &mut *sum), |bytes, sum| codes.add(bytes, sum))?;
        }
        return Ok(own);
    }
    let places = coded::places(segment, ranges, &consecutive(ranges));
    memory.gpu()?.add_codes(codes, received, senders, &places, &mut own)?;
    Ok(own)
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
