//! Muon: matches `torch.optim.Muon`, and each matrix has one owner.

use zero_engine::{Config, Engine, Kind, zoo};
use zero_optim::{Muon, Step};

use crate::optimizers::whole_parameters::MUON;
use crate::python::python;
use crate::world::{engine, gpt2_config, reproducible, world};

/// Returns values from −1 to 1, exact in f32, that depend on the index and the seed. The script computes the same
/// values.
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

/// The only state of a matrix is a momentum, which one rank holds. The other parameters have two states.
#[test]
fn each_matrix_is_owned_by_one_rank() {
    let owned = world(4, |comm| {
        let rank = comm.rank();
        let engine = engine(comm, &reproducible(3, 4, MUON));
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
    // Each layer has four matrices: two of its attention and two of its MLP. Muon does not update the embeddings, of
    // which one is also the head.
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
    ] {
        let said = error(&with(params), zero);
        assert!(said.contains(expected), "{said}");
    }
    let frozen = format!("{}\ntraining: {{trainable: ['*.bias']}}", with("lr: 0.1"));
    assert!(error(&frozen, "stage: 1").contains("no trainable matrix"), "{}", error(&frozen, "stage: 1"));
}
