//! The other halves of messages: receives are posted ahead of their use, sends are awaited at the end.

use std::collections::{BTreeMap, HashMap};

use crate::instruction::Instruction;
use crate::message::{Channel, Kind, Message};

/// Puts [`Instruction::Receive`] and [`Instruction::AwaitSend`] into a program that has only [`Instruction::Send`] and
/// [`Instruction::AwaitReceive`]. `arriving` has for each channel what is sent through it to this stage, in order.
///
/// Receives are posted in the order in which the other side sends. In every channel of activations and of gradients one is always
/// posted: the next message arrives while this one computes. Tied gradients can be as large as a vocabulary, so there is room for
/// one of them only when it, or one sent after it, is needed. Nobody waits for a send before the end: that would hold up a stage
/// which is allowed to be ahead, and with several chunks on a stage two could wait for each other. What has gone is given up
/// before that, and how much has not is bounded by the schedule.
pub(super) fn asynchronous(
    instructions: Vec<Instruction>,
    arriving: &BTreeMap<Channel, Vec<Message>>,
) -> Vec<Instruction> {
    let is_ahead = |channel: &Channel| channel.0 != Kind::Tied;
    let mut out = vec![];
    let mut posted: BTreeMap<Channel, usize> = BTreeMap::new();
    let mut post = |out: &mut Vec<Instruction>, channel: Channel, up_to: usize| {
        let from = posted.entry(channel).or_default();
        let messages = arriving.get(&channel).map_or(&[][..], Vec::as_slice);
        let next = messages.get(*from..up_to.min(messages.len())).unwrap_or_default();
        out.extend(next.iter().map(|&message| Instruction::Receive { message }));
        *from += next.len();
    };
    for channel in arriving.keys().filter(|channel| is_ahead(channel)) {
        post(&mut out, *channel, 1);
    }
    let places: HashMap<&Message, usize> = arriving
        .values()
        .flat_map(|messages| messages.iter().enumerate().map(|(place, message)| (message, place)))
        .collect();
    let mut leaving = vec![];
    for instruction in instructions {
        match instruction {
            Instruction::AwaitReceive { message } => {
                let channel = message.channel();
                let needed = places.get(&message).map_or(0, |place| place + 1);
                post(&mut out, channel, needed);
                out.push(instruction);
                if is_ahead(&channel) {
                    post(&mut out, channel, needed + 1);
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
