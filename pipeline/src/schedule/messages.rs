//! The other halves of messages: receives are posted ahead of their use, sends are awaited at the end.

use std::collections::BTreeMap;

use crate::instruction::Instruction;
use crate::message::{Channel, Kind, Message};

/// Puts [`Instruction::Receive`] and [`Instruction::AwaitSend`] into a program that has only [`Instruction::Send`] and
/// [`Instruction::AwaitReceive`].
///
/// In every channel of activations and of gradients one receive is always posted: the next message arrives while this one
/// computes. Tied gradients can be as large as a vocabulary, so there is room for one of them only when it is needed. Nobody
/// waits for a send before the end: that would hold up a stage which is allowed to be ahead, and with several chunks on a stage
/// two could wait for each other. What has gone is given up before that, and how much has not is bounded by the schedule.
pub(super) fn asynchronous(instructions: Vec<Instruction>) -> Vec<Instruction> {
    let awaited = instructions.iter().filter_map(|instruction| match instruction {
        Instruction::AwaitReceive { message } => Some(*message),
        _ => None,
    });
    let mut expected: BTreeMap<Channel, Vec<Message>> = BTreeMap::new();
    awaited.for_each(|message| expected.entry(message.channel()).or_default().push(message));
    let is_ahead = |channel: &Channel| channel.0 != Kind::Tied;
    let mut out = vec![];
    for (_, messages) in expected.iter().filter(|(channel, _)| is_ahead(channel)) {
        out.extend(messages.first().map(|&message| Instruction::Receive { message }));
    }
    let mut received: BTreeMap<Channel, usize> = BTreeMap::new();
    let mut leaving = vec![];
    for instruction in instructions {
        match instruction {
            Instruction::AwaitReceive { message } => {
                let channel = message.channel();
                let count = received.entry(channel).or_default();
                *count += 1;
                if !is_ahead(&channel) {
                    out.push(Instruction::Receive { message });
                }
                out.push(instruction);
                if is_ahead(&channel) {
                    out.extend(expected[&channel].get(*count).map(|&message| Instruction::Receive { message }));
                }
            }
            Instruction::Send { message } => {
                leaving.push(Instruction::AwaitSend { message });
                out.push(instruction);
            }
            other => out.push(other),
        }
    }
    out.append(&mut leaving);
    out
}
