//! Gathers and reductions that send codes, that is, values quantized in blocks, instead of the values (ZeRO++: Wang et
//! al., 2023, arXiv 2306.10209).
//!
//! The blocks of [`BlockCodes`] are counted from the start of each parameter. Shards are cut at multiples of a block.
//! The codes of a segment are therefore the concatenated codes of its shards and do not depend on the number of ranks.
//!
//! A gather (qwZ) sends the codes of the working parameters. Every rank decodes the codes of all shards, including its
//! own, so all ranks compute with the same weights.
//!
//! A reduction (qgZ, `reductions/coded.rs`) sends each rank the codes of the other ranks' gradients of its shard. The
//! rank decodes them and adds them in f32 to its own gradients, in the order of the ranks. If the shard group is
//! divided into near groups, a first all-to-all sums every shard over the ranks of each near group, and a second
//! all-to-all adds these sums over the near groups. Codes have 8 bits within near groups, where links are fast, and 4
//! bits between them.

use std::ops::Range;

use candle_core::{CpuStorage, Storage};
use zero_comm::{Gathered, ToGather};
use zero_model::ops::in_parallel;
use zero_optim::norm::BLOCK;
use zero_optim::{BlockCodes, LengthError};
use zero_pipeline::{Coordinates, Mesh, Placement, SegmentId};

use crate::accounting::ledger::Category;
use crate::accounting::memory::Memory;
use crate::error::ZeroError;
use crate::gpu;
use crate::options::Coded;
use crate::rank::Rank;
use crate::segment::{Segment, flat_bytes};
use crate::storage::not_floats;
use crate::threads::share;

/// One segment's part of an all-to-all in a reduction that sends codes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CodedLevel {
    /// The codes.
    pub codes: BlockCodes,
    /// For each rank of the communicator, the ranges of the segment whose gradients that rank receives from all ranks
    /// and sums.
    pub ranges: Vec<Vec<Range<usize>>>,
    /// This rank's place in the communicator.
    pub own: usize,
    /// Whether the communicator is the near group; an undivided shard group counts as a near group.
    pub is_near: bool,
}

impl CodedLevel {
    /// Returns the bytes that the rank sends to each rank: none to itself.
    #[must_use]
    pub fn sent(&self, segment: &Segment) -> Vec<usize> {
        let bytes = |rank: usize| if rank == self.own { 0 } else { self.of_each(segment, rank) };
        (0..self.ranges.len()).map(bytes).collect()
    }

    /// Returns the bytes that the rank receives from each rank: none from itself.
    #[must_use]
    pub fn received(&self, segment: &Segment) -> Vec<usize> {
        let of_each = self.of_sender(segment);
        (0..self.ranges.len()).map(|rank| if rank == self.own { 0 } else { of_each }).collect()
    }

    /// Returns the bytes that this rank receives from each other rank.
    pub(crate) fn of_sender(&self, segment: &Segment) -> usize {
        self.of_each(segment, self.own)
    }

    /// Returns the bytes that each other rank sends to `rank`.
    fn of_each(&self, segment: &Segment, rank: usize) -> usize {
        self.ranges[rank].iter().map(|range| segment.code_bytes(self.codes, range)).sum()
    }

    /// Returns the ranges that the rank sums.
    #[must_use]
    pub fn summed(&self) -> &[Range<usize>] {
        &self.ranges[self.own]
    }

    /// Returns the number of elements that the rank sums.
    #[must_use]
    pub fn elements(&self) -> usize {
        self.summed().iter().map(Range::len).sum()
    }

    /// Returns the bytes of the codes that the rank sends to other ranks.
    #[must_use]
    pub fn leaving(&self, segment: &Segment) -> usize {
        self.sent(segment).iter().sum()
    }

    /// Returns the bytes of the codes that the rank sends and receives.
    #[must_use]
    pub fn bytes(&self, segment: &Segment) -> usize {
        self.leaving(segment) + self.received(segment).iter().sum::<usize>()
    }
}

impl Segment {
    /// Returns the codes that gathers of the segment send; `None` if they send values.
    #[must_use]
    pub fn gathered_as(&self, coded: Coded) -> Option<BlockCodes> {
        let is_wanted = if self.is_trainable { coded.weights } else { coded.frozen_weights };
        let is_gathered = self.placements.parameters == Placement::Sharded && self.quantization.is_none();
        (is_wanted && is_gathered).then_some(BlockCodes::Int8)
    }

    /// Returns the all-to-alls in which the rank at `at` reduces the segment's gradients, in order; none if the
    /// reduction sends values. An undivided shard group needs one all-to-all. A divided shard group needs two: the
    /// first sums within the near group, and the second sends these sums between near groups. The last all-to-all gives
    /// the sum for the rank's shard.
    #[must_use]
    pub fn reduced_as(&self, coded: Coded, mesh: Mesh, at: Coordinates) -> Vec<CodedLevel> {
        if !coded.gradients || self.placements.gradients == Placement::Replicated {
            return vec![];
        }
        let (near, groups) = (mesh.near(), mesh.shards() / mesh.near());
        let (place, group) = (at.shard % near, at.shard / near);
        let at_place = |place| (0..groups).map(|group| self.shard(group * near + place)).collect();
        let within = CodedLevel {
            codes: BlockCodes::Int8,
            ranges: (0..near).map(at_place).collect(),
            own: place,
            is_near: true,
        };
        let in_group = |group| vec![self.shard(group * near + place)];
        let between = CodedLevel {
            codes: BlockCodes::Fp4,
            ranges: (0..groups).map(in_group).collect(),
            own: group,
            is_near: false,
        };
        [within, between].into_iter().filter(|level| level.ranges.len() > 1).collect()
    }

    /// Returns the bytes of the codes of a range that begins and ends at shard boundaries.
    #[must_use]
    pub fn code_bytes(&self, codes: BlockCodes, range: &Range<usize>) -> usize {
        self.overlaps(range.clone()).map(|(_, inside, _)| codes.bytes(inside.len())).sum()
    }

    /// Returns the bytes of the codes of each rank's shard.
    #[must_use]
    pub fn shard_code_bytes(&self, codes: BlockCodes) -> Vec<usize> {
        self.bounds.windows(2).map(|bounds| self.code_bytes(codes, &(bounds[0]..bounds[1]))).collect()
    }

    /// Returns the bytes of the flat buffer through which NCCL gathers the codes; 0 if the codes of all shards have
    /// equal lengths.
    #[must_use]
    pub fn flat_code_bytes(&self, codes: BlockCodes) -> usize {
        flat_bytes(&self.shard_code_bytes(codes), 1)
    }

    /// Divides ranges among threads. Each part is (index of its range, position in that range, bytes of its codes).
    fn shares(&self, codes: BlockCodes, ranges: &[Range<usize>]) -> Vec<Vec<(usize, Range<usize>, usize)>> {
        let size = share(ranges.iter().map(Range::len).sum());
        let (mut shares, mut room) = (vec![vec![]], size);
        for (index, range) in ranges.iter().enumerate() {
            for (.., at) in self.overlaps(range.clone()) {
                let mut start = at.start;
                while start < at.end {
                    let end = at.end.min(start + room.next_multiple_of(BLOCK));
                    shares.last_mut().into_iter().for_each(|share| {
                        share.push((index, start..end, codes.bytes(end - start)));
                    });
                    room = room.saturating_sub(end - start);
                    if room == 0 {
                        shares.push(vec![]);
                        room = size;
                    }
                    start = end;
                }
            }
        }
        shares.retain(|share| !share.is_empty());
        shares
    }
}

/// A range of a segment that is encoded or decoded.
pub(crate) struct CodedPart {
    pub(crate) range: Range<usize>,
    /// Position of its first value.
    pub(crate) first: usize,
    /// Offset of its codes in bytes.
    pub(crate) at: usize,
}

/// Cuts ranges of a segment at the boundaries of parameters. Returns, for each resulting part, its range in the values
/// and the offset of its codes in bytes.
pub(crate) fn places(segment: &Segment, codes: BlockCodes, parts: &[CodedPart]) -> Vec<(Range<usize>, usize)> {
    let of_part = |&CodedPart { ref range, first, mut at }: &CodedPart| {
        let place = segment.overlaps(range.clone()).map(move |(.., of)| {
            let offset = at;
            at += codes.bytes(of.len());
            (first + of.start..first + of.end, offset)
        });
        place.collect::<Vec<_>>()
    };
    parts.iter().flat_map(of_part).collect()
}

/// Writes the codes of parts, whose offsets increase. Runs `work` on several threads, each time on a part of a range
/// and the bytes for its codes.
pub(crate) fn encode(
    segment: &Segment,
    codes: BlockCodes,
    parts: &[CodedPart],
    written: &mut [u8],
    work: impl Fn(Range<usize>, &mut [u8]) -> Result<(), LengthError> + Sync,
) -> Result<(), ZeroError> {
    let (mut rest, mut done) = (written, 0);
    let mut offsets: Vec<usize> = parts.iter().map(|part| part.at).collect();
    let mut cut = |(index, of, count): (usize, Range<usize>, usize)| {
        let (at, first) = (offsets[index], parts[index].first);
        offsets[index] += count;
        let (_, from_here) = std::mem::take(&mut rest).split_at_mut(at - done);
        let (bytes, later) = from_here.split_at_mut(count);
        (rest, done) = (later, at + count);
        (first + of.start..first + of.end, bytes)
    };
    let ranges: Vec<Range<usize>> = parts.iter().map(|part| part.range.clone()).collect();
    let shares = segment.shares(codes, &ranges).into_iter();
    let shares = shares.map(|share| share.into_iter().map(&mut cut).collect());
    run(shares.collect(), |(of, bytes)| work(of.clone(), bytes))
}

/// Runs `work` on several threads, each time on the codes of a part of a range and its slice of `values`, which holds
/// the concatenated ranges.
pub(crate) fn decode<T: Send>(
    segment: &Segment,
    codes: BlockCodes,
    ranges: &[Range<usize>],
    (mut bytes, mut values): (&[u8], &mut [T]),
    work: impl Fn(&[u8], &mut [T]) -> Result<(), LengthError> + Sync,
) -> Result<(), ZeroError> {
    let mut cut = |(_, part, count): (usize, Range<usize>, usize)| {
        let (now, later) = bytes.split_at(count);
        let (place, places) = std::mem::take(&mut values).split_at_mut(part.len());
        (bytes, values) = (later, places);
        (now, place)
    };
    let shares = segment.shares(codes, ranges).into_iter();
    let shares = shares.map(|share| share.into_iter().map(&mut cut).collect());
    run(shares.collect(), |(bytes, values)| work(bytes, values))
}

/// Runs `work` on the parts of each share; each share has its own thread.
fn run<P: Send>(shares: Vec<Vec<P>>, work: impl Fn(&mut P) -> Result<(), LengthError> + Sync) -> Result<(), ZeroError> {
    let mut shares: Vec<_> = shares.into_iter().map(|share| (share, Ok(()))).collect();
    in_parallel(&mut shares, |(share, result)| *result = share.iter_mut().try_for_each(&work));
    Ok(shares.into_iter().try_for_each(|(_, result)| result)?)
}

/// Encodes `shard`, this rank's shard of a segment, for a gather. The codes count as staging until they are decoded. If
/// the shard is on a GPU, the GPU encodes it and, if the communicators transfer between GPUs, sends the codes.
pub(crate) fn to_gather(
    rank: &Rank,
    memory: &mut Memory,
    id: SegmentId,
    codes: BlockCodes,
    shard: &Storage,
) -> Result<ToGather, ZeroError> {
    let (segment, counts) = (rank.segment(id), rank.segment(id).shard_code_bytes(codes));
    let own = [CodedPart { range: rank.shard(id), first: 0, at: 0 }];
    let by_gpu = rank.options.on_gpu.gathers && matches!(shard, Storage::Cuda(_));
    let (of_own, bytes) = (counts[rank.shards().rank()], counts.iter().sum());
    memory.count(Category::Staging, of_own + bytes, 1);
    let shard = match shard {
        Storage::Cuda(values) => {
            let mut written = memory.gpu()?.codes(of_own)?;
            gpu::quantize(codes, values, &places(segment, codes, &own), &mut written)?;
            gpu::leaving(written, of_own, by_gpu)?
        }
        Storage::Cpu(values) => {
            let mut written = vec![0; of_own];
            match values {
                CpuStorage::F32(values) => {
                    encode(segment, codes, &own, &mut written, |of, bytes| codes.quantize(&values[of], bytes))?;
                }
                CpuStorage::BF16(values) => {
                    encode(segment, codes, &own, &mut written, |of, bytes| codes.quantize_half(&values[of], bytes))?;
                }
                CpuStorage::F16(values) => {
                    encode(segment, codes, &own, &mut written, |of, bytes| codes.quantize_half(&values[of], bytes))?;
                }
                _ => return Err(not_floats()),
            }
            written.into()
        }
        Storage::Metal(_) => return Err(not_floats()),
    };
    Ok(ToGather { shard, output: memory.room_for_codes(bytes, by_gpu)?, counts })
}

/// Decodes a gathered segment. The values count as staging.
pub(crate) fn gathered(
    rank: &Rank,
    memory: &mut Memory,
    id: SegmentId,
    codes: BlockCodes,
    Gathered { shard: sent, output }: Gathered,
) -> Result<Storage, ZeroError> {
    let (segment, received) = (rank.segment(id), sent.len() + output.len());
    let elements = segment.elements();
    let all = Range { start: 0, end: elements };
    memory.count(Category::Staging, elements, rank.width(id));
    // Decode on the host if a secondary shard on the host copies its part of the values.
    if rank.is_on_gpu() && (rank.options.on_gpu.parameters || !segment.has_secondary()) {
        let places = places(segment, codes, &[CodedPart { range: all, first: 0, at: 0 }]);
        let from = memory.gpu()?.arrived(output)?;
        let values = gpu::dequantized(codes, &from, &places, (rank.dtype, elements))?;
        memory.uncount(Category::Staging, received, 1);
        return Ok(values);
    }
    let bytes = output.into_u8()?;
    let mut values = memory.blank(rank.dtype, elements, false)?;
    let all = &[all];
    match &mut values {
        Storage::Cpu(CpuStorage::F32(values)) => {
            decode(segment, codes, all, (&bytes, values), |bytes, values| codes.dequantize(bytes, values))?;
        }
        Storage::Cpu(CpuStorage::BF16(values)) => {
            decode(segment, codes, all, (&bytes, values), |bytes, values| codes.dequantize_half(bytes, values))?;
        }
        Storage::Cpu(CpuStorage::F16(values)) => {
            decode(segment, codes, all, (&bytes, values), |bytes, values| codes.dequantize_half(bytes, values))?;
        }
        _ => return Err(not_floats()),
    }
    memory.uncount(Category::Staging, received, 1);
    Ok(values)
}
