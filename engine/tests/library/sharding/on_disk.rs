//! State on a disk, for every kind of update and storage: runs are bit-identical to runs in memory, resume from and
//! into memory, and move the bytes of the formula.

use std::path::Path;

use zero_engine::Layers;
use zero_optim::EIGHT_BIT_BLOCK;
use zero_partition::{Category, Segment, disk_bytes, expected_state};

use crate::world::{
    BF16, Trajectory, agreed, assert_same, batch, engine, engine_of, gpt2, reproducible, resume, run_of, save,
    trajectory, world,
};

/// Puts the state of a run with [`reproducible`] keys on a disk, in tiles of 2,048 elements. At stage 3, also puts its
/// parameters there.
pub(crate) fn offloaded(text: &str, folder: &Path) -> String {
    let nvme = format!("{{device: nvme, nvme_path: {folder:?}}}");
    let parameters = if text.contains("stage: 3") { format!(", offload_param: {nvme}") } else { String::new() };
    let keys = format!("zero_optimization: {{sub_group_size: 2048, offload_optimizer: {nvme}{parameters}, ");
    assert!(text.contains("zero_optimization: {"), "{text}");
    format!("{}\naio: {{block_size: 4096}}", text.replace("zero_optimization: {", &keys))
}

/// Asserts that [`reproducible`] runs with `more` are bit-identical with state on a disk, in every layout, and after
/// resuming in another layout.
pub(crate) fn assert_offloads(more: &str, layers: impl Fn() -> Layers + Sync) {
    let folder = tempfile::tempdir().unwrap();
    let expected = run_of(&layers, 1, 6, &reproducible(0, 1, more));
    assert_ne!(expected.losses[0], expected.losses[5], "{more}");
    let text = |stage, data, more: &str| offloaded(&reproducible(stage, data, more), folder.path());
    let run = |ranks: usize, text: &str| -> Trajectory {
        let all = world(ranks, |comm| {
            let mut engine = engine_of(layers(), comm, text);
            let trajectory = trajectory(&mut engine, 6);
            (trajectory, engine.zero().disk_use().map_or(0, |used| used.read.min(used.written)))
        });
        assert!(all.iter().all(|(_, moved)| *moved > 0), "{text}");
        agreed(all.into_iter().map(|(trajectory, _)| trajectory).collect(), text)
    };
    for (ranks, stage) in [(1, 1), (2, 1), (2, 2), (4, 2), (2, 3), (4, 3)] {
        let text = text(stage, ranks, more);
        assert_same(&expected, &run(ranks, &text), &text);
    }
    for (replicas, stage) in [(1, 1), (2, 3)] {
        let text = text(stage, replicas, &format!("{more}\npipeline: {{stages: 2}}"));
        assert_same(&expected, &run(2 * replicas, &text), &text);
    }
    let on_disk = |stage, ranks| (ranks, text(stage, ranks, more));
    let in_memory = |stage, ranks| (ranks, reproducible(stage, ranks, more));
    for (from, to) in
        [(on_disk(3, 2), in_memory(0, 1)), (in_memory(1, 2), on_disk(3, 4)), (on_disk(1, 2), on_disk(2, 4))]
    {
        let saved = tempfile::tempdir().unwrap();
        save((from.0, 3), saved.path(), |comm| engine_of(layers(), comm, &from.1));
        let rest = resume((to.0, 3), saved.path(), |comm| engine_of(layers(), comm, &to.1));
        assert_same(&expected.after(3), &rest, &format!("{} to {}", from.1, to.1));
    }
}

const NO_COPY: &str = "bf16: {enabled: true, bf16_master_weights_and_grads: true}";
const NARROW: &str = "bf16: {enabled: true, bf16_master_weights_and_grads: true, bf16_optimizer_states: true}";
pub(crate) const STOCHASTIC: &str = "bf16: {enabled: true, bf16_master_weights_and_grads: true, bf16_optimizer_states: true, \
                          stochastic_rounding: true}";
const STATES: &str = "bf16: {enabled: true}\n\
                      optimizer: {type: AdamW, params: {lr: 0.01, weight_decay: 0.1, fp32_optimizer_states: false}}";
const LION: &str = "optimizer: {type: Lion, params: {lr: 0.001}}";
const MUON: &str = "optimizer: {type: Muon, params: {muon_lr: 0.02, adam_lr: 0.003, weight_decay: 0.1}}";
const LAMB: &str = "optimizer: {type: Lamb, params: {lr: 0.01, weight_decay: 0.1}}";
const ADAFACTOR: &str = "optimizer: {type: Adafactor, params: {lr: 0.02}}";
const FREE: &str = "optimizer: {type: AdamWScheduleFree, params: {lr: 0.01, warmup_steps: 3, weight_decay: 0.1}}";
const EIGHT: &str = crate::optimizers::eight_bit::ADAMW;
const EIGHT_LION: &str = "optimizer: {type: Lion, params: {lr: 0.001, optim_bits: 8, min_8bit_size: 500}}";

#[test]
fn bf16_state_is_bit_identical() {
    for more in [NO_COPY, NARROW, STOCHASTIC, STATES, &format!("{NARROW}\n{LION}")] {
        assert_offloads(more, gpt2);
    }
}

#[test]
fn states_in_8_bits_are_bit_identical() {
    for more in [EIGHT, EIGHT_LION, &format!("{EIGHT}\n{STOCHASTIC}").replace(", bf16_optimizer_states: true", "")] {
        assert_offloads(more, gpt2);
    }
}

/// The owner of a matrix updates it as one tile.
#[test]
fn muon_is_bit_identical() {
    for more in [MUON, &format!("{MUON}\n{BF16}")] {
        assert_offloads(more, gpt2);
    }
}

/// The update takes two passes: the first sums up the norms of whole parameters over their tiles.
#[test]
fn lamb_and_adafactor_are_bit_identical() {
    for more in [LAMB, &format!("{LAMB}\n{BF16}"), ADAFACTOR, &format!("{ADAFACTOR}\n{BF16}")] {
        assert_offloads(more, gpt2);
    }
}

/// The module `averages` compares the evaluations of such runs.
#[test]
fn a_schedule_free_optimizer_is_bit_identical() {
    for more in [FREE, &format!("{FREE}\n{BF16}")] {
        assert_offloads(more, gpt2);
    }
}

/// A step reads and writes each tile once, or twice if the optimizer needs norms of whole parameters. A tile has whole
/// pages for each state and for the f32 copy.
#[test]
fn bytes_match_the_formula() {
    const F32: fn(usize) -> usize = |elements| 4 * elements;
    const HALF: fn(usize) -> usize = |elements| 2 * elements;
    const BITS: fn(usize) -> usize = |elements| elements + 4 * elements.div_ceil(EIGHT_BIT_BLOCK);
    for (more, columns) in [
        ("", vec![F32, F32]),
        ("bf16: {enabled: true}", vec![F32, F32, F32]),
        (STATES, vec![HALF, HALF, F32]),
        (NO_COPY, vec![F32, F32]),
        (NARROW, vec![HALF, HALF]),
        (&format!("{NARROW}\n{LION}"), vec![HALF]),
        (EIGHT, vec![BITS, BITS]),
        (EIGHT_LION, vec![BITS]),
        (LAMB, vec![F32, F32]),
        (FREE, vec![F32, F32]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        for (ranks, stage) in [(1, 1), (2, 1), (2, 2)] {
            let text = offloaded(&reproducible(stage, ranks, more), folder.path());
            world(ranks, |comm| {
                let rank = comm.rank();
                let mut engine = engine(comm, &text);
                let mut step = |index| {
                    engine.train_batch(&batch(index, 4)).unwrap();
                    engine.zero().disk_use().unwrap()
                };
                let (first, second) = (step(0), step(1));
                let of_tile = |segment: &Segment, elements: usize| -> u64 {
                    let columns = if segment.is_eight_bit || !more.contains("8bit") {
                        &columns
                    } else {
                        &vec![F32; columns.len()]
                    };
                    columns.iter().map(|bytes| bytes(elements).next_multiple_of(4096) as u64).sum()
                };
                let of_segment = |segment: &Segment| -> u64 {
                    let elements = if segment.tiers.tiles > 0 { segment.shard(rank).len() } else { 0 };
                    (0..elements).step_by(2048).map(|start| of_tile(segment, 2048.min(elements - start))).sum()
                };
                let (zero, widths) = (engine.zero(), engine.zero().widths());
                let expected: u64 = zero.layout().segments().iter().map(of_segment).sum();
                assert!(expected > 0, "{text}");
                // Disk space for the weights while the averages replace them.
                let kept = |segment: &Segment| match (more == FREE, segment.tiers.tiles) {
                    (true, 1..) => (4 * segment.shard(rank).len()).next_multiple_of(4096) as u64,
                    _ => 0,
                };
                let size = expected + zero.layout().segments().iter().map(kept).sum::<u64>();
                assert_eq!(first.bytes, size, "{text}");
                let moved = expected * if more == LAMB { 2 } else { 1 };
                assert_eq!((second.read - first.read, second.written - first.written), (moved, moved), "{text}");
                let (stages, at) = (zero.stages(), zero.groups().at());
                assert_eq!(disk_bytes(zero.layout(), stages, at, &widths).optimizer, size, "{text}");
                let state = expected_state(zero.layout(), stages, at, &widths);
                assert_eq!(zero.ledger().peak(Category::OptimizerState), state.optimizer, "{text}");
                assert_eq!(zero.ledger().peak(Category::Parameters), state.parameters, "{text}");
            });
        }
    }
}
