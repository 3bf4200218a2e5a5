//! Sends updated tied parameters from the pipeline stage that owns them to the stages that use them too.

use zero_pipeline::{Content, Instruction, Message, ModelShape, Placement, Program, SegmentId, StageId, Stages};

/// Puts the messages behind the updates: at the owner as soon as every rank of its group has the new values, elsewhere at the
/// end. What travels is what each rank holds: everything where parameters are replicated, a shard where they are sharded.
#[must_use]
pub fn tie(program: Program, shape: &ModelShape, stages: &Stages, stage: StageId) -> Program {
    let Program { instructions, micro_batches } = program;
    let from_here = |segment: SegmentId| {
        let content = Content::TiedParameters { segment };
        stages.borrowers(segment).into_iter().map(move |to| Message { content, from: stage, to })
    };
    let mut out = vec![];
    let mut leaving = vec![];
    for instruction in instructions {
        let ready = match &instruction {
            Instruction::Update { segment } if !is_refreshed(shape, *segment) => vec![*segment],
            Instruction::AwaitRefresh { segments } => segments.clone(),
            _ => vec![],
        };
        out.push(instruction);
        for message in ready.into_iter().flat_map(from_here) {
            out.push(Instruction::Send { message });
            leaving.push(Instruction::AwaitSend { message });
        }
    }
    let to_here = (0..shape.segments.len()).filter(|&segment| stages.borrowers(segment).contains(&stage));
    for segment in to_here {
        let message = Message { content: Content::TiedParameters { segment }, from: stages.owner(segment), to: stage };
        out.extend([Instruction::Receive { message }, Instruction::AwaitReceive { message }]);
    }
    out.append(&mut leaving);
    Program { instructions: out, micro_batches }
}

fn is_refreshed(shape: &ModelShape, segment: SegmentId) -> bool {
    let placements = shape.segments[segment].placements;
    placements.parameters == Placement::Replicated && placements.optimizer == Placement::Sharded
}
