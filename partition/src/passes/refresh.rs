//! Gathers replicated parameters after different ranks have updated different parts of them: all parameters at ZeRO
//! stages 1 and 2, and persistent parameters at stage 3.

use zero_pipeline::{Instruction, LayerId, ModelShape, Program, SegmentId};

/// Options of the gather after the optimizer step, named by DeepSpeed's keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RefreshOptions {
    /// `allgather_bucket_size` in elements; `None` (`auto`) refreshes layer by layer.
    pub bucket: Option<usize>,
    /// `overlap_comm`: awaits a refresh after the next update instead of immediately.
    pub overlap: bool,
    /// Refreshes only after the last update. If a segment has one owner, an earlier refresh would make the other ranks
    /// wait for the owner's update before their own updates.
    pub last: bool,
}

/// Inserts [`Instruction::Refresh`] and [`Instruction::AwaitRefresh`] after the updates and outer steps.
#[must_use]
pub fn refresh(program: Program, shape: &ModelShape, options: &RefreshOptions) -> Program {
    let layers = shape.layers.iter().enumerate().rev();
    let mut layer_of = vec![0; shape.segments.len()];
    layers.for_each(|(layer, of)| of.segments.iter().for_each(|&segment| layer_of[segment] = layer));
    let mut refreshes = Refreshes { shape, options, layer_of, bucket: vec![], pending: vec![], out: vec![] };
    let mut late = vec![];
    for instruction in program.instructions {
        if let Instruction::Update { segment } | Instruction::AwaitOuterStep { segment } = instruction {
            refreshes.make_room(segment);
            if shape.segments[segment].placements.need_refresh() {
                if options.last { late.push(segment) } else { refreshes.bucket.push(segment) }
            }
        }
        refreshes.out.push(instruction);
    }
    for segment in late {
        refreshes.make_room(segment);
        refreshes.bucket.push(segment);
    }
    refreshes.start();
    let Refreshes { mut out, pending, .. } = refreshes;
    out.extend(pending.into_iter().map(|segments| Instruction::AwaitRefresh { segments }));
    Program { instructions: out, micro_batches: program.micro_batches }
}

/// The program so far, and the segments whose refresh it has not started or not awaited.
struct Refreshes<'a> {
    shape: &'a ModelShape,
    options: &'a RefreshOptions,
    /// The first layer of each segment.
    layer_of: Vec<LayerId>,
    bucket: Vec<SegmentId>,
    pending: Vec<Vec<SegmentId>>,
    out: Vec<Instruction>,
}

impl Refreshes<'_> {
    /// Starts the refresh of the bucket if the next segment does not fit or, with `auto`, belongs to another layer.
    fn make_room(&mut self, next: SegmentId) {
        let elements = || self.bucket.iter().chain([&next]).map(|&id| self.shape.segments[id].elements).sum::<usize>();
        let is_full = match self.options.bucket {
            Some(limit) => self.shape.segments[next].placements.need_refresh() && elements() > limit,
            None => self.bucket.iter().any(|&id| self.layer_of[id] != self.layer_of[next]),
        };
        if is_full {
            self.start();
        }
    }

    /// Starts the refresh of the bucket. Awaits all pending refreshes or, with `overlap_comm`, all except this one.
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
