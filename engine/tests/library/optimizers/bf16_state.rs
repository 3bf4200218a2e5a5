//! Parameters without an f32 copy, and gradients and states in bf16: they match PyTorch, are bit-identical at every
//! layout, and have the bytes of the formula.

use std::path::Path;

use half::bf16;
use zero_optim::{AdamW, Optimizer, Step};
use zero_partition::{Grads, Values, update};

use crate::python::{python, results, small_llama};
use crate::sharding::bytes::assert_state;
use crate::sharding::on_disk::offloaded;
use crate::world::{
    Trajectory, agreed, assert_resumes, assert_same, batch, configured_engine, engine, relative_difference,
    reproducible, run, world,
};

const NO_COPY: &str = "bf16: {enabled: true, bf16_master_weights_and_grads: true}";
const ALL: &str = "bf16: {enabled: true, bf16_master_weights_and_grads: true, bf16_optimizer_states: true}";
const STOCHASTIC: &str = "bf16: {enabled: true, bf16_master_weights_and_grads: true, bf16_optimizer_states: true, \
                          stochastic_rounding: true}";
const STATES: &str = "bf16: {enabled: true}\n\
                      optimizer: {type: AdamW, params: {lr: 0.01, weight_decay: 0.1, fp32_optimizer_states: false}}";
const LION: &str = "optimizer: {type: Lion, params: {lr: 0.001}}";

#[test]
fn every_layout_is_bit_identical() {
    let all: Vec<Trajectory> = [NO_COPY, ALL, STOCHASTIC, STATES, &format!("{ALL}\n{LION}")]
        .into_iter()
        .map(|more| {
            let expected = run(1, 5, &reproducible(0, 1, more));
            for (ranks, stage) in [(2, 0), (2, 1), (4, 2), (4, 3)] {
                let text = reproducible(stage, ranks, more);
                assert_same(&expected, &run(ranks, 5, &text), &text);
            }
            for (replicas, stage) in [(1, 0), (2, 1), (2, 3)] {
                let text = reproducible(stage, replicas, &format!("{more}\npipeline: {{stages: 2}}"));
                assert_same(&expected, &run(2 * replicas, 5, &text), &text);
            }
            for more in ["adapter: {r: 4}", "activation_checkpointing: {}"].map(|other| format!("{more}\n{other}")) {
                let of = |ranks, stage| run(ranks, 5, &reproducible(stage, ranks, &more));
                assert_same(&of(1, 0), &of(2, 3), &more);
            }
            expected
        })
        .collect();
    for (index, one) in all.iter().enumerate() {
        assert!(all[..index].iter().all(|other| other.parameters != one.parameters), "{index}");
    }
    // With states in bf16, the average of the weights is still in f32.
    let averaged = reproducible(0, 1, STATES).replace("training: {", "training: {ema: {decay: 0.9}, ");
    assert_same(&all[3], &run(1, 5, &averaged), "with an average");
}

#[test]
fn a_run_is_resumed_in_another_layout() {
    for more in [ALL, STOCHASTIC, STATES] {
        assert_resumes(more, &[(1, 0), (4, 1)]);
    }
}

/// Returns keys of a run on global batches of 4 samples. Gradients travel in the working dtype, bf16.
fn accumulating(stage: u8, data: usize, micro_batches: usize, more: &str) -> String {
    format!(
        "train_micro_batch_size_per_gpu: {}\ngradient_accumulation_steps: {micro_batches}\n{more}\n\
         zero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 40}}",
        4 / data / micro_batches
    )
}

/// The gradient of a single micro-batch arrives in bf16 anyway, so keeping it in bf16 loses nothing. Sums over several
/// micro-batches are rounded.
#[test]
fn bf16_accumulation_is_exact_for_one_micro_batch() {
    let [narrow, wide] = ["bf16", "fp32"].map(|dtype| format!("data_types: {{grad_accum_dtype: {dtype}}}"));
    for more in ["bf16: {enabled: true}", NO_COPY, &format!("{STOCHASTIC}\n{LION}")] {
        let of = |stage, data, count, more: &str, dtype: &str| {
            run(data, 5, &accumulating(stage, data, count, &format!("{more}\n{dtype}")))
        };
        for (ranks, stage) in [(1, 0), (2, 0), (2, 1), (4, 2), (4, 3)] {
            let single = |dtype: &str| of(stage, ranks, 1, more, dtype);
            assert_same(&single(&wide), &single(&narrow), &format!("{more} {ranks} {stage}"));
        }
        let default = if more.contains("master") { &narrow } else { &wide };
        assert_same(&of(2, 2, 2, more, ""), &of(2, 2, 2, more, default), "the default");
        let sums = |stage, more: &str| of(stage, 2, 2, more, &narrow);
        assert_same(&sums(0, more), &sums(1, more), "sums of each rank");
        assert_same(&sums(2, more), &sums(3, more), "sums of shards");
        assert_same(&sums(2, more), &sums(2, &format!("{more}\nactivation_checkpointing: {{}}")), "recomputed");
        let piped = format!("{more}\n{narrow}\npipeline: {{stages: 2}}");
        assert_same(&of(1, 1, 4, more, &narrow), &run(2, 5, &accumulating(1, 1, 4, &piped)), "two pipeline stages");
        let exact = of(1, 1, 4, more, &wide);
        let rounded = of(1, 1, 4, more, &narrow);
        assert!(rounded.parameters != exact.parameters, "{more}");
        let apart = relative_difference(&rounded.loss_values(), &exact.loss_values());
        println!("{more}: losses of sums of four gradients in bf16 differ by {apart:.1e}");
        assert!(apart < 0.01, "{more}: {apart}");
    }
}

/// Without the f32 copy, and with gradients and states in bf16, AdamW needs 8 bytes per element instead of 18, and Lion
/// 6 instead of 14.
#[test]
fn bytes_match_the_formula() {
    let f32_states = "bf16: {enabled: true}";
    let lion = |more: &str| format!("{more}\n{LION}");
    let gradients = |dtype: &str| format!("data_types: {{grad_accum_dtype: {dtype}}}");
    for (more, bytes) in [
        (f32_states.to_string(), 18),
        (format!("{f32_states}\n{}", gradients("bf16")), 16),
        (STATES.to_string(), 14),
        (NO_COPY.to_string(), 12),
        (format!("{NO_COPY}\n{}", gradients("fp32")), 14),
        (ALL.to_string(), 8),
        (lion(f32_states), 14),
        (lion(ALL), 6),
    ] {
        for (ranks, stage, micro_batches) in [(1, 0, 1), (1, 0, 4), (2, 1, 2), (2, 2, 2), (2, 3, 1)] {
            let text = accumulating(stage, ranks, micro_batches, &more);
            world(ranks, |comm| {
                let mut engine = engine(comm, &text);
                engine.train_batch(&batch(0, 4)).unwrap();
                let state = assert_state(&engine, &text);
                if stage == 0 {
                    assert_eq!(state.total(), bytes * engine.zero().layout().elements() as u64, "{text}");
                }
            });
        }
    }
}

/// With each of these options, the gradient of a single micro-batch arrives in bf16. The results are therefore
/// bit-identical with gradients in f32, with gradients in bf16, and with state on disk.
#[test]
fn other_options_work_with_gradients_in_bf16() {
    let folder = tempfile::tempdir().unwrap();
    let adamw = "optimizer: {type: AdamW, params: {lr: 0.01, optim_bits: 8, min_8bit_size: 1}}";
    let group = "training: {param_groups: [{kinds: embedding, gradient_clipping: 0.1}]}";
    for more in [
        "training: {ema: {decay: 0.9}}",
        "adapter: {r: 4}",
        adamw,
        "optimizer: {type: AdamWScheduleFree, params: {lr: 0.01}}",
        group,
        "training: {gradient_noise_scale: {}}",
        "activation_checkpointing: {}",
    ] {
        let of = |stage, dtype: &str| {
            let more = format!("bf16: {{enabled: true}}\n{more}\ndata_types: {{grad_accum_dtype: {dtype}}}");
            accumulating(stage, 2, 1, &more)
        };
        for stage in [1, 3] {
            let expected = run(2, 5, &of(stage, "fp32"));
            assert_same(&expected, &run(2, 5, &of(stage, "bf16")), more);
            assert_same(&expected, &run(2, 5, &offloaded(&of(stage, "bf16"), folder.path())), more);
        }
    }
    let sums = |text: &str| run(2, 5, text);
    let text = accumulating(2, 2, 2, ALL);
    assert_same(&sums(&text), &sums(&offloaded(&text, folder.path())), "sums beside a disk");
}

fn losses(folder: &Path, more: &str) -> Vec<f32> {
    let text = format!(
        "train_micro_batch_size_per_gpu: 2\ngradient_clipping: 0\ncommunication_data_type: fp32\n\
         model: {{pretrained: {folder:?}}}\ntraining: {{weight_decay_on: all}}\n{more}\nzero_optimization: {{stage: 3}}"
    );
    let losses = world(2, |comm| {
        let mut engine = configured_engine(comm, &text);
        (0..200).map(|step| engine.train_batch(&batch(step % 2, 4)).unwrap().loss).collect::<Vec<f32>>()
    });
    agreed(losses, more)
}

/// PyTorch's fused AdamW computes like this engine: in f32, from parameters and states in bf16. The gradients come from
/// its own bf16 kernels, so only the course of the loss is compared.
#[test]
fn losses_follow_pytorch_and_stochastic_rounding_follows_f32() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("base");
    let script = small_llama()
        + &format!(
            "
import json
model = llama({folder:?}).to(torch.bfloat16)
optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.1, fused=True), []
for step in range(200):
    inputs, targets = tokens(step % 2, 4)
    loss = torch.nn.functional.cross_entropy(model(inputs).logits.float().flatten(0, 1), targets.flatten())
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    losses.append(loss.item())
print('result', json.dumps(losses))
"
        );
    let Some(theirs) = python(&["torch", "transformers"], &script) else { return };
    let theirs: Vec<f32> = serde_json::from_str(results(&theirs).next().unwrap()).unwrap();
    let adamw = "optimizer: {type: AdamW, params: {lr: 1.0e-3, eps: 1.0e-6, weight_decay: 0.1}}";
    let of = |bf16: &str| losses(&folder, &format!("{adamw}\n{bf16}"));
    let (nearest, stochastic, exact) = (of(ALL), of(STOCHASTIC), of("bf16: {enabled: true}"));
    println!(
        "nearest from PyTorch {:.1e}, from the f32 copy {:.1e}; stochastic from the f32 copy {:.1e}",
        relative_difference(&nearest, &theirs),
        relative_difference(&nearest, &exact),
        relative_difference(&stochastic, &exact)
    );
    assert!(relative_difference(&nearest, &theirs) < 0.05, "{nearest:?}\n{theirs:?}");
    assert!(relative_difference(&stochastic, &exact) < 0.05, "{stochastic:?}\n{exact:?}");
    assert!(nearest[199] < 0.9 * nearest[0], "{nearest:?}");
}

/// Given the same gradients, parameters and states are bit-identical to PyTorch, except for a few roundings.
#[test]
fn fifty_steps_agree_with_pytorchs_fused_adamw() {
    const COUNT: usize = 4096;
    let script = format!(
        "
import torch
def wave(seed):
    i = torch.arange({COUNT})
    return ((i * i * 7919 + i * 31 * (seed + 1) + seed * 104729) % 2003).float() / 1024.0 - 1.0
p = torch.nn.Parameter(wave(0).bfloat16())
optimizer = torch.optim.AdamW([p], lr=0.01, weight_decay=0.1, fused=True)
for step in range(1, 51):
    p.grad = wave(step).bfloat16()
    optimizer.step()
state = optimizer.state[p]
for values in p.detach(), state['exp_avg'], state['exp_avg_sq']:
    print(*(x.item() for x in values.float()))
"
    );
    let Some(output) = python(&["torch"], &script) else { return };
    let theirs: Vec<Vec<f32>> =
        output.lines().map(|line| line.split(' ').map(|value| value.parse().unwrap()).collect()).collect();
    let wave = |seed: usize| -> Vec<bf16> {
        let wave = |i: usize| ((i * i * 7919 + i * 31 * (seed + 1) + seed * 104_729) % 2003) as f32 / 1024.0 - 1.0;
        (0..COUNT).map(|i| bf16::from_f32(wave(i))).collect()
    };
    let optimizer = Optimizer::AdamW(AdamW { weight_decay: 0.1, ..AdamW::default() });
    let (mut params, mut states) = (wave(0), [vec![bf16::ZERO; COUNT], vec![bf16::ZERO; COUNT]]);
    for step in 1..=50 {
        let grads = wave(step);
        let step = Step { step: step as u64, lr: 0.01, grad_scale: 1.0, grad_limit: f32::INFINITY, decay: true };
        let states = states.iter_mut().map(|state| Values::Bf16(state)).collect();
        update(&optimizer, &step, Values::Bf16(&mut params), Grads::Bf16(&grads), states, None).unwrap();
    }
    let [m, v] = states;
    for (name, (ours, theirs)) in ["parameters", "exp_avg", "exp_avg_sq"].iter().zip([params, m, v].iter().zip(&theirs))
    {
        let apart = |(ours, theirs): (&bf16, &f32)| (ours.to_f32() - theirs).abs() / theirs.abs().max(1e-3);
        let (differ, furthest) = ours
            .iter()
            .zip(theirs)
            .map(apart)
            .fold((0, 0.0), |(count, furthest), apart| (count + usize::from(apart > 0.0), apart.max(furthest)));
        println!("{name}: {differ} of {COUNT} differ, by {furthest:.1e} at most");
        // One rounding changes a value by at most 2⁻⁸ of the value.
        assert!(differ < COUNT / 50 && furthest < 0.02, "{name}: {differ} differ, by {furthest}");
    }
}
