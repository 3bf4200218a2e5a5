//! Makes messages asynchronous: receives are posted before they are needed, and sends are awaited at the end.

use std::collections::{BTreeMap, HashMap};

use crate::instruction::Instruction;
use crate::message::{Channel, Kind, Message};

/// Inserts [`Instruction::Receive`] and [`Instruction::AwaitSend`] into a program that has only [`Instruction::Send`]
/// and [`Instruction::AwaitReceive`]. `arriving` lists the messages sent to this stage by channel, in sending order.
///
/// Receives are posted in the order in which the peer sends. Every channel of activations or gradients always has one
/// posted receive, so that the next message can arrive while this stage computes. A tied gradient can be as large as
/// the embedding of a whole vocabulary. Its receive is therefore posted only when this gradient, or a message that the
/// peer sends after it, is needed. Sends are awaited only at the end. An earlier wait would hold up a stage that could
/// run ahead, and with several chunks per stage two stages could wait for each other. The buffer of a send is freed
/// when the send is complete, even before it is awaited. The schedule bounds the number of incomplete sends.
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
