//! A batch size that grows (`training.rampup_batch_size`): the sizes match Megatron-LM, and runs are bit-identical in
//! every layout.

use zero_engine::config::{BatchSizes, RampUp};
use zero_engine::{Config, Engine};

use crate::python::{python, results};
use crate::world::{Trajectory, agreed, assert_same, batch, gpt2, trajectory_of, world};

/// `train_batch_size`, and the keys `start`, `increment` and `samples`.
const CASES: [(usize, [usize; 3]); 6] = [
    (16, [4, 4, 48]),
    (1024, [32, 32, 300_000]),
    (96, [8, 8, 1000]),
    (6, [1, 1, 7]),
    (40, [10, 30, 1]),
    (256, [4, 4, 4096]),
];

fn sizes((full, [start, increment, samples]): (usize, [usize; 3])) -> BatchSizes {
    BatchSizes { full, rampup: Some(RampUp { start, increment, samples: samples as u64 }) }
}

/// Returns the batch sizes of the first `steps` steps.
fn first(sizes: BatchSizes, steps: u64) -> Vec<usize> {
    (0..steps).map(|step| sizes.at(sizes.after(0, step))).collect()
}

#[test]
fn batch_sizes_match_megatron() {
    let script = format!(
        "import json, warnings\n\
         warnings.simplefilter('ignore')\n\
         from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator as Sizes\n\
         for full, (start, increment, samples) in {:?}:\n\
         \x20   sizes, consumed, all = Sizes(full, 1, 1, False, 1, start, increment, samples), 0, []\n\
         \x20   for step in range(400):\n\
         \x20       sizes.update(consumed, True)\n\
         \x20       all.append(sizes.get_current_global_batch_size())\n\
         \x20       consumed += all[-1]\n\
         \x20   print('result', json.dumps(all))\n",
        CASES,
    );
    let Some(output) = python(&["torch", "megatron.core"], &script) else { return };
    let theirs: Vec<Vec<usize>> = results(&output).map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(theirs.len(), CASES.len());
    for (case, theirs) in CASES.into_iter().zip(theirs) {
        assert_eq!(first(sizes(case), 400), theirs, "{case:?}");
    }
}

/// Checks the batch sizes of the first case without Python, and the number of steps that consume a given number of
/// samples.
#[test]
fn batch_sizes_grow_evenly() {
    let sizes = sizes(CASES[0]);
    assert_eq!(first(sizes, 11), [4, 4, 4, 4, 8, 8, 12, 12, 16, 16, 16]);
    let consumed: Vec<u64> = (0..11).map(|steps| sizes.after(0, steps)).collect();
    for (steps, &samples) in consumed.iter().enumerate() {
        assert_eq!(sizes.steps(0, samples), steps as u64, "{samples}");
        assert_eq!(sizes.after(sizes.after(0, 3), steps as u64), sizes.after(0, steps as u64 + 3));
    }
    assert_eq!(sizes.steps(8, 9), 1);
    assert_eq!(sizes.steps(9, 8), 0);
    assert_eq!(BatchSizes { full: 16, rampup: None }.steps(0, 33), 3);
}

const RAMPUP: &str = "rampup_batch_size: {start: 4, increment: 4, samples: 12}";

fn run(ranks: usize, stage: u8, training: &str, more: &str) -> Trajectory {
    let replicas = if more.contains("pipeline") { ranks / 2 } else { ranks };
    let text = format!(
        "train_batch_size: 8\ntrain_micro_batch_size_per_gpu: 1\ngradient_accumulation_steps: {}\n\
         optimizer: {{type: AdamW, params: {{lr: 0.01}}}}\ngradient_clipping: 0.5\n{more}\n\
         training: {{reproducible: true, {training}}}\n\
         zero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 40}}",
        8 / replicas
    );
    let all = world(ranks, |comm| {
        let config = Config::with_world_size("test.yaml", &text, ranks).unwrap_or_else(|error| panic!("{error}"));
        let mut engine = Engine::with_communicator(config, gpt2(), comm).unwrap_or_else(|error| panic!("{error}"));
        trajectory_of(&mut engine, 6, |engine, step| {
            let wanted = engine.batch_size();
            let step = engine.train_batch(&batch(step, wanted)).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(step.samples, wanted);
            step
        })
    });
    agreed(all, &text)
}

#[test]
fn every_layout_is_bit_identical() {
    let expected = run(1, 0, RAMPUP, "");
    for (ranks, stage, more) in [
        (2, 0, ""),
        (2, 1, ""),
        (4, 2, ""),
        (4, 3, ""),
        (2, 1, "pipeline: {stages: 2}"),
        (4, 3, "pipeline: {stages: 2, schedule: interleaved_1f1b}"),
        (2, 1, "pipeline: {stages: 2, schedule: zb_h1}"),
        // The first steps have one micro-batch for each replica.
        (8, 1, "pipeline: {stages: 2}"),
    ] {
        assert_same(&expected, &run(ranks, stage, RAMPUP, more), &format!("stage {stage} on {ranks} ranks, {more}"));
    }
}

/// Steps of 4 samples equal those of a run whose `train_batch_size` is 4.
#[test]
fn a_small_step_matches_a_run_of_that_batch_size() {
    let grown = run(1, 0, RAMPUP, "");
    let text = "train_batch_size: 4\ntrain_micro_batch_size_per_gpu: 1\noptimizer: {type: AdamW, params: {lr: 0.01}}\n\
                gradient_clipping: 0.5\ntraining: {reproducible: true}";
    let small = world(1, |comm| {
        let config = Config::with_world_size("test.yaml", text, 1).unwrap();
        let mut engine = Engine::with_communicator(config, gpt2(), comm).unwrap();
        trajectory_of(&mut engine, 2, |engine, step| engine.train_batch(&batch(step, 4)).unwrap())
    });
    assert_eq!((&grown.losses[..2], &grown.norms[..2]), (&small[0].losses[..], &small[0].norms[..]));
}

#[test]
fn mistakes_are_errors() {
    for (batch, rampup, expected) in [
        (
            "train_batch_size: 8",
            "start: 8, increment: 2, samples: 9",
            "a batch size that starts at 8 cannot reach `train_batch_size` 8 in increments of 2",
        ),
        (
            "train_batch_size: 8",
            "start: 2, increment: 4, samples: 9",
            "a batch size that starts at 2 cannot reach `train_batch_size` 8 in increments of 4",
        ),
        (
            "{train_batch_size: 16, train_micro_batch_size_per_gpu: 2}",
            "start: 2, increment: 2, samples: 9",
            "2 samples are not a multiple of 4",
        ),
        (
            "{train_batch_size: 16, train_micro_batch_size_per_gpu: 2}",
            "start: 4, increment: 6, samples: 9",
            "6 samples are not a multiple of 4",
        ),
        (
            "{train_batch_size: 16, train_micro_batch_size_per_gpu: 1}",
            "start: 4, increment: 4, samples: 9}, reproducible: true, spikes: {",
            "a step of 12 samples has 12",
        ),
        ("train_batch_size: 8", "start: 2, increment: 2, samples: 0", "in: training.rampup_batch_size.samples"),
        ("train_batch_size: 8", "start: 2, samples: 5", "`training.rampup_batch_size.increment` is missing"),
        (
            "train_batch_size: 8",
            "start: 4, increment: 4, samples: 5}, trace: true, spikes: {",
            "a trace needs steps of equal size",
        ),
        ("train_batch_size: 8", "start: 16, increment: 4, samples: 5}, gradient_noise_scale: {", "cannot reach"),
        (
            "{train_batch_size: 8, data: {train: a.txt, sequence_length: 9, max_tokens: 9}}",
            "start: 4, increment: 4, samples: 5",
            "a growing batch size needs micro-batches with equal numbers of samples",
        ),
        (
            "{train_batch_size: 8, pipeline: {stages: 2, schedule: interleaved_1f1b}, train_micro_batch_size_per_gpu: 1}",
            "start: 1, increment: 1, samples: 9",
            "1 samples are not a multiple of 2, the number of samples in one micro-batch per stage on every replica",
        ),
    ] {
        let text = format!(
            "{}\ntraining: {{rampup_batch_size: {{{rampup}}}}}",
            batch
                .strip_prefix('{')
                .and_then(|batch| batch.strip_suffix('}'))
                .unwrap_or(batch)
                .replace(", train_", "\ntrain_")
                .replace(", data", "\ndata")
                .replace(", pipeline", "\npipeline")
        );
        let error = Config::with_world_size("test.yaml", &text, 2).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let text = "train_batch_size: 4\ntrain_micro_batch_size_per_gpu: 1\ntraining: {rampup_batch_size: {start: 2, increment: 2, samples: 9}}";
    let comm = zero_engine::comm::threads(1, &Default::default()).remove(0);
    let config = Config::with_world_size("test.yaml", text, 1).unwrap();
    let mut engine = Engine::with_communicator(config, gpt2(), comm).unwrap();
    let error = engine.train_batch(&batch(0, 4)).unwrap_err().to_string();
    assert!(error.contains("it has 4 samples, but the next step of `training.rampup_batch_size` has 2"), "{error}");
}
