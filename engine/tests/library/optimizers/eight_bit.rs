//! Optimizer states in 8 bits: byte-identical to bitsandbytes, bit-identical at every layout, with the bytes of the
//! formula.

use zero_optim::{AdamW, EIGHT_BIT_BLOCK, EightBit, Lion, Optimizer, Step};
use zero_partition::{Grads, Values, update};

use crate::python::{python, results, small_llama};
use crate::sharding::bytes::assert_optimizer_state;
use crate::world::{
    BF16, agreed, assert_resumes, assert_same, batch, configured_engine, engine, relative_difference, reproducible,
    resume, run, save, world,
};

pub(crate) const ADAMW: &str =
    "optimizer: {type: AdamW, params: {lr: 0.01, weight_decay: 0.1, optim_bits: 8, min_8bit_size: 500}}";
const LION: &str = "optimizer: {type: Lion, params: {lr: 0.001, optim_bits: 8, min_8bit_size: 500}}";
const NO_COPY: &str = "bf16: {enabled: true, bf16_master_weights_and_grads: true, stochastic_rounding: true}";

#[test]
fn every_layout_is_bit_identical() {
    let of_parts = "training: {param_groups: [{kinds: [embedding], optim_bits: 32}]}";
    let plain = run(1, 5, &reproducible(0, 1, "optimizer: {type: AdamW, params: {lr: 0.01, weight_decay: 0.1}}"));
    for more in [
        ADAMW,
        LION,
        &format!("{ADAMW}\n{BF16}"),
        &format!("{ADAMW}\n{NO_COPY}"),
        &format!("{ADAMW}\nadapter: {{r: 8}}"),
    ] {
        let expected = run(1, 5, &reproducible(0, 1, more));
        assert!(expected.parameters != plain.parameters, "{more}");
        for (ranks, stage) in [(2, 0), (2, 1), (4, 2), (4, 3)] {
            let text = reproducible(stage, ranks, more);
            assert_same(&expected, &run(ranks, 5, &text), &text);
        }
        for (replicas, stage) in [(1, 0), (2, 1), (2, 3)] {
            let text = reproducible(stage, replicas, &format!("{more}\npipeline: {{stages: 2}}"));
            assert_same(&expected, &run(2 * replicas, 5, &text), &text);
        }
        let offloaded = reproducible(2, 2, more).replace("stage: 2", "stage: 2, offload_optimizer: {device: cpu}");
        assert_same(&expected, &run(2, 5, &offloaded), &offloaded);
    }
    let with_groups = |ranks, stage| {
        let text = reproducible(stage, ranks, ADAMW);
        run(ranks, 5, &text.replace("training: {", &format!("{}, ", of_parts.trim_end_matches('}'))))
    };
    let expected = with_groups(1, 0);
    assert_same(&expected, &with_groups(2, 3), "groups");
    assert!(expected.parameters != run(1, 5, &reproducible(0, 1, ADAMW)).parameters);
}

/// A checkpoint restores the indices and the largest value of each block bit for bit, even in another layout.
#[test]
fn a_run_is_resumed_in_another_layout() {
    for more in [ADAMW, LION] {
        assert_resumes(more, &[(1, 0), (4, 1), (2, 3)]);
    }
}

/// A run with states in f32 continues from states in 8 bits, and a run with states in 8 bits from states in f32.
#[test]
fn states_are_converted_when_a_run_is_resumed() {
    let root = tempfile::tempdir().unwrap();
    let wide = ADAMW.replace("optim_bits: 8, min_8bit_size: 500", "optim_bits: 32");
    for (index, (before, after)) in [(ADAMW, wide.as_str()), (wide.as_str(), ADAMW)].into_iter().enumerate() {
        let folder = root.path().join(index.to_string());
        let whole = run(1, 6, &reproducible(0, 1, before));
        save((2, 3), &folder, |comm| engine(comm, &reproducible(3, 2, before)));
        let rest = resume((1, 3), &folder, |comm| engine(comm, &reproducible(0, 1, after)));
        let difference = relative_difference(&rest.loss_values(), &whole.after(3).loss_values());
        assert!(0.0 < difference && difference < 0.01, "{before}: {difference}");
    }
}

/// Each state takes one byte per element and four bytes per block. Small parameters have states in f32.
#[test]
fn bytes_match_the_formula() {
    for (more, states) in [(ADAMW, 2), (LION, 1)] {
        for (ranks, stage) in [(1, 0), (2, 1), (2, 2), (2, 3)] {
            let text = reproducible(stage, ranks, more);
            world(ranks, |comm| {
                let mut engine = engine(comm, &text);
                engine.train_batch(&batch(0, 4)).unwrap();
                let held = assert_optimizer_state(&engine, &text);
                if stage == 0 {
                    let of = |elements: usize| match elements {
                        500.. => elements + 4 * elements.div_ceil(EIGHT_BIT_BLOCK),
                        _ => 4 * elements,
                    };
                    let bytes: usize = engine.model().parameters().iter().map(|p| states * of(p.elements())).sum();
                    assert_eq!(held, bytes as u64, "{text}");
                }
            });
        }
    }
}

/// The 256 values, and the indices of a million numbers, equal those of bitsandbytes.
#[test]
fn quantization_matches_bitsandbytes() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("bytes");
    // For f64, the CPU implementation of bitsandbytes stores the nearest value, as its device-independent
    // implementation does. For f32, it looks up the value in a coarser table.
    let script = format!(
        "
import torch
import bitsandbytes.functional as F
torch.manual_seed(0)
out = open({file:?}, 'wb')
for signed in (True, False):
    code = F.create_dynamic_map(signed=signed)
    x = torch.randn(1 << 19) * torch.exp(2 * torch.randn(1 << 19))
    if not signed: x = x * x
    indices, largest = torch.ops.bitsandbytes.quantize_blockwise(x.double(), code.clone(), 256)
    for part in (code, x, indices, largest.float()): out.write(part.numpy().tobytes())
print('result', 0)
"
    );
    let Some(_) = python(&["torch", "bitsandbytes"], &script) else { return };
    let bytes = std::fs::read(&file).unwrap();
    let mut rest = bytes.as_slice();
    let mut take = |count: usize| rest.split_off(..count).unwrap();
    for of in [EightBit::Signed, EightBit::Unsigned] {
        let n = 1 << 19;
        assert_eq!(floats(take(4 * 256)), of.all(), "{of:?}");
        let (x, theirs, their_largest) = (floats(take(4 * n)), take(n), floats(take(4 * n / EIGHT_BIT_BLOCK)));
        let (mut indices, mut largest) = (vec![0; n], vec![0.0; n / EIGHT_BIT_BLOCK]);
        of.quantize(&x, &mut indices, &mut largest).unwrap();
        assert!(largest == their_largest && indices == theirs, "{of:?}");
    }
}

/// After 50 steps on the same gradients, the states equal those of bitsandbytes, byte for byte.
#[test]
fn fifty_steps_give_the_state_bytes_of_bitsandbytes() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("bytes");
    const N: usize = 8192 + 100;
    let script = exact_quantization()
        + &format!(
            "
out = open({file:?}, 'wb')
for of in ('AdamW8bit', 'Lion8bit'):
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn({N}))
    optimizer = getattr(bnb.optim, of)([param], lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    out.write(param.detach().numpy().tobytes())
    for step in range(50):
        param.grad = torch.randn({N}) * torch.exp(torch.randn({N}))
        out.write(param.grad.numpy().tobytes())
        optimizer.step()
    state = optimizer.state[param]
    for name in ('state1', 'absmax1') + (('state2', 'absmax2') if of == 'AdamW8bit' else ()):
        out.write(state[name].numpy().tobytes())
    out.write(param.detach().numpy().tobytes())
print('result', 0)
"
        );
    let Some(_) = python(&["torch", "bitsandbytes"], &script) else { return };
    let bytes = std::fs::read(&file).unwrap();
    let mut rest = bytes.as_slice();
    let mut take = |count: usize| rest.split_off(..count).unwrap();
    let (betas, weight_decay) = ((0.9, 0.99), 0.1);
    for optimizer in [
        Optimizer::AdamW(AdamW { betas, weight_decay, ..AdamW::default() }),
        Optimizer::Lion(Lion { betas, weight_decay }),
    ] {
        let mut params = floats(take(4 * N));
        let kinds = [EightBit::Signed, EightBit::Unsigned];
        let kinds = &kinds[..optimizer.states().len()];
        let blocks = N.div_ceil(EIGHT_BIT_BLOCK);
        let mut states: Vec<_> = kinds.iter().map(|_| (vec![0; N], vec![0.0; blocks])).collect();
        for step in 1..=50 {
            let grads = floats(take(4 * N));
            let step = Step { step, lr: 1e-3, grad_scale: 1.0, grad_limit: f32::INFINITY, decay: true };
            let values = states.iter_mut().zip(kinds);
            let values = values.map(|((indices, largest), of)| Values::EightBit(*of, indices, largest)).collect();
            update(&optimizer, &step, Values::F32(&mut params), Grads::F32(&grads), values, None).unwrap();
        }
        for (indices, largest) in &states {
            let (theirs, their_largest) = (take(N), floats(take(4 * blocks)));
            let differing = indices.iter().zip(theirs).filter(|(a, b)| a != b).count();
            println!("{optimizer:?}: {differing} of {N} bytes differ");
            assert!(differing == 0 && *largest == their_largest, "{optimizer:?}");
        }
        let theirs = floats(take(4 * N));
        let furthest = params.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(furthest < 1e-6, "{optimizer:?}: {furthest}");
    }
}

/// Decodes little-endian values.
fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

/// Makes bitsandbytes' optimizers on the CPU store the nearest values, as its device-independent implementation does.
fn exact_quantization() -> String {
    "
import torch
import bitsandbytes as bnb
import bitsandbytes.backends.cpu.ops as ops
quantize = torch.ops.bitsandbytes.quantize_blockwise
def exact(a, code, largest, out, size):
    indices, found = quantize(a.double(), code, size)
    out.copy_(indices); largest.copy_(found)
ops._quant_blockwise_fp32_direct = exact
"
    .to_string()
}

/// Compares the losses of 50 steps with those of bitsandbytes' AdamW and Lion in 8 bits. AdamW's losses differ more
/// than with states in f32: gradients differ by rounding, and if that changes the index of a state, the state changes
/// by up to a few percent.
#[test]
fn fifty_steps_agree_with_bitsandbytes() {
    let root = tempfile::tempdir().unwrap();
    for (index, (class, arguments, optimizer)) in [
        (
            "AdamW8bit",
            "lr=1e-3, eps=1e-6, weight_decay=0.1",
            "{type: AdamW, params: {lr: 1.0e-3, eps: 1.0e-6, weight_decay: 0.1, ",
        ),
        (
            "Lion8bit",
            "lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1",
            "{type: Lion, params: {lr: 1.0e-4, betas: [0.9, 0.99], weight_decay: 0.1, ",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let folder = root.path().join(index.to_string());
        let script = small_llama()
            + &exact_quantization()
            + &format!(
                "
import json
model = llama({folder:?})
def loss(model, step):
    inputs, targets = tokens(step, 4)
    return torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
optimizer, losses = bnb.optim.{class}(model.parameters(), {arguments}, min_8bit_size=512), []
for step in range(50):
    of_step = loss(model, step % 2)
    of_step.backward()
    optimizer.step(); optimizer.zero_grad()
    losses.append(of_step.item())
states = sum(state['state1'].dtype == torch.uint8 for state in optimizer.state.values())
print('result', json.dumps([states, losses]))
"
            );
        let Some(theirs) = python(&["torch", "transformers", "bitsandbytes"], &script) else { return };
        let (states, theirs): (usize, Vec<f32>) = serde_json::from_str(results(&theirs).next().unwrap()).unwrap();
        let text = format!(
            "train_micro_batch_size_per_gpu: 2\ngradient_clipping: 0\nmodel: {{pretrained: {folder:?}}}\n\
             optimizer: {optimizer}optim_bits: 8, min_8bit_size: 512}}}}\n\
             training: {{weight_decay_on: all}}\nzero_optimization: {{stage: 2}}"
        );
        let found = world(2, |comm| {
            let mut engine = configured_engine(comm.clone(), &text);
            let losses = (0..50).map(|step| engine.train_batch(&batch(step % 2, 4)).unwrap().loss).collect::<Vec<_>>();
            let eight = engine.model().parameters().iter().filter(|parameter| parameter.tuning().eight_bit).count();
            (eight, losses)
        });
        let (eight, losses) = agreed(found, class);
        assert_eq!(eight, states);
        let relative = relative_difference(&losses, &theirs);
        println!("{class}: losses differ by {relative:.1e} at most");
        assert!(relative < 5e-4, "{class}: {relative}\n{losses:?}\n{theirs:?}");
    }
}
