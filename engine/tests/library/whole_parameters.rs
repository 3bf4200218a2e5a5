//! Optimizers that update whole parameters: runs are bit-identical in every layout, and resume in another one.

use std::path::Path;
use std::sync::Arc;

use zero_engine::comm::Communicator;
use zero_engine::{Config, Engine};

use crate::world::{Trajectory, agreed, assert_same, gpt2, trajectory, world};

pub(crate) const MUON: &str = "optimizer: {type: Muon, params: {lr: 0.02, adam_lr: 0.003, weight_decay: 0.1}}";
pub(crate) const LAMB: &str = "optimizer: {type: Lamb, params: {lr: 0.01, weight_decay: 0.1, min_coeff: 0.1}}";
pub(crate) const ADAFACTOR: &str = "optimizer: {type: Adafactor, params: {lr: 0.02, weight_decay: 0.1}}";
const OPTIMIZERS: [&str; 3] = [MUON, LAMB, ADAFACTOR];

pub(crate) fn text(zero_stage: u8, accumulation: usize, more: &str) -> String {
    format!(
        "train_micro_batch_size_per_gpu: 1\ngradient_accumulation_steps: {accumulation}\ngradient_clipping: 0.5\n{more}\n\
         zero_optimization: {{stage: {zero_stage}, stage3_param_persistence_threshold: 40}}"
    )
}

pub(crate) fn reproducible(zero_stage: u8, replicas: usize, more: &str) -> String {
    text(zero_stage, 4 / replicas, &format!("training: {{reproducible: true}}\n{more}"))
}

pub(crate) fn engine(comm: Arc<dyn Communicator>, text: &str) -> Engine {
    let config = Config::with_world_size("test.yaml", text, comm.size()).unwrap_or_else(|error| panic!("{error}"));
    Engine::with_communicator(config, gpt2(), comm).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn run(ranks: usize, text: &str) -> Trajectory {
    agreed(world(ranks, |comm| trajectory(&mut engine(comm, text), 6)), text)
}

#[test]
fn every_layout_is_bit_identical() {
    let more = ["", "bf16: {enabled: true}", "activation_checkpointing: {}", "adapter: {r: 4}"];
    for (optimizer, more) in OPTIMIZERS.iter().flat_map(|optimizer| more.map(|more| (optimizer, more))) {
        let more = format!("{optimizer}\n{more}");
        let expected = run(1, &reproducible(0, 1, &more));
        assert_ne!(expected.losses[0], expected.losses[5]);
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

/// Guards against a former error of DeepSpeed's Muon, which orthogonalized each micro-batch (DeepSpeed#8600).
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
        let whole = run(1, &reproducible(0, 1, optimizer));
        let save = |ranks: usize, text: &str, folder: &Path| {
            world(ranks, |comm| {
                let mut engine = engine(comm, text);
                trajectory(&mut engine, 3);
                engine.save_checkpoint(folder).unwrap();
            });
        };
        for (from, to) in [((1, 0), (4, 3)), ((2, 2), (1, 0)), ((4, 3), (2, 1))] {
            let folder = root.path().join(format!("{index} {from:?}"));
            save(from.0, &reproducible(from.1, from.0, optimizer), &folder);
            let text = reproducible(to.1, to.0, optimizer);
            for rest in world(to.0, |comm| {
                let mut engine = engine(comm, &text);
                engine.resume(&folder).unwrap();
                trajectory(&mut engine, 3)
            }) {
                assert_eq!(rest.losses, whole.losses[3..], "{from:?} to {to:?}");
                assert!(rest.parameters == whole.parameters, "{from:?} to {to:?}");
            }
        }
    }
}
