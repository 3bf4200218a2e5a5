//! A run resumes from a checkpoint bit-identically under any layout.

mod damage;
mod saves;

use crate::world;

use std::fs;
use std::path::{Path, PathBuf};

use world::{BF16, FP16, Trajectory, batch, config, engine, gpt2, save, train, trajectory, world};
use zero_engine::{Engine, Kind};

fn settings(zero_stage: u8, more: &str) -> String {
    format!(
        "train_micro_batch_size_per_gpu: 1\n{more}\n\
         zero_optimization: {{stage: {zero_stage}, stage3_param_persistence_threshold: 64}}"
    )
}

/// Trains `steps` steps and saves a checkpoint.
fn saved(root: &Path, ranks: usize, steps: u64, text: &str) -> PathBuf {
    save((ranks, steps), root, |comm| engine(comm, text))
}

#[test]
fn a_resumed_run_is_bit_identical_to_an_uninterrupted_one() {
    let root = tempfile::tempdir().unwrap();
    for (name, more) in [
        ("plain", "gradient_accumulation_steps: 2"),
        ("bf16", BF16),
        ("fp16", FP16),
        ("scheduled", "scheduler: {type: WarmupLR, params: {warmup_num_steps: 8, warmup_max_lr: 0.01}}"),
        ("rmsprop", "optimizer: {type: RMSprop, params: {lr: 0.001, momentum: 0.9}}"),
        ("nadam", "optimizer: {type: NAdam}"),
        ("radam", "optimizer: {type: RAdam}"),
        ("schedule-free", "optimizer: {type: AdamWScheduleFree}"),
        (
            "one cycle",
            "scheduler: {type: OneCycle, params: {cycle_min_lr: 0.0001, cycle_max_lr: 0.01, cycle_first_step_size: 4, \
             cycle_second_step_size: 3, decay_step_size: 2, decay_lr_rate: 0.5, decay_mom_rate: 0.01}}",
        ),
    ] {
        for zero_stage in 0..=3 {
            let text = settings(zero_stage, more);
            let root = root.path().join(format!("{name}-{zero_stage}"));
            let whole = world(2, |comm| trajectory(&mut engine(comm, &text), 10));
            let folder = saved(&root, 2, 5, &text);
            assert_eq!(folder, root.join("step-00000005"));
            let rest: Vec<Trajectory> = world(2, |comm| {
                let mut engine = engine(comm, &text);
                assert_eq!(engine.resume(&root).unwrap(), Some(folder.clone()));
                assert_eq!(engine.steps(), 5);
                trajectory(&mut engine, 5)
            });
            for (whole, rest) in whole.iter().zip(&rest) {
                assert_eq!(rest.losses, whole.losses[5..], "{name}, stage {zero_stage}: losses");
                assert_eq!(rest.norms, whole.norms[5..], "{name}, stage {zero_stage}: norms");
                assert!(rest.parameters == whole.parameters, "{name}, stage {zero_stage}: parameters");
            }
        }
    }
}

/// Collects the parameters and optimizer states of all ranks: (parameter, kind, bits).
fn state(ranks: usize, text: &str, prepare: impl Fn(&mut Engine) + Sync) -> Vec<(String, Kind, Vec<u32>)> {
    let pieces = world(ranks, |comm| {
        let mut engine = engine(comm, text);
        prepare(&mut engine);
        let mut pieces = vec![];
        for kind in engine.zero().kinds() {
            for range in engine.zero().saved_ranges() {
                let values = engine.zero().read(kind, &range).unwrap();
                pieces.push((range.parameter, kind, range.elements.start, values));
            }
        }
        let names: Vec<String> = engine.model().parameters().iter().map(|p| p.name().to_string()).collect();
        (names, pieces)
    });
    let names = pieces[0].0.clone();
    let mut pieces: Vec<_> = pieces.into_iter().flat_map(|(_, pieces)| pieces).collect();
    pieces.sort_by_key(|(parameter, kind, start, _)| (*parameter, *kind, *start));
    let mut whole: Vec<(String, Kind, Vec<u32>)> = vec![];
    for (parameter, kind, start, values) in pieces {
        if start == 0 {
            whole.push((names[parameter].clone(), kind, vec![]));
        }
        let bits = &mut whole.last_mut().unwrap().2;
        assert_eq!(bits.len(), start, "a gap in {}", names[parameter]);
        bits.extend(values.into_iter().map(f32::to_bits));
    }
    whole
}

#[test]
fn a_checkpoint_loads_into_any_layout() {
    let root = tempfile::tempdir().unwrap();
    for more in ["", BF16, FP16] {
        for (zero_stage, ranks) in [(0, 1), (1, 2), (2, 3), (3, 4)] {
            let text = settings(zero_stage, more);
            let folder = saved(&root.path().join(format!("{zero_stage}{}", more.len())), ranks, 3, &text);
            let original = state(ranks, &text, |engine| drop(train(engine, 3)));
            assert_eq!(original.len(), 3 * (2 * 12 + 4), "parameters and two states of each");
            for into_ranks in [1, 2, 3] {
                for into_stage in 0..=3 {
                    let loaded = state(into_ranks, &settings(into_stage, more), |engine| {
                        engine.load_checkpoint(&folder).unwrap_or_else(|e| panic!("{e}"));
                    });
                    assert!(
                        loaded == original,
                        "stage {zero_stage} on {ranks} ranks into stage {into_stage} on {into_ranks}"
                    );
                }
            }
        }
    }
}

/// After a load, all ranks must hold the same values of all replicated parameters.
#[test]
fn every_rank_has_the_loaded_parameters() {
    let root = tempfile::tempdir().unwrap();
    let folder = saved(root.path(), 2, 2, &settings(3, ""));
    for zero_stage in 0..=3 {
        let losses = world(3, |comm| {
            let mut engine = engine(comm, &settings(zero_stage, ""));
            engine.load_checkpoint(&folder).unwrap();
            (
                engine.forward(batch(9, 1).inputs).unwrap().tensors()[0]
                    .flatten_all()
                    .unwrap()
                    .to_vec1::<f32>()
                    .unwrap(),
                engine.local_parameter("transformer.wte.weight").unwrap(),
            )
        });
        assert!(losses.iter().all(|(logits, _)| *logits == losses[0].0), "stage {zero_stage}");
    }
}

/// An engine that only evaluates has no optimizer states, except those from which it computes averaged weights.
#[test]
fn weights_load_without_the_optimizer_states() {
    let root = tempfile::tempdir().unwrap();
    let groups = "training: {param_groups: [{kinds: [bias], optimizer: {type: Lion}}]}";
    let averages = "training: {ema: {decay: 0.9}}";
    for (name, more, states) in [
        ("plain", "", &[][..]),
        ("bf16", BF16, &[]),
        ("groups", groups, &[]),
        ("averages", averages, &["ema"]),
        ("schedule-free", "optimizer: {type: AdamWScheduleFree}", &["x_minus_y", "exp_avg_sq"]),
    ] {
        let folder = saved(&root.path().join(name), 2, 3, &settings(2, more));
        let losses = |ranks: usize, only_evaluates: bool, zero_stage: u8| {
            let losses = world(ranks, |comm| {
                let mut config = config(ranks, &settings(zero_stage, more));
                if only_evaluates {
                    config = config.for_evaluation();
                }
                let mut engine = Engine::with_communicator(config, gpt2(), comm).unwrap();
                if only_evaluates {
                    engine.load_weights(&folder).unwrap();
                    let found = engine.zero().state_names();
                    assert!(
                        found.len() == states.len() && states.iter().all(|state| found.contains(state)),
                        "{found:?}"
                    );
                } else {
                    engine.load_checkpoint(&folder).unwrap();
                }
                assert_eq!(engine.steps(), 3);
                let averages = engine.with_averages(|engine| engine.eval_batch(&batch(9, 1)));
                (engine.eval_batch(&batch(9, 1)).unwrap().to_bits(), averages.ok().map(f32::to_bits))
            });
            losses[0]
        };
        let expected = losses(1, false, 0);
        for (ranks, zero_stage) in [(1, 0), (2, 1), (3, 3)] {
            assert_eq!(losses(ranks, true, zero_stage), expected, "{name}, stage {zero_stage}");
        }
    }
    let folder = saved(&root.path().join("other"), 1, 1, &settings(0, ""));
    world(1, |comm| {
        let config = config(1, &settings(0, averages)).for_evaluation();
        let mut engine = Engine::with_communicator(config, gpt2(), comm).unwrap();
        let error = engine.load_weights(&folder).unwrap_err().to_string();
        assert!(error.contains("but not `ema`"), "{error}");
    });
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

/// After a resume, the data continue after the consumed samples, even if the batch size has changed. The position
/// depends on the number of samples, not of steps.
#[test]
fn data_continue_after_the_consumed_samples() {
    let root = tempfile::tempdir().unwrap();
    let folder = saved(root.path(), 2, 3, &settings(1, "gradient_accumulation_steps: 2"));
    world(1, |comm| {
        let mut engine = engine(comm, &settings(1, ""));
        engine.load_checkpoint(&folder).unwrap();
        assert_eq!((engine.steps(), engine.samples()), (3, 12));
        train(&mut engine, 1);
        assert_eq!((engine.steps(), engine.samples()), (4, 13));
    });
}
