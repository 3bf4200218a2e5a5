//! `Engine::train_micro_batches`: each step splits its global batch into another number of micro-batches, of different sizes.

use crate::models::ignored_targets::{assert_near, chats, plain, run, text};
use crate::world::{Trajectory, agreed, batch, engine_of, gpt2, trajectory_of, world};

use zero_engine::{Batch, Layers};

/// Number of samples in each micro-batch, by step. Each step has 8 samples.
const ROWS: [&[usize]; 4] = [&[3, 1, 2, 2], &[6, 2], &[2, 2, 2, 2], &[1, 2, 1, 1, 1, 2]];

fn uneven(
    layers: impl Fn() -> Layers + Sync,
    ranks: usize,
    text: &str,
    of: impl Fn(u64) -> Batch + Sync,
) -> Trajectory {
    let all = world(ranks, |comm| {
        trajectory_of(&mut engine_of(layers(), comm, text), 4, |engine, step| {
            let (whole, rows) = (of(step), ROWS[step as usize]);
            let load = |index: usize| whole.narrow(rows[..index].iter().sum(), rows[index]);
            engine.train_micro_batches(rows, load).unwrap_or_else(|error| panic!("{text}: {error}"))
        })
    });
    agreed(all, text)
}

/// Tests a loss with weights, a loss without weights, and dropout, whose masks depend on the sample.
#[test]
fn uneven_micro_batches_match_one_micro_batch() {
    let unweighted = |step: u64| batch(step, 8);
    type Case<'a> = (fn() -> Layers, &'a (dyn Fn(u64) -> Batch + Sync));
    let cases: [Case<'_>; 3] = [(plain, &chats), (plain, &unweighted), (gpt2, &chats)];
    for (layers, of) in cases {
        let expected = run(layers, 1, &text(0, 8, 1, ""), of);
        for (ranks, stage, more) in
            [(1, 0, ""), (2, 0, ""), (2, 1, ""), (2, 2, ""), (2, 3, ""), (2, 2, "activation_checkpointing: {}")]
        {
            let got = uneven(layers, ranks, &text(stage, 2, 4 / ranks, more), of);
            assert_near(&got, &expected, &format!("stage {stage}, {ranks} ranks {more}"));
        }
    }
}

#[test]
fn invalid_micro_batch_sizes_are_errors() {
    for (ranks, more, rows, expected) in [
        (1, "", &[4, 4, 4][..], "together must have 8 samples"),
        (1, "", &[8, 0], "no micro-batch may be empty"),
        (2, "", &[4, 2, 2], "must be a multiple of 2"),
        (2, "pipeline: {stages: 2}", &[3, 1, 2, 2], "cannot pass through pipeline stages"),
    ] {
        let accumulation = if more.is_empty() { 4 / ranks } else { 4 };
        for error in world(ranks, |comm| {
            let mut engine = engine_of(plain(), comm, &text(1, 2, accumulation, more));
            engine.train_micro_batches(rows, |_| panic!("nothing is loaded")).unwrap_err().to_string()
        }) {
            assert!(error.contains(expected) || error.contains("lost"), "{error}");
        }
    }
    world(1, |comm| {
        let mut engine = engine_of(plain(), comm, &text(1, 2, 4, ""));
        let error = engine.train_micro_batches(&[5, 3], |_| batch(0, 8).narrow(0, 4)).unwrap_err().to_string();
        assert!(error.contains("a micro-batch has 4 samples, expected 5"), "{error}");
    });
}
