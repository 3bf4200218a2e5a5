//! Several tied parameters at once: on each channel, receives must be posted in the order of the sends.

use zero_pipeline::Instruction::{self, AwaitReceive, Receive, Send};
use zero_pipeline::schedule::{self, SCHEDULES};
use zero_pipeline::{Kind, Message, ModelShape, Schedule, Stages, ZeroStage};

use crate::shapes::{layer, segment};

/// Returns six layers with a segment each, plus segments that several layers share.
fn shape(ties: &[&[usize]]) -> ModelShape {
    let shared =
        |layer: usize| ties.iter().enumerate().filter(move |(_, users)| users.contains(&layer)).map(|(k, _)| 6 + k);
    let layer = |index: usize| layer(format!("layer.{index}"), std::iter::once(index).chain(shared(index)).collect());
    ModelShape { layers: (0..6).map(layer).collect(), segments: vec![segment(10, ZeroStage::Zero); 6 + ties.len()] }
}

/// Returns the messages sent and the receives posted on the tied channel between two stages, in order.
fn through(programs: &[Vec<Instruction>], from: usize, to: usize) -> (Vec<Message>, Vec<Message>) {
    let is_tied = |m: &Message| (m.content.kind(), m.from, m.to) == (Kind::Tied, from, to);
    let sent = programs[from].iter().filter_map(|i| if let Send { message } = i { Some(*message) } else { None });
    let posted = programs[to].iter().filter_map(|i| if let Receive { message } = i { Some(*message) } else { None });
    (sent.filter(is_tied).collect(), posted.filter(is_tied).collect())
}

#[test]
fn nested_and_crossed_ties_keep_the_order_of_their_channel() {
    let all: [&[&[usize]]; 4] =
        [&[&[0, 5], &[1, 4]], &[&[0, 5], &[1, 5]], &[&[0, 4], &[1, 5]], &[&[0, 2, 5], &[1, 3, 4], &[2, 5]]];
    for ties in all {
        let shape = shape(ties);
        for (count, chunks) in [(2, vec![0..3, 3..6]), (3, vec![0..2, 2..4, 4..6])] {
            let stages = Stages::new(&shape, count, chunks).unwrap();
            for schedule in SCHEDULES.into_iter().filter(|&s| s != Schedule::Interleaved) {
                let program = |stage| schedule::training(schedule, &shape, &stages, stage, 4).instructions;
                let programs: Vec<Vec<Instruction>> = (0..count).map(program).collect();
                for (from, to) in (0..count).flat_map(|a| (0..count).map(move |b| (a, b))).filter(|(a, b)| a != b) {
                    let (sent, posted) = through(&programs, from, to);
                    assert_eq!(sent, posted, "{schedule}, {ties:?}, {from} to {to}");
                }
                // Every receive is posted before it is awaited.
                for instructions in &programs {
                    for (index, instruction) in instructions.iter().enumerate() {
                        if let AwaitReceive { message } = instruction {
                            assert!(instructions[..index].contains(&Receive { message: *message }), "{message:?}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_tie_within_a_stage_is_found() {
    let cut = |ties: &[&[usize]], count: usize, chunks: Vec<std::ops::Range<usize>>| {
        Stages::new(&shape(ties), count, chunks).unwrap().tied_within_a_stage()
    };
    let six = || (0..6).map(|layer| layer..layer + 1).collect::<Vec<_>>();
    assert_eq!(cut(&[&[0, 2]], 2, six()), Some(6), "chunks 0 and 2 are both on stage 0");
    assert_eq!(cut(&[&[0, 1, 2]], 2, six()), None, "a user on stage 1 separates the others");
    assert_eq!(cut(&[&[0, 5]], 2, six()), None);
    assert_eq!(cut(&[&[0, 2]], 1, six()), None, "a single stage finishes a micro-batch before the next");
    assert_eq!(cut(&[&[0, 1]], 2, vec![0..3, 3..6]), None, "both users are in one chunk");
}
