//! Reduces gradients over the ranks during the backward, bucket by bucket.

use zero_pipeline::{Instruction, ModelShape, Placement, Program, SegmentId};

/// DeepSpeed's keys for gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReduceOptions {
    /// `reduce_bucket_size` in elements: segments are held back until the next one would exceed it. `None`
    /// (`auto`) reduces layer by layer. A single larger segment is a bucket of its own.
    pub bucket: Option<usize>,
    /// `overlap_comm`: a reduction is awaited when the next one starts, and not at once.
    pub overlap: bool,
}

/// Puts [`Instruction::Accumulate`], [`Instruction::Reduce`] and [`Instruction::AwaitReduce`] behind the backward.
///
/// Sharded gradients are reduced for every micro-batch. Replicated ones are added up first and reduced once.
#[must_use]
pub fn reduce(program: Program, shape: &ModelShape, options: &ReduceOptions) -> Program {
    let Program { instructions, micro_batches } = program;
    let mut pass = Pass { shape, options, bucket: vec![], pending: None, out: vec![] };
    for instruction in instructions {
        match instruction {
            Instruction::Backward { layer, micro_batch } => {
                pass.out.push(instruction);
                for segment in shape.completed_by(layer) {
                    let sharded = shape.segments[segment].placements.gradients == Placement::Sharded;
                    if !sharded {
                        pass.out.push(Instruction::Accumulate { segment, micro_batch });
                    }
                    if sharded || micro_batch + 1 == micro_batches {
                        pass.add(segment, micro_batch);
                    }
                }
                if options.bucket.is_none() || layer == 0 {
                    pass.flush(micro_batch);
                }
            }
            Instruction::GradientNorm => {
                pass.settle();
                pass.out.push(instruction);
            }
            other => pass.out.push(other),
        }
    }
    Program { instructions: pass.out, micro_batches }
}

struct Pass<'a> {
    shape: &'a ModelShape,
    options: &'a ReduceOptions,
    bucket: Vec<SegmentId>,
    pending: Option<(Vec<SegmentId>, usize)>,
    out: Vec<Instruction>,
}

impl Pass<'_> {
    fn add(&mut self, segment: SegmentId, micro_batch: usize) {
        let elements = |s: SegmentId| self.shape.segments[s].elements;
        let filled: usize = self.bucket.iter().map(|&s| elements(s)).sum();
        if self.options.bucket.is_some_and(|limit| filled + elements(segment) > limit) {
            self.flush(micro_batch);
        }
        self.bucket.push(segment);
    }

    fn flush(&mut self, micro_batch: usize) {
        if self.bucket.is_empty() {
            return;
        }
        self.settle();
        let segments = std::mem::take(&mut self.bucket);
        self.out.push(Instruction::Reduce { segments: segments.clone(), micro_batch });
        self.pending = Some((segments, micro_batch));
        if !self.options.overlap {
            self.settle();
        }
    }

    fn settle(&mut self) {
        if let Some((segments, micro_batch)) = self.pending.take() {
            self.out.push(Instruction::AwaitReduce { segments, micro_batch });
        }
    }
}
