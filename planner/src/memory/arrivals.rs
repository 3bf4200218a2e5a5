//! Computes, for each message that a pipeline stage sends, the point in the stage's program after which the message has
//! certainly arrived.
//!
//! The memory of a message can be freed once the message has arrived. The sender learns of the arrival without a clock:
//! a stage that receives a message also learns everything that its sender knew at the time of sending (Lamport, "Time,
//! Clocks, and the Ordering of Events in a Distributed System", 1978).

use std::collections::BTreeMap;

use zero_pipeline::{Channel, Instruction, Message, Program};

/// For each message that a stage sends, the position in its program at which the arrival becomes certain. A message
/// without an entry may be in flight until the end.
pub(crate) type Arrivals = BTreeMap<Message, usize>;

/// Computes the arrivals of all stages from their programs.
pub(crate) fn arrivals(programs: &[Program]) -> Vec<Arrivals> {
    // The loop may run the programs in any order, because what a stage knows at an instruction does not depend on how
    // long the stage has waited.
    let mut stages = vec![Stage::default(); programs.len()];
    let mut under_way: BTreeMap<Message, Knowledge> = BTreeMap::new();
    let mut moved = true;
    while std::mem::take(&mut moved) {
        for (stage, program) in stages.iter_mut().zip(programs) {
            while let Some(instruction) = program.instructions.get(stage.next) {
                match instruction {
                    Instruction::Send { message } => {
                        stage.sent.entry(message.channel()).or_default().push(*message);
                        under_way.insert(*message, stage.knowledge.clone());
                    }
                    Instruction::AwaitReceive { message } => match under_way.remove(message) {
                        Some(knowledge) => stage.learn(*message, &knowledge),
                        None => break,
                    },
                    _ => {}
                }
                stage.next += 1;
                moved = true;
            }
        }
    }
    stages.into_iter().map(|stage| stage.arrived).collect()
}

/// For each channel, how many of its messages, in the order of sending, have arrived.
type Knowledge = BTreeMap<Channel, usize>;

#[derive(Clone, Default)]
struct Stage {
    next: usize,
    knowledge: Knowledge,
    sent: BTreeMap<Channel, Vec<Message>>,
    arrived: Arrivals,
}

impl Stage {
    fn learn(&mut self, message: Message, theirs: &Knowledge) {
        for (&channel, &count) in theirs {
            let known = self.knowledge.entry(channel).or_default();
            for sent in self.sent.get(&channel).into_iter().flat_map(|sent| sent.iter().take(count).skip(*known)) {
                self.arrived.insert(*sent, self.next);
            }
            *known = count.max(*known);
        }
        *self.knowledge.entry(message.channel()).or_default() += 1;
    }
}

#[cfg(test)]
mod tests {
    use zero_pipeline::Content;

    use super::*;

    fn activations(micro_batch: usize, from: usize, to: usize) -> Message {
        Message { content: Content::Activations { layer: 1, micro_batch }, from, to }
    }

    fn gradients(micro_batch: usize, from: usize, to: usize) -> Message {
        Message { content: Content::Gradients { layer: 1, micro_batch }, from, to }
    }

    fn send(message: Message) -> Instruction {
        Instruction::Send { message }
    }

    fn take(message: Message) -> Instruction {
        Instruction::AwaitReceive { message }
    }

    fn program(instructions: Vec<Instruction>) -> Program {
        Program { instructions, micro_batches: 2 }
    }

    #[test]
    fn a_message_back_confirms_earlier_arrivals() {
        let (a, b) = (activations(0, 0, 1), activations(1, 0, 1));
        let (x, y) = (gradients(0, 1, 0), gradients(1, 1, 0));
        let first = program(vec![send(a), send(b), take(x), take(y)]);
        let after_each = program(vec![take(a), send(x), take(b), send(y)]);
        assert_eq!(arrivals(&[first.clone(), after_each])[0], BTreeMap::from([(a, 2), (b, 3)]));
        let after_both = program(vec![take(a), take(b), send(x), send(y)]);
        let known = arrivals(&[first, after_both]);
        assert_eq!(known[0], BTreeMap::from([(a, 2), (b, 2)]));
        // The second stage receives no later message, so it never learns that its gradients have arrived.
        assert!(known[1].is_empty());
    }

    #[test]
    fn arrivals_at_a_third_stage_are_known_through_the_second() {
        let (a, far) = (activations(0, 0, 1), activations(0, 0, 2));
        let (told, back) = (gradients(0, 2, 1), gradients(0, 1, 0));
        let programs =
            [vec![send(far), send(a), take(back)], vec![take(a), take(told), send(back)], vec![take(far), send(told)]];
        assert_eq!(arrivals(&programs.map(program))[0], BTreeMap::from([(a, 2), (far, 2)]));
    }

    #[test]
    fn a_deadlocked_program_has_no_known_arrivals() {
        let (a, x) = (activations(0, 0, 1), gradients(0, 1, 0));
        let stuck = [program(vec![take(x), send(a)]), program(vec![take(a), send(x)])];
        assert_eq!(arrivals(&stuck), [BTreeMap::new(), BTreeMap::new()]);
    }
}
