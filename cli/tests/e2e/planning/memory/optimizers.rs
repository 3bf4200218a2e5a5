//! Compares planned and counted memory for optimizers, their states, and averages of the weights.

use super::{BLOCKS, GPT2, LLAMA, PARAMETERS, STATE, holds};

#[test]
fn muon_matrices() {
    let muon = "optimizer={type: Muon, params: {lr: 0.01}}";
    for model in [GPT2, LLAMA] {
        for (ranks, zero) in [(1, "stage: 0"), (2, "stage: 1"), (2, "stage: 2"), (2, "stage: 3"), (3, "stage: 3")] {
            holds(ranks, zero, &[model, muon, "train_micro_batch_size_per_gpu=4"]);
        }
        holds(2, "stage: 2", &[model, muon, "bf16.enabled=true", "train_micro_batch_size_per_gpu=4"]);
        holds(2, &format!("stage: 3, {STATE}, {PARAMETERS}"), &[model, muon, BLOCKS]);
    }
}

#[test]
fn adafactor_factored_moments() {
    let adafactor = "optimizer={type: Adafactor}";
    for model in [GPT2, LLAMA] {
        for (ranks, zero) in [(1, "stage: 0"), (2, "stage: 1"), (2, "stage: 2"), (3, "stage: 3")] {
            holds(ranks, zero, &[model, adafactor, "train_micro_batch_size_per_gpu=4"]);
        }
    }
    holds(2, "stage: 2", &[adafactor, "bf16.enabled=true", "train_micro_batch_size_per_gpu=4"]);
    holds(2, &format!("stage: 3, {STATE}, {PARAMETERS}"), &[adafactor, BLOCKS]);
    let saves = "training={max_steps: 3, output_dir: run, save_last: false, save_async: true, save_every: 1}";
    holds(2, "stage: 3", &[adafactor, saves]);
}

/// Each group has the states of its own optimizer, in memory and on a disk.
#[test]
fn optimizers_of_parameter_groups() {
    let by_elements = "training.param_groups=[{kinds: embedding, optimizer: {type: SGD, params: {momentum: 0.9}}}, \
                       {kinds: [norm, bias], optimizer: {type: SGD}}]";
    let of_whole = "training.param_groups=[{kinds: embedding, optimizer: {type: Adafactor}}, \
                    {kinds: [norm, bias], optimizer: {type: Lamb}}, {layers: [0], optimizer: {type: Muon}}]";
    for groups in [by_elements, of_whole] {
        for (ranks, zero) in [(1, "stage: 0"), (2, "stage: 1"), (2, "stage: 2"), (3, "stage: 3")] {
            holds(ranks, zero, &[groups, "train_micro_batch_size_per_gpu=4"]);
        }
        holds(2, "stage: 2", &[groups, "bf16.enabled=true", "train_micro_batch_size_per_gpu=4"]);
    }
    for groups in [by_elements, of_whole] {
        holds(2, &format!("stage: 3, {STATE}"), &[groups, BLOCKS]);
    }
}

/// A background save copies the states in f32.
#[test]
fn states_in_eight_bits() {
    let adamw = "optimizer={type: AdamW, params: {optim_bits: 8, min_8bit_size: 1000}}";
    for (ranks, zero) in [(1, "stage: 0"), (2, "stage: 2"), (3, "stage: 3")] {
        holds(ranks, zero, &[adamw, "train_micro_batch_size_per_gpu=4"]);
    }
    let saves = "training={max_steps: 3, output_dir: run, save_last: false, save_async: true, save_every: 1}";
    holds(2, "stage: 3", &[adamw, saves]);
    holds(2, &format!("stage: 2, {STATE}"), &[adamw, BLOCKS]);
}

/// Ranks also keep the weights in memory while they evaluate the averages.
#[test]
fn schedule_free_averages() {
    let free = "optimizer={type: AdamWScheduleFree, params: {lr: 0.01}}";
    for (ranks, zero, more) in [
        (1, "stage: 0", "train_micro_batch_size_per_gpu=1"),
        (1, "stage: 0", "bf16.enabled=true"),
        (2, "stage: 1", "train_micro_batch_size_per_gpu=4"),
        (2, "stage: 2", "bf16.enabled=true"),
        (2, "stage: 3", "train_micro_batch_size_per_gpu=2"),
    ] {
        holds(ranks, zero, &[free, "training.eval_every=1", more]);
    }
    holds(1, "stage: 0", &[free]);
    holds(2, &format!("stage: 3, {STATE}, {PARAMETERS}"), &[free, "training.eval_every=1", BLOCKS]);
}

#[test]
fn lamb_trust_ratios() {
    let lamb = "optimizer={type: Lamb, params: {lr: 0.01}}";
    for (ranks, zero) in [(1, "stage: 0"), (2, "stage: 1"), (2, "stage: 2"), (2, "stage: 3")] {
        holds(ranks, zero, &[lamb, "train_micro_batch_size_per_gpu=4"]);
    }
    holds(2, "stage: 3", &[LLAMA, lamb, "bf16.enabled=true", "train_micro_batch_size_per_gpu=4"]);
    holds(2, &format!("stage: 2, {STATE}"), &[lamb, "bf16.enabled=true", BLOCKS]);
}

#[test]
fn ema_weights() {
    let averages = ["training.ema={decay: 0.9}", "training.eval_every=1", "train_micro_batch_size_per_gpu=4"];
    for (ranks, zero, more) in [
        (1, "stage: 0", "bf16.enabled=true"),
        (2, "stage: 1", "optimizer={type: Muon, params: {lr: 0.01}}"),
        (2, "stage: 2", "optimizer={type: SGD, params: {lr: 0.01}}"),
        (2, "stage: 3", "adapter={r: 8}"),
    ] {
        holds(ranks, zero, &[averages[0], averages[1], averages[2], more]);
    }
    for ranks in [1, 2] {
        holds(ranks, &format!("stage: 3, {STATE}"), &[averages[0], averages[1], BLOCKS]);
    }
}

#[test]
fn bf16_states_gradients_and_master_weights() {
    let all = "bf16={enabled: true, bf16_master_weights_and_grads: true, bf16_optimizer_states: true, \
               stochastic_rounding: true}";
    let states = "optimizer={type: AdamW, params: {fp32_optimizer_states: false}}";
    for (ranks, zero) in [(1, "stage: 0"), (2, "stage: 1"), (2, "stage: 2"), (2, "stage: 3")] {
        holds(ranks, zero, &[all, "train_micro_batch_size_per_gpu=4"]);
        holds(ranks, zero, &[states, "bf16.enabled=true", "train_micro_batch_size_per_gpu=4"]);
    }
    holds(2, "stage: 2", &[all, "adapter={r: 8}"]);
    holds(2, &format!("stage: 1, {STATE}"), &[states, "bf16.enabled=true", BLOCKS]);
    holds(2, &format!("stage: 3, {STATE}, {PARAMETERS}"), &[all, BLOCKS]);
    for (ranks, stage) in [(1, 1), (2, 0), (2, 1), (2, 2), (2, 3)] {
        let accumulated = ["gradient_accumulation_steps=3", "data_types.grad_accum_dtype=bf16", "bf16.enabled=true"];
        holds(ranks, &format!("stage: {stage}"), &accumulated);
        let [accumulated, gradients, _] = accumulated;
        for more in ["communication_data_type=fp32", "zero_optimization.reduce_scatter=false"] {
            holds(ranks, &format!("stage: {stage}"), &[accumulated, gradients, all, more]);
        }
    }
}
