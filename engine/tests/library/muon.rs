//! Muon: equal to `torch.optim.Muon`, bit-identical at every layout, and resumed in another one.

use std::path::Path;
use std::sync::Arc;

use zero_engine::comm::Communicator;
use zero_engine::{Config, Engine, Kind, zoo};
use zero_optim::{Muon, Step};

use crate::python::python;
use crate::world::{Trajectory, agreed, assert_same, gpt2, gpt2_config, trajectory, world};

const MUON: &str = "optimizer: {type: Muon, params: {lr: 0.02, adam_lr: 0.003, weight_decay: 0.1}}";

fn text(zero_stage: u8, accumulation: usize, more: &str) -> String {
    format!(
        "train_micro_batch_size_per_gpu: 1\ngradient_accumulation_steps: {accumulation}\ngradient_clipping: 0.5\n{more}\n\
         zero_optimization: {{stage: {zero_stage}, stage3_param_persistence_threshold: 40}}"
    )
}

fn reproducible(zero_stage: u8, replicas: usize, more: &str) -> String {
    text(zero_stage, 4 / replicas, &format!("{MUON}\ntraining: {{reproducible: true}}\n{more}"))
}

fn engine(comm: Arc<dyn Communicator>, text: &str) -> Engine {
    let config = Config::with_world_size("test.yaml", text, comm.size()).unwrap_or_else(|error| panic!("{error}"));
    Engine::with_communicator(config, gpt2(), comm).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn run(ranks: usize, text: &str) -> Trajectory {
    agreed(world(ranks, |comm| trajectory(&mut engine(comm, text), 6)), text)
}

/// Values between −1 and 1 that depend on the seed alone, exact in f32. The script computes the same.
fn wave(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * i * 7919 + i * 31 * (seed + 1) + seed * 104_729) % 2003) as f32 / 1024.0 - 1.0).collect()
}

const SHAPES: [[usize; 2]; 4] = [[16, 16], [24, 40], [40, 24], [1, 9]];
const STEPS: usize = 50;

/// `torch.optim.Muon` computes its iterations in bf16. The script keeps them in f32, to compare the formulas.
#[test]
fn fifty_steps_agree_with_pytorch() {
    for (nesterov, decay) in [(true, 0.1), (false, 0.0)] {
        let flag = if nesterov { "True" } else { "False" };
        let script = format!(
            "import torch\n\
             torch.bfloat16 = torch.float32\n\
             def wave(rows, columns, seed):\n\
             \x20   i = torch.arange(rows * columns)\n\
             \x20   return (((i * i * 7919 + i * 31 * (seed + 1) + seed * 104729) % 2003).float() / 1024.0 - 1.0).view(rows, columns)\n\
             for rows, columns in {SHAPES:?}:\n\
             \x20   p = torch.nn.Parameter(wave(rows, columns, 0))\n\
             \x20   muon = torch.optim.Muon([p], lr=0.02, momentum=0.95, weight_decay={decay}, nesterov={flag})\n\
             \x20   for step in range(1, {STEPS} + 1):\n\
             \x20       p.grad = wave(rows, columns, step)\n\
             \x20       muon.step()\n\
             \x20   print(*(x.item() for x in p.detach().flatten()))\n"
        );
        let Some(output) = python(&["torch"], &script) else { return };
        let muon = Muon { nesterov, weight_decay: decay, ..Muon::default() };
        for (line, [rows, columns]) in output.lines().zip(SHAPES) {
            let expected: Vec<f64> = line.split(' ').map(|value| value.parse().unwrap()).collect();
            let (mut params, mut exp_avg) = (wave(rows * columns, 0), vec![0.0; rows * columns]);
            for step in 1..=STEPS {
                let step_of =
                    Step { step: step as u64, lr: 0.02, grad_scale: 1.0, grad_limit: f32::INFINITY, decay: true };
                let grads = wave(rows * columns, step);
                zero_partition::update_matrix(&muon, &step_of, [rows, columns], &mut params, &grads, &mut exp_avg)
                    .unwrap();
            }
            let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
            let of = norm(&mut expected.iter().copied());
            let difference = norm(&mut params.iter().zip(&expected).map(|(a, b)| f64::from(*a) - b)) / of;
            println!("{rows} × {columns}, nesterov {nesterov}: relative difference {difference:.1e}");
            assert!(difference < 1e-6, "{rows} × {columns}: {difference}");
        }
        assert_eq!(output.lines().count(), SHAPES.len());
    }
}

#[test]
fn every_layout_is_bit_identical() {
    for more in ["", "bf16: {enabled: true}", "activation_checkpointing: {}", "adapter: {r: 4}"] {
        let expected = run(1, &reproducible(0, 1, more));
        assert_ne!(expected.losses[0], expected.losses[5]);
        for ranks in [1, 2, 4] {
            for zero_stage in 0..=3 {
                let got = run(ranks, &reproducible(zero_stage, ranks, more));
                assert_same(&expected, &got, &format!("{more}, stage {zero_stage} on {ranks} ranks"));
            }
        }
        for (replicas, zero_stage) in [(1, 0), (2, 1), (2, 2), (2, 3)] {
            let more = format!("{more}\npipeline: {{stages: 2}}");
            let got = run(2 * replicas, &reproducible(zero_stage, replicas, &more));
            assert_same(&expected, &got, &format!("{more}, stage {zero_stage}"));
        }
        let on_host = reproducible(2, 2, more).replace("stage: 2", "stage: 2, offload_optimizer: {device: cpu}");
        assert_same(&expected, &run(2, &on_host), &on_host);
    }
}

/// DeepSpeed's Muon once orthogonalized each micro-batch (DeepSpeed#8600).
#[test]
fn accumulation_changes_rounding_alone() {
    let losses = |trajectory: Trajectory| trajectory.losses.into_iter().map(f32::from_bits).collect::<Vec<_>>();
    let whole = text(0, 1, MUON).replace("gpu: 1", "gpu: 4");
    let expected = losses(run(1, &whole));
    for (ranks, zero_stage, accumulation) in [(1, 0, 4), (2, 1, 2), (2, 3, 2), (4, 3, 1)] {
        let got = losses(run(ranks, &text(zero_stage, accumulation, MUON)));
        for (a, b) in got.iter().zip(&expected) {
            assert!((a - b).abs() < 1e-4 * b, "stage {zero_stage}, {ranks} ranks: {got:?} {expected:?}");
        }
    }
}

#[test]
fn a_run_is_resumed_in_another_layout() {
    let root = tempfile::tempdir().unwrap();
    let whole = run(1, &reproducible(0, 1, ""));
    let save = |ranks: usize, text: &str, folder: &Path| {
        world(ranks, |comm| {
            let mut engine = engine(comm, text);
            trajectory(&mut engine, 3);
            engine.save_checkpoint(folder).unwrap();
        });
    };
    for (from, to) in [((1, 0), (4, 3)), ((2, 2), (1, 0)), ((4, 3), (2, 1))] {
        let folder = root.path().join(format!("{from:?}"));
        save(from.0, &reproducible(from.1, from.0, ""), &folder);
        let text = reproducible(to.1, to.0, "");
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

/// A matrix has its momentum alone, and is on one rank. The other parameters have two states.
#[test]
fn matrices_have_an_owner() {
    let owned = world(4, |comm| {
        let rank = comm.rank();
        let engine = engine(comm, &reproducible(3, 4, ""));
        let layout = engine.zero().layout();
        let matrices = layout.segments().iter().filter(|segment| segment.matrix.is_some());
        let names: Vec<String> =
            matrices.clone().filter(|s| !s.shard(rank).is_empty()).map(|s| s.name.clone()).collect();
        assert!(matrices.into_iter().all(|s| s.shard(rank).is_empty() || s.shard(rank).len() == s.elements()));
        let held = |state| engine.zero().held_ranges(Kind::State(state)).into_iter().map(|range| range.parameter);
        let is_matrix = |&parameter: &usize| engine.model().parameters()[parameter].is_matrix();
        assert_eq!(held(0).filter(is_matrix).count(), names.len());
        assert_eq!(held(1).filter(is_matrix).count(), 0);
        assert!(held(1).count() > 0 || rank > 0);
        names
    });
    let mut all: Vec<&str> = owned.iter().flatten().map(String::as_str).collect();
    all.sort_unstable();
    // Two layers of attention and two maps each, without the embeddings, which are the head as well.
    assert_eq!(all.len(), 4 * gpt2_config().n_layer, "{all:?}");
    assert!(all.iter().all(|name| name.ends_with(".weight") && !name.contains("wte") && !name.contains("wpe")));
    assert!(owned.iter().all(|names| names.len() == all.len() / 4), "all ranks own the same number: {owned:?}");
}

#[test]
fn mistakes_are_errors() {
    let error = |more: &str, zero: &str| {
        let text = format!("train_batch_size: 1\n{more}\nzero_optimization: {{{zero}}}");
        let comm = zero_engine::comm::threads(1, &Default::default()).remove(0);
        let config = Config::with_world_size("test.yaml", &text, 1).unwrap_or_else(|error| panic!("{error}"));
        Engine::with_communicator(config, zoo::gpt2(&gpt2_config()), comm).err().expect("an error").to_string()
    };
    let with = |params: &str| format!("optimizer: {{type: Muon, params: {{{params}}}}}");
    for (params, zero, expected) in [
        ("matrices: ['*.c_atn.*']", "stage: 1", "no parameter matches `*.c_atn.*`"),
        ("matrices: ['*.ln_f.*']", "stage: 1", "no parameter that matches `*.ln_f.*` has two dimensions"),
        ("matrices: ['[']", "stage: 1", "["),
        (
            "lr: 0.1",
            "stage: 2, offload_optimizer: {device: nvme, nvme_path: /tmp}",
            "Muon needs whole matrices, and state on a disk is updated in tiles",
        ),
    ] {
        let said = error(&with(params), zero);
        assert!(said.contains(expected), "{said}");
    }
    let frozen = format!("{}\ntraining: {{trainable: ['*.bias']}}", with("lr: 0.1"));
    assert!(error(&frozen, "stage: 1").contains("no trainable matrix"), "{}", error(&frozen, "stage: 1"));
}
