//! Reduces gradients over the ranks during the backward, bucket by bucket.

use zero_pipeline::{Instruction, LayerId, ModelShape, Placement, Program, SegmentId};

/// Options of gradient reductions, named by DeepSpeed's keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReduceOptions {
    /// `reduce_bucket_size` in elements: a bucket is reduced as soon as the next segment would no longer fit. `None`
    /// (`auto`) reduces layer by layer. A single larger segment gets a bucket of its own.
    pub bucket: Option<usize>,
    /// `overlap_comm`: awaits a reduction when the next one starts instead of immediately.
    pub overlap: bool,
}

/// Inserts [`Instruction::Accumulate`], [`Instruction::Reduce`] and [`Instruction::AwaitReduce`] after the backward.
///
/// Sharded gradients are reduced for every micro-batch. Replicated gradients are accumulated first and reduced once.
#[must_use]
pub fn reduce(program: Program, shape: &ModelShape, options: &ReduceOptions) -> Program {
    let Program { instructions, micro_batches } = program;
    // The layer whose backward ends a micro-batch on this stage.
    let lowest = instructions.iter().filter_map(contribution).map(|(layer, _)| layer).min();
    let completed: Vec<Vec<SegmentId>> = (0..shape.layers.len()).map(|layer| shape.completed_by(layer)).collect();
    let mut pass = Pass { shape, options, bucket: vec![], of: 0, pending: None, out: vec![] };
    for instruction in instructions {
        if let Some((layer, micro_batch)) = contribution(&instruction) {
            if micro_batch != pass.of {
                // A bucket holds gradients of one micro-batch.
                pass.flush();
                pass.of = micro_batch;
            }
            pass.out.push(instruction);
            for &segment in &completed[layer] {
                let sharded = shape.segments[segment].placements.gradients == Placement::Sharded;
                if !sharded {
                    pass.out.push(Instruction::Accumulate { segment, micro_batch });
                }
                if sharded || micro_batch + 1 == micro_batches {
                    pass.add(segment);
                }
            }
            if options.bucket.is_none() || Some(layer) == lowest {
                pass.flush();
            }
        } else if instruction == Instruction::GradientNorm {
            pass.flush();
            pass.settle();
            pass.out.push(instruction);
        } else {
            pass.out.push(instruction);
        }
    }
    Program { instructions: pass.out, micro_batches }
}

/// Returns the layer and micro-batch whose parameter gradients an instruction completes.
fn contribution(instruction: &Instruction) -> Option<(LayerId, usize)> {
    match *instruction {
        Instruction::Backward { layer, micro_batch } | Instruction::BackwardWeight { layer, micro_batch } => {
            Some((layer, micro_batch))
        }
        _ => None,
    }
}

struct Pass<'a> {
    shape: &'a ModelShape,
    options: &'a ReduceOptions,
    bucket: Vec<SegmentId>,
    /// Micro-batch of the bucket.
    of: usize,
    pending: Option<(Vec<SegmentId>, usize)>,
    out: Vec<Instruction>,
}

impl Pass<'_> {
    fn add(&mut self, segment: SegmentId) {
        let elements = |s: SegmentId| self.shape.segments[s].elements;
        let filled: usize = self.bucket.iter().map(|&s| elements(s)).sum();
        if self.options.bucket.is_some_and(|limit| filled + elements(segment) > limit) {
            self.flush();
        }
        self.bucket.push(segment);
    }

    fn flush(&mut self) {
        if self.bucket.is_empty() {
            return;
        }
        self.settle();
        let (segments, micro_batch) = (std::mem::take(&mut self.bucket), self.of);
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
