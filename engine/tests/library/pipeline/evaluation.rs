//! Evaluation and forward passes are bit-identical to those of one stage on all ranks, and do not affect training.

use candle_core::{DType, Tensor};
use zero_engine::{Engine, Error};

use super::{SCHEDULES, engine_of, gpt2, text};
use crate::world::{BF16, batch, train, world};

fn bits(tensor: &Tensor) -> Vec<u32> {
    let values = tensor.to_dtype(DType::F32).and_then(|t| t.flatten_all()).and_then(|t| t.to_vec1::<f32>()).unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

/// Results of one rank.
#[derive(Debug, PartialEq)]
struct Found {
    /// Losses of one micro-batch, then of five, and finally of the first one again.
    losses: Vec<u32>,
    /// Logits of the replica's own samples, before and after training.
    logits: [Vec<u32>; 2],
    training: Vec<u32>,
}

/// Evaluates between training steps. Each replica has its own samples.
fn found(engine: &mut Engine) -> Found {
    let replica = engine.replica() as u64;
    let sample = |index: usize| batch(100 + 10 * index as u64 + replica, 2);
    let logits = |engine: &mut Engine| {
        let outputs = engine.forward(batch(200 + replica, 3).inputs).unwrap();
        assert_eq!(outputs.single().unwrap().dims(), [3, 16, 61]);
        bits(outputs.single().unwrap())
    };
    let before = logits(engine);
    let mut losses = vec![engine.eval_batch(&sample(0)).unwrap()];
    let mut training = train(engine, 1);
    losses.extend(engine.eval_with(5, |index| Ok(sample(index))).unwrap());
    assert_eq!(losses.len(), 6);
    training.extend(train(engine, 1));
    losses.push(engine.eval_batch(&sample(0)).unwrap());
    Found {
        losses: losses.into_iter().map(f32::to_bits).collect(),
        logits: [before, logits(engine)],
        training: training.iter().map(|step| step.loss.to_bits()).collect(),
    }
}

#[test]
fn losses_and_outputs_match_one_stage_on_all_ranks() {
    for zero_stage in 0..=3 {
        for more in ["", BF16, "fp16: {enabled: true, initial_scale_power: 10}"] {
            for data in [1, 2] {
                let of = |stages: usize, schedule: &str| {
                    let pipeline = format!("stages: {stages}, schedule: {schedule}");
                    let text = text(zero_stage, 4, &pipeline, more);
                    world(stages * data, |comm| found(&mut engine_of(gpt2(40, true), comm, &text)))
                };
                let expected = of(1, "1f1b");
                assert!(
                    expected[0].logits[0] != expected[0].logits[1] && expected[0].losses[0] != expected[0].losses[6]
                );
                for (stages, schedule) in [(2, 0), (3, 1), (2, 2), (3, 3)].map(|(n, s)| (n, SCHEDULES[s])) {
                    // Consecutive ranks are replicas of the same stage.
                    for (rank, got) in of(stages, schedule).iter().enumerate() {
                        let what = format!("rank {rank} of {stages} × {data}, {schedule}, ZeRO {zero_stage}, {more}");
                        assert!(*got == expected[rank % data], "{what}");
                    }
                }
            }
        }
    }
}

/// If one rank cannot load a batch, all ranks fail instead of waiting for it.
#[test]
fn a_batch_missing_on_one_rank_fails_all_ranks() {
    let text = text(1, 4, "stages: 3", "");
    let errors = world(3, |comm| {
        let rank = comm.rank();
        let mut engine = engine_of(gpt2(40, true), comm, &text);
        let missing = |_| Err(Error::Batch("no such sample".into()));
        match rank {
            2 => engine.eval_with(3, missing).unwrap_err().to_string(),
            _ => engine.eval_with(3, |index| Ok(batch(index as u64, 2))).unwrap_err().to_string(),
        }
    });
    assert!(errors[2].contains("no such sample"), "{}", errors[2]);
    assert!(errors[..2].iter().all(|error| error.contains("rank 2")), "{errors:?}");
}

#[test]
fn zero_micro_batches_have_no_losses() {
    let losses = world(2, |comm| {
        let mut engine = engine_of(gpt2(16, true), comm, &text(0, 4, "stages: 2", ""));
        engine.eval_with(0, |_| unreachable!("there is nothing to load")).unwrap()
    });
    assert!(losses.iter().all(Vec::is_empty));
}
