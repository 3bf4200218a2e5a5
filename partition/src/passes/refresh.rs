//! Gathers updated parameters that are replicated but updated in parts by different ranks: all parameters at ZeRO
//! stages 1 and 2, and persistent parameters at stage 3.

use zero_pipeline::{Instruction, ModelShape, Program, SegmentId};

/// Options of the gather after the optimizer step, named by DeepSpeed's keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RefreshOptions {
    /// `allgather_bucket_size` in elements; `None` (`auto`) refreshes segment by segment.
    pub bucket: Option<usize>,
    /// `overlap_comm`: awaits a refresh after the next update instead of immediately.
    pub overlap: bool,
    /// Refreshes after the last update. If a segment has one owner, the other ranks would wait for its update before their
    /// own.
    pub last: bool,
}

/// Inserts [`Instruction::Refresh`] and [`Instruction::AwaitRefresh`] after the updates.
#[must_use]
pub fn refresh(program: Program, shape: &ModelShape, options: &RefreshOptions) -> Program {
    let needs = |segment: SegmentId| shape.segments[segment].placements.need_refresh();
    let elements = |segments: &[SegmentId]| segments.iter().map(|&s| shape.segments[s].elements).sum::<usize>();
    let mut out = vec![];
    let mut bucket: Vec<SegmentId> = vec![];
    let mut pending: Vec<Vec<SegmentId>> = vec![];
    let start = |bucket: &mut Vec<SegmentId>, pending: &mut Vec<Vec<SegmentId>>, out: &mut Vec<Instruction>| {
        if !bucket.is_empty() {
            let segments = std::mem::take(bucket);
            out.push(Instruction::Refresh { segments: segments.clone() });
            pending.push(segments);
        }
        let keep = usize::from(options.overlap);
        while pending.len() > keep {
            out.push(Instruction::AwaitRefresh { segments: pending.remove(0) });
        }
    };
    // Adds a segment to the bucket, and its update to the program, and starts the refresh of a full bucket.
    let add = |segment: SegmentId,
               update: Option<Instruction>,
               bucket: &mut Vec<_>,
               pending: &mut Vec<_>,
               out: &mut Vec<_>| {
        if options.bucket.is_some_and(|limit| elements(bucket) + elements(&[segment]) > limit) {
            start(bucket, pending, out);
        }
        bucket.push(segment);
        out.extend(update);
        if options.bucket.is_none() {
            start(bucket, pending, out);
        }
    };
    let mut late = vec![];
    for instruction in program.instructions {
        let segment = match instruction {
            Instruction::Update { segment } if needs(segment) => Some(segment),
            _ => None,
        };
        match segment {
            Some(segment) if options.last => {
                out.push(instruction);
                late.push(segment);
            }
            Some(segment) => add(segment, Some(instruction), &mut bucket, &mut pending, &mut out),
            None => out.push(instruction),
        }
    }
    late.into_iter().for_each(|segment| add(segment, None, &mut bucket, &mut pending, &mut out));
    start(&mut bucket, &mut pending, &mut out);
    out.extend(pending.into_iter().map(|segments| Instruction::AwaitRefresh { segments }));
    Program { instructions: out, micro_batches: program.micro_batches }
}
