"""Trains with plain PyTorch: `--mode plain` (one process), `ddp`, or `fsdp2` (parameters sharded, gathered block by
block)."""

import contextlib

import torch
import torch.distributed as dist

from gpt import build
from presets import ADAMW, CLIP, PRESETS
from trainer import arguments, memory, rendezvous, run

parser = arguments()
parser.add_argument("--mode", choices=["plain", "ddp", "fsdp2"], required=True)
chosen = parser.parse_args()
imported = memory()
rendezvous()
dist.init_process_group("gloo")
bf16 = chosen.dtype == "bf16"
model = build(PRESETS[chosen.preset])
autocast = contextlib.nullcontext
if chosen.mode == "fsdp2":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
elif bf16:
    # The usual setup with DDP: f32 parameters, products in bf16.
    def autocast():
        return torch.autocast("cpu", dtype=torch.bfloat16)


if chosen.mode == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)


def micro_step(tokens, targets, is_last):
    if chosen.mode == "ddp":
        model.require_backward_grad_sync = is_last
    elif chosen.mode == "fsdp2":
        model.set_requires_gradient_sync(is_last)
    with autocast():
        loss = model(tokens, targets)
    (loss / chosen.accumulation).backward()
    return loss


def finish_step():
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


run(chosen, imported, micro_step, finish_step)
