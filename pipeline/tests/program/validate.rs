//! Every kind of defect must be reported with the rank, the instruction and the reason.

use zero_pipeline::Instruction::{self, *};
use zero_pipeline::{
    LayerShape, ModelShape, Placement, Program, SegmentShape, Stages, Tiers, Violation, World, ZeroStage, schedule,
};

/// Validates programs on one pipeline stage.
fn validate(programs: &[Program], shape: &ModelShape) -> Result<(), Violation> {
    let stages = Stages::single(shape);
    zero_pipeline::validate(programs, &World::data_parallel(shape, &stages, programs.len()))
}

/// Three layers; the last one also uses the first one's segment.
fn shape(zero_stage: ZeroStage) -> ModelShape {
    let layer = |name: &str, segments: &[usize]| LayerShape {
        name: name.into(),
        segments: segments.to_vec(),
        read_backward: segments.to_vec(),
        splits: false,
        reads_batch: false,
        exchanges: false,
    };
    let segment = |elements| SegmentShape {
        elements,
        placements: zero_stage.placements(),
        tiers: Tiers::default(),
        has_secondary: false,
        is_trainable: true,
    };
    ModelShape {
        layers: vec![layer("embed", &[0]), layer("block", &[1]), layer("head", &[0, 2])],
        segments: vec![segment(40), segment(100), segment(10)],
    }
}

/// The plainest valid step: everything is gathered right before its use, released right after, and awaited at once.
/// Written without the passes, so that the test covers only the validator.
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
fn a_backward_may_run_without_parameters() {
    let mut shape = shape(ZeroStage::Three);
    let mut program = plain_step(&shape, 1);
    let backward = position(&program, &Backward { layer: 0, micro_batch: 0 });
    let has_gathered = program.instructions[backward - 1] == AwaitGather { segments: vec![0] };
    let has_released = matches!(program.instructions[backward + 1], Release { segment: 0 });
    assert!(has_gathered && has_released, "{program}");
    program.instructions.remove(backward + 1);
    program.instructions.drain(backward - 2..backward);
    let violation = validate(&[program.clone()], &shape).unwrap_err();
    assert_reason(&violation, "backward layer 0 of micro-batch 0", "it reads segment 0, which is still released");
    shape.layers[0].read_backward.clear();
    assert_eq!(validate(&[program], &shape), Ok(()));
}

#[test]
fn parameters_are_gathered_exactly_when_they_are_read() {
    let s = ZeroStage::Three;
    let drop_both = changed(s, |program| {
        let at = position(program, &Gather { segments: vec![1] });
        program.instructions.drain(at..at + 2);
    });
    assert_reason(&drop_both, "forward layer 1 of micro-batch 0", "it reads segment 1, which is still released");
    let never_started = without(s, &Gather { segments: vec![1] });
    assert_reason(&never_started, "await_gather segments [1]", "its parameters are released, not being gathered");
    let not_awaited = without(s, &AwaitGather { segments: vec![1] });
    assert_reason(
        &not_awaited,
        "forward layer 1 of micro-batch 0",
        "it reads segment 1, which is still being gathered",
    );
    let not_released = without(s, &Release { segment: 1 });
    assert_reason(&not_released, "gather segments [1]", "its parameters are gathered, not released");
    let twice = changed(s, |program| {
        let at = position(program, &Gather { segments: vec![1] });
        program.instructions.insert(at, Gather { segments: vec![1] });
    });
    assert_reason(&twice, "gather segments [1]", "its parameters are being gathered, not released");
    let release_first = changed(s, |program| program.instructions.insert(0, Release { segment: 2 }));
    assert_reason(&release_first, "release segment 2", "its parameters are released, not gathered");
    let left_over = changed(s, |program| {
        program.instructions.extend([Gather { segments: vec![0] }, AwaitGather { segments: vec![0] }]);
    });
    assert_reason(&left_over, "end", "segment 0 is still gathered");
    let replicated = changed(ZeroStage::Two, |program| program.instructions.insert(0, Gather { segments: vec![0] }));
    assert_reason(&replicated, "gather segments [0]", "its parameters are replicated");
    let released = changed(ZeroStage::Two, |program| program.instructions.insert(0, Release { segment: 0 }));
    assert_reason(&released, "release segment 0", "its parameters are replicated");
}

#[test]
fn segments_are_gathered_together() {
    let s = ZeroStage::Three;
    // Replaces the gathers before the backward of the head, which reads segments 0 and 2.
    let together = |program: &mut Program, started: &[usize], awaited: &[usize]| {
        let at = position(program, &Backward { layer: 2, micro_batch: 0 });
        let pair = [Gather { segments: started.to_vec() }, AwaitGather { segments: awaited.to_vec() }];
        program.instructions.splice(at - 4..at, pair);
    };
    let shape = shape(s);
    let mut program = plain_step(&shape, 1);
    together(&mut program, &[0, 2], &[0, 2]);
    assert_eq!(validate(&[program.clone(), program], &shape), Ok(()));
    let other_await = changed(s, |program| together(program, &[0, 2], &[2, 0]));
    assert_reason(&other_await, "await_gather segments [2, 0]", "no such gather was started");
    let part = changed(s, |program| together(program, &[0, 2], &[0]));
    assert_reason(&part, "await_gather segments [0]", "no such gather was started");
    let twice = changed(s, |program| together(program, &[0, 0], &[0, 0]));
    assert_reason(&twice, "gather segments [0, 0]", "its parameters are being gathered, not released");
    let unknown = changed(s, |program| together(program, &[0, 3], &[0, 3]));
    assert_reason(&unknown, "gather segments [0, 3]", "there is no segment 3");
}

/// The plain step with secondary shards: the second gather of each segment reads them.
fn step_with_secondary() -> (ModelShape, Program) {
    let mut shape = shape(ZeroStage::Three);
    shape.segments.iter_mut().for_each(|segment| segment.has_secondary = true);
    let mut program = plain_step(&shape, 1);
    let mut filled = [false; 3];
    for instruction in &mut program.instructions {
        let is_filled = |segments: &Vec<usize>| segments.iter().all(|&segment| filled[segment]);
        match instruction.clone() {
            Gather { segments } if is_filled(&segments) => *instruction = GatherSecondary { segments },
            AwaitGather { segments } if is_filled(&segments) => *instruction = AwaitGatherSecondary { segments },
            AwaitGather { segments } => segments.into_iter().for_each(|segment| filled[segment] = true),
            _ => {}
        }
    }
    (shape, program)
}

#[test]
fn secondary_shards_are_filled_before_they_are_gathered() {
    let (shape, program) = step_with_secondary();
    let refused = |change: &dyn Fn(&mut Program)| {
        let mut program = program.clone();
        change(&mut program);
        validate(&[program.clone(), program], &shape).unwrap_err()
    };
    assert_eq!(validate(&[program.clone(), program.clone()], &shape), Ok(()), "{program}");
    let at = position(&program, &Gather { segments: vec![1] });
    let unfilled = refused(&|program| program.instructions[at] = GatherSecondary { segments: vec![1] });
    let reason = "its secondary shards were not filled since its last update";
    assert_reason(&unfilled, "gather_secondary segments [1]", reason);
    // The update changes the parameters, so the secondary shards are stale.
    let stale = refused(&|program| {
        program
            .instructions
            .extend([GatherSecondary { segments: vec![1] }, AwaitGatherSecondary { segments: vec![1] }]);
    });
    assert_reason(&stale, "gather_secondary segments [1]", reason);
    let other_await = refused(&|program| {
        let at = position(program, &AwaitGatherSecondary { segments: vec![1] });
        program.instructions[at] = AwaitGather { segments: vec![1] };
    });
    assert_reason(&other_await, "await_gather segments [1]", "no such gather was started");
    let not_started = refused(&|program| {
        let at = position(program, &GatherSecondary { segments: vec![1] });
        program.instructions.remove(at);
    });
    assert_reason(
        &not_started,
        "await_gather_secondary segments [1]",
        "its parameters are released, not being gathered",
    );
    let both = refused(&|program| {
        let at = position(program, &AwaitGatherSecondary { segments: vec![1] });
        program.instructions.insert(at, Gather { segments: vec![1] });
    });
    assert_reason(&both, "gather segments [1]", "its parameters are being gathered, not released");
    let mut none = shape.clone();
    none.segments[1].has_secondary = false;
    let violation = validate(&[program.clone(), program.clone()], &none).unwrap_err();
    assert_reason(&violation, "gather_secondary segments [1]", "it has no secondary shards");
    // One rank gathers from all shards, and the other from secondary ones.
    let mut from_all = program.clone();
    for instruction in &mut from_all.instructions {
        match instruction.clone() {
            GatherSecondary { segments } => *instruction = Gather { segments },
            AwaitGatherSecondary { segments } => *instruction = AwaitGather { segments },
            _ => {}
        }
    }
    let violation = validate(&[program.clone(), from_all], &shape).unwrap_err();
    assert!(
        violation.rank == 1 && violation.reason.contains("all ranks of a stage must start the same"),
        "{violation}"
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
    assert_reason(&no_layer, "forward layer 3 of micro-batch 0", "no such layer");
    let shape = shape(s);
    let mut evaluation = schedule::forward_only(&shape, &Stages::single(&shape), 0, 2);
    evaluation.instructions.pop();
    let unfinished = validate(&[evaluation], &shape).unwrap_err();
    assert_reason(&unfinished, "end", "not every layer ran on every micro-batch");
}

#[test]
fn a_gradient_is_complete_before_it_is_reduced() {
    // Segment 0 is tied: the head's backward contributes to it, and the embedding's backward completes it.
    let too_early = changed(ZeroStage::Two, |program| {
        let from = position(program, &Reduce { segments: vec![0], micro_batch: 0 });
        let reduce = program.instructions.remove(from);
        let to = position(program, &Backward { layer: 1, micro_batch: 0 });
        program.instructions.insert(to, reduce);
    });
    let reason = "segment 0's gradient of that micro-batch is not complete";
    assert_reason(&too_early, "reduce segments [0] of micro-batch 0", reason);
    let wrong_micro_batch = changed(ZeroStage::Two, |program| {
        let at = position(program, &Reduce { segments: vec![2], micro_batch: 0 });
        program.instructions[at] = Reduce { segments: vec![2], micro_batch: 1 };
    });
    let reason = "segment 2's gradient of that micro-batch is not complete";
    assert_reason(&wrong_micro_batch, "reduce segments [2] of micro-batch 1", reason);
    let not_added_up = without(ZeroStage::One, &Accumulate { segment: 1, micro_batch: 1 });
    assert_reason(
        &not_added_up,
        "reduce segments [1] of micro-batch 1",
        "segment 1 cannot be reduced yet: 1 of 2 micro-batches are accumulated",
    );
    let left_open = without(ZeroStage::One, &Accumulate { segment: 1, micro_batch: 0 });
    let reason = "segment 1 still holds the gradient of another micro-batch";
    assert_reason(&left_open, "backward layer 1 of micro-batch 1", reason);
    let sharded = changed(ZeroStage::Two, |program| {
        let at = position(program, &Reduce { segments: vec![1], micro_batch: 0 });
        program.instructions.insert(at, Accumulate { segment: 1, micro_batch: 0 });
    });
    let reason = "sharded gradients must be reduced, not accumulated";
    assert_reason(&sharded, "accumulate segment 1 of micro-batch 0", reason);
    let twice = changed(ZeroStage::One, |program| {
        let at = position(program, &Reduce { segments: vec![1], micro_batch: 1 });
        program.instructions.insert(at, Reduce { segments: vec![1], micro_batch: 1 });
    });
    assert_reason(&twice, "reduce segments [1] of micro-batch 1", "segment 1 is reduced already");
    let out_of_order = changed(ZeroStage::Two, |program| {
        let from = position(program, &AwaitReduce { segments: vec![1], micro_batch: 0 });
        let awaiting = program.instructions.remove(from);
        let to = position(program, &GradientNorm);
        program.instructions.insert(to, awaiting);
    });
    let instruction = "await_reduce segments [1] of micro-batch 1";
    assert_reason(
        &out_of_order,
        instruction,
        "micro-batches must be added in order: segment 1 needs micro-batch 0 next",
    );
    let not_started = without(ZeroStage::Two, &Reduce { segments: vec![1], micro_batch: 1 });
    assert_reason(&not_started, "await_reduce segments [1] of micro-batch 1", "no such reduction was started");
}

#[test]
fn the_norm_sees_every_gradient_and_comes_before_the_updates() {
    for zero_stage in STAGES {
        let not_awaited = without(zero_stage, &AwaitReduce { segments: vec![1], micro_batch: 1 });
        assert_reason(&not_awaited, "gradient_norm", "the gradients of segment 1 are not reduced");
        let no_norm = without(zero_stage, &GradientNorm);
        assert_reason(&no_norm, "update segment 0", "the gradient norm must be computed first");
        let twice = changed(zero_stage, |program| {
            let at = position(program, &GradientNorm);
            program.instructions.insert(at, GradientNorm);
        });
        assert_reason(&twice, "gradient_norm", "computed twice");
        let again = changed(zero_stage, |program| program.instructions.push(Update { segment: 1 }));
        assert_reason(&again, "update segment 1", "updated twice");
        let missing = changed(zero_stage, |program| {
            let at = position(program, &Update { segment: 2 });
            program.instructions.truncate(at);
        });
        assert_reason(&missing, "end", "segment 2 was never updated");
        let unknown = changed(zero_stage, |program| program.instructions.push(Update { segment: 3 }));
        assert_reason(&unknown, "update segment 3", "there is no segment 3");
    }
}

#[test]
fn no_parameters_are_stale_after_the_step() {
    let kept = changed(ZeroStage::Three, |program| {
        let at = position(program, &GradientNorm);
        program.instructions.splice(at..at, [Gather { segments: vec![1] }, AwaitGather { segments: vec![1] }]);
    });
    assert_reason(&kept, "update segment 1", "its gathered parameters would become stale; they must be released first");
    let on_its_way = changed(ZeroStage::Three, |program| {
        let at = position(program, &GradientNorm);
        program.instructions.insert(at, Gather { segments: vec![1] });
    });
    assert_reason(
        &on_its_way,
        "update segment 1",
        "its gathered parameters would become stale; they must be released first",
    );
    for zero_stage in [ZeroStage::One, ZeroStage::Two] {
        let refresh = Refresh { segments: vec![1] };
        let missing = changed(zero_stage, |program| {
            let at = position(program, &refresh);
            program.instructions.drain(at..at + 2);
        });
        let reason = "segment 1 differs between ranks: it was updated but not refreshed";
        assert_reason(&missing, "end", reason);
        let not_awaited = without(zero_stage, &AwaitRefresh { segments: vec![1] });
        assert_reason(&not_awaited, "end", "a refresh was not awaited");
        let not_started = without(zero_stage, &refresh);
        assert_reason(&not_started, "await_refresh segments [1]", "no such refresh was started");
        let early = changed(zero_stage, |program| {
            let at = position(program, &Update { segment: 1 });
            program.instructions.swap(at, at + 1);
        });
        assert_reason(&early, "refresh segments [1]", "segment 1 is not updated");
    }
    let needless = changed(ZeroStage::Zero, |program| program.instructions.push(Refresh { segments: vec![1] }));
    assert_reason(&needless, "refresh segments [1]", "segment 1 needs no refresh");
}

#[test]
fn all_ranks_start_the_same_collectives_in_the_same_order() {
    let shape = shape(ZeroStage::Three);
    let good = plain_step(&shape, 1);
    // Two gathers before the first use, in either order: each is valid by itself.
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
    let reason = "all ranks of a stage must start the same collectives: number 0 is `gather segments [1]` here, but `gather segments [0]` on rank 0";
    assert_reason(&violation, "gather segments [1]", reason);
    // One collective too many.
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
    // One collective too few.
    let violation = validate(&[more, good.clone()], &shape).unwrap_err();
    assert_eq!((violation.rank, violation.index), (1, good.instructions.len()));
    assert!(violation.reason.ends_with("is nothing here, but `gather segments [0]` on rank 0"), "{violation}");
}

#[test]
fn ranks_that_share_sequences_must_be_in_the_same_layer() {
    let mut shape = shape(ZeroStage::Zero);
    shape.layers[1].exchanges = true;
    let stages = Stages::single(&shape);
    let program = schedule::forward_only(&shape, &stages, 0, 2);
    let mut other = program.clone();
    for instruction in &mut other.instructions {
        match instruction {
            Load { micro_batch } | Forward { micro_batch, .. } => *micro_batch = 1 - *micro_batch,
            _ => {}
        }
    }
    let check = |other: &Program, context: usize| {
        let mesh = zero_pipeline::Mesh::new(4, 1).unwrap().with_context(context).unwrap();
        let programs = [program.clone(), other.clone(), program.clone(), other.clone()];
        zero_pipeline::validate(&programs, &World { shape: &shape, stages: &stages, mesh, capacity: 0 })
    };
    assert_eq!((check(&program, 2), check(&other, 1)), (Ok(()), Ok(())));
    let violation = check(&other, 2).unwrap_err();
    assert_reason(
        &violation,
        "forward layer 1 of micro-batch 1",
        "all ranks of a stage must start the same collectives: number 0 is `forward layer 1 of micro-batch 1` here, \
         but `forward layer 1 of micro-batch 0` on rank 0",
    );
}
