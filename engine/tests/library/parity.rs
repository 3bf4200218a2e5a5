//! All layouts are bit-identical.

use crate::world;

use world::{BF16, FP16, assert_same, run};

fn stage(stage: u8, accumulation: usize, more: &str, zero: &str) -> String {
    format!(
        "train_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: {accumulation}\n{more}\n\
         zero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 0, stage3_max_reuse_distance: 0{zero}}}"
    )
}

#[test]
fn all_stages_are_bit_identical_at_one_micro_batch() {
    for ranks in 1..=4 {
        let expected = run(ranks, 8, &stage(0, 1, "", ""));
        assert!(expected.losses.len() == 8 && expected.losses[0] != expected.losses[7]);
        for zero_stage in 1..=3 {
            let got = run(ranks, 8, &stage(zero_stage, 1, "", ""));
            assert_same(&expected, &got, &format!("stage {zero_stage} on {ranks} ranks"));
        }
    }
}

#[test]
fn options_of_communication_are_bit_identical() {
    let expected = run(2, 8, &stage(3, 2, "", ""));
    for zero in [
        ", stage3_prefetch_bucket_size: 0",
        ", overlap_comm: false",
        ", stage3_max_live_parameters: 1",
        ", stage3_param_persistence_threshold: 100",
        ", stage3_max_reuse_distance: 1000000000",
        ", reduce_bucket_size: 0, allgather_bucket_size: 0",
        ", reduce_bucket_size: 500000000",
        ", reduce_scatter: false",
    ] {
        // A key must not occur twice, so replace the default that `stage` sets.
        let key = zero.trim_start_matches(", ").split(':').next().unwrap();
        let text = stage(3, 2, "", "");
        let text = text.replace(&format!("{key}: 0"), &format!("{key}_: 0"));
        let text = match text.contains(&format!("{key}_: 0")) {
            true => text.replace(&format!("{key}_: 0"), zero.trim_start_matches(", ")),
            false => stage(3, 2, "", zero),
        };
        assert_same(&expected, &run(2, 8, &text), zero);
    }
}

#[test]
fn with_accumulation_stages_0_1_and_2_3_are_bit_identical() {
    for ranks in [1, 2, 3] {
        let of = |zero_stage| run(ranks, 8, &stage(zero_stage, 4, "", ""));
        assert_same(&of(0), &of(1), &format!("0 = 1 on {ranks} ranks"));
        assert_same(&of(2), &of(3), &format!("2 = 3 on {ranks} ranks"));
    }
}

#[test]
fn reproducible_runs_are_bit_identical_over_stages_and_ranks() {
    let reproducible = |zero_stage: u8, ranks: usize| {
        run(ranks, 8, &stage(zero_stage, 8 / ranks, "training: {reproducible: true}", ""))
    };
    let expected = reproducible(0, 1);
    for ranks in [1, 2, 4, 8] {
        for zero_stage in 0..=3 {
            assert_same(&expected, &reproducible(zero_stage, ranks), &format!("stage {zero_stage} on {ranks} ranks"));
        }
    }
}

/// All optimizers except the default one, and a schedule that changes the betas.
pub(crate) const OPTIMIZERS: [&str; 10] = [
    "optimizer: {type: SGD, params: {lr: 0.01, momentum: 0.9, weight_decay: 0.1}}",
    "optimizer: {type: Lion, params: {lr: 0.001, weight_decay: 0.1}}",
    "optimizer: {type: Adagrad, params: {lr: 0.01, weight_decay: 0.1}}",
    "optimizer: {type: RMSprop, params: {lr: 0.001, weight_decay: 0.1}}",
    "optimizer: {type: RMSprop, params: {lr: 0.001, momentum: 0.9, weight_decay: 0.1}}",
    "optimizer: {type: RMSprop, params: {lr: 0.001, centered: true, weight_decay: 0.1}}",
    "optimizer: {type: NAdam, params: {lr: 0.002, weight_decay: 0.1}}",
    "optimizer: {type: AdamWScheduleFree, params: {lr: 0.002, weight_decay: 0.1}}",
    "optimizer: {type: RAdam, params: {lr: 0.002, weight_decay: 0.1, decoupled_weight_decay: true}}",
    "scheduler: {type: OneCycle, params: {cycle_min_lr: 0.0001, cycle_max_lr: 0.01, cycle_first_step_size: 4}}",
];

#[test]
fn every_optimizer_is_bit_identical_over_stages_and_ranks() {
    for optimizer in OPTIMIZERS {
        let expected = run(2, 10, &stage(0, 1, optimizer, ""));
        assert!(expected.losses[0] != expected.losses[9], "{optimizer}");
        for zero_stage in 1..=3 {
            let got = run(2, 10, &stage(zero_stage, 1, optimizer, ""));
            assert_same(&expected, &got, &format!("{optimizer}, stage {zero_stage}"));
        }
        let more = format!("{optimizer}\ntraining: {{reproducible: true}}");
        let expected = run(1, 10, &stage(0, 4, &more, ""));
        for (zero_stage, ranks) in [(1, 2), (3, 2), (3, 4)] {
            let got = run(ranks, 10, &stage(zero_stage, 4 / ranks, &more, ""));
            assert_same(&expected, &got, &format!("{optimizer}, stage {zero_stage} on {ranks} ranks"));
        }
    }
}

#[test]
fn stages_are_bit_identical_in_16_bits() {
    for dtype in [BF16, FP16] {
        let expected = run(2, 8, &stage(0, 1, dtype, ""));
        for zero_stage in 1..=3 {
            assert_same(&expected, &run(2, 8, &stage(zero_stage, 1, dtype, "")), dtype);
        }
    }
}

/// With `reproducible`, gradients are reduced in f32, so the layout does not change the bits in 16-bit training either.
#[test]
fn reproducible_runs_are_bit_identical_in_16_bits() {
    for dtype in [BF16, FP16] {
        let reproducible = |zero_stage: u8, ranks: usize| {
            run(ranks, 8, &stage(zero_stage, 4 / ranks, &format!("training: {{reproducible: true}}\n{dtype}"), ""))
        };
        let expected = reproducible(0, 1);
        for ranks in [1, 2, 4] {
            for zero_stage in 0..=3 {
                let what = format!("{dtype}, stage {zero_stage} on {ranks} ranks");
                assert_same(&expected, &reproducible(zero_stage, ranks), &what);
            }
        }
    }
}
