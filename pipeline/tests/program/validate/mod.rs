//! Every kind of defect must be reported with the rank, the instruction and the reason.

mod gathers;
mod updates;

use zero_pipeline::Instruction::{self, *};
use zero_pipeline::{
    Degrees, Exchanges, ModelShape, Placement, Program, Stages, Violation, World, ZeroStage, schedule,
};

use crate::shapes::{layer, segment};

/// Validates programs on one pipeline stage.
fn validate(programs: &[Program], shape: &ModelShape) -> Result<(), Violation> {
    let stages = Stages::single(shape);
    zero_pipeline::validate(programs, &World::data_parallel(shape, &stages, programs.len()))
}

/// Returns three layers. The last layer also uses the segment of the first layer.
fn shape(zero_stage: ZeroStage) -> ModelShape {
    ModelShape {
        layers: vec![layer("embed", vec![0]), layer("block", vec![1]), layer("head", vec![0, 2])],
        segments: [40, 100, 10].map(|elements| segment(elements, zero_stage)).to_vec(),
    }
}

/// Returns the simplest valid step: every segment is gathered right before its use and released right after, and every
/// operation is awaited at once. The step is written without the passes, so that the test covers only the validator.
fn plain_step(shape: &ModelShape, micro_batches: usize) -> Program {
    let mut instructions = vec![];
    for instruction in schedule::accumulation(shape, micro_batches).instructions {
        match instruction {
            Forward { layer, .. } | Backward { layer, .. } => {
                let sharded = |&s: &usize| shape.segments[s].placements.parameters == Placement::Sharded;
                let needed: Vec<usize> = shape.layers[layer].segments.iter().copied().filter(sharded).collect();
                instructions.extend(needed.iter().flat_map(|&segment| {
                    [Gather { segments: vec![segment] }, AwaitGather { segments: vec![segment] }]
                }));
                instructions.push(instruction.clone());
                instructions.extend(needed.iter().map(|&segment| Release { segment }));
                if let Backward { layer, micro_batch } = instruction {
                    let completed = shape.completed_by(layer);
                    instructions
                        .extend(completed.into_iter().flat_map(|s| reduced(shape, s, micro_batch, micro_batches)));
                }
            }
            Update { segment } => {
                instructions.push(instruction);
                let placements = shape.segments[segment].placements;
                if placements.parameters == Placement::Replicated && placements.optimizer == Placement::Sharded {
                    let segments = vec![segment];
                    instructions.extend([Refresh { segments: segments.clone() }, AwaitRefresh { segments }]);
                }
            }
            other => instructions.push(other),
        }
    }
    Program { instructions, micro_batches }
}

fn reduced(shape: &ModelShape, segment: usize, micro_batch: usize, micro_batches: usize) -> Vec<Instruction> {
    let segments = vec![segment];
    let reduction = [Reduce { segments: segments.clone(), micro_batch }, AwaitReduce { segments, micro_batch }];
    match shape.segments[segment].placements.gradients {
        Placement::Sharded => reduction.to_vec(),
        Placement::Replicated if micro_batch + 1 < micro_batches => vec![Accumulate { segment, micro_batch }],
        Placement::Replicated => [vec![Accumulate { segment, micro_batch }], reduction.to_vec()].concat(),
    }
}

const STAGES: [ZeroStage; 4] = [ZeroStage::Zero, ZeroStage::One, ZeroStage::Two, ZeroStage::Three];

fn position(program: &Program, wanted: &Instruction) -> usize {
    program.instructions.iter().position(|i| i == wanted).unwrap_or_else(|| panic!("no `{wanted}` in\n{program}"))
}

/// Changes a valid step with two micro-batches, and returns the violation.
fn changed(zero_stage: ZeroStage, change: impl FnOnce(&mut Program)) -> Violation {
    let shape = shape(zero_stage);
    let mut program = plain_step(&shape, 2);
    change(&mut program);
    validate(&[program], &shape).expect_err("the program is accepted")
}

/// Removes the first occurrence of an instruction from a valid step, and returns the violation.
fn without(zero_stage: ZeroStage, instruction: &Instruction) -> Violation {
    changed(zero_stage, |program| {
        program.instructions.remove(position(program, instruction));
    })
}

#[track_caller]
fn assert_reason(violation: &Violation, instruction: &str, reason: &str) {
    assert_eq!((violation.instruction.as_str(), violation.reason.as_str()), (instruction, reason), "{violation}");
}

#[test]
fn plain_steps_are_valid() {
    for zero_stage in STAGES {
        for micro_batches in 1..=4 {
            let shape = shape(zero_stage);
            let program = plain_step(&shape, micro_batches);
            assert_eq!(validate(&[program.clone(), program.clone(), program], &shape), Ok(()));
        }
    }
    let shape = shape(ZeroStage::Zero);
    assert_eq!(validate(&[schedule::forward_only(&shape, &Stages::single(&shape), 0, 3)], &shape), Ok(()));
}

#[test]
fn a_violation_names_rank_instruction_and_reason() {
    let shape = shape(ZeroStage::Three);
    let good = plain_step(&shape, 1);
    let mut bad = good.clone();
    let index = position(&bad, &AwaitGather { segments: vec![1] });
    bad.instructions.remove(index);
    let violation = validate(&[good.clone(), good, bad], &shape).unwrap_err();
    assert_eq!((violation.rank, violation.index), (2, index));
    assert_eq!(
        violation.to_string(),
        format!(
            "rank 2, instruction {index} (forward layer 1 of micro-batch 0): it reads segment 1, which is still being gathered"
        )
    );
}

#[test]
fn layers_run_in_order_and_once() {
    let s = ZeroStage::Zero;
    let unloaded = without(s, &Load { micro_batch: 0 });
    assert_reason(&unloaded, "forward layer 0 of micro-batch 0", "its micro-batch is not loaded");
    let loaded_twice = changed(s, |program| program.instructions.insert(0, Load { micro_batch: 0 }));
    assert_reason(&loaded_twice, "load micro-batch 0", "loaded twice");
    let skipped = without(s, &Forward { layer: 1, micro_batch: 0 });
    assert_reason(&skipped, "forward layer 2 of micro-batch 0", "the previous layer has not run");
    let swapped = changed(s, |program| {
        let at = position(program, &Forward { layer: 1, micro_batch: 0 });
        program.instructions.swap(at, at + 1);
    });
    assert_reason(&swapped, "forward layer 2 of micro-batch 0", "the previous layer has not run");
    let forward_twice = changed(s, |program| program.instructions.insert(2, Forward { layer: 0, micro_batch: 0 }));
    assert_reason(&forward_twice, "forward layer 0 of micro-batch 0", "run twice");
    let no_forward = without(s, &Forward { layer: 2, micro_batch: 0 });
    assert_reason(&no_forward, "backward layer 2 of micro-batch 0", "its forward has not run");
    let no_backward = without(s, &Backward { layer: 2, micro_batch: 0 });
    assert_reason(
        &no_backward,
        "accumulate segment 2 of micro-batch 0",
        "segment 2's gradient of that micro-batch is not complete",
    );
    let backward_early = changed(s, |program| {
        let (from, to) = (Backward { layer: 1, micro_batch: 0 }, Backward { layer: 2, micro_batch: 0 });
        let (from, to) = (position(program, &from), position(program, &to));
        program.instructions.swap(from, to);
    });
    assert_reason(&backward_early, "backward layer 1 of micro-batch 0", "the backward of the next layer has not run");
    let unknown = changed(s, |program| program.instructions.insert(0, Load { micro_batch: 2 }));
    assert_reason(&unknown, "load micro-batch 2", "no such micro-batch");
    let no_layer = changed(s, |program| program.instructions.insert(1, Forward { layer: 3, micro_batch: 0 }));
    assert_reason(&no_layer, "forward layer 3 of micro-batch 0", "there is no layer 3");
    let shape = shape(s);
    let mut evaluation = schedule::forward_only(&shape, &Stages::single(&shape), 0, 2);
    evaluation.instructions.pop();
    let unfinished = validate(&[evaluation], &shape).unwrap_err();
    assert_reason(&unfinished, "end", "not every layer ran on every micro-batch");
}

#[test]
fn all_ranks_start_the_same_collectives_in_the_same_order() {
    let shape = shape(ZeroStage::Three);
    let good = plain_step(&shape, 1);
    // Both programs start two gathers before the first use, in opposite orders. Each order is valid by itself.
    let ahead = |first, second| {
        let mut program = good.clone();
        for segment in [0, 1] {
            program.instructions.remove(position(&program, &Gather { segments: vec![segment] }));
        }
        program.instructions.splice(0..0, [Gather { segments: vec![first] }, Gather { segments: vec![second] }]);
        program
    };
    let (one, other) = (ahead(0, 1), ahead(1, 0));
    assert_eq!(validate(&[one.clone(), one.clone()], &shape), Ok(()));
    assert_eq!(validate(&[other.clone(), other.clone()], &shape), Ok(()));
    let violation = validate(&[one.clone(), one.clone(), other], &shape).unwrap_err();
    assert_eq!((violation.rank, violation.index), (2, 0));
    let reason = "all ranks of a stage must start the same collectives: collective 0 is `gather segments [1]` here, but `gather segments [0]` on rank 0";
    assert_reason(&violation, "gather segments [1]", reason);
    // A program with one collective too many.
    let mut more = good.clone();
    let end = more.instructions.len();
    let segment = 0;
    more.instructions.extend([
        Gather { segments: vec![segment] },
        AwaitGather { segments: vec![segment] },
        Release { segment },
    ]);
    let violation = validate(&[good.clone(), more.clone()], &shape).unwrap_err();
    assert_eq!((violation.rank, violation.index), (1, end));
    assert!(violation.reason.ends_with("is `gather segments [0]` here, but nothing on rank 0"), "{violation}");
    // A program with one collective too few.
    let violation = validate(&[more, good.clone()], &shape).unwrap_err();
    assert_eq!((violation.rank, violation.index), (1, good.instructions.len()));
    assert!(violation.reason.ends_with("is nothing here, but `gather segments [0]` on rank 0"), "{violation}");
}

#[test]
fn ranks_that_exchange_values_must_run_the_same_layer() {
    let mut shape = shape(ZeroStage::Zero);
    shape.layers[1].exchanges = Exchanges { context: true, tensor: true };
    let stages = Stages::single(&shape);
    let program = schedule::forward_only(&shape, &stages, 0, 2);
    let mut other = program.clone();
    for instruction in &mut other.instructions {
        match instruction {
            Load { micro_batch } | Forward { micro_batch, .. } => *micro_batch = 1 - *micro_batch,
            _ => {}
        }
    }
    let check = |other: &Program, degrees: Degrees| {
        let mesh = zero_pipeline::Mesh::new(4, degrees).unwrap();
        let programs = [program.clone(), other.clone(), program.clone(), other.clone()];
        zero_pipeline::validate(&programs, &World { shape: &shape, stages: &stages, mesh, capacity: 0 })
    };
    let one = Degrees::stages(1);
    assert_eq!(check(&other, one), Ok(()));
    for degrees in [
        Degrees { heads: 2, ..one },
        Degrees { queries: 2, ..one },
        Degrees { tensor: 2, ..one },
        Degrees { heads: 2, tensor: 2, ..one },
    ] {
        assert_eq!(check(&program, degrees), Ok(()));
        let violation = check(&other, degrees).unwrap_err();
        assert_reason(
            &violation,
            "forward layer 1 of micro-batch 1",
            "all ranks of a stage must start the same collectives: collective 0 is `forward layer 1 of micro-batch 1` here, \
             but `forward layer 1 of micro-batch 0` on rank 0",
        );
    }
}
