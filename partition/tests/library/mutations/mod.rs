//! Programs accepted by the validator compute the right result.
//!
//! The test mutates valid programs of every ZeRO stage in every possible way: each instruction is removed, duplicated,
//! moved to each other position, and swapped with each other instruction. Mutants that the validator accepts are
//! executed symbolically ([`meaning`]) and must produce the same sums, norm and parameters as the original.

mod meaning;

use std::collections::BTreeSet;

use meaning::meaning;
use zero_partition::passes::{
    GatherOptions, OffloadOptions, PassOptions, RecomputeOptions, ReduceOptions, RefreshOptions, Share, training_step,
};
use zero_pipeline::{ModelShape, Placement, Placements, Program, Schedule, Stages, Tier, Tiers, ZeroStage};

use crate::{layer, segment, validate, with_secondary};

/// Returns three layers, the last one tied to the first. At stage 3, segment 2 stays gathered.
fn shape(zero_stage: ZeroStage) -> ModelShape {
    let segment = |elements| segment(zero_stage, elements, elements == 10);
    ModelShape {
        layers: vec![layer("embed", &[0]), layer("block", &[1, 2]), layer("head", &[0])],
        segments: vec![segment(40), segment(100), segment(10)],
    }
}

/// Returns programs with as much overlapped communication as the options allow, and programs with none.
fn programs() -> Vec<(ModelShape, Program)> {
    let mut programs = vec![];
    for zero_stage in [ZeroStage::Zero, ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
        let again = RecomputeOptions { layers: vec![true; 3], interval: 2, on_disk: false };
        let none = RecomputeOptions::none();
        let away = RecomputeOptions { layers: vec![true; 3], interval: 1, on_disk: true };
        for (overlap, bucket, recompute) in [
            (false, None, &none),
            (true, None, &none),
            (true, Some(120), &none),
            (true, None, &again),
            (false, None, &away),
        ] {
            let options = PassOptions {
                offload: OffloadOptions::PLAIN,
                recompute: recompute.clone(),
                gather: GatherOptions { prefetch: 100, max_live: 1000, max_reuse_distance: 0, overlap },
                reduce: ReduceOptions { bucket, overlap },
                refresh: RefreshOptions { bucket, overlap, last: false },
            };
            let shape = shape(zero_stage);
            let (stages, schedule) = (Stages::single(&shape), Schedule::OneFOneB);
            let share = Share { shape: &shape, stages: &stages, stage: 0 };
            let program = training_step(&share, schedule, 2, &options);
            programs.push((shape, program));
        }
    }
    for (overlap, micro_batches, interval) in [(true, 2, None), (false, 1, Some(1))] {
        let layers = vec![interval.is_some(); 3];
        let options = PassOptions {
            offload: OffloadOptions::PLAIN,
            recompute: RecomputeOptions { layers, interval: interval.unwrap_or(1), on_disk: false },
            gather: GatherOptions { prefetch: 100, max_live: 1000, max_reuse_distance: 0, overlap },
            reduce: ReduceOptions { bucket: None, overlap },
            refresh: RefreshOptions { bucket: None, overlap, last: false },
        };
        let shape = with_secondary(shape(ZeroStage::Three));
        let stages = Stages::single(&shape);
        let share = Share { shape: &shape, stages: &stages, stage: 0 };
        let program = training_step(&share, Schedule::OneFOneB, micro_batches, &options);
        programs.push((shape, program));
    }
    // Programs with offloaded state. They have no recomputation and at most two micro-batches, because the number of
    // mutants grows with the square of the number of instructions.
    for (zero_stage, gather, micro_batches) in
        [(ZeroStage::One, 0, 1), (ZeroStage::Two, 0, 2), (ZeroStage::Three, 100, 1)]
    {
        for tiles in [1, 3] {
            let options = PassOptions {
                offload: OffloadOptions { shards: tiles, tiles, reads_ahead: tiles > 1, writes_behind: tiles > 1 },
                recompute: RecomputeOptions::none(),
                gather: GatherOptions { prefetch: gather, max_live: 1000, max_reuse_distance: 0, overlap: true },
                reduce: ReduceOptions { bucket: None, overlap: true },
                refresh: RefreshOptions { bucket: None, overlap: true, last: false },
            };
            let shape = on_disk(shape(zero_stage));
            let (stages, schedule) = (Stages::single(&shape), Schedule::OneFOneB);
            let share = Share { shape: &shape, stages: &stages, stage: 0 };
            let program = training_step(&share, schedule, micro_batches, &options);
            programs.push((shape, program));
        }
    }
    programs
}

/// Offloads all but the smallest segment to disk, as far as its placements allow, in two tiles.
fn on_disk(mut shape: ModelShape) -> ModelShape {
    let tier = |placement| if placement == Placement::Sharded { Tier::Nvme } else { Tier::Memory };
    for segment in shape.segments.iter_mut().filter(|segment| segment.elements > 10) {
        let Placements { parameters, gradients, .. } = segment.placements;
        let (parameters, gradients) = (tier(parameters), tier(gradients));
        segment.tiers =
            Tiers { parameters, gradients, optimizer: Tier::Nvme, tiles: 2, two_passes: segment.elements % 2 == 0 };
    }
    shape
}

fn changed(program: &Program, change: impl FnOnce(&mut Vec<zero_pipeline::Instruction>)) -> Program {
    let mut program = program.clone();
    change(&mut program.instructions);
    program
}

/// Returns every program that differs from this one by one edit.
fn mutants(program: &Program) -> impl Iterator<Item = Program> + '_ {
    let n = program.instructions.len();
    let dropped = (0..n).map(|i| changed(program, |list| drop(list.remove(i))));
    let swapped = (0..n).flat_map(move |i| (i + 1..n).map(move |j| changed(program, |list| list.swap(i, j))));
    let moved = (0..n).flat_map(move |i| {
        (0..n).map(move |j| {
            changed(program, |list| {
                let instruction = list.remove(i);
                list.insert(j, instruction);
            })
        })
    });
    let doubled = (0..n).flat_map(move |i| {
        (0..=n).map(move |j| changed(program, |list| list.insert(j, program.instructions[i].clone())))
    });
    dropped.chain(swapped).chain(moved).chain(doubled).filter(move |mutant| mutant != program)
}

#[test]
fn accepted_mutants_have_the_same_meaning() {
    for (shape, program) in programs() {
        let original = meaning(&program, &shape).unwrap();
        let (mut refused, mut accepted) = (0, 0);
        for mutant in mutants(&program) {
            match validate(&[mutant.clone(), mutant.clone()], &shape) {
                Err(_) => refused += 1,
                Ok(()) => {
                    accepted += 1;
                    let got = meaning(&mutant, &shape).unwrap_or_else(|e| panic!("{e} in\n{mutant}"));
                    assert!(got == original, "the mutant means\n{got:?}\ninstead of\n{original:?}\nmutant:\n{mutant}");
                }
            }
        }
        // Both cases occur: most edits are defects, and some reorder independent instructions.
        assert!(refused > accepted && accepted > 0, "{refused} refused, {accepted} accepted");
    }
}

#[test]
fn no_instruction_can_be_dropped() {
    for (shape, program) in programs() {
        for index in 0..program.instructions.len() {
            let mutant = changed(&program, |list| drop(list.remove(index)));
            let text = &program.instructions[index];
            assert!(
                validate(&[mutant.clone(), mutant.clone()], &shape).is_err(),
                "`{text}` can be dropped by all ranks"
            );
            assert!(
                validate(&[program.clone(), mutant], &shape).is_err(),
                "the validator accepts programs without `{text}` on one rank"
            );
        }
    }
}

/// A rank that starts two collectives in a different order than the others would wait forever.
#[test]
fn no_rank_alone_can_reorder_collectives() {
    for (shape, program) in programs() {
        for mutant in mutants(&program) {
            let order = |program: &Program| -> Vec<String> {
                program.instructions.iter().filter(|i| i.is_collective()).map(ToString::to_string).collect()
            };
            if order(&mutant) != order(&program) {
                assert!(
                    validate(&[program.clone(), mutant.clone()], &shape).is_err(),
                    "accepted beside the original:\n{mutant}"
                );
            }
        }
    }
}

/// Neighbouring instructions of the kinds listed here may be swapped if they concern different objects; all other pairs
/// have a fixed order.
#[test]
fn only_independent_neighbours_can_be_swapped() {
    let mut free = BTreeSet::new();
    for (shape, program) in programs() {
        for i in 1..program.instructions.len() {
            let mutant = changed(&program, |list| list.swap(i - 1, i));
            if validate(&[mutant.clone(), mutant], &shape).is_ok() {
                let mut pair = [program.instructions[i - 1].kind(), program.instructions[i].kind()];
                pair.sort_unstable();
                free.insert(pair);
            }
        }
    }
    let free: Vec<String> = free.into_iter().map(|pair| pair.join(" ")).collect();
    let expected = [
        "accumulate accumulate",
        "accumulate await_fetch",
        "accumulate await_reduce",
        "accumulate backward",
        "accumulate load",
        "accumulate reduce",
        "await_fetch await_gather",
        "await_fetch await_reduce",
        "await_fetch backward",
        "await_fetch fetch",
        "await_fetch gather",
        "await_fetch load",
        "await_fetch offload",
        "await_gather discard",
        "await_gather fetch",
        "await_gather gather",
        "await_gather gather_secondary",
        "await_gather keep",
        "await_gather load",
        "await_gather release",
        "await_gather_secondary gather_secondary",
        "await_gather_secondary load",
        "await_gather_secondary release",
        "await_offload await_offload",
        "await_offload await_reduce",
        "await_offload await_refresh",
        "await_offload discard",
        "await_offload fetch",
        "await_offload keep",
        "await_offload offload",
        "await_offload refresh",
        "await_offload update",
        "await_reduce backward",
        "await_reduce gather_secondary",
        "await_reduce load",
        "await_reduce reduce",
        "await_reduce release",
        "await_refresh await_refresh",
        "await_refresh refresh",
        "await_refresh update",
        "backward fetch",
        "backward gather",
        "backward gather_secondary",
        "backward reduce",
        "backward release",
        "discard forward",
        "discard gather",
        "discard gather_secondary",
        "discard keep",
        "discard release",
        "fetch fetch",
        "fetch gather",
        "fetch gradient_norm",
        "fetch load",
        "fetch offload",
        "fetch recompute",
        "fetch reduce",
        "fetch refresh",
        "fetch release",
        "forward gather",
        "forward gather_secondary",
        "forward offload",
        "gather keep",
        "gather load",
        "gather offload",
        "gather recompute",
        "gather release",
        "gather_secondary release",
        "load reduce",
        "offload reduce",
        "offload refresh",
        "offload update",
        "reduce release",
        "refresh update",
        "update update",
    ];
    assert_eq!(free, expected);
}
