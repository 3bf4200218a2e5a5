//! Activation checkpointing does not change a bit of a run: recomputed forwards use the same dropout masks.

use crate::world;

use world::{BF16, FP16, assert_same, config, engine, engine_of, gpt2, resume, run, save, train, world};
use zero_engine::{Engine, Layers, zoo};

fn settings(zero_stage: u8, micro_batches: usize, extra: &str) -> String {
    format!(
        "train_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: {micro_batches}\n\
         zero_optimization: {{stage: {zero_stage}, stage3_param_persistence_threshold: 40, stage3_max_reuse_distance: 0}}\n{extra}"
    )
}

#[test]
fn recomputation_is_bit_identical() {
    for zero_stage in 0..=3 {
        for (ranks, micro_batches) in [(1, 2), (2, 1), (3, 2)] {
            let expected = run(ranks, 6, &settings(zero_stage, micro_batches, ""));
            for section in ["{}", "{interval: 2}", "{number_checkpoints: 1}", "{layers: ['.']}", "{layers: ['h\\.1']}"]
            {
                let extra = format!("activation_checkpointing: {section}");
                let got = run(ranks, 6, &settings(zero_stage, micro_batches, &extra));
                assert_same(&expected, &got, &format!("ZeRO {zero_stage}, {ranks} ranks, {section}"));
            }
        }
    }
}

#[test]
fn recomputation_is_bit_identical_in_16_bits() {
    for (zero_stage, dtype) in [(0, BF16), (3, BF16), (0, FP16), (3, FP16)] {
        let expected = run(2, 8, &settings(zero_stage, 2, dtype));
        let got = run(2, 8, &settings(zero_stage, 2, &format!("{dtype}\nactivation_checkpointing: {{}}")));
        assert_same(&expected, &got, &format!("ZeRO {zero_stage}, {dtype}"));
    }
}

/// Saved inputs are offloaded to disk. The model comes from a configuration, so that a dry run can compute its sizes.
#[test]
fn inputs_offloaded_to_disk_are_bit_identical() {
    let folder = tempfile::tempdir().unwrap();
    let model = "model: {type: gpt2, vocab_size: 61, n_positions: 16, n_embd: 32, n_layer: 2, n_head: 2, n_inner: 64, \
                 initializer_range: 0.1}\ndata: {train: none.txt}";
    let nvme = format!("{{device: nvme, nvme_path: '{}'}}", folder.path().display());
    for (zero_stage, pipeline, ranks) in [(0, "", 1), (3, "", 2), (1, "pipeline: {stages: 2}\n", 2)] {
        for dtype in ["", BF16, FP16] {
            let text = |section: &str| settings(zero_stage, 3, &format!("{model}\n{pipeline}{dtype}\n{section}"));
            let expected = run(ranks, 5, &text(""));
            let got = run(ranks, 5, &text(&format!("activation_checkpointing: {nvme}")));
            assert_same(&expected, &got, &format!("ZeRO {zero_stage}, {pipeline}, {dtype}"));
        }
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "files were left");
}

fn eight_blocks() -> Layers {
    let config = zoo::Gpt2Config {
        vocab_size: 61,
        n_positions: 16,
        n_embd: 32,
        n_layer: 8,
        n_head: 2,
        resid_pdrop: 0.1,
        ..zoo::Gpt2Config::default()
    };
    zoo::gpt2(&config)
}

/// Returns the number of recomputed forwards in a step of ten layers: an embedding, eight blocks, and a head with its
/// norm.
fn recomputed(section: &str) -> u64 {
    world(1, |comm| {
        let text = settings(1, 1, section);
        let mut engine = engine_of(eight_blocks(), comm, &text);
        train(&mut engine, 1);
        engine.timing().calls().find(|(kind, _)| *kind == "recompute").map_or(0, |(_, calls)| calls)
    })[0]
}

#[test]
fn an_empty_section_enables_recomputation() {
    assert_eq!(recomputed(""), 0);
    assert_eq!(recomputed("activation_checkpointing: {enabled: false}"), 0);
    assert_eq!(recomputed("activation_checkpointing: {}"), recomputed("activation_checkpointing: {interval: 3}"));
    assert!(recomputed("activation_checkpointing: {}") >= 8);
    assert_eq!(recomputed("activation_checkpointing: {layers: ['h\\.[0-3]$']}"), 4);
}

/// Patterns must match at least one layer other than the last.
#[test]
fn patterns_without_a_match_are_errors() {
    for (pattern, wanted) in [("attention", "no layer name matches"), ("lm_head", "only the last layer matches")] {
        let text = settings(1, 1, &format!("activation_checkpointing: {{layers: ['{pattern}']}}"));
        let error = world(1, |comm| Engine::with_communicator(config(1, &text), gpt2(), comm).err())[0].take();
        let error = error.unwrap_or_else(|| panic!("`{pattern}` was taken")).to_string();
        assert!(error.contains(wanted), "{error}");
    }
}

/// A checkpoint does not depend on activation checkpointing.
#[test]
fn a_run_resumes_without_recomputation() {
    let folder = tempfile::tempdir().unwrap();
    let again = settings(2, 1, "activation_checkpointing: {}");
    let kept = settings(2, 1, "");
    let expected = run(2, 6, &kept);
    save((2, 3), folder.path(), |comm| engine(comm, &again));
    let rest = resume((2, 3), folder.path(), |comm| engine(comm, &kept));
    assert_same(&expected.after(3), &rest, "resumed without recomputation");
}
