"""Shared by the trainers: their arguments, the training loop, and the result that `compare.py` reads.

Each rank reads RANK and WORLD_SIZE, which `compare.py` (or torchrun) sets. Rank 0 prints one line `RESULT {json}`.
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist

from corpus import Batches
from presets import PRESETS


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", choices=PRESETS, required=True)
    parser.add_argument("--tokens", required=True, help="u16 token file")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a rank per step")
    parser.add_argument("--steps", type=int, default=10, help="measured steps")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before those")
    return parser


def memory():
    """Peak resident set of this process in MB, since its start or since the last `forget_peak`."""
    with open("/proc/self/status") as status:
        peak = next(line for line in status if line.startswith("VmHWM:"))
    return int(peak.split()[1]) / 1024


def forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def run(arguments, imported_mb, micro_step, finish_step):
    """Trains and reports the result. `micro_step(tokens, targets, is_last)` returns the loss; `finish_step()`
    updates."""
    preset, rank, ranks = PRESETS[arguments.preset], dist.get_rank(), dist.get_world_size()
    batches = Batches(
        arguments.tokens, preset.length, preset.micro_batch, arguments.accumulation, rank, ranks
    )
    times, losses, start_peak = [], [], 0.0
    for step in range(arguments.warm_up + arguments.steps):
        if step == arguments.warm_up:
            start_peak = memory()
            forget_peak()
            dist.barrier()
        started = time.perf_counter()
        parts = []
        for micro_batch in range(arguments.accumulation):
            tokens, targets = batches.get(step, micro_batch)
            parts.append(micro_step(tokens, targets, micro_batch == arguments.accumulation - 1).detach())
        finish_step()
        losses.append(sum(float(part) for part in parts) / len(parts))
        times.append(time.perf_counter() - started)
    steps_peak = memory()
    own = {"peak_mb": max(start_peak, steps_peak), "peak_of_steps_mb": steps_peak, "imported_mb": imported_mb}
    everyone = [None] * ranks
    dist.all_gather_object(everyone, (own, losses))
    if rank == 0:
        mean = [sum(of_step) / ranks for of_step in zip(*(losses for _, losses in everyone))]
        result = {
            "step_ms": [1e3 * seconds for seconds in times[arguments.warm_up :]],
            "tokens_per_step": ranks * arguments.accumulation * preset.micro_batch * preset.length,
            "losses": mean,
            "ranks": [own for own, _ in everyone],
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
        }
        print("RESULT " + json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def rendezvous():
    """Sets defaults for a single rank, so that a trainer can run on its own."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29611")
