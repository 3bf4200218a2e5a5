"""Trains GPT-2 on one GPU alternately with PyTorch and with zero-train. Prints tokens per second, peak GPU memory, and the share of the
measured rate of matrix products.

    python gpu.py --binary ../../target/release/zero-train
    python gpu.py --binary ../../target/release/zero-train --models 124m --rounds 5 --micro-batch 16

bf16 with f32 master weights: zero-train has `bf16: {enabled: true}`. PyTorch, eager or compiled, runs in one of two ways, with a fused AdamW:
"torch eager" and "torch compile" use autocast over f32 parameters; "torch bf16 eager" and "torch bf16 compile" have bf16 parameters and f32
master weights, as zero-train and DeepSpeed do. All have the same initial weights, tokens and order. Ratios are taken within a round. Fails if
one of the first eight losses differs by more than 0.3 % from that of a trainer with the same types of parameters, or if a trainer fails; the
figures of the other trainers are still printed. Later losses are not compared: without a warm-up of the learning rate, two runs of PyTorch on
one GPU differ by 10 % at some steps. Autocast keeps the residual stream in f32, so its losses are not compared either. With `--weights own`
each trainer makes its own random weights, no weight file is written, and losses are not compared. `--device cpu --models 10m` tests the script on a machine without a GPU; the figures are meaningless there.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import corpus
import weights
import world
from compare import bench_step, rate, ratios, spread
from gpt import build
from presets import ADAMW, AGREEMENT, CLIP, COMPARED, ON_GPU, configuration

TRAINERS = ["torch eager", "torch compile", "torch bf16 eager", "torch bf16 compile"]


def parameters(preset):
    """Number of parameters of all layers; the tied head counts once."""
    block = 12 * preset.width**2 + 13 * preset.width
    return (preset.vocabulary + preset.length + 2) * preset.width + preset.layers * block


def operations(preset):
    """Operations per token, forward and backward: six for each parameter of a product, plus those of causal
    attention."""
    return 6 * (parameters(preset) - preset.length * preset.width) + 6 * preset.layers * preset.length * preset.width


def files(name, preset, own_weights):
    """The token file and the initial weights, written if they are missing; no weights if each trainer makes its own."""
    world.WORK.mkdir(parents=True, exist_ok=True)
    tokens = world.WORK / f"tokens-{preset.vocabulary}.u16.bin"
    start = None if own_weights else world.WORK / f"gpu-{name}-{preset.length}.safetensors"
    if not tokens.exists():
        corpus.write(preset.vocabulary, tokens)
    if start and not start.exists():
        weights.write(preset, start)
    return tokens, start


def measured_peak(device):
    """Operations per second of large bf16 matrix products: the median of twenty."""
    import torch

    size = 8192 if device == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(25):
        synchronize(device)
        started = time.perf_counter()
        a @ b
        synchronize(device)
        times.append(time.perf_counter() - started)
    return 2 * size**3 / statistics.median(times[5:])


def synchronize(device):
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def sized(name, chosen):
    preset = ON_GPU[name]
    return replace(preset, micro_batch=chosen.micro_batch or preset.micro_batch)


def updater(network, chosen, device):
    """Returns a function that clips the gradients, updates the parameters and frees the gradients, and the context of
    the forward. Converts the parameters to bf16 if the trainer has f32 master weights."""
    import torch

    parameters = list(network.parameters())
    if chosen.dtype == "f32" or "bf16" not in chosen.child:
        optimizer = torch.optim.AdamW(parameters, fused=True, **ADAMW)

        def update():
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        bf16 = chosen.dtype == "bf16"
        return update, torch.autocast(device, dtype=torch.bfloat16) if bf16 else contextlib.nullcontext()
    masters = [parameter.detach().clone() for parameter in parameters]
    network.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(masters, fused=True, **ADAMW)

    def update():
        for master, parameter in zip(masters, parameters):
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        optimizer.zero_grad(set_to_none=True)

    return update, contextlib.nullcontext()


def torch_child(chosen):
    """Trains with PyTorch in this process, and prints its result."""
    import torch

    name, device, own_weights = chosen.models[0], chosen.torch_device or chosen.device, chosen.weights == "own"
    preset = sized(name, chosen)
    tokens, _ = files(name, preset, own_weights)
    network = build(preset, device) if own_weights else build(preset).to(device)
    update, precision = updater(network, chosen, device)
    forward = torch.compile(network) if "compile" in chosen.child else network
    batches = corpus.Batches(tokens, preset.length, preset.micro_batch, 1, 0, 1)
    times, losses = [], []
    for step in range(chosen.warm_up + chosen.steps):
        synchronize(device)
        started = time.perf_counter()
        inputs, targets = (x.to(device) for x in batches.get(step, 0))
        with precision:
            loss = forward(inputs, targets)
        loss.backward()
        update()
        losses.append(float(loss.detach()))
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - started))
    result = {
        "step_ms": times[chosen.warm_up :],
        "losses": losses,
        "tokens_per_step": preset.micro_batch * preset.length,
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
    }
    print("RESULT " + json.dumps(result), flush=True)


def run_torch(trainer, name, chosen):
    command = [sys.executable, __file__, "--child", trainer, "--models", name, "--weights", chosen.weights]
    command += ["--device", chosen.torch_device or chosen.device, "--dtype", chosen.dtype]
    command += ["--steps", str(chosen.steps), "--warm-up", str(chosen.warm_up)]
    command += ["--micro-batch", str(chosen.micro_batch or 0)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=world.LIMIT_SECONDS)
    if done.returncode:
        sys.exit(f"{trainer} failed with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.rpartition("RESULT ")[2].splitlines()[0])


def run_ours(name, chosen):
    preset = sized(name, chosen)
    tokens, start = files(name, preset, chosen.weights == "own")
    config = configuration(preset, tokens, start, chosen.device, chosen.dtype)
    result = bench_step(chosen.binary, config, "--steps", str(chosen.steps), "--warm-up", str(chosen.warm_up))
    result["peak_bytes"] = max(result["peak_gpu_bytes"] or [0])
    return result


def run(trainer, name, chosen):
    """Runs a trainer; returns its measurements, or prints the error and returns None if it failed."""
    try:
        result = run_ours(name, chosen) if trainer == "zero-train" else run_torch(trainer, name, chosen)
    except (SystemExit, subprocess.TimeoutExpired) as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        return None
    if chosen.results:
        with chosen.results.open("a") as file:
            file.write(json.dumps({"model": name, "trainer": trainer, "tokens_per_s": rate(result), **result}) + "\n")
    return result


def measure(name, chosen):
    """The results of each round, by trainer."""
    runs = ["zero-train", *chosen.trainers]
    results = {trainer: [] for trainer in runs}
    for round_ in range(chosen.rounds):
        for trainer in runs if round_ % 2 == 0 else reversed(runs):
            # A trainer that failed would fail again.
            if None not in results[trainer]:
                results[trainer].append(run(trainer, name, chosen))
    return results


def differing(name, results, dtype):
    """Describes the first step whose losses differ from those of a trainer with the same types of parameters."""
    for trainer, of_rounds in results.items():
        if dtype == "bf16" and trainer != "zero-train" and "bf16" not in trainer:
            continue
        both = zip(results["zero-train"][0]["losses"], of_rounds[0]["losses"], strict=True)
        for step, (ours, theirs) in enumerate(list(both)[:COMPARED], 1):
            if not abs(ours - theirs) <= AGREEMENT * abs(theirs):
                return [f"{name}: at step {step} a loss of {ours} here, of {theirs} with {trainer}"]
    return []


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", help="zero-train, a release build with the feature cuda")
    parser.add_argument("--models", nargs="+", choices=ON_GPU, default=["124m", "350m", "1.5b"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="measured steps of a run")
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--micro-batch", type=int, default=0, help="instead of the model's own")
    parser.add_argument("--dtype", choices=["bf16", "f32"], default="bf16")
    parser.add_argument("--weights", choices=["same", "own"], default="same", help="own: random ones, not from a file")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--torch-device", choices=["cuda", "cpu"], help="PyTorch's, where it is another")
    parser.add_argument("--trainers", nargs="*", choices=TRAINERS, default=TRAINERS)
    parser.add_argument("--results", type=Path, help="file to append a line of JSON to, for each run")
    parser.add_argument("--child", choices=TRAINERS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.dtype == "f32":
        # These differ in bf16 only.
        chosen.trainers = [trainer for trainer in chosen.trainers if "bf16" not in trainer]
    if not chosen.child and (not chosen.binary or not Path(chosen.binary).exists()):
        parser.error("--binary is missing")
    return chosen


def main():
    chosen = arguments()
    if chosen.child:
        return torch_child(chosen)
    peak = measured_peak(chosen.torch_device or chosen.device)
    print(f"products of bf16 matrices: {peak / 1e12:.1f} Tflop/s")
    print("| model | trainer | tokens/s | zero-train's over it | peak memory | of the products' rate |")
    print("|---|---|---|---|---|---|")
    wrong = []
    for name in chosen.models:
        results = measure(name, chosen)
        wrong += [f"{name}: {trainer} failed" for trainer, of_rounds in results.items() if None in of_rounds]
        results = {trainer: of_rounds for trainer, of_rounds in results.items() if None not in of_rounds}
        if "zero-train" in results and chosen.weights == "same":
            wrong += differing(name, results, chosen.dtype)
        for trainer, of_rounds in results.items():
            rates = [rate(result) for result in of_rounds]
            ours = None if trainer == "zero-train" else results.get("zero-train")
            over = spread(ratios(ours, of_rounds), 2) if ours else ""
            memory = max(result["peak_bytes"] for result in of_rounds) / 1e9
            share = statistics.median(rates) * operations(ON_GPU[name]) / peak
            print(f"| {name} | {trainer} | {spread(rates)} | {over} | {memory:.2f} GB | {share:.0%} |", flush=True)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
