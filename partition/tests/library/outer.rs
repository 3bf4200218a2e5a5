//! Tests the program of an outer step: the validator accepts it, and rejects it if an instruction is missing or
//! repeated.

use zero_partition::passes::{
    GatherOptions, OffloadOptions, PassOptions, RecomputeOptions, ReduceOptions, RefreshOptions, Share, averaging,
    training_step,
};
use zero_pipeline::Instruction::{AwaitOuterStep, OuterStep};
use zero_pipeline::{Degrees, Mesh, ModelShape, Program, Schedule, Stages, World, ZeroStage};

use crate::{layer, segment, validate};

/// Returns an embedding tied to the head, and two blocks, of which one is frozen.
fn shape(zero_stage: ZeroStage) -> ModelShape {
    let mut segments = [64, 100, 8, 120].map(|elements| segment(zero_stage, elements, elements == 8)).to_vec();
    segments[3].is_trainable = false;
    let layers = vec![layer("embed", &[0]), layer("frozen", &[3]), layer("block", &[1, 2]), layer("head", &[0])];
    ModelShape { layers, segments }
}

fn options(overlap: bool) -> PassOptions {
    PassOptions {
        offload: OffloadOptions::PLAIN,
        recompute: RecomputeOptions::none(),
        gather: GatherOptions { prefetch: 0, max_live: usize::MAX, max_reuse_distance: 0, overlap },
        reduce: ReduceOptions { bucket: None, overlap },
        refresh: RefreshOptions { bucket: None, overlap, last: false },
    }
}

#[test]
fn no_instruction_can_be_dropped_or_repeated() {
    for zero_stage in [ZeroStage::Zero, ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
        for overlap in [false, true] {
            let shape = shape(zero_stage);
            let stages = Stages::single(&shape);
            let program = averaging(&Share { shape: &shape, stages: &stages, stage: 0 }, &options(overlap));
            validate(&[program.clone(), program.clone()], &shape).unwrap_or_else(|e| panic!("{e}\n{program}"));
            let started = program.instructions.iter().filter(|it| matches!(it, OuterStep { .. })).count();
            assert_eq!(started, 3, "those of trainable segments");
            for index in 0..program.instructions.len() {
                let (mut dropped, mut repeated) = (program.clone(), program.clone());
                let instruction = dropped.instructions.remove(index);
                repeated.instructions.insert(index, instruction.clone());
                for mutant in [dropped, repeated] {
                    let result = validate(&[mutant.clone(), mutant.clone()], &shape);
                    assert!(result.is_err(), "{instruction}\n{mutant}");
                }
            }
        }
    }
}

#[test]
fn frozen_segments_and_training_steps_have_no_outer_step() {
    let shape = shape(ZeroStage::One);
    let stages = Stages::single(&shape);
    let share = Share { shape: &shape, stages: &stages, stage: 0 };
    let refused = |program: &Program| validate(&[program.clone(), program.clone()], &shape).unwrap_err().reason;
    let mut program = averaging(&share, &options(false));
    program.instructions.splice(0..0, [OuterStep { segment: 3 }, AwaitOuterStep { segment: 3 }]);
    assert_eq!(refused(&program), "the segment is frozen");
    let mut program = training_step(&share, Schedule::OneFOneB, 1, &options(false));
    program.instructions.splice(0..0, [OuterStep { segment: 1 }, AwaitOuterStep { segment: 1 }]);
    assert_eq!(refused(&program), "replicates must be averaged between training steps");
}

/// The stage that owns the tied embedding sends it to the stage of the head.
#[test]
fn stages_exchange_tied_parameters() {
    let shape = shape(ZeroStage::Two);
    let stages = Stages::new(&shape, 2, vec![0..2, 2..4]).unwrap();
    let of_stage = |stage| averaging(&Share { shape: &shape, stages: &stages, stage }, &options(true));
    let programs = [of_stage(0), of_stage(1)];
    let world = World { shape: &shape, stages: &stages, mesh: Mesh::new(2, Degrees::stages(2)).unwrap(), capacity: 0 };
    zero_pipeline::validate(&programs, &world).unwrap_or_else(|e| panic!("{e}\n{}\n{}", programs[0], programs[1]));
    let text = programs[0].to_string();
    assert!(text.contains("send tied parameters of segment 0 to stage 1"), "{text}");
    // Without the message, the other stage would train on old values.
    let drops = |program: &Program| Program {
        instructions: program.instructions.iter().filter(|it| !it.to_string().contains("tied")).cloned().collect(),
        micro_batches: 0,
    };
    assert!(zero_pipeline::validate(&programs.each_ref().map(drops), &world).is_err());
}
