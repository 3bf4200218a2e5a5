//! How ranks are arranged: the number of ranks, pipeline stages, ranks that share sequences, ranks that divide layers,
//! and the ZeRO stage.

use std::iter::successors;

use super::{CONTEXT, Partial, RANKS, ROTATE, SLICES, STAGES, Space, TENSOR, ZERO};

/// How the ranks of a pipeline stage share sequences and layers; `settings` has the values of the keys that select it.
struct Sharing {
    slices: usize,
    tensor: usize,
    settings: Vec<(&'static str, String)>,
}

impl Space<'_> {
    /// Returns all combinations of the numbers of ranks, stages and sharing ranks with the ZeRO stages.
    pub(super) fn meshes(&self) -> Vec<Partial> {
        let most = self.base.world_size;
        let (fast, mut all) = (self.tuning.fast, vec![]);
        for ranks in self.numbers(RANKS, || if fast { vec![most] } else { powers(most) }) {
            let stages = || match fast {
                true => vec![self.base.pipeline.stages],
                false => powers(ranks).into_iter().filter(|&stages| ranks.is_multiple_of(stages)).collect(),
            };
            // Skip numbers of stages that do not divide the number of ranks.
            let stages = self.numbers(STAGES, stages).into_iter().filter(|&stages| ranks.is_multiple_of(stages));
            for stages in stages {
                let of_stage = ranks / stages;
                let zero = || ["0", "1", "2", "3"].map(String::from).to_vec();
                let zero = self.where_it_matters(ZERO, of_stage > 1, zero);
                for Sharing { slices, tensor, settings } in self.sharings(of_stage) {
                    for zero in zero.iter().cloned() {
                        let of_ranks = [(RANKS, ranks.to_string()), (STAGES, stages.to_string())];
                        let settings = of_ranks.into_iter().chain(settings.clone()).chain([(ZERO, zero.clone())]);
                        let settings = settings.map(|(path, value)| (path.to_string(), value)).collect();
                        all.push(Partial { ranks, stages, slices, tensor, zero, settings });
                    }
                }
            }
        }
        all
    }

    /// Returns how `ranks` ranks of a pipeline stage can share sequences and layers. Varies only the keys that the
    /// user's file or `autotuning.space` sets, because sharing changes the results of a run by rounding.
    fn sharings(&self, ranks: usize) -> Vec<Sharing> {
        let degrees = |path, own: usize| {
            let ours = || if self.tuning.fast || !self.is_typed(path) { vec![own] } else { powers(ranks) };
            self.numbers(path, ours)
        };
        let (of_base, base) = (self.base.tensor_size(), self.base.tensor_parallel.autotp_size);
        let all_slices = degrees(SLICES, self.base.sequence_parallel_size);
        let contexts = degrees(CONTEXT, self.base.mesh.context_parallel_degree);
        let tensors = degrees(TENSOR, of_base);
        let mut all = vec![];
        for &slices in &all_slices {
            for &context in &contexts {
                let methods = || match self.is_typed(ROTATE) {
                    true => self.base_and(ROTATE, &["allgather", "alltoall"]),
                    false => vec![self.value(ROTATE).to_string()],
                };
                for method in self.where_it_matters(ROTATE, context > 1, methods) {
                    let tensors = tensors.iter().filter(|&tensor| ranks.is_multiple_of(slices * context * tensor));
                    all.extend(tensors.map(|&tensor| {
                        // `autotp_size: 0` means 1.
                        let written = if tensor == of_base { base } else { tensor };
                        let settings = vec![
                            (SLICES, slices.to_string()),
                            (CONTEXT, context.to_string()),
                            (ROTATE, method.clone()),
                            (TENSOR, written.to_string()),
                        ];
                        Sharing { slices: slices * context, tensor, settings }
                    }));
                }
            }
        }
        all
    }

    /// Returns the numbers to try for a key. 0 means 1.
    fn numbers(&self, path: &str, ours: impl FnOnce() -> Vec<usize>) -> Vec<usize> {
        let found = self.or_ours(path, || ours().iter().map(ToString::to_string).collect());
        found.iter().filter_map(|value| value.parse().ok()).map(|n: usize| n.max(1)).collect()
    }
}

/// Returns 1, 2, 4, … below `most`, and `most`.
fn powers(most: usize) -> Vec<usize> {
    successors(Some(1), |n| Some(n * 2)).take_while(|&n| n < most).chain([most]).collect()
}
