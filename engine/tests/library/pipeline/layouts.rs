//! A checkpoint has the same bits whichever layout writes it and whichever reads it. Layouts differ in replicas,
//! pipeline stages, ZeRO stage, dtype and disk offload.

use std::path::Path;

use proptest::prelude::*;
use zero_engine::{Engine, Kind};

use super::{engine_of, gpt2, text};
use crate::world::{BF16, FP16, config, train, world};

/// A layout: replicas, pipeline stages, ZeRO stage, whether state and parameters are offloaded to disk.
type Setup = (usize, usize, u8, bool);

fn settings((data, stages, zero_stage, on_disk): Setup, more: &str, folder: &Path) -> String {
    let text = text(zero_stage, stages, &format!("stages: {stages}"), more);
    let disk = format!("{{device: nvme, nvme_path: '{}', buffer_count: 5}}", folder.display());
    let disk = match (on_disk, zero_stage) {
        (false, _) => String::new(),
        (true, 3) => format!(", offload_optimizer: {disk}, offload_param: {disk}"),
        (true, _) => format!(", offload_optimizer: {disk}"),
    };
    let text = text
        .replace("stage3_param_persistence_threshold: 20}", &format!("stage3_param_persistence_threshold: 20{disk}}}"));
    // Every layout must resolve.
    config(data * stages, &text);
    text
}

/// Elements of parameters and optimizer state that ranks hold: name, kind, index of the first element, bits.
type Held = Vec<(String, Kind, usize, Vec<u32>)>;

fn held(engine: &Engine) -> Held {
    let (zero, model) = (engine.zero(), engine.model());
    let mut held = vec![];
    for kind in zero.kinds() {
        for range in zero.saved_ranges() {
            let bits = zero.read(kind, &range).unwrap().into_iter().map(f32::to_bits).collect();
            held.push((model.parameters()[range.parameter].name().to_string(), kind, range.elements.start, bits));
        }
    }
    held
}

/// Joins the pieces of each tensor.
fn joined(all: Vec<Held>) -> Vec<(String, Kind, Vec<u32>)> {
    let mut all: Held = all.into_iter().flatten().collect();
    all.sort_by(|a, b| (&a.0, a.1, a.2).cmp(&(&b.0, b.1, b.2)));
    let mut whole: Vec<(String, Kind, Vec<u32>)> = vec![];
    for (name, kind, start, bits) in all {
        if start == 0 {
            whole.push((name, kind, vec![]));
        }
        let last = whole.last_mut().unwrap();
        assert_eq!(last.2.len(), start, "a gap in {}", last.0);
        last.2.extend(bits);
    }
    whole
}

/// Trains under a layout and saves. Returns the state.
fn written(root: &Path, place: Setup, more: &str) -> Vec<(String, Kind, Vec<u32>)> {
    let text = settings(place, more, root);
    joined(world(place.0 * place.1, |comm| {
        let mut engine = engine_of(gpt2(40, true), comm, &text);
        train(&mut engine, 2);
        engine.save_checkpoint(root).unwrap_or_else(|e| panic!("{place:?}: {e}"));
        held(&engine)
    }))
}

/// Loads under a layout. Returns the state.
fn loaded(root: &Path, place: Setup, more: &str) -> Vec<(String, Kind, Vec<u32>)> {
    let text = settings(place, more, root);
    joined(world(place.0 * place.1, |comm| {
        let mut engine = engine_of(gpt2(40, true), comm, &text);
        engine.resume(root).unwrap_or_else(|e| panic!("{place:?}: {e}")).expect("a checkpoint");
        assert_eq!(engine.steps(), 2);
        held(&engine)
    }))
}

#[test]
fn checkpoints_load_bit_identically_for_each_pair_of_a_grid() {
    let places = [(1, 1, 0, false), (2, 1, 3, true), (3, 1, 1, false), (2, 2, 2, false), (1, 3, 3, false)];
    for from in places {
        let root = tempfile::tempdir().unwrap();
        let expected = written(root.path(), from, "");
        assert_eq!(expected.len(), 3 * (6 * 12 + 4), "parameters and two states of each");
        for into in places {
            assert!(loaded(root.path(), into, "") == expected, "{from:?} into {into:?}");
        }
    }
}

fn place() -> impl Strategy<Value = Setup> {
    // ZeRO stage 0 has no sharded state to offload.
    (1..=4usize, 1..=3usize, 0..=3u8, any::<bool>())
        .prop_map(|(data, stages, zero, disk)| (data, stages, zero, disk && zero > 0))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn checkpoints_load_bit_identically_for_random_layouts(
        from in place(), into in place(), more in prop::sample::select(&["", BF16, FP16][..]),
    ) {
        let root = tempfile::tempdir().unwrap();
        let expected = written(root.path(), from, more);
        prop_assert!(loaded(root.path(), into, more) == expected, "{:?} into {:?}", from, into);
    }
}
