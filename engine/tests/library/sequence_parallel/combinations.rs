//! Every combination of ZeRO stage, pipeline stages, replicates, shards, slices of sequences and tensor-parallel ranks
//! on up to 8 ranks trains and evaluates like one rank, up to rounding, and continues from the checkpoint of another
//! combination. Some of the combinations are also tested in bf16 and with grouped queries.

use std::path::Path;

use zero_engine::Layers;

use super::{gpt2, keys, kinds, llama};
use crate::world::{BF16, Trajectory, agreed, assert_near, batch, engine_of, resume, run_of, train, world};

/// Steps after the checkpoint. The second step reads optimizer state that the first one updated.
const RESUMED: u64 = 2;

/// How up to 8 ranks train on global batches of 4 samples.
#[derive(Debug, Clone, Copy)]
struct Layout {
    stage: u8,
    stages: usize,
    replicates: usize,
    shards: usize,
    slices: usize,
    /// How ranks share sequences, as an index into `kinds`: by heads, by queries, by a ring, by heads and queries, or
    /// by heads and a ring.
    kind: usize,
    /// Number of tensor-parallel ranks.
    tensor: usize,
}

impl Layout {
    fn ranks(self) -> usize {
        self.stages * self.replicates * self.shards * self.slices * self.tensor
    }

    fn text(self, more: &str) -> String {
        let Self { stage, stages, replicates, shards, slices, tensor, .. } = self;
        let mesh = match replicates {
            1 => String::new(),
            _ => format!("mesh: {{data_parallel_replicate_degree: {replicates}}}\n"),
        };
        let more = format!("{mesh}pipeline: {{stages: {stages}}}\ntensor_parallel: {{autotp_size: {tensor}}}\n{more}");
        kinds(slices)[self.kind](keys(slices, 1, 4 / (replicates * shards), stage, &more))
    }
}

/// Returns all layouts in an order that looks random and is the same in every run.
fn layouts() -> Vec<Layout> {
    let mut all = vec![];
    for stage in 0..=3 {
        for stages in [1, 2] {
            for (replicates, shards) in [(1, 1), (1, 2), (2, 1), (2, 2)] {
                for (slices, kind) in [(1, 0), (2, 0), (4, 0), (2, 1), (4, 1), (4, 3), (2, 2), (4, 2), (4, 4)] {
                    for tensor in [1, 2, 4] {
                        let layout = Layout { stage, stages, replicates, shards, slices, kind, tensor };
                        // The models have four heads.
                        let has_heads = [slices, 1, 1, 2, 2][kind] * tensor <= 4;
                        if layout.ranks() <= 8 && has_heads && (replicates == 1 || stage > 0) {
                            all.push(layout);
                        }
                    }
                }
            }
        }
    }
    let mut random = 1u64;
    for last in (1..all.len()).rev() {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        all.swap((random >> 33) as usize % (last + 1), last);
    }
    all
}

/// A model, and how far its losses may differ from those of one rank.
#[derive(Clone, Copy)]
struct Model {
    layers: fn() -> Layers,
    dtype: &'static str,
    tolerance: f32,
}

impl Model {
    /// Trains one step, evaluates and saves a checkpoint. Returns the losses of the step and of the evaluation.
    fn begun(self, ranks: usize, text: &str, folder: &Path) -> Trajectory {
        let all = world(ranks, |comm| {
            let mut engine = engine_of((self.layers)(), comm, text);
            let step = train(&mut engine, 1).remove(0);
            let evaluated = engine.eval_batch(&batch(50, 2)).unwrap();
            engine.save_checkpoint(folder).unwrap();
            let losses = [step.loss, evaluated].map(f32::to_bits).to_vec();
            Trajectory { losses, norms: vec![step.grad_norm.to_bits()], parameters: vec![] }
        });
        agreed(all, text)
    }

    /// Trains with each layout, starting from the checkpoint of the previous layout, and compares the losses with those
    /// of one rank that trains without an interruption.
    fn train_with(self, layouts: impl IntoIterator<Item = Layout>) {
        let mut before = tempfile::tempdir().unwrap();
        let text = keys(1, 1, 4, 0, self.dtype);
        let first = self.begun(1, &text, before.path());
        let rest = run_of(self.layers, 1, 1 + RESUMED, &text).after(1);
        for layout in layouts {
            let folder = tempfile::tempdir().unwrap();
            let (ranks, text) = (layout.ranks(), layout.text(self.dtype));
            assert_near(&self.begun(ranks, &text, folder.path()), &first, self.tolerance, &text);
            let resumed = resume((ranks, RESUMED), before.path(), |comm| engine_of((self.layers)(), comm, &text));
            assert_near(&resumed, &rest, self.tolerance, &text);
            before = folder;
        }
    }
}

#[test]
fn every_combination_trains_evaluates_and_resumes_another_one() {
    let all = layouts();
    assert_eq!(all.len(), 287);
    Model { layers: gpt2, dtype: "", tolerance: 1e-5 }.train_with(all);
}

/// A rounding to bf16 changes a value by at most 2⁻⁸ of the value.
#[test]
fn some_combinations_train_in_bf16_and_with_grouped_queries() {
    // The Llama has two key and value heads.
    let few_heads = |layout: &Layout| layout.tensor <= 2;
    let every = |first: usize| layouts().into_iter().filter(few_heads).skip(first).step_by(6);
    Model { layers: gpt2, dtype: BF16, tolerance: 1e-2 }.train_with(every(0));
    Model { layers: llama, dtype: "", tolerance: 1e-5 }.train_with(every(2));
    Model { layers: llama, dtype: BF16, tolerance: 1e-2 }.train_with(every(4));
}
