//! Reductions that send codes (qgZ), in one or two all-to-alls for all segments of a bucket. Each rank decodes the
//! codes that it receives and adds them in f32 to its own values, in the order of the ranks.

use std::ops::Range;
use std::sync::Arc;

use candle_core::CudaStorage;
use zero_comm::{Buffer, Communicator, Exchanged, Pending};
use zero_model::sink::FlatBuffer;
use zero_optim::BlockCodes;
use zero_pipeline::SegmentId;

use crate::accounting::ledger::Category;
use crate::accounting::memory::Memory;
use crate::coded::{CodedLevel, CodedPart, decode, encode, places};
use crate::error::ZeroError;
use crate::gpu;
use crate::grad_buffer::{GradBuffer, Grads};
use crate::rank::Rank;
use crate::segment::Segment;
use crate::threads::widen;

/// Returns the all-to-alls of a segment's reduction; none if it sends values.
pub(super) fn levels(rank: &Rank, id: SegmentId) -> Vec<CodedLevel> {
    rank.segment(id).reduced_as(rank.options.coded, rank.groups.mesh(), rank.groups.at())
}

/// An all-to-all of codes in flight. Its buffers have a part for each rank, with the codes of one segment after the
/// other.
pub(super) struct Exchange {
    level: usize,
    /// For each segment, this rank's own unrounded values of the ranges that it sums.
    own: Vec<FlatBuffer>,
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

/// Memory with codes.
enum Codes {
    Host(Vec<u8>),
    Device(CudaStorage),
}

impl Codes {
    fn room(memory: &mut Memory, bytes: usize, is_on_device: bool) -> Result<Self, ZeroError> {
        Ok(if is_on_device { Self::Device(memory.gpu()?.codes(bytes)?) } else { Self::Host(vec![0; bytes]) })
    }

    /// Writes the codes of parts of a segment.
    fn write(
        &mut self,
        (segment, codes): (&Segment, BlockCodes),
        parts: &[CodedPart],
        values: &GradBuffer,
    ) -> Result<(), ZeroError> {
        match (self, values.host()) {
            (Self::Host(to), Some(Grads::F32(values))) => {
                encode(segment, codes, parts, to, |of, bytes| codes.quantize(&values[of], bytes))
            }
            (Self::Host(to), Some(Grads::Bf16(values))) => {
                encode(segment, codes, parts, to, |of, bytes| codes.quantize_half(&values[of], bytes))
            }
            (Self::Device(to), None) => {
                gpu::quantize(codes, gpu::values_of(values.f32()?)?, &places(segment, codes, parts), to)
            }
            _ => Err(gpu::elsewhere()),
        }
    }

    /// Adds the values of several senders to `sum`, which holds `ranges` of a segment, in the order of the senders. The
    /// codes of consecutive senders start `apart` bytes after each other; those of the first sender start at `at`.
    fn add(
        &self,
        (segment, codes): (&Segment, BlockCodes),
        (senders, apart, at): (usize, usize, usize),
        ranges: &[Range<usize>],
        sum: &mut FlatBuffer,
    ) -> Result<(), ZeroError> {
        match self {
            Self::Host(from) => {
                let sum = sum.host_mut().ok_or_else(gpu::elsewhere)?;
                for sender in 0..senders {
                    let from = &from[at + sender * apart..];
                    decode(segment, codes, ranges, (from, &mut *sum), |bytes, sum| codes.add(bytes, sum))?;
                }
                Ok(())
            }
            Self::Device(from) => {
                let mut parts: Vec<CodedPart> = vec![];
                let (mut first, mut at) = (0, at);
                for range in ranges {
                    parts.push(CodedPart { range: range.clone(), first, at });
                    first += range.len();
                    at += segment.code_bytes(codes, range);
                }
                gpu::add_codes(codes, from, (senders, apart), &places(segment, codes, &parts), sum)
            }
        }
    }

    /// Wraps the codes to be sent: from the GPU if `by_gpu`, otherwise from the host.
    fn leaving(self, bytes: usize, by_gpu: bool) -> Result<Buffer, ZeroError> {
        match self {
            Self::Host(written) => Ok(written.into()),
            Self::Device(written) => gpu::leaving(written, bytes, by_gpu),
        }
    }
}

/// Starts the all-to-all of a level. At the first level, `values` are the gradients of whole segments; at the second
/// level, they are the sums of the first. All of them are on the host, or all are on the GPU. The ledger stops counting
/// `values` as staging, and counts the codes and this rank's own values instead.
pub(super) fn exchange(
    rank: &Rank,
    memory: &mut Memory,
    ids: &[SegmentId],
    level: usize,
    values: Vec<GradBuffer>,
) -> Result<Exchange, ZeroError> {
    let of_all: Vec<(SegmentId, CodedLevel)> = at_level(rank, ids, level);
    let sent = total(rank, &of_all, CodedLevel::sent);
    let bytes = sent.iter().sum();
    memory.count(Category::Staging, bytes, 1);
    let is_on_device = values.iter().any(|values| values.host().is_none());
    let mut codes = Codes::room(memory, bytes, is_on_device)?;
    let start = |next: &mut usize, bytes: &usize| Some(std::mem::replace(next, *next + bytes));
    // For each rank, the offset of the next segment's codes.
    let mut next: Vec<usize> = sent.iter().scan(0, start).collect();
    let mut own = Vec::with_capacity(ids.len());
    for ((id, of), values) in of_all.iter().zip(values) {
        let (segment, mut stay, mut leave, mut behind) = (rank.segment(*id), vec![], vec![], 0);
        for (to, range) in of.ranges.iter().enumerate().flat_map(|(to, ranges)| ranges.iter().map(move |r| (to, r))) {
            let first = if level == 0 { range.start } else { behind };
            behind += range.len();
            if to == of.own {
                stay.push(first..first + range.len());
                continue;
            }
            leave.push(CodedPart { range: range.clone(), first, at: next[to] });
            next[to] += segment.code_bytes(of.codes, range);
        }
        memory.count(Category::Staging, of.elements(), 4);
        own.push(copied(rank, memory, *id, &values, &stay)?);
        codes.write((segment, of.codes), &leave, &values)?;
        memory.uncount(Category::Staging, values.len(), 4);
        memory.give_kept_back(values);
    }
    let by_gpu = rank.options.on_gpu.sums && is_on_device;
    let leaving = codes.leaving(bytes, by_gpu)?;
    let received = total(rank, &of_all, CodedLevel::received);
    let bytes = received.iter().sum();
    memory.count(Category::Staging, bytes, 1);
    let room = memory.room_for_codes(bytes, by_gpu)?;
    let pending = communicator(rank, level).all_to_all(leaving, room, &sent, &received);
    Ok(Exchange { level, own, pending })
}

/// Copies ranges of values to one buffer.
fn copied(
    rank: &Rank,
    memory: &mut Memory,
    id: SegmentId,
    values: &GradBuffer,
    ranges: &[Range<usize>],
) -> Result<FlatBuffer, ZeroError> {
    let mut own = memory.room(rank, id, ranges.iter().map(Range::len).sum())?;
    let mut at = 0;
    for range in ranges {
        match (values, &mut own) {
            (GradBuffer::F32(values), own) => own.copy(at, values, range.clone())?,
            (GradBuffer::Bf16(values), own) => {
                let own = own.host_mut().ok_or_else(|| ZeroError::internal("gradients in bf16 are on a GPU"))?;
                widen(&values[range.clone()], &mut own[at..at + range.len()])?;
            }
        }
        at += range.len();
    }
    Ok(own)
}

/// Waits for a level's codes, decodes them, and adds them to this rank's own values in the order of the ranks. Returns
/// the sums of the segments. The ledger still counts the sums as staging, but no longer the codes.
pub(super) fn sum(
    rank: &Rank,
    memory: &mut Memory,
    ids: &[SegmentId],
    exchange: Exchange,
) -> Result<Vec<FlatBuffer>, ZeroError> {
    let Exchange { level, mut own, pending } = exchange;
    let of_all = at_level(rank, ids, level);
    let received = pending.wait()?.output;
    let received = match own.iter().any(|own| own.host().is_none()) {
        true => Codes::Device(memory.gpu()?.arrived(received)?),
        false => Codes::Host(received.into_u8()?),
    };
    let apart = of_all.iter().map(|(id, of)| of.of_sender(rank.segment(*id))).sum();
    let mut at = 0;
    for ((id, of), own) in of_all.iter().zip(&mut own) {
        let (segment, senders) = (rank.segment(*id), of.ranges.len() - 1);
        received.add((segment, of.codes), (senders, apart, at), of.summed(), own)?;
        at += of.of_sender(segment);
        memory.uncount(Category::Staging, of.bytes(segment), 1);
    }
    Ok(own)
}

/// Returns the segments' parts of an all-to-all.
fn at_level(rank: &Rank, ids: &[SegmentId], level: usize) -> Vec<(SegmentId, CodedLevel)> {
    ids.iter().map(|&id| (id, levels(rank, id).swap_remove(level))).collect()
}

/// Returns the bytes that all segments together exchange with each rank.
fn total(
    rank: &Rank,
    of_all: &[(SegmentId, CodedLevel)],
    bytes: impl Fn(&CodedLevel, &Segment) -> Vec<usize>,
) -> Vec<usize> {
    let mut total = vec![0; of_all.first().map_or(0, |(_, of)| of.ranges.len())];
    for (id, of) in of_all {
        total.iter_mut().zip(bytes(of, rank.segment(*id))).for_each(|(total, bytes)| *total += bytes);
    }
    total
}

/// Returns the communicator of a level. In a divided shard group, level 0 is the near group, and level 1 is the ranks
/// at the same position in all near groups. In an undivided shard group, level 0 is the whole group.
fn communicator(rank: &Rank, level: usize) -> &Arc<dyn Communicator> {
    let of_level = if level == 0 { rank.groups.near() } else { rank.groups.across() };
    of_level.unwrap_or_else(|| rank.shards())
}
