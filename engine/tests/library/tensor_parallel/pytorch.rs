//! Losses and norms match those of PyTorch's tensor parallelism on the same weights.

use crate::python::{python, results, small_llama};
use crate::world::{agreed, configured_engine, relative_difference, train, world};

const STEPS: u64 = 20;

/// PyTorch's ranks are processes that rendezvous through a file. The vocabulary of 61 is cut unevenly.
#[test]
fn twenty_steps_agree_with_pytorch() {
    for (tensor, key_value_heads) in [(2, 2), (4, 4)] {
        agrees(tensor, key_value_heads);
    }
}

fn agrees(tensor: usize, key_value_heads: usize) {
    let root = tempfile::tempdir().unwrap();
    let (folder, meeting) = (root.path().join("base"), root.path().join("meeting"));
    let base = small_llama().replace("num_key_value_heads=2", &format!("num_key_value_heads={key_value_heads}"));
    let ranks = base.clone()
        + &format!(
            "
import json, os, sys
rank, size = int(sys.argv[1]), {tensor}
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
    loss_parallel, parallelize_module)
dist.init_process_group('gloo', init_method='file://' + {meeting:?}, rank=rank, world_size=size)
# Queries, keys and values are those of the rank's heads.
def own_heads(module, query, key, value, mask, **_):
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None
transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS['own_heads'] = own_heads
model = transformers.AutoModelForCausalLM.from_pretrained({folder:?}, attn_implementation='own_heads').float().train()
# The plan of torchtitan: between the layers, ranks have slices of the sequences.
slices, everything = Shard(1), Replicate()
plan = {{
    'model.embed_tokens': RowwiseParallel(input_layouts=everything, output_layouts=slices),
    'model.layers.*.input_layernorm': SequenceParallel(),
    'model.layers.*.self_attn': PrepareModuleInput(input_kwarg_layouts={{'hidden_states': slices}},
        desired_input_kwarg_layouts={{'hidden_states': everything}}),
    'model.layers.*.self_attn.o_proj': RowwiseParallel(output_layouts=slices),
    'model.layers.*.post_attention_layernorm': SequenceParallel(),
    'model.layers.*.mlp': PrepareModuleInput(input_layouts=slices, desired_input_layouts=everything),
    'model.layers.*.mlp.down_proj': RowwiseParallel(output_layouts=slices),
    'model.norm': SequenceParallel(),
    'lm_head': ColwiseParallel(input_layouts=slices, output_layouts=Shard(-1), use_local_output=False),
}}
for name in ['self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj', 'mlp.gate_proj', 'mlp.up_proj']:
    plan['model.layers.*.' + name] = ColwiseParallel()
parallelize_module(model, init_device_mesh('cpu', (size,)), plan)
assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.1)
positions = torch.arange(16)[None]
losses, norms = [], []
for step in range({STEPS}):
    inputs, targets = tokens(step, 4)
    with loss_parallel():
        logits = model(inputs, position_ids=positions, use_cache=False).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, targets.flatten())
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step(); optimizer.zero_grad()
    losses.append(loss.detach().full_tensor().item())
    norms.append(norm.full_tensor().item())
if rank == 0: print('result', json.dumps([losses, norms]))
# An interpreter that ends as usual sometimes aborts while gloo stops its threads.
sys.stdout.flush(); os._exit(0)
"
        );
    let script = base
        + &format!(
            "
import subprocess, sys
llama({folder:?})
ranks = [subprocess.Popen([sys.executable, '-W', 'ignore', '-c', {ranks:?}, str(rank)]) for rank in range({tensor})]
assert all([rank.wait() == 0 for rank in ranks])
"
        );
    let Some(theirs) = python(&["torch", "transformers"], &script) else { return };
    let [losses, norms]: [Vec<f32>; 2] = serde_json::from_str(results(&theirs).next().unwrap()).unwrap();
    for (ranks, stage) in [(tensor, 0), (tensor, 3), (2 * tensor, 1), (2 * tensor, 2), (2 * tensor, 3)] {
        let text = format!(
            "tensor_parallel: {{autotp_size: {tensor}}}\ntrain_batch_size: 4\ngradient_clipping: 0.5\n\
             model: {{pretrained: {folder:?}}}\ntraining: {{weight_decay_on: all}}\n\
             optimizer: {{type: AdamW, params: {{lr: 1.0e-3, eps: 1.0e-6, weight_decay: 0.1}}}}\n\
             zero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 0}}"
        );
        let ours = world(ranks, |comm| {
            let steps = train(&mut configured_engine(comm, &text), STEPS);
            steps.into_iter().map(|step| (step.loss, step.grad_norm as f32)).collect::<Vec<(f32, f32)>>()
        });
        let (our_losses, our_norms): (Vec<f32>, Vec<f32>) = agreed(ours, &text).into_iter().unzip();
        for (what, ours, theirs) in [("losses", &our_losses, &losses), ("norms", &our_norms, &norms)] {
            let relative = relative_difference(ours, theirs);
            println!("{text}\n{what} differ from PyTorch's by {relative:.1e} at most");
            // The comparison of norms is needed: halved gradients of norm weights would change norms by 3e-3, but
            // losses by 1e-6 only.
            assert!(relative < 1e-5, "{what}: {relative}\n{ours:?}\n{theirs:?}");
        }
    }
}
