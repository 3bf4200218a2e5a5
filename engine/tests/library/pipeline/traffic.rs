//! The bytes that each rank sends match the program exactly.

use candle_core::DType;
use zero_engine::Engine;
use zero_engine::pipeline::{Content, Instruction};
use zero_partition::expected_payload;

use super::{SCHEDULES, engine_of, gpt2, text};
use crate::sharding::bytes::{all_reduced, options};
use crate::world::{BF16, FP16, batch, world};

const WIDTH: usize = 40;
/// Number of elements of a micro-batch's hidden states: samples × positions × width.
const HIDDEN: usize = 2 * 16 * WIDTH;

/// Bytes of a message of this model: one tensor of three dimensions. The first message also carries an announcement in
/// words of 8 bytes. For activations, it has the announcement's length, the dtype, the number of dimensions and the
/// dimensions; for gradients, a flag that says whether the tensor has a gradient.
fn message_bytes(content: &Content, width: usize) -> usize {
    let announced = |micro_batch: usize, words: usize| if micro_batch == 0 { 8 * words } else { 0 };
    match *content {
        Content::Activations { micro_batch, .. } => HIDDEN * width + announced(micro_batch, 1 + 2 + 3),
        Content::Gradients { micro_batch, .. } => HIDDEN * width + announced(micro_batch, 1),
        Content::TiedGradient { .. } | Content::TiedParameters { .. } => panic!("the layout knows what is tied"),
    }
}

/// Bytes that a step sends in addition to its program: one exact sum over all ranks for the norm, a sum of the losses
/// over the replicas of the last stage, and a broadcast of the mean loss to all ranks.
fn norm_and_loss(engine: &Engine, zero_stage: u8, micro_batches: usize) -> u64 {
    let (comm, at, mesh) = (engine.communicator(), engine.zero().groups().at(), engine.zero().groups().mesh());
    let norm = 8 * all_reduced(zero_optim::exact_sum::LIMBS, comm.size(), comm.rank());
    let stages = engine.zero().stages();
    if stages.stage_of(stages.layers() - 1) != at.stage {
        return norm as u64;
    }
    let losses = 4 * all_reduced(if zero_stage >= 2 { micro_batches } else { 1 }, mesh.data(), engine.replica());
    let told = if engine.replica() == 0 && mesh.pipe() > 1 { 4 * (comm.size() - 1) } else { 0 };
    (norm + losses + told) as u64
}

/// One rank's second training step: bytes sent, bytes expected, and the number of messages in its program with
/// activations, gradients and tied segments.
struct Rank {
    sent: u64,
    expected: u64,
    messages: [usize; 3],
}

struct Run {
    zero_stage: u8,
    data: usize,
    stages: usize,
    schedule: &'static str,
    micro_batches: usize,
    tied: bool,
    dtype: DType,
}

impl Run {
    fn step(&self) -> Vec<Rank> {
        let more = match self.dtype {
            DType::BF16 => BF16,
            DType::F16 => FP16,
            _ => "",
        };
        let pipeline = format!("stages: {}, schedule: {}", self.stages, self.schedule);
        let text = text(self.zero_stage, self.micro_batches, &pipeline, more);
        let width = self.dtype.size_in_bytes();
        world(self.stages * self.data, |comm| {
            let mut engine = engine_of(gpt2(WIDTH, self.tied), comm, &text);
            let step = |engine: &mut Engine, number| {
                engine.train_batch(&batch(number, 2 * self.data * self.micro_batches)).unwrap().sent_bytes
            };
            // Every step sends announcements again, and an evaluation does not change the bytes of the next step.
            let first = step(&mut engine, 0);
            engine.eval_batch(&batch(9, 2)).unwrap();
            let sent = step(&mut engine, 1);
            assert_eq!(sent, first, "{text}");
            let options = options(&engine, self.dtype);
            let (program, layout, groups) = (engine.program(), engine.zero().layout(), engine.zero().groups());
            let place = (groups.mesh(), groups.at());
            let payload = expected_payload(program, layout, place, width, &options, |m| message_bytes(m, width));
            let mut messages = [0; 3];
            for instruction in &program.instructions {
                if let Instruction::Send { message } = instruction {
                    messages[match message.content {
                        Content::Activations { .. } => 0,
                        Content::Gradients { .. } => 1,
                        Content::TiedGradient { .. } | Content::TiedParameters { .. } => 2,
                    }] += 1;
                }
            }
            Rank {
                sent,
                expected: payload.total() + norm_and_loss(&engine, self.zero_stage, self.micro_batches),
                messages,
            }
        })
    }
}

#[test]
fn sent_bytes_match_the_program() {
    for zero_stage in 0..=3 {
        for schedule in SCHEDULES {
            for (stages, data, tied, dtype) in [
                (2, 1, true, DType::F32),
                (2, 2, true, DType::BF16),
                (3, 2, true, DType::F32),
                (3, 1, false, DType::F16),
            ] {
                let run = Run { zero_stage, data, stages, schedule, micro_batches: 4, tied, dtype };
                let ranks = run.step();
                for (rank, measured) in ranks.iter().enumerate() {
                    let what = format!(
                        "{schedule}, rank {rank} of {stages} × {data}, ZeRO {zero_stage}, tied {tied}, {dtype:?}"
                    );
                    assert_eq!(measured.sent, measured.expected, "{what}");
                }
                // Counted by hand: every micro-batch crosses every boundary once in each direction. A tied gradient
                // travels from the last stage to the first once per micro-batch, and the parameter travels back once
                // per step.
                let chunks = if schedule == "interleaved_1f1b" { 2 * stages } else { stages };
                let total = |kind: usize| ranks.iter().map(|rank| rank.messages[kind]).sum::<usize>();
                let crossings = data * run.micro_batches * (chunks - 1);
                let of_tied = if tied { data * (run.micro_batches + 1) } else { 0 };
                assert_eq!([total(0), total(1), total(2)], [crossings, crossings, of_tied], "{schedule}");
            }
        }
    }
}
