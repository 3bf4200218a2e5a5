"""The steps for the remaining time: compute-sanitizer, NCCL, and the time of each kernel in a whole step."""

import csv
import json
import lzma
import os
import re
import shutil
from pathlib import Path

import models
from harness import Skipped
from libtest import names, tests

PLACES = ["/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/nvidia/nsight-compute/*"]
# The most rows of the table of kernels.
MOST_KERNELS = 16


def tool(name):
    """Finds one of NVIDIA's tools, or skips the step."""
    found = shutil.which(name)
    for place in PLACES:
        root, star, _ = place.partition("*")
        folders = sorted(Path(root).glob("*"), reverse=True) if star else [Path(place)]
        found = found or next((str(folder / name) for folder in folders if os.access(folder / name, os.X_OK)), None)
    if not found:
        raise Skipped(f"{name} is not installed")
    return found


def sanitizer(card, step):
    """Runs the kernels' cases under memcheck and racecheck, one test module at a time, until the time is up."""
    program = tool("compute-sanitizer")
    env = card.test_env | {"ZERO_TRAIN_TEST_SEED": str(card.seed)}
    modules = list(dict.fromkeys(test.rpartition("::")[0] for test in names(step, card.programs["kernels"], env)))
    # Kernels with tiles, asynchronous copies and barriers come first.
    modules = sorted(filter(None, modules), key=lambda module: (module != "attention", module))
    ran = step.figures["ran"] = {}
    for module in modules:
        for check in ("memcheck", "racecheck"):
            if step.left() < 10:
                ran[f"{check} {module}"] = "no time left"
                continue
            command = [program, "--tool", check, "--error-exitcode", 77, card.programs["kernels"], f"{module}::", "--test-threads", 1]
            done = step.command(command, env=env, most=min(90, step.left() - 2))
            summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", done.output)
            ran[f"{check} {module}"] = summary[-1] if summary else ("ran out of time" if done.status is None else done.how())
            if done.status is not None and (done.status or not summary or not summary[-1].startswith("0 ")):
                step.fail(f"{check} of {module}: {ran[f'{check} {module}']}")
    for what, said in ran.items():
        step.say(f"{what}: {said}")


def carried(card):
    """Unpacks a newer NCCL, if libnccl.so.2.xz lies beside the pack, and returns its folder."""
    packed = card.pack.parent / "libnccl.so.2.xz"
    if card.mock or not packed.exists():
        return []
    folder = card.work / "nccl"
    folder.mkdir()
    with lzma.open(packed) as source, (folder / "libnccl.so.2").open("wb") as target:
        shutil.copyfileobj(source, target)
    return [str(folder)]


def nccl(card, step):
    """Runs one rank and, if NCCL allows it, several ranks on one card."""
    path = ":".join([*carried(card), card.test_env["LD_LIBRARY_PATH"]])
    env = card.test_env | {"LD_LIBRARY_PATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    version = nccl_version(card, step, card.env if card.mock else env)
    tests(step, card.programs, "nccl-device", env=env)
    step.say(f"NCCL {'.'.join(map(str, version))}: {step.figures['tests']['nccl-device']}")
    if card.mock:
        return
    if version < (2, 30):
        step.figures["several_ranks"] = f"NCCL {version[0]}.{version[1]} refuses a second rank on one card"
        step.say(step.figures["several_ranks"])
        return
    env |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
    before = step.figures.pop("tests")
    tests(step, card.programs, "nccl-device", env=env)
    tests(step, card.programs, "gpu", "ranks_with_a_gpu_each", env=env)
    step.figures |= {"several_ranks": step.figures.pop("tests"), "tests": before}
    step.say(f"several ranks on one card: {step.figures['several_ranks']}")


def nccl_version(card, step, env):
    """The version that `doctor` reports."""
    done = step.command([card.programs["zero-train"], "doctor"], env=env)
    found = re.search(r"^NCCL\s+(\d+)\.(\d+)\.(\d+)", done.output, re.M)
    if not found:
        raise RuntimeError(f"doctor finds no NCCL: {' '.join(done.output.split())[-300:]}")
    version = tuple(int(part) for part in found.groups())
    step.figures["nccl"] = list(version)
    return version


def profiled(card, step):
    """Launches and microseconds of each kernel in one step of 124M with two layers, from Nsight Compute, which
    serializes the kernels: with twelve layers it takes minutes."""
    program = tool("ncu")
    config = models.gpt2(models.preset("124m", card.mock, layers=2), card.peers, training={"save_last": False})
    command = [card.binary, "bench", "step", "--config", "-", "--json", "--warm-up", 1, "--steps"]
    # No replay: a single pass with one metric. Clock control stays off.
    ncu = [program, "--clock-control", "none", "--metrics", "gpu__time_duration.sum", "--csv", "--target-processes", "all"]
    runs = []
    for steps in (1, 2):
        done = step.command([*ncu, *command, steps], text=json.dumps(config))
        if done.status:
            raise RuntimeError(f"ncu {done.how()}: {done.output.strip()[-300:]}")
        runs.append(durations(done.output))
    # The difference that one more step makes.
    one, two = runs
    found = {}
    for kernel, (launches, us) in two.items():
        before = one.get(kernel, (0, 0))
        if launches > before[0]:
            found[kernel] = [launches - before[0], round(us - before[1], 1)]
    step.figures |= {
        "launches_a_step": sum(launches for launches, _ in found.values()),
        "us_a_step": round(sum(us for _, us in found.values()), 1),
        "kernels": dict(sorted(found.items(), key=lambda item: -item[1][1])),
    }
    step.say(f"{step.figures['launches_a_step']} launches and {step.figures['us_a_step']} µs in kernels a step")
    for kernel, (launches, us) in list(step.figures["kernels"].items())[:MOST_KERNELS]:
        step.say(f"{us:>9.1f} µs {launches:>5} × {kernel[:70]}")


def durations(output):
    """Launches and µs by kernel, parsed from ncu's table."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    unit = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
    found = {}
    for row in csv.DictReader(lines):
        if row.get("Metric Name") == "gpu__time_duration.sum":
            launches, us = found.get(row["Kernel Name"], (0, 0.0))
            value = float(row["Metric Value"].replace(",", "")) * unit[row["Metric Unit"]]
            found[row["Kernel Name"]] = (launches + 1, us + value)
    return found


STEPS = [
    (12, "compute-sanitizer: memcheck and racecheck of the kernels", 240, sanitizer),
    (13, "NCCL with one rank, and with several on one card", 200, nccl),
    (14, "launches and time of each kernel in a step of 124M with two layers", 110, profiled),
]
