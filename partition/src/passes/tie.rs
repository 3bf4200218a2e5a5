//! Sends updated tied parameters from the owning pipeline stage to the other stages that use them.

use zero_pipeline::{Content, Instruction, Message, ModelShape, Program, SegmentId, StageId, Stages};

/// Appends the messages at the end of the program, when every rank of the owner's group has the new values. Sender and
/// receiver use the same order of segments. Each rank sends the parameters that it holds: the whole segment if they are
/// replicated, its shard if they are sharded.
#[must_use]
pub fn tie(program: Program, shape: &ModelShape, stages: &Stages, stage: StageId) -> Program {
    let Program { instructions: mut out, micro_batches } = program;
    let from_here = |segment: SegmentId| {
        let content = Content::TiedParameters { segment };
        stages.borrowers(segment).into_iter().map(move |to| Message { content, from: stage, to })
    };
    let owned = (0..shape.segments.len()).filter(|&segment| stages.owner(segment) == stage);
    let mut leaving = vec![];
    for message in owned.flat_map(from_here) {
        out.push(Instruction::Send { message });
        leaving.push(Instruction::AwaitSend { message });
    }
    let to_here = (0..shape.segments.len()).filter(|&segment| stages.borrowers(segment).contains(&stage));
    for segment in to_here {
        let message = Message { content: Content::TiedParameters { segment }, from: stages.owner(segment), to: stage };
        out.extend([Instruction::Receive { message }, Instruction::AwaitReceive { message }]);
    }
    out.append(&mut leaving);
    Program { instructions: out, micro_batches }
}
