//! Every combination of ZeRO stage, pipeline, replicates, shards, slices and tensor-parallel ranks on up to 8 ranks
//! trains like one rank, up to rounding, and continues from the checkpoint of the previous combination.

use std::path::Path;

use super::{gpt2, keys, kinds};
use crate::world::{Trajectory, agreed, assert_near, engine_of, resume, run_of, train, world};

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
    /// How ranks share sequences, as an index into `kinds`: by heads, by queries, by a ring, by heads and queries, or by
    /// heads and a ring.
    kind: usize,
    /// Number of tensor-parallel ranks.
    tensor: usize,
}

impl Layout {
    fn ranks(self) -> usize {
        self.stages * self.replicates * self.shards * self.slices * self.tensor
    }

    fn text(self) -> String {
        let Self { stage, stages, replicates, shards, slices, tensor, .. } = self;
        let mesh = match replicates {
            1 => String::new(),
            _ => format!("mesh: {{data_parallel_replicate_degree: {replicates}}}\n"),
        };
        let more = format!("{mesh}pipeline: {{stages: {stages}}}\ntensor_parallel: {{autotp_size: {tensor}}}");
        kinds(slices)[self.kind](keys(slices, 1, 4 / (replicates * shards), stage, &more))
    }
}

fn layouts() -> Vec<Layout> {
    let mut all = vec![];
    for stage in 0..=3 {
        for stages in [1, 2] {
            for (replicates, shards) in [(1, 1), (1, 2), (2, 1), (2, 2)] {
                for (slices, kind) in [(1, 0), (2, 0), (4, 0), (2, 1), (4, 1), (4, 3), (2, 2), (4, 2), (4, 4)] {
                    for tensor in [1, 2, 4] {
                        let layout = Layout { stage, stages, replicates, shards, slices, kind, tensor };
                        // The model has four heads.
                        let has_heads = [slices, 1, 1, 2, 2][kind] * tensor <= 4;
                        if layout.ranks() <= 8 && has_heads && (replicates == 1 || stage > 0) {
                            all.push(layout);
                        }
                    }
                }
            }
        }
    }
    all
}

/// Trains one step and saves a checkpoint.
fn begun(layout: Layout, folder: &Path) -> Trajectory {
    let text = layout.text();
    let all = world(layout.ranks(), |comm| {
        let mut engine = engine_of(gpt2(), comm, &text);
        let step = train(&mut engine, 1).remove(0);
        engine.save_checkpoint(folder).unwrap();
        Trajectory { losses: vec![step.loss.to_bits()], norms: vec![step.grad_norm.to_bits()], parameters: vec![] }
    });
    agreed(all, &text)
}

#[test]
fn every_combination_trains_and_resumes_the_previous_one() {
    let whole = run_of(gpt2, 1, 1 + RESUMED, &keys(1, 1, 4, 0, ""));
    let part = |steps: std::ops::Range<usize>| Trajectory {
        losses: whole.losses[steps.clone()].to_vec(),
        norms: whole.norms[steps].to_vec(),
        parameters: vec![],
    };
    let [first, rest] = [part(0..1), part(1..1 + RESUMED as usize)];
    let all = layouts();
    assert_eq!(all.len(), 287);
    let mut before: Option<tempfile::TempDir> = None;
    for layout in all {
        let folder = tempfile::tempdir().unwrap();
        let what = format!("{layout:?}");
        assert_near(&begun(layout, folder.path()), &first, 1e-5, &what);
        if let Some(before) = before.replace(folder) {
            let text = layout.text();
            let resumed = resume((layout.ranks(), RESUMED), before.path(), |comm| engine_of(gpt2(), comm, &text));
            assert_near(&resumed, &rest, 1e-5, &what);
        }
    }
}
