//! Losses with sequence parallelism match those of DeepSpeed's `DistributedAttention` on the same weights.

use super::KINDS;
use crate::python::{python, results, small_llama};
use crate::world::{agreed, configured_engine, relative_difference, train, world};

const STEPS: u64 = 20;
const SLICES: usize = 2;

/// DeepSpeed's ranks are processes that rendezvous through a file.
#[test]
fn twenty_steps_agree_with_deepspeed() {
    let root = tempfile::tempdir().unwrap();
    let (folder, meeting) = (root.path().join("base"), root.path().join("meeting"));
    let ranks = small_llama()
        + &format!(
            "
import json, os, sys
rank, size = int(sys.argv[1]), {SLICES}
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), DS_ACCELERATOR='cpu')
# DeepSpeed compiles an extension with ninja.
os.environ['PATH'] = os.path.dirname(sys.executable) + ':' + os.environ['PATH']
import deepspeed, torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
deepspeed.init_distributed('gloo', auto_mpi_discovery=False, init_method='file://' + {meeting:?}, rank=rank, world_size=size)
def whole(*qkv):
    qkv = [x.transpose(1, 2) for x in qkv]
    out = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).contiguous()
attention = DistributedAttention(whole, dist.group.WORLD, scatter_idx=2, gather_idx=1)
def shared(module, query, key, value, mask, **_):
    return attention(*[x.transpose(1, 2).contiguous() for x in (query, key, value)], 0), None
transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS['shared'] = shared
model = transformers.AutoModelForCausalLM.from_pretrained({folder:?}, attn_implementation='shared').float().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.1)
positions = torch.arange(16).chunk(size)[rank]
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
ranks = [subprocess.Popen([sys.executable, '-W', 'ignore', '-c', {ranks:?}, str(rank)]) for rank in range({SLICES})]
assert all([rank.wait() == 0 for rank in ranks])
"
        );
    let Some(theirs) = python(&["torch", "transformers", "deepspeed", "ninja"], &script) else { return };
    let theirs: Vec<f32> = serde_json::from_str(results(&theirs).next().unwrap()).unwrap();
    for (ranks, slices, stage, kind) in [
        (1, 1, 0, KINDS[0]),
        (2, 2, 2, KINDS[0]),
        (2, 2, 3, KINDS[0]),
        (4, 4, 3, KINDS[0]),
        (4, 2, 1, KINDS[0]),
        (2, 2, 2, KINDS[1]),
        (4, 4, 3, KINDS[1]),
    ] {
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
        println!("{text}\nlosses differ from DeepSpeed's by {relative:.1e} at most");
        assert!(relative < 1e-4, "{relative}\n{losses:?}\n{theirs:?}");
    }
}
