//! Local steps combined with adapters, 8-bit states, groups with their own optimizers, secondary shards and quantized
//! collectives.

use super::checkpoints::{resumed, with_a_skipped_update};
use super::{of_replicates, run, staged, text};
use crate::optimizers::eight_bit::ADAMW;
use crate::optimizers::group_optimizers::{BY_ELEMENTS, OF_WHOLE};
use crate::world::{engine, train, trajectory, world};

const LORA: &str = "adapter: {r: 4, lora_alpha: 16, init_lora_weights: false, bias: lora_only}";

/// Keys of a configuration, and parameter groups.
const VARIANTS: [(&str, &str); 4] = [(LORA, ""), (ADAMW, ""), ("", BY_ELEMENTS), ("", OF_WHOLE)];

/// Returns the keys of a run of two replicates, for a ZeRO stage, a number of ranks of a shard group and a number of
/// pipeline stages.
fn keys((more, groups): (&str, &str), stage: u8, shards: usize, stages: usize) -> String {
    let text = staged((stage, shards, stages), more);
    match groups {
        "" => text,
        _ => text.replace("training: {", &format!("training: {{param_groups: [{groups}], ")),
    }
}

#[test]
fn layouts_train_bit_identically() {
    let plain = run(2, 7, &text(0, 1, 2, ""));
    for variant in VARIANTS {
        let expected = run(2, 7, &keys(variant, 0, 1, 1));
        assert!(expected != plain && expected[0].losses != expected[1].losses, "{variant:?}");
        for stage in 0..=3 {
            for (shards, stages) in [(1, 1), (2, 1), (2, 2)] {
                let text = keys(variant, stage, shards, stages);
                assert!(run(2 * shards * stages, 7, &text) == expected, "{text}");
            }
        }
    }
}

#[test]
fn a_resumed_run_is_bit_identical_to_an_uninterrupted_one() {
    for variant in VARIANTS {
        let first = keys(variant, 0, 1, 1);
        let whole = of_replicates(world(2, |comm| with_a_skipped_update(comm, &first, None)), &first);
        let (from, root) = (keys(variant, 2, 2, 1), tempfile::tempdir().unwrap());
        world(4, |comm| with_a_skipped_update(comm, &from, Some(root.path())));
        for (ranks, text) in [(2, first), (4, from), (8, keys(variant, 3, 2, 2))] {
            let rest = of_replicates(world(ranks, |comm| resumed(comm, &text, root.path())), &text);
            assert!(rest == whole, "{text}");
        }
    }
}

/// Replicates send and average only trained parameters: those of the adapter.
#[test]
fn frozen_weights_are_not_averaged() {
    for stage in 0..=3 {
        let text = text(stage, 1, 2, LORA);
        let sent = world(2, |comm| {
            let mut engine = engine(comm, &text);
            let between = |engine: &zero_engine::Engine| engine.zero().groups().apart().unwrap().stats().sent_bytes();
            train(&mut engine, 2);
            let before = between(&engine);
            assert!(train(&mut engine, 1)[0].averaged);
            let parameters = engine.model().parameters();
            let trained = parameters.iter().filter(|of| of.is_trainable()).map(|of| of.elements()).sum::<usize>();
            let all = parameters.iter().map(|of| of.elements()).sum::<usize>();
            assert!(2 * trained < all, "{trained} of {all}");
            (between(&engine) - before, trained as u64)
        });
        // For each trained element, all replicates together send 2 (R − 1) f32 values, with R = 2.
        assert_eq!(sent.iter().map(|(sent, _)| sent).sum::<u64>(), 4 * 2 * sent[0].1, "{text}");
    }
}

/// A gather from secondary shards is bit-identical to the first gather of the step.
#[test]
fn secondary_shards_are_bit_identical() {
    let of = |near: usize| {
        let zero = format!("stage: 3, stage3_max_reuse_distance: 0, zero_hpz_partition_size: {near}");
        text(3, 4, 1, "").replace("stage: 3", &zero).replace("threshold: 40", "threshold: 0")
    };
    let bits = |near| {
        let text = of(near);
        let found = world(8, |comm| {
            let mut engine = engine(comm, &text);
            assert_eq!(engine.zero().layout().secondary().is_some(), near > 1, "{text}");
            (engine.zero().outer().unwrap().share.replicate, trajectory(&mut engine, 7))
        });
        of_replicates(found, &text)
    };
    assert!(bits(1) == bits(2));
}

/// A run with quantized collectives is deterministic and resumable, and its replicates hold the same f32 copies after
/// an outer step.
#[test]
fn quantized_collectives_are_deterministic_and_resumable() {
    let exact = text(3, 2, 1, "").replace("threshold: 40", "threshold: 0");
    let plain = run(4, 6, &exact);
    for codes in [
        "zero_quantized_weights: true",
        "zero_quantized_gradients: true",
        "zero_quantized_weights: true, zero_quantized_gradients: true",
    ] {
        let text = exact.replace("zero_optimization: {", &format!("zero_optimization: {{{codes}, "));
        let found = run(4, 6, &text);
        assert!(found == run(4, 6, &text), "{text}");
        assert!(found[0].losses != plain[0].losses, "{text}");
        assert!(found[0].parameters == found[1].parameters, "{text}");
        let whole = of_replicates(world(4, |comm| with_a_skipped_update(comm, &text, None)), &text);
        let root = tempfile::tempdir().unwrap();
        world(4, |comm| with_a_skipped_update(comm, &text, Some(root.path())));
        let rest = of_replicates(world(4, |comm| resumed(comm, &text, root.path())), &text);
        assert!(rest == whole, "{text}");
    }
}
