//! Defects of reductions, of the gradient norm, and of updates and refreshes.

use zero_pipeline::Instruction::*;
use zero_pipeline::ZeroStage;

use super::{STAGES, assert_reason, changed, position, without};

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
