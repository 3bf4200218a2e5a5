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
    for instruction in program.instructions {
        let updated = match instruction {
            Instruction::Update { segment } if needs(segment) => Some(segment),
            _ => None,
        };
        if let Some(segment) = updated {
            if options.bucket.is_some_and(|limit| elements(&bucket) + elements(&[segment]) > limit) {
                start(&mut bucket, &mut pending, &mut out);
            }
            bucket.push(segment);
        }
        out.push(instruction);
        if updated.is_some() && options.bucket.is_none() {
            start(&mut bucket, &mut pending, &mut out);
        }
    }
    start(&mut bucket, &mut pending, &mut out);
    out.extend(pending.into_iter().map(|segments| Instruction::AwaitRefresh { segments }));
    Program { instructions: out, micro_batches: program.micro_batches }
}
