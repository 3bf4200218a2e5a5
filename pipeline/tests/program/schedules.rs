//! Every schedule must produce valid programs for every number of stages and micro-batches, and defects of messages
//! must be detected.

use std::collections::BTreeMap;

use zero_pipeline::Instruction::{self, *};
use zero_pipeline::schedule::{self, SCHEDULES, Size, Work};
use zero_pipeline::{
    Content, Degrees, Exchanges, Mesh, ModelShape, Program, Schedule, Stages, Violation, World, ZeroStage, validate,
};

use crate::shapes;

/// Returns layers with a segment each. If `tied`, the last layer also uses the segment of the first layer.
fn shape(layers: usize, tied: bool) -> ModelShape {
    let mut shape = shapes::shape(layers, ZeroStage::Zero);
    if tied && layers > 1 {
        shape.layers[layers - 1] = shapes::layer(format!("layer.{}", layers - 1), vec![0, layers - 1]);
    }
    shape
}

/// Cuts the layers of a model into `count` × `chunks` parts of nearly equal length.
fn stages(shape: &ModelShape, count: usize, chunks: usize) -> Stages {
    let (parts, layers) = (count * chunks, shape.layers.len());
    let cuts = (0..parts).map(|part| layers * part / parts..layers * (part + 1) / parts);
    Stages::new(shape, count, cuts.collect()).unwrap()
}

/// Adds the instructions that schedules leave to passes: accumulation, and messages of tied parameters.
fn completed(program: Program, shape: &ModelShape, stages: &Stages, stage: usize) -> Program {
    let Program { instructions, micro_batches } = program;
    let mut out = vec![];
    let content = |segment| Content::TiedParameters { segment };
    let tied: Vec<usize> = (0..shape.segments.len()).filter(|&s| stages.is_tied(s)).collect();
    for instruction in instructions {
        out.push(instruction.clone());
        match instruction {
            Backward { layer, micro_batch } | BackwardWeight { layer, micro_batch } => {
                for segment in shape.completed_by(layer) {
                    out.push(Accumulate { segment, micro_batch });
                    if micro_batch + 1 == micro_batches {
                        out.push(Reduce { segments: vec![segment], micro_batch });
                        out.push(AwaitReduce { segments: vec![segment], micro_batch });
                    }
                }
            }
            Update { segment } => {
                for to in stages.borrowers(segment) {
                    let message = zero_pipeline::Message { content: content(segment), from: stage, to };
                    out.extend([Send { message }, AwaitSend { message }]);
                }
            }
            _ => {}
        }
    }
    for segment in tied.into_iter().filter(|&segment| stages.borrowers(segment).contains(&stage)) {
        let message = zero_pipeline::Message { content: content(segment), from: stages.owner(segment), to: stage };
        out.extend([Receive { message }, AwaitReceive { message }]);
    }
    Program { instructions: out, micro_batches }
}

fn programs(schedule: Schedule, shape: &ModelShape, stages: &Stages, micro_batches: usize) -> Vec<Program> {
    let program = |stage| {
        let program = schedule::training(schedule, shape, stages, stage, micro_batches);
        completed(program, shape, stages, stage)
    };
    (0..stages.count()).map(program).collect()
}

fn check(programs: &[Program], shape: &ModelShape, stages: &Stages) -> Result<(), Violation> {
    let mesh = Mesh::new(programs.len(), Degrees::stages(stages.count())).unwrap();
    validate(programs, &World { shape, stages, mesh, capacity: 0 })
}

#[test]
fn every_schedule_runs_over_channels_without_capacity() {
    for schedule in SCHEDULES {
        for count in 1..=8 {
            for chunks in if schedule == Schedule::Interleaved { 1..=3 } else { 1..=1 } {
                for tied in [false, true] {
                    let shape = shape(count * chunks + 2, tied);
                    let stages = stages(&shape, count, chunks);
                    for micro_batches in 1..=17 {
                        let programs = programs(schedule, &shape, &stages, micro_batches);
                        check(&programs, &shape, &stages).unwrap_or_else(|e| {
                            panic!("{schedule}, {count} × {chunks}, {micro_batches}, tied {tied}: {e}")
                        });
                        let forwards: Vec<Program> = (0..count)
                            .map(|stage| schedule::forward_only(&shape, &stages, stage, micro_batches))
                            .collect();
                        check(&forwards, &shape, &stages).unwrap();
                    }
                }
            }
        }
    }
}

/// Ranks of a tensor group synchronize in every layer. Each plane has its own messages.
#[test]
fn every_schedule_runs_with_tensor_and_context_groups() {
    for schedule in SCHEDULES {
        for (count, chunks) in
            [(1, 1), (2, 1), (3, 2)].into_iter().filter(|(_, c)| *c == 1 || schedule == Schedule::Interleaved)
        {
            let mut shape = shape(count * chunks + 2, true);
            shape.layers.iter_mut().for_each(|layer| layer.exchanges = Exchanges { context: true, tensor: true });
            let stages = stages(&shape, count, chunks);
            let degrees = Degrees { tensor: 2, heads: 2, ..Degrees::stages(count) };
            let mesh = Mesh::new(4 * count, degrees).unwrap();
            let of_stages = programs(schedule, &shape, &stages, 5);
            let mut all: Vec<Program> =
                (0..4 * count).map(|rank| of_stages[mesh.coordinates(rank).stage].clone()).collect();
            let world = World { shape: &shape, stages: &stages, mesh, capacity: 0 };
            validate(&all, &world).unwrap_or_else(|e| panic!("{schedule}, {count} × {chunks}: {e}"));
            // A rank that leaves out a layer is found in every plane.
            let last = all.len() - 1;
            let at = all[last].instructions.iter().position(|i| matches!(i, Backward { .. } | BackwardInput { .. }));
            all[last].instructions.remove(at.unwrap());
            assert!(validate(&all, &world).is_err());
        }
    }
}

/// A stage whose layers read the batch loads each micro-batch once, in its first chunk that reads it.
#[test]
fn each_stage_that_reads_the_batch_loads_it_once() {
    for (readers, chunks, expected) in [
        (vec![], 1, [3, 0, 0, 3]),
        (vec![1], 1, [3, 3, 0, 3]),
        (vec![2, 6], 2, [3, 0, 3, 3]),
        (vec![5, 7], 2, [3, 3, 0, 3]),
    ] {
        let mut shape = shape(4 * chunks, false);
        readers.iter().for_each(|&layer: &usize| shape.layers[layer].reads_batch = true);
        let stages = Stages::new(&shape, 4, (0..4 * chunks).map(|layer| layer..layer + 1).collect()).unwrap();
        let schedule = if chunks > 1 { Schedule::Interleaved } else { Schedule::OneFOneB };
        let valid = programs(schedule, &shape, &stages, 3);
        check(&valid, &shape, &stages).unwrap();
        let loads = |program: &Program| program.instructions.iter().filter(|i| matches!(i, Load { .. })).count();
        assert_eq!(valid.iter().map(loads).collect::<Vec<_>>(), expected, "{readers:?}");
        for stage in readers.iter().map(|layer| layer % 4) {
            let mut unloaded = valid.clone();
            unloaded[stage].instructions.retain(|instruction| *instruction != Load { micro_batch: 1 });
            let violation = check(&unloaded, &shape, &stages).unwrap_err().to_string();
            assert!(violation.contains("its micro-batch is not loaded"), "{readers:?}: {violation}");
        }
    }
}

/// Returns the peak number of micro-batches whose forward has run and whose backward has not finished.
fn live(schedule: Schedule, size: Size, stage: usize) -> usize {
    let (mut now, mut most) = (0usize, 0);
    for slot in schedule.slots(size, stage) {
        match (slot.work, schedule) {
            (Work::Forward, _) => now += 1,
            (Work::BackwardWeight, _) | (Work::Backward, _) => now -= 1,
            (Work::BackwardInput, _) => {}
        }
        most = most.max(now);
    }
    most
}

#[test]
fn live_micro_batches_match_the_closed_forms() {
    for stages in 1..=16 {
        for micro_batches in 1..=64 {
            let size = Size { stages, chunks: 1, micro_batches };
            for stage in 0..stages {
                assert_eq!(live(Schedule::GPipe, size, stage), micro_batches);
                assert_eq!(live(Schedule::OneFOneB, size, stage), micro_batches.min(stages - stage));
                assert!(live(Schedule::ZeroBubble, size, stage) <= micro_batches.min(stages), "{size:?} {stage}");
            }
        }
    }
}

#[test]
fn slots_run_once_and_micro_batches_in_order() {
    for schedule in SCHEDULES {
        for stages in 1..=6 {
            for chunks in if schedule == Schedule::Interleaved { 1..=3 } else { 1..=1 } {
                for micro_batches in 1..=13 {
                    for stage in 0..stages {
                        let mut next: BTreeMap<(String, usize), usize> = BTreeMap::new();
                        for slot in schedule.slots(Size { stages, chunks, micro_batches }, stage) {
                            let expected = next.entry((format!("{:?}", slot.work), slot.chunk)).or_default();
                            assert_eq!(slot.micro_batch, *expected, "{schedule} {stages} {chunks} {micro_batches}");
                            *expected += 1;
                        }
                        assert!(next.values().all(|&count| count == micro_batches));
                        assert_eq!(next.len(), chunks * if schedule == Schedule::ZeroBubble { 3 } else { 2 });
                    }
                }
            }
        }
    }
}

/// Makes messages blocking: each send is awaited at once, and each receive is posted where it is needed.
fn blocking(program: &Program) -> Program {
    let instructions = program.instructions.iter().flat_map(|instruction| match instruction {
        Send { message } => vec![Send { message: *message }, AwaitSend { message: *message }],
        AwaitReceive { message } => vec![Receive { message: *message }, AwaitReceive { message: *message }],
        AwaitSend { .. } | Receive { .. } => vec![],
        other => vec![other.clone()],
    });
    Program { instructions: instructions.collect(), micro_batches: program.micro_batches }
}

#[test]
fn blocking_messages_deadlock_1f1b_and_not_gpipe() {
    let shape = shape(4, false);
    let stages = stages(&shape, 4, 1);
    let mesh = Mesh::new(4, Degrees::stages(4)).unwrap();
    for micro_batches in [4, 8] {
        for capacity in [0, 1] {
            let world = World { shape: &shape, stages: &stages, mesh, capacity };
            let blocked = |schedule| -> Vec<Program> {
                programs(schedule, &shape, &stages, micro_batches).iter().map(blocking).collect()
            };
            assert_eq!(validate(&blocked(Schedule::GPipe), &world), Ok(()));
            let outcome = validate(&blocked(Schedule::OneFOneB), &world);
            if capacity > 0 {
                assert_eq!(outcome, Ok(()));
                continue;
            }
            let violation = outcome.expect_err("1F1B with rendezvous channels");
            assert!(violation.reason.starts_with("deadlock: this rank waits here, rank "), "{violation}");
            assert!(violation.instruction.starts_with("await_"), "{violation}");
        }
    }
}

/// Changes one of the programs of three 1F1B stages, and returns the resulting violation.
fn changed(stage: usize, change: impl FnOnce(&mut Vec<Instruction>)) -> String {
    let shape = shape(3, true);
    let stages = stages(&shape, 3, 1);
    let mut programs = programs(Schedule::OneFOneB, &shape, &stages, 4);
    change(&mut programs[stage].instructions);
    check(&programs, &shape, &stages).expect_err("the programs are accepted").to_string()
}

fn remove(instructions: &mut Vec<Instruction>, kind: &str, what: &str) {
    let is_it = |i: &Instruction| i.kind() == kind && i.to_string().contains(what);
    let position = instructions.iter().position(is_it).expect("there is one");
    instructions.remove(position);
}

#[test]
fn message_errors_are_named() {
    let found = changed(0, |i| remove(i, "send", "activations"));
    assert!(found.contains("the message was not sent"), "{found}");
    let found = changed(0, |i| {
        remove(i, "send", "activations");
        remove(i, "await_send", "activations");
    });
    assert!(found.starts_with("rank 1") && found.contains("rank 0 sends"), "{found}");
    let found = changed(1, |i| remove(i, "receive", "activations"));
    assert!(found.starts_with("rank 1") && found.contains("no receive of the message was started"), "{found}");
    let found = changed(1, |i| remove(i, "await_receive", "activations"));
    assert!(found.contains("the previous layer has not run"), "{found}");
    let found = changed(2, |i| remove(i, "send", "tied gradient"));
    assert!(found.contains("segment 0 still holds the gradient of another micro-batch"), "{found}");
    let found = changed(0, |i| {
        remove(i, "receive", "tied gradient");
        remove(i, "await_receive", "tied gradient");
    });
    assert!(found.contains("tied gradient of segment 0 for layer 0 of micro-batch 0 was not received"), "{found}");
    let found = changed(2, |i| {
        remove(i, "receive", "tied parameters");
        remove(i, "await_receive", "tied parameters");
    });
    assert!(found.contains("were never received"), "{found}");
    let found = changed(1, |i| {
        let last = i.iter().rposition(|i| i.kind() == "forward").expect("there is one");
        let Forward { micro_batch, .. } = i[last] else { unreachable!() };
        i[last] = Forward { layer: 0, micro_batch };
    });
    assert!(found.contains("the layer is on stage 0"), "{found}");
}

#[test]
fn a_deadlock_names_the_waiting_ranks() {
    // Stage 0 waits for a gradient before it loads micro-batch 0.
    let found = changed(0, |i| {
        let (from, to) = ("await_send activations for layer 1 of micro-batch 0", "load micro-batch 0");
        let find = |i: &[Instruction], what: &str| i.iter().position(|i| i.to_string().starts_with(what)).unwrap();
        let at = find(i, "await_receive gradients");
        let waiting = i.remove(at);
        let start = find(i, to);
        i.insert(start, waiting);
        assert!(find(i, from) > start);
    });
    assert!(found.starts_with("rank 0") && found.contains("deadlock") && found.contains("rank 1 waits at"), "{found}");
}

#[test]
fn invalid_stage_boundaries_are_refused() {
    let shape = shape(4, false);
    let cut = |count, chunks: &[std::ops::Range<usize>]| Stages::new(&shape, count, chunks.to_vec());
    assert!(cut(2, &[0..2, 2..4]).is_ok());
    for chunks in [vec![0..2, 2..3], vec![0..2, 3..4], vec![0..4, 4..4], vec![1..2, 2..4], vec![0..3, 2..4]] {
        let error = cut(2, &chunks).expect_err("not the layers");
        assert!(error.to_string().contains("without gaps or overlaps"), "{error}");
    }
    assert!(cut(3, &[0..2, 2..4]).unwrap_err().to_string().contains("must be a multiple of the number of stages"));
}
