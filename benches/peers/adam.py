"""Compares AdamW of PyTorch and DeepSpeed with `zero-train bench adam`, alternating: one flat f32 tensor, one thread.

    python adam.py --binary ../../target/release/zero-train

All read four arrays and write three: 28 bytes a parameter. The floor is the loop that `zero-train bench adam` measures
beside its own: the same reads and writes with next to no arithmetic.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import time

import instruction_sets
import world

BYTES_PER_PARAMETER = 28
PARAMETERS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def optimizers():
    import torch

    instruction_sets.hold_deepspeed()
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return {
        "torch AdamW, fused": lambda tensor: torch.optim.AdamW([tensor], fused=True, **PARAMETERS),
        "torch AdamW, for each": lambda tensor: torch.optim.AdamW([tensor], foreach=True, **PARAMETERS),
        "DeepSpeedCPUAdam": lambda tensor: DeepSpeedCPUAdam([tensor], adamw_mode=True, **PARAMETERS),
    }


def compile_operators():
    """Compiles the operators that DeepSpeed compiles on first use: its optimizers, and its communication on one
    host."""
    import torch
    import trainer
    from deepspeed import init_distributed
    from deepspeed.ops.adam import FusedAdam

    instruction_sets.hold_deepspeed()
    trainer.rendezvous()
    init_distributed(dist_backend="gloo", verbose=False)
    tensor = torch.nn.Parameter(torch.zeros(1024))
    FusedAdam([tensor])
    for make in optimizers().values():
        make(tensor)


def milliseconds(step, repeats):
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - started))
    return times


def ours(binary, millions, repeats):
    """Median times of AdamW and of its floor."""
    command = [binary, "bench", "adam", "--millions", str(millions), "--repeats", str(repeats)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    medians = {name: float(ms) for name, ms in re.findall(r"^\s+(AdamW|floor)\b.*?([\d.]+) ms", text, re.MULTILINE)}
    return medians["AdamW"], medians["floor"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", help="zero-train, a release build")
    parser.add_argument("--millions", type=int, default=50, help="millions of parameters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5, help="steps of each in a round")
    parser.add_argument("--isa", choices=[instruction_sets.DEFAULT, *instruction_sets.SETS], default="default")
    parser.add_argument("--compile-only", action="store_true", help="compile DeepSpeed's operators, measure nothing")
    chosen = parser.parse_args()
    os.environ.update(world.environment(threads=1, isa=chosen.isa))
    if chosen.compile_only:
        return compile_operators()
    if not chosen.binary:
        parser.error("--binary is missing")

    import torch

    elements = chosen.millions * 1_000_000
    tensor = torch.nn.Parameter(torch.randn(elements))
    tensor.grad = torch.randn(elements) * 1e-3
    times = {name: [] for name in [*optimizers(), "zero-train", "floor"]}
    for _ in range(chosen.rounds):
        for name, make in optimizers().items():
            optimizer = make(tensor)
            optimizer.step()
            times[name].append(statistics.median(milliseconds(optimizer.step, chosen.repeats)))
            del optimizer
        step, floor = ours(chosen.binary, chosen.millions, chosen.repeats)
        times["zero-train"].append(step)
        times["floor"].append(floor)
    rounds = f"{chosen.rounds} rounds of {chosen.repeats} steps"
    print(f"AdamW on {chosen.millions} million f32 parameters, one thread, {rounds}, instruction set: {chosen.isa}")
    for name, of_rounds in times.items():
        middle = statistics.median(of_rounds)
        of_floor = sorted(floor / own for floor, own in zip(times["floor"], of_rounds))
        print(
            f"  {name:<22}{middle:8.1f} ms {elements * BYTES_PER_PARAMETER / middle / 1e6:7.1f} GB/s"
            f" {statistics.median(of_floor):8.1%} of the floor's rate ({of_floor[0]:.1%} – {of_floor[-1]:.1%})"
        )


if __name__ == "__main__":
    main()
