"""The steps that check the correctness of programs on the card."""

import json
import shutil
import sys
from pathlib import Path

import models
from libtest import tests
from presets import AGREEMENT, COMPARED

HERE = Path(__file__).resolve().parent
# Libraries that only quantized kernels need, which our programs never call.
NOT_NEEDED = ["libcudart"]


def machine(card, step):
    """Records the card and driver, and checks that every program finds its libraries."""
    if smi := shutil.which("nvidia-smi"):
        query = "name,driver_version,memory.total,clocks.max.sm,power.limit"
        done = step.command([smi, f"--query-gpu={query}", "--format=csv,noheader"])
        step.figures["gpus"] = done.output.strip().splitlines()
        step.command([smi])
        for line in step.figures["gpus"]:
            step.say(line)
    elif not card.mock:
        step.fail("there is no nvidia-smi")
    for name, path in card.programs.items():
        done = step.command(["ldd", path], env=card.env)
        if lost := [line.strip() for line in done.output.splitlines() if "not found" in line]:
            step.fail(f"{name}: {'; '.join(lost)}")
    done = step.command([card.binary, "doctor"])
    told = [line.partition(" ")[::2] for line in done.output.splitlines()]
    about = [(what, " ".join(said.split())) for what, said in told if what in ("driver", "GPU", "NCCL", "missing", "memory", "cores")]
    step.figures["doctor"] = [list(pair) for pair in about]
    for what, said in about:
        step.say(f"{what}: {said}")
        if what == "missing" and not card.mock and not any(library in said for library in NOT_NEEDED):
            step.fail(f"doctor: missing: {said}")
    if done.status or not any(what == "GPU" for what, _ in about):
        step.fail(f"doctor finds no GPU: {' '.join(done.output.split())[-300:]}")


def entries(card, step):
    """Loads every entry of every module, and records which of them use local memory."""
    done = tests(step, card.programs, "kernels-device", "entries::", env=card.test_env)
    found = [line for line in done.objects() if "registers" in line]
    step.figures |= {
        "entries": len(found),
        "most_registers": max((line["registers"] for line in found), default=0),
        "in_local_memory": {line["entry"]: line["local_bytes"] for line in found if line["local_bytes"]},
    }
    step.say(f"{len(found)} entries, at most {step.figures['most_registers']} registers, local memory: {step.figures['in_local_memory']}")
    if not found:
        step.fail("no entry was loaded")


def kernels(card, step):
    """Runs the emulator's cases through the driver, with new random inputs."""
    step.figures["seed"] = card.seed
    env = card.test_env | {"ZERO_TRAIN_TEST_SEED": str(card.seed)}
    tests(step, card.programs, "kernels", env=env, threads=card.threads)
    tests(step, card.programs, "kernels-device", env=card.test_env, threads=card.threads)
    count(step)


def count(step):
    every = step.figures["tests"].values()
    step.say(", ".join(f"{sum(of[what] for of in every)} {what}" for what in ("passed", "failed", "skipped")))


def reference(card, step):
    """Attention and head: bit-identical in two runs, and compared with PyTorch in f64."""
    folder = card.work / "reference"
    folder.mkdir()
    env = card.test_env | {"ZERO_TRAIN_REFERENCE": str(folder), "ZERO_TRAIN_TEST_SEED": str(card.seed)}
    if card.mock:
        env["ZERO_TRAIN_REFERENCE_SMALL"] = "1"
    name = "gpu::reference::attention_and_head_for_pytorch"
    tests(step, card.programs, "ops", "--ignored", "--exact", name, env=env)
    card.needs_torch()
    device = "cpu" if card.mock else "cuda"
    done = step.command([sys.executable, "-W", "ignore", HERE / "reference.py", folder, device])
    shutil.rmtree(folder)
    found = done.objects()
    step.details += found
    for key in ("error", "row_error"):
        step.figures[f"largest_{key}"] = max((line[key] for line in found), default=None)
    step.figures["compared"] = len(found)
    worst = max(found, key=lambda line: line["error"], default=None)
    if worst:
        step.say(
            f"{len(found)} tensors, largest error {worst['error']:.1e} ({worst['case']} {worst['tensor']}; PyTorch's own"
            f" {worst['torch_error']:.1e}), of a row {step.figures['largest_row_error']:.1e}"
        )
    for line in found:
        if not line["ok"]:
            step.fail(f"{line['case']} {line['tensor']} {line['shape']} is off by {line['error']:.1e}, a row by {line['row_error']:.1e}")
    if done.status and not step.problems or not found:
        step.fail(f"reference.py {done.how()}: {(done.output.strip().splitlines() or [''])[-1]}")


def training(card, step):
    """Tests training: candle's operations, ours, and the engine."""
    tests(step, card.programs, "candle_device", env=card.test_env, threads=card.threads)
    tests(step, card.programs, "ops", "gpu::", env=card.test_env, threads=card.threads)
    tests(step, card.programs, "gpu_blocks", env=card.test_env, threads=card.threads)
    tests(step, card.programs, "gpu", env=card.test_env, threads=card.threads)
    count(step)


def losses(card, step):
    """GPT-2 124M in bf16, 20 steps: bit-identical in two runs, and compared with PyTorch's losses from the same
    weights."""
    preset = models.preset("124m", card.mock)
    count, start = 3 if card.mock else 20, None
    if card.has_torch():
        start = card.work / "start.safetensors"
        script = "import pathlib, sys, presets, weights; weights.write(presets.ON_GPU[sys.argv[1]], pathlib.Path(sys.argv[2]))"
        name = "tiny" if card.mock else "124m"
        done = step.command([sys.executable, "-W", "ignore", "-c", script, name, start], cwd=models.PEERS)
        if done.status:
            raise RuntimeError(f"weights.py {done.how()}: {done.output[-300:]}")
    config = models.gpt2(preset, card.peers, start)
    runs = [bench(card, step, config, count, 0) for _ in range(2)]
    ours = runs[0]["losses"]
    step.figures |= {"first_loss": ours[0], "last_loss": ours[-1], "step_ms": round(runs[1]["step_ms"][-1], 3)}
    step.say(f"loss {ours[0]:.4f} -> {ours[-1]:.4f} after {len(ours)} steps")
    if runs[1]["losses"] != ours:
        at = next(at for at, (a, b) in enumerate(zip(*(run["losses"] for run in runs))) if a != b)
        step.fail(f"the second run has other losses from step {at + 1} on: {runs[1]['losses'][at]} for {ours[at]}")
    if not ours[-1] < ours[0]:
        step.fail(f"the loss does not fall: {ours[0]} -> {ours[-1]}")
    card.needs_torch()
    command = [sys.executable, "-W", "ignore", models.PEERS / "gpu.py", "--child", "torch bf16 eager"]
    command += ["--models", "tiny" if card.mock else "124m", "--device", "cpu" if card.mock else "cuda"]
    done = step.command([*command, "--steps", count, "--warm-up", 0], env=card.torch_env)
    start.unlink()
    if done.status or "RESULT " not in done.output:
        raise RuntimeError(f"PyTorch {done.how()}: {(done.output.strip().splitlines() or [''])[-1]}")
    theirs = json.loads(done.output.rpartition("RESULT ")[2].splitlines()[0])["losses"]
    apart = [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
    compared = max(apart[:COMPARED])
    step.figures |= {"from_torch": compared, "first_from_torch": apart[0], "later_from_torch": max(apart), "torch_last_loss": theirs[-1]}
    step.say(f"from PyTorch's at most {compared:.1e} in the first {COMPARED} steps, {max(apart):.1e} in all, {apart[0]:.1e} in the first")
    if not compared <= AGREEMENT:
        step.fail(f"losses of the first {COMPARED} steps are {compared:.1e} from PyTorch's")


def bench(card, step, config, steps, warm_up):
    """Runs `zero-train bench step` and returns its measurements."""
    command = [card.binary, "bench", "step", "--config", "-", "--json", "--steps", steps, "--warm-up", warm_up]
    done = step.command(command, text=json.dumps(config))
    found = [line for line in done.objects() if "losses" in line]
    if done.status or not found:
        raise RuntimeError(f"zero-train {done.how()}: {done.output.strip()[-400:]}")
    return found[0]


STEPS = [
    (1, "card, driver, libraries, doctor", 30, machine),
    (2, "every entry of every fatbin loads", 20, entries),
    (3, "kernels against f64 and the CPU's bits, fresh seed", 90, kernels),
    (4, "attention and head against PyTorch in f64", 60, reference),
    (5, "candle's operations, ours, training", 150, training),
    (6, "124M bf16: same bits twice, PyTorch's losses", 60, losses),
]
