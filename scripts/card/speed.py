"""The steps that measure speed: kernels, whole training steps compared with PyTorch's, and a breakdown of the time."""

import gzip
import json
import shutil
import sys
import subprocess
import threading
from pathlib import Path

import models
import timeline
from correct import bench
from harness import TimedOut
from libtest import tests
from programs import of_python

HERE = Path(__file__).resolve().parent


def kernels(card, step):
    """Times each kernel with events, and measures a copy and a product for comparison."""
    if of_python("torch") and not card.mock:
        done = step.command([sys.executable, "-W", "ignore", HERE / "ceilings.py"])
        if found := done.objects():
            step.figures["ceilings"] = found[0]
            step.say(", ".join(f"{name} {value}" for name, value in found[0].items()))
        else:
            step.fail(f"ceilings.py {done.how()}: {(done.output.strip().splitlines() or [''])[-1]}")
    done = tests(step, card.programs, "kernels-device", "--ignored", "speed", env=card.test_env)
    found = [line for line in done.objects() if "kernel" in line]
    step.figures["copy"] = [line for line in done.objects() if "ceiling" in line]
    step.figures["kernels"] = found
    for model in dict.fromkeys(line["model"] for line in found):
        told = [f"{line['kernel']} {line['us']} µs {line['share']:.0%}" for line in found if line["model"] == model]
        step.say(f"{model}, of the ceiling:")
        for at in range(0, len(told), 5):
            step.say(", ".join(told[at : at + 5]))
    if not found:
        step.fail("no kernel was timed")


def beside_torch(card, step, name, trainers, rounds, steps, warm_up, weights):
    """Runs benches/peers/gpu.py; its measurements are kept even if it runs out of time or a trainer fails."""
    card.needs_torch()
    results = card.work / f"peers-{step.number}.jsonl"
    command = [sys.executable, "-W", "ignore", models.PEERS / "gpu.py", "--binary", card.binary, "--results", results]
    command += ["--models", "tiny" if card.mock else name, "--weights", weights, "--rounds", rounds]
    command += ["--steps", steps, "--warm-up", warm_up, "--trainers", *trainers]
    if card.mock:
        command += ["--torch-device", "cpu"]
    late = None
    try:
        done = step.command(command, env=card.torch_env)
    except TimedOut as error:
        late = error
    found = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    step.details += found
    rates = {}
    for line in found:
        median = sorted(line["step_ms"])[len(line["step_ms"]) // 2]
        of = rates.setdefault(line["trainer"], {"tokens_per_s": [], "median_step_ms": [], "peak_gb": 0})
        of["tokens_per_s"].append(round(line["tokens_per_s"]))
        of["median_step_ms"].append(round(median, 2))
        of["peak_gb"] = max(of["peak_gb"], round(line["peak_bytes"] / 1e9, 2))
    step.figures |= rates
    for trainer, of in rates.items():
        step.say(f"{trainer}: tokens/s {of['tokens_per_s']}, step {of['median_step_ms']} ms, peak {of['peak_gb']} GB")
    ours = rates.get("zero-train")
    for trainer in trainers:
        if ours and trainer in rates:
            theirs = rates[trainer]["tokens_per_s"]
            over = [round(a / b, 3) for a, b in zip(ours["tokens_per_s"], theirs)]
            step.figures[f"over {trainer}"] = over
            step.say(f"zero-train over {trainer}: {over}")
    if late:
        raise late
    if done.status:
        # Failures are printed last; a missing compiler fails only its own part.
        step.fail(f"gpu.py: {done.output.strip()[-600:]}")


def small(card, step):
    # torch.compile on the CPU would tell nothing.
    trainers = ["torch bf16 eager"] if card.mock else ["torch eager", "torch compile", "torch bf16 compile"]
    beside_torch(card, step, "124m", trainers, 2, *((2, 1) if card.mock else (20, 5)), "same")


def large(card, step):
    beside_torch(card, step, "1.5b", ["torch eager"], 1, *((2, 1) if card.mock else (10, 3)), "own")


def traced(card, step):
    """Traces a run of 124M to see what the GPU and the host do in a step."""
    config = models.gpt2(models.preset("124m", card.mock), card.peers, training={"trace": True, "save_last": False})
    run = card.work / "traced"
    file = models.written(config, card.work / "traced.json")
    env = dict(card.env, MOCK_COUNTS="1")
    steps = 4 if card.mock else 12
    done = step.command([card.binary, "--config", file, "--max-steps", steps, "--out", run, "--plain"], env=env)
    if done.status:
        raise RuntimeError(f"zero-train {done.how()}: {done.output.strip()[-400:]}")
    report = json.loads((run / "report.json").read_text())
    figures = timeline.figures(run / "trace.json")
    step.figures |= {"gpu_timeline": report["gpu_timeline"], **figures}
    # Only the mock driver prints these counters.
    for line in done.output.splitlines():
        name, _, value = line.partition(" ")
        if name in ("mock_launches", "mock_waits"):
            step.figures[f"{name.removeprefix('mock_')}_a_step"] = round(int(value) / steps, 1)
            step.say(f"{name.removeprefix('mock_')} a step, the start of the run included: {int(value) / steps:.1f}")
    step.say(f"GPU {figures['gpu_step_us']:.0f} µs a step, host {figures['host_step_us']:.0f}, gaps {figures['gaps_us_a_step']:.0f}")
    for what in ("gpu_us_a_layer", "host_us_a_layer", "gpu_us_by_kind"):
        step.say(f"{what.replace('_', ' ')}: {', '.join(f'{kind} {us}' for kind, us in figures[what].items())}")
    for us, before, after in figures["longest_gaps_us"][:4]:
        step.say(f"gap {us} µs between {before} and {after}")
    shutil.copy(run / "report.json", step.folder.path / "report.json")
    with gzip.open(step.folder.path / "trace.json.gz", "wb") as file:
        file.write((run / "trace.json").read_bytes())


class Used:
    """Samples the card's memory in MiB with nvidia-smi."""

    def __init__(self):
        self.smi, self.values, self.over = shutil.which("nvidia-smi"), [], threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def watch(self):
        while self.smi and not self.over.wait(0.5):
            query = [self.smi, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
            done = subprocess.run(query, capture_output=True, text=True)
            if done.returncode == 0:
                self.values.append(int(done.stdout.split()[0]))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join(5)


def others(card, step):
    """Runs Llama, and watches the driver's pool over many steps with the optimizer's state on the host."""
    run = bench(card, step, models.llama_1b(card.peers, card.mock), *((2, 1) if card.mock else (10, 3)))
    said(step, "llama_1b", run)
    preset = models.preset("1.5b", card.mock)
    offload = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    config = models.gpt2(preset, card.peers, zero_optimization=offload, training={"save_last": False})
    file, folder = models.written(config, card.work / "offload.json"), card.work / "offload"
    steps, late = 4 if card.mock else 30, None
    with Used() as used:
        try:
            done = step.command([card.binary, "--config", file, "--max-steps", steps, "--out", folder, "--plain"], env=card.env)
        except TimedOut as error:
            late = error
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    found = [json.loads(line) for line in lines]
    step.details += found
    times = sorted(line["step_ms"] for line in found[3:])
    half = len(used.values) // 2
    step.figures["offload_1.5b"] = {
        "steps": len(found),
        "median_step_ms": times[len(times) // 2] if times else None,
        "first_loss": found[0]["loss"] if found else None,
        "last_loss": found[-1]["loss"] if found else None,
        "used_mib": used.values,
    }
    if (folder / "report.json").exists():
        of_gpu = json.loads((folder / "report.json").read_text())["memory"]["ranks"][0].get("gpu_bytes")
        step.figures["offload_1.5b"]["gpu_bytes"] = of_gpu
        step.say(f"1.5B, bytes of the GPU: {of_gpu}")
    step.say(f"1.5B, optimizer on the host: {len(found)} steps, median {step.figures['offload_1.5b']['median_step_ms']} ms")
    if used.values:
        early, latest = max(used.values[:half], default=0), max(used.values[half:])
        step.say(f"memory of the card by nvidia-smi: {early} MiB in the first half, {latest} in the second")
        # A leak would keep growing.
        if latest > 1.05 * early + 256:
            step.fail(f"the card's memory grows: {early} MiB, then {latest}")
    if late:
        raise late
    if done.status:
        step.fail(f"zero-train {done.how()}: {done.output.strip()[-400:]}")


def said(step, name, run):
    median = sorted(run["step_ms"])[len(run["step_ms"]) // 2]
    peak = max(run["peak_gpu_bytes"] or [0]) / 1e9
    rate = run["tokens_per_step"] / median * 1e3
    step.figures[name] = {
        "median_step_ms": round(median, 2), "tokens_per_s": round(rate), "peak_gb": round(peak, 2),
        "opened_s": round(run["opened_ms"] / 1e3, 1), "first_loss": run["losses"][0], "last_loss": run["losses"][-1],
    }  # fmt: skip
    step.say(f"{name}: {rate:.0f} tokens/s, step {median:.1f} ms, peak {peak:.1f} GB, loss {run['losses'][0]:.3f} -> {run['losses'][-1]:.3f}")


STEPS = [
    (7, "kernels by events, copy and product ceilings", 60, kernels),
    (8, "124M beside PyTorch, eager and compiled", 200, small),
    (9, "1.5B beside PyTorch, eager", 150, large),
    (10, "a traced step of 124M", 30, traced),
    (11, "Llama 1B; 1.5B with the optimizer on the host", 100, others),
]
