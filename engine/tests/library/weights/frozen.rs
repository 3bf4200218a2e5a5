//! Models in which only some parameters are trained: training is bit-identical at every layout, and after one step the
//! trained parameters match those of full training.

use crate::sharding::bytes::assert_state;
use crate::world;

use tempfile::TempDir;
use world::{BF16, Trajectory, assert_same, batch, config, engine_of, run_of, save, trajectory, world};
use zero_engine::{Engine, Layers, zoo};

pub(crate) fn model(tied: bool) -> Layers {
    zoo::gpt2(&zoo::Gpt2Config {
        vocab_size: 61,
        n_positions: 16,
        n_embd: 32,
        n_layer: 3,
        n_head: 2,
        resid_pdrop: 0.1,
        embd_pdrop: 0.1,
        tie_word_embeddings: tied,
        initializer_range: 0.1,
        ..zoo::Gpt2Config::default()
    })
}

/// The last block; everything except the tied embedding; all biases; the final norm; a block in the middle without its
/// biases.
pub(crate) const SELECTIONS: [&str; 5] = [
    "trainable: ['*.h.2.*']",
    "frozen: ['*wte*']",
    "trainable: ['*.bias']",
    "trainable: ['*ln_f*']",
    "trainable: ['*.h.1.*'], frozen: ['*.bias']",
];

fn text(stage: u8, micro_batches: usize, selection: &str, more: &str, zero: &str) -> String {
    format!(
        "train_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: {micro_batches}\n{more}\n\
         training: {{reproducible: true, {selection}}}\n\
         zero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 40, \
         stage3_max_reuse_distance: 0{zero}}}"
    )
}

fn run(ranks: usize, text: &str) -> Trajectory {
    run_of(|| model(true), ranks, 4, text)
}

#[test]
fn every_stage_and_number_of_ranks_is_bit_identical() {
    for selection in SELECTIONS {
        for dtype in ["", BF16] {
            let expected = run(1, &text(0, 4, selection, dtype, ""));
            assert_ne!(expected.losses[0], expected.losses[3]);
            for (ranks, stage) in [(1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (4, 3)] {
                let got = run(ranks, &text(stage, 4 / ranks, selection, dtype, ""));
                assert_same(&expected, &got, &format!("{selection}, {dtype} stage {stage} on {ranks} ranks"));
            }
        }
    }
}

#[test]
fn every_pipeline_is_bit_identical() {
    for selection in SELECTIONS {
        let expected = run(1, &text(0, 4, selection, "", ""));
        for (stages, data, zero_stage) in [(2, 1, 1), (3, 1, 0), (2, 2, 3), (5, 1, 3)] {
            for schedule in ["gpipe", "1f1b", "interleaved_1f1b, virtual_stages: 2", "zb_h1"] {
                if schedule.contains("virtual") && stages > 2 {
                    continue; // there are five layers
                }
                let pipeline = format!("pipeline: {{stages: {stages}, schedule: {schedule}}}");
                let text = text(zero_stage, 4 / data, selection, &pipeline, "");
                let got = run(stages * data, &text);
                assert_same(&expected, &got, &format!("{selection}, {schedule}, {stages} × {data}"));
            }
        }
    }
}

#[test]
fn offloading_and_recomputation_are_bit_identical() {
    let folder = TempDir::new().unwrap();
    let nvme = |name: &str| format!(", {name}: {{device: nvme, nvme_path: '{}'}}", folder.path().display());
    let (optimizer, parameters) = (nvme("offload_optimizer"), nvme("offload_param"));
    let both = format!("{optimizer}{parameters}");
    let recomputes = "activation_checkpointing: {enabled: true}";
    for selection in SELECTIONS {
        for dtype in ["", BF16] {
            let expected = run(1, &text(0, 2, selection, dtype, ""));
            for (stage, more, zero) in [
                (0, recomputes, ""),
                (3, recomputes, ""),
                (2, "", optimizer.as_str()),
                (3, "", parameters.as_str()),
                (3, recomputes, both.as_str()),
            ] {
                let more = format!("{dtype}\n{more}\naio: {{block_size: 4096}}");
                let got = run(2, &text(stage, 1, selection, &more, zero));
                assert_same(&expected, &got, &format!("{selection}, {more}, stage {stage}{zero}"));
            }
        }
    }
}

/// After one step of plain SGD, the trained parameters are bit-identical to those of full training, and the frozen
/// parameters are unchanged.
#[test]
fn one_step_of_sgd_changes_the_selected_parameters_alone() {
    let step = |selection: &str| {
        let text = format!("train_micro_batch_size_per_gpu: 2\ntraining: {{{selection}}}");
        let sgd = "gradient_clipping: 0\noptimizer: {type: SGD, params: {lr: 0.1}}\n";
        let config = zero_engine::Config::with_world_size("test.yaml", format!("{sgd}{text}"), 1).unwrap();
        let mut all = world(1, |comm| {
            let mut engine = Engine::with_communicator(config.clone(), model(true), comm).unwrap();
            let before = trajectory(&mut engine, 0).parameters;
            let trained: Vec<bool> = engine.model().parameters().iter().map(|p| p.is_trainable()).collect();
            let after = trajectory(&mut engine, 1);
            (before, trained, after)
        });
        all.remove(0)
    };
    let (_, _, full) = step("seed: 1234");
    for selection in SELECTIONS {
        let (before, trained, got) = step(selection);
        assert_eq!(got.losses, full.losses);
        let mut changed = 0;
        for (i, (name, values)) in got.parameters.iter().enumerate() {
            let expected = if trained[i] { &full.parameters[i].1 } else { &before[i].1 };
            assert!(values == expected, "{selection}: {name}");
            changed += usize::from(*values != before[i].1);
        }
        assert_eq!(changed, trained.iter().filter(|&&trained| trained).count(), "{selection}");
    }
}

#[test]
fn frozen_parameters_have_no_other_state() {
    for dtype in ["", BF16] {
        for (stage, ranks) in [(0, 1), (1, 2), (2, 2), (3, 2)] {
            for selection in SELECTIONS {
                let text = text(stage, 1, selection, dtype, "");
                world(ranks, |comm| {
                    let mut engine = engine_of(model(true), comm, &text);
                    engine.train_batch(&batch(0, 2 * ranks)).unwrap();
                    let (zero, width) = (engine.zero(), if dtype.is_empty() { 4 } else { 2 });
                    let expected = assert_state(&engine, &text);
                    if stage == 0 {
                        let (all, trained) = (zero.layout().elements() as u64, zero.layout().trainable() as u64);
                        assert_eq!(expected.optimizer, 8 * trained);
                        let master = if width == 4 { 0 } else { 4 * trained };
                        assert_eq!(expected.parameters, width as u64 * all + master);
                    }
                });
            }
        }
    }
}

#[test]
fn checkpoints_load_at_another_layout_and_say_what_was_frozen() {
    let folder = TempDir::new().unwrap();
    for dtype in ["", BF16] {
        let selection = "trainable: ['*.h.1.*']";
        let root = folder.path().join(if dtype.is_empty() { "f32" } else { "bf16" });
        let expected = run(1, &text(0, 2, selection, dtype, ""));
        save((2, 2), &root, |comm| engine_of(model(true), comm, &text(3, 1, selection, dtype, "")));
        let resumed = |selection: &str| {
            let mut all = world(2, |comm| {
                let pipeline = format!("{dtype}\npipeline: {{stages: 2}}");
                let mut engine = engine_of(model(true), comm, &text(1, 2, selection, &pipeline, ""));
                engine.resume(&root).map_err(|error| error.to_string())?;
                Ok::<_, String>(trajectory(&mut engine, 2))
            });
            all.remove(0)
        };
        let got = resumed(selection).unwrap();
        assert_same(&expected.after(2), &got, dtype);
        let error = resumed("trainable: ['*.h.1.*', '*.h.0.*']").unwrap_err();
        assert!(error.contains("was frozen"), "{error}");
    }
}

#[test]
fn selections_without_effect_are_errors() {
    let error = |selection: &str| {
        let text = format!("train_micro_batch_size_per_gpu: 2\ntraining: {{{selection}}}");
        let mut all = world(1, |comm| Engine::with_communicator(config(1, &text), model(true), comm).map(drop));
        all.remove(0).unwrap_err().to_string()
    };
    let unknown = error("frozen: ['*.q_proj.*']");
    assert!(unknown.contains("training.frozen") && unknown.contains("`*.q_proj.*`"), "{unknown}");
    assert!(error("trainable: ['*.q_proj.*']").contains("training.trainable"));
    assert!(error("frozen: ['*']").contains("no parameter is trainable"));
    assert!(error("trainable: []").contains("no parameter is trainable"));
    assert!(error("trainable: ['[']").contains("`[`"));
}
