//! Defects of gathers and releases of parameters, and of secondary shards.

use zero_pipeline::Instruction::*;
use zero_pipeline::{ModelShape, Program, ZeroStage};

use super::{assert_reason, changed, plain_step, position, shape, validate, without};

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

/// Returns the plain step with secondary shards. The second gather of each segment reads them.
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
    // One rank gathers from all shards, the other from secondary shards.
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
