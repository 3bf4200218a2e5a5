//! Losses with sequence parallelism match those of DeepSpeed's `DistributedAttention` and of PyTorch's ring attention
//! on the same weights.

use super::KINDS;
use crate::python::{python, results, small_llama};
use crate::world::{agreed, configured_engine, relative_difference, train, world};

const STEPS: u64 = 20;

const DEEPSPEED: Peer = Peer {
    name: "DeepSpeed",
    modules: &["torch", "transformers", "deepspeed", "ninja"],
    ranks: 2,
    setup: "
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), DS_ACCELERATOR='cpu')
# DeepSpeed compiles an extension with ninja.
os.environ['PATH'] = os.path.dirname(sys.executable) + ':' + os.environ['PATH']
import deepspeed, torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
deepspeed.init_distributed('gloo', auto_mpi_discovery=False, init_method='file://' + meeting, rank=rank, world_size=size)
def whole(*qkv):
    qkv = [x.transpose(1, 2) for x in qkv]
    out = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).contiguous()
attention = DistributedAttention(whole, dist.group.WORLD, scatter_idx=2, gather_idx=1)
def shared(module, query, key, value, mask, **_):
    return attention(*[x.transpose(1, 2).contiguous() for x in (query, key, value)], 0), None
positions = torch.arange(16).chunk(size)[rank]
",
};

/// The ring of PyTorch's `context_parallel` around PyTorch's attention for CPUs. `context_parallel` itself supports
/// only attention kernels for GPUs.
const PYTORCH: Peer = Peer {
    name: "PyTorch",
    modules: &["torch", "transformers"],
    ranks: 4,
    setup: "
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
dist.init_process_group('gloo', init_method='file://' + meeting, rank=rank, world_size=size)
ring._cp_options.rotate_method = ring._RotateMethod.ALL_TO_ALL
aten = torch.ops.aten
def backward(grad_out, query, key, value, out, logsumexp, is_causal):
    attention = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return attention(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)
class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *qkv):
        attention = aten._scaled_dot_product_flash_attention_for_cpu
        out, log_sums, *_ = ring._templated_ring_attention(dist.group.WORLD, 2, attention, *qkv, is_causal=True)
        ctx.save_for_backward(*qkv, out, log_sums)
        return out
    @staticmethod
    def backward(ctx, grad_out):
        return ring._templated_ring_attention_backward(
            dist.group.WORLD, 2, backward, grad_out, 'grad_out', *ctx.saved_tensors, True)[:3]
def shared(module, query, key, value, mask, **_):
    key, value = [x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value)]
    out = Ring.apply(*[x.contiguous() for x in (query, key, value)])
    return out.transpose(1, 2).contiguous(), None
chunks = torch.arange(16).chunk(2 * size)
positions = torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])
",
};

/// A library that shares sequences among `ranks` processes, which rendezvous through the file `meeting`. `setup`
/// defines the attention `shared` and the `positions` of this rank.
struct Peer {
    name: &'static str,
    modules: &'static [&'static str],
    ranks: usize,
    setup: &'static str,
}

#[test]
fn twenty_steps_agree_with_deepspeed() {
    agrees(
        &DEEPSPEED,
        &[
            (1, 1, 0, KINDS[0]),
            (2, 2, 2, KINDS[0]),
            (2, 2, 3, KINDS[0]),
            (4, 4, 3, KINDS[0]),
            (4, 2, 1, KINDS[0]),
            (2, 2, 2, KINDS[1]),
            (4, 4, 3, KINDS[1]),
        ],
    );
}

#[test]
fn twenty_steps_agree_with_the_ring_attention_of_pytorch() {
    agrees(&PYTORCH, &[(1, 1, 0, KINDS[0]), (2, 2, 2, KINDS[2]), (4, 4, 3, KINDS[2]), (4, 2, 1, KINDS[2])]);
}

/// Ranks, slices, ZeRO stage and the way to share sequences.
type Layout = (usize, usize, u8, fn(String) -> String);

/// Compares losses of a peer with those of layouts.
fn agrees(peer: &Peer, layouts: &[Layout]) {
    let root = tempfile::tempdir().unwrap();
    let (folder, meeting) = (root.path().join("base"), root.path().join("meeting"));
    let (size, setup) = (peer.ranks, peer.setup);
    let ranks = small_llama()
        + &format!(
            "
import json, os, sys
rank, size, meeting = int(sys.argv[1]), {size}, {meeting:?}
{setup}
transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS['shared'] = shared
model = transformers.AutoModelForCausalLM.from_pretrained({folder:?}, attn_implementation='shared').float().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.1)
losses = []
for step in range({STEPS}):
    inputs, targets = [x[:, positions] for x in tokens(step, 4)]
    logits = model(inputs, position_ids=positions[None]).logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, targets.flatten()) / size
    loss.backward()
    for parameter in model.parameters(): dist.all_reduce(parameter.grad)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step(); optimizer.zero_grad()
    loss = loss.detach(); dist.all_reduce(loss)
    losses.append(loss.item())
if rank == 0: print('result', json.dumps(losses))
dist.destroy_process_group()
"
        );
    let script = small_llama()
        + &format!(
            "
import subprocess, sys
llama({folder:?})
ranks = [subprocess.Popen([sys.executable, '-W', 'ignore', '-c', {ranks:?}, str(rank)]) for rank in range({size})]
assert all([rank.wait() == 0 for rank in ranks])
"
        );
    let Some(theirs) = python(peer.modules, &script) else { return };
    let theirs: Vec<f32> = serde_json::from_str(results(&theirs).next().unwrap()).unwrap();
    for &(ranks, slices, stage, kind) in layouts {
        let text = kind(format!(
            "sequence_parallel_size: {slices}\ntrain_batch_size: 4\ngradient_clipping: 0.5\n\
             model: {{pretrained: {folder:?}}}\ntraining: {{weight_decay_on: all}}\n\
             optimizer: {{type: AdamW, params: {{lr: 1.0e-3, eps: 1.0e-6, weight_decay: 0.1}}}}\n\
             zero_optimization: {{stage: {stage}, stage3_param_persistence_threshold: 0}}"
        ));
        let losses = world(ranks, |comm| {
            let mut engine = configured_engine(comm, &text);
            train(&mut engine, STEPS).into_iter().map(|step| step.loss).collect::<Vec<f32>>()
        });
        let losses = agreed(losses, &text);
        let relative = relative_difference(&losses, &theirs);
        println!("{text}\nlosses differ from those of {} by {relative:.1e} at most", peer.name);
        assert!(relative < 1e-4, "{relative}\n{losses:?}\n{theirs:?}");
    }
}
