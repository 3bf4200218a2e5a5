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

/// Inserts [`Instruction::Refresh`] and [`Instruction::AwaitRefresh`] after the updates and outer steps.
#[must_use]
pub fn refresh(program: Program, shape: &ModelShape, options: &RefreshOptions) -> Program {
    let mut refreshes = Refreshes { shape, options, bucket: vec![], pending: vec![], out: vec![] };
    let mut late = vec![];
    for instruction in program.instructions {
        match instruction {
            Instruction::Update { segment } | Instruction::AwaitOuterStep { segment }
                if shape.segments[segment].placements.need_refresh() =>
            {
                if options.last {
                    refreshes.out.push(instruction);
                    late.push(segment);
                } else {
                    refreshes.add(segment, Some(instruction));
                }
            }
            _ => refreshes.out.push(instruction),
        }
    }
    late.into_iter().for_each(|segment| refreshes.add(segment, None));
    refreshes.start();
    let Refreshes { mut out, pending, .. } = refreshes;
    out.extend(pending.into_iter().map(|segments| Instruction::AwaitRefresh { segments }));
    Program { instructions: out, micro_batches: program.micro_batches }
}

/// The program so far, and the segments whose refresh it has not begun or not awaited.
struct Refreshes<'a> {
    shape: &'a ModelShape,
    options: &'a RefreshOptions,
    bucket: Vec<SegmentId>,
    pending: Vec<Vec<SegmentId>>,
    out: Vec<Instruction>,
}

impl Refreshes<'_> {
    /// Adds a segment to the bucket, and its update to the program. Starts the refresh of a full bucket.
    fn add(&mut self, segment: SegmentId, update: Option<Instruction>) {
        let elements: usize = self.bucket.iter().chain([&segment]).map(|&id| self.shape.segments[id].elements).sum();
        if self.options.bucket.is_some_and(|limit| elements > limit) {
            self.start();
        }
        self.bucket.push(segment);
        self.out.extend(update);
        if self.options.bucket.is_none() {
            self.start();
        }
    }

    /// Starts the refresh of the bucket, and awaits those before it.
    fn start(&mut self) {
        if !self.bucket.is_empty() {
            let segments = std::mem::take(&mut self.bucket);
            self.out.push(Instruction::Refresh { segments: segments.clone() });
            self.pending.push(segments);
        }
        let keep = usize::from(self.options.overlap);
        while self.pending.len() > keep {
            self.out.push(Instruction::AwaitRefresh { segments: self.pending.remove(0) });
        }
    }
}
