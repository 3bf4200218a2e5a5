//! Optimizers that update whole parameters: runs are bit-identical in every layout, and resume in another one.

use crate::world::{self, Trajectory, assert_same, engine, reproducible, resume, save};

pub(crate) const MUON: &str = "optimizer: {type: Muon, params: {lr: 0.02, adam_lr: 0.003, weight_decay: 0.1}}";
pub(crate) const LAMB: &str = "optimizer: {type: Lamb, params: {lr: 0.01, weight_decay: 0.1, min_coeff: 0.1}}";
pub(crate) const ADAFACTOR: &str = "optimizer: {type: Adafactor, params: {lr: 0.02, weight_decay: 0.1}}";
const OPTIMIZERS: [&str; 3] = [MUON, LAMB, ADAFACTOR];

pub(crate) fn text(zero_stage: u8, accumulation: usize, more: &str) -> String {
    format!(
        "train_micro_batch_size_per_gpu: 1\ngradient_accumulation_steps: {accumulation}\n{more}\n\
         zero_optimization: {{stage: {zero_stage}, stage3_param_persistence_threshold: 40}}"
    )
}

/// Trains three steps.
fn run(ranks: usize, text: &str) -> Trajectory {
    world::run(ranks, 3, text)
}

#[test]
fn every_layout_is_bit_identical() {
    let more = ["", "bf16: {enabled: true}", "activation_checkpointing: {}", "adapter: {r: 4}"];
    for (optimizer, more) in OPTIMIZERS.iter().flat_map(|optimizer| more.map(|more| (optimizer, more))) {
        let more = format!("{optimizer}\n{more}");
        let expected = run(1, &reproducible(0, 1, &more));
        assert_ne!(expected.losses[0], expected.losses[2]);
        for ranks in [1, 2, 4] {
            for zero_stage in 0..=3 {
                let got = run(ranks, &reproducible(zero_stage, ranks, &more));
                assert_same(&expected, &got, &format!("{more}, stage {zero_stage} on {ranks} ranks"));
            }
        }
        for (replicas, zero_stage) in [(1, 0), (2, 1), (2, 2), (2, 3)] {
            let more = format!("{more}\npipeline: {{stages: 2}}");
            let got = run(2 * replicas, &reproducible(zero_stage, replicas, &more));
            assert_same(&expected, &got, &format!("{more}, stage {zero_stage}"));
        }
        let on_host = reproducible(2, 2, &more).replace("stage: 2", "stage: 2, offload_optimizer: {device: cpu}");
        assert_same(&expected, &run(2, &on_host), &on_host);
    }
}

/// Guards against a former bug of DeepSpeed's Muon: it orthogonalized the gradient of each micro-batch
/// (DeepSpeed#8600).
#[test]
fn accumulation_changes_results_by_rounding_only() {
    for optimizer in OPTIMIZERS {
        let whole = text(0, 1, optimizer).replace("gpu: 1", "gpu: 4");
        let expected = run(1, &whole).loss_values();
        for (ranks, zero_stage, accumulation) in [(1, 0, 4), (2, 1, 2), (2, 3, 2), (4, 3, 1)] {
            let got = run(ranks, &text(zero_stage, accumulation, optimizer)).loss_values();
            for (a, b) in got.iter().zip(&expected) {
                assert!((a - b).abs() < 1e-4 * b, "stage {zero_stage}, {ranks} ranks: {got:?} {expected:?}");
            }
        }
    }
}

#[test]
fn a_run_is_resumed_in_another_layout() {
    let root = tempfile::tempdir().unwrap();
    for (index, optimizer) in OPTIMIZERS.iter().enumerate() {
        let whole = world::run(1, 5, &reproducible(0, 1, optimizer));
        for (from, to) in [((1, 0), (4, 3)), ((2, 2), (1, 0)), ((4, 3), (2, 1))] {
            let folder = root.path().join(format!("{index} {from:?}"));
            let engine = |comm, (ranks, stage)| engine(comm, &reproducible(stage, ranks, optimizer));
            save((from.0, 3), &folder, |comm| engine(comm, from));
            let rest = resume((to.0, 2), &folder, |comm| engine(comm, to));
            assert_same(&whole.after(3), &rest, &format!("{from:?} to {to:?}"));
        }
    }
}
