"""Trains the same model alternately with a peer and with zero-train, and prints the ratio of their tokens per second.

    python compare.py --binary ../../target/release/zero-train --preset 10m --peer ddp --stages 0 1 2 3
    python compare.py --binary ../../target/release/zero-train --preset 124m --peer deepspeed-3 --layout 2x1 --dtype bf16
    python compare.py --binary ../../target/release/zero-train --preset 10m --peer ddp --isa avx2

A round is one run of the peer and one of zero-train at each stage, each in fresh processes; every other round has the
reverse order. A run's figure is its median step. Ratios are taken within a round, so that other load slows both sides.
Rounds in which others used the machine are repeated. Fails if the losses differ at any step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import corpus
import instruction_sets
import weights
import world
from presets import ADAMW, CLIP, PRESETS, model
from undisturbed import undisturbed

HERE = Path(__file__).resolve().parent
PEERS = {
    "plain": ["torch_train.py", "--mode", "plain"],
    "ddp": ["torch_train.py", "--mode", "ddp"],
    "fsdp2": ["torch_train.py", "--mode", "fsdp2"],
    **{f"deepspeed-{stage}": ["deepspeed_train.py", "--stage", str(stage)] for stage in range(4)},
    # LoRA, on both sides.
    "peft": ["peft_train.py"],
}
SAME_STAGE = {"plain": 0, "peft": 0, "ddp": 0, "fsdp2": 3, **{f"deepspeed-{stage}": stage for stage in range(4)}}
# Largest allowed relative difference of a loss. bf16 keeps 8 bits of each activation, and trainers round at different
# places.
AGREEMENT = {"f32": 1e-3, "bf16": 1e-2}
MEASURED_STEPS = {"10m": 20, "124m": 8}


@dataclass(frozen=True)
class Setting:
    preset: str
    dtype: str
    accumulation: int
    ranks: int
    threads: int
    steps: int
    isa: str


def files(preset):
    """The token file and the initial weights of a preset, written if they are missing."""
    world.WORK.mkdir(exist_ok=True)
    vocabulary = PRESETS[preset].vocabulary
    tokens, start = world.WORK / f"tokens-{vocabulary}.u16.bin", world.WORK / f"{preset}.safetensors"
    if not tokens.exists():
        corpus.write(vocabulary, tokens)
    if not start.exists():
        weights.write(PRESETS[preset], start)
    return tokens, start


def adapter(preset):
    """The folder of the adapter that both sides of a comparison with PEFT start from, written if it is missing."""
    folder = world.WORK / f"adapter-{preset}"
    if not folder.exists():
        import peft_train

        peft_train.write(PRESETS[preset], folder)
    return folder


def run_peer(peer, setting, tokens, shim):
    """Runs a peer; returns the RESULT that its rank 0 prints."""
    script, *more = PEERS[peer]
    if peer == "peft":
        more += ["--adapter", str(adapter(setting.preset))]
    arguments = [str(HERE / script), *more, "--preset", setting.preset, "--tokens", str(tokens)]
    arguments += ["--dtype", setting.dtype, "--accumulation", str(setting.accumulation), "--steps", str(setting.steps)]
    output = world.run(arguments, setting.ranks, setting.threads, shim, setting.isa)
    return json.loads(output.rpartition("RESULT ")[2].splitlines()[0])


def bench_step(binary, config, *more, isa=instruction_sets.DEFAULT):
    """Runs `zero-train bench step` on a configuration and returns its measurements."""
    command = [binary, "bench", "step", "--config", "-", "--json", *more]
    held = os.environ | instruction_sets.held(isa)
    limit = world.LIMIT_SECONDS
    done = subprocess.run(command, input=json.dumps(config), capture_output=True, text=True, timeout=limit, env=held)
    if done.returncode:
        sys.exit(f"zero-train failed with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run_ours(binary, peer, stage, setting, tokens, start):
    """Runs zero-train once."""
    preset = PRESETS[setting.preset]
    config = {
        "train_micro_batch_size_per_gpu": preset.micro_batch,
        "gradient_accumulation_steps": setting.accumulation,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": setting.dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": stage},
        "model": model(preset),
        "data": {"train": str(tokens), "format": "tokens", "shuffle": False},
        "training": {"initial_weights": str(start), "weight_decay_on": "all"},
        "launcher": {"num_processes": setting.ranks, "threads_per_rank": setting.threads},
    }
    if peer == "peft":
        saved = json.loads((adapter(setting.preset) / "adapter_config.json").read_text())
        config["adapter"] = {"r": saved["r"], "lora_alpha": saved["lora_alpha"], "pretrained": str(adapter(setting.preset))}
    result = bench_step(binary, config, "--steps", str(setting.steps), isa=setting.isa)
    result["ranks"] = [{"peak_mb": bytes / 2**20} for bytes in result["peak_resident_bytes"]]
    return result


def rate(result, of_steps=statistics.median):
    """Tokens per second of the median step, or of the fastest one with `min`."""
    return result["tokens_per_step"] / of_steps(result["step_ms"]) * 1e3


def spread(values, digits=0):
    values = sorted(values)
    return f"{statistics.median(values):.{digits}f} ({values[0]:.{digits}f} – {values[-1]:.{digits}f})"


def ratios(ours, theirs):
    """Ratios of tokens per second, by round."""
    return [rate(own) / rate(peer) for own, peer in zip(ours, theirs, strict=True)]


def ratio_of_fastest(ours, theirs):
    """The ratio of the fastest steps over all rounds, which depends least on other load on the machine."""
    return max(rate(own, min) for own in ours) / max(rate(peer, min) for peer in theirs)


def apart(ours, theirs):
    """Largest relative difference between two losses of the same step."""
    pairs = [(own["losses"], peer["losses"]) for own, peer in zip(ours, theirs, strict=True)]
    return max(abs(a - b) / abs(b) for own, peer in pairs for a, b in zip(own, peer, strict=True))


def peaks(results, key):
    """The median over runs for each rank, in MB."""
    ranks = zip(*([rank[key] for rank in result["ranks"]] for result in results))
    return "/".join(f"{statistics.median(rank):.0f}" for rank in ranks)


def measure(chosen, setting, stages):
    """Runs the peer, and zero-train at each stage; returns lists of results in round order."""
    tokens, start = files(setting.preset)
    runs = {None: lambda: run_peer(chosen.peer, setting, tokens, chosen.shim)}
    for stage in stages:
        runs[stage] = lambda stage=stage: run_ours(chosen.binary, chosen.peer, stage, setting, tokens, start)
    rounds = []
    for index in range(2 * chosen.rounds):
        results = {}
        for stage in list(runs) if index % 2 == 0 else reversed(runs):
            results[stage] = undisturbed(runs[stage])
            if results[stage] is None:
                break
        else:
            rounds.append(results)
        if len(rounds) == chosen.rounds:
            break
    if not rounds:
        sys.exit("the machine is too busy to measure on")
    return [results[None] for results in rounds], {stage: [results[stage] for results in rounds] for stage in stages}


def sets(results):
    """The instruction sets that the runs report: exactly one, unless something is wrong."""
    return "/".join(sorted({result.get("instruction_set", "not recorded").lower() for result in results}))


def show(setting, peer, theirs, ours):
    print(
        f"{setting.preset} {setting.dtype}, {setting.ranks} ranks x {setting.threads} threads,"
        f" accumulation {setting.accumulation}, {len(theirs)} rounds of {setting.steps} steps"
    )
    losses = theirs[0]["losses"]
    print(
        f"  {peer + ' on ' + sets(theirs):<34}{spread(map(rate, theirs)):>22} tokens/s   peak {peaks(theirs, 'peak_mb')} MB"
        f" ({peaks(theirs, 'peak_of_steps_mb')} in steps, {peaks(theirs, 'imported_mb')} imported)"
        f"   loss {losses[0]:.5f} -> {losses[-1]:.5f}"
    )
    for stage, runs in ours.items():
        print(
            f"  {f'zero-train on {sets(runs)}, stage {stage}':<34}{spread(map(rate, runs)):>22} tokens/s   peak {peaks(runs, 'peak_mb')} MB"
            f"   ratio {spread(ratios(runs, theirs), 2)}, of the fastest steps {ratio_of_fastest(runs, theirs):.2f}"
            f"   losses differ by {apart(runs, theirs):.1e}"
        )


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True, help="zero-train, a release build")
    parser.add_argument("--preset", choices=PRESETS, required=True)
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--stages", type=int, nargs="+", help="ZeRO stages of zero-train [default: the peer's]")
    parser.add_argument("--layout", default="2x1", help="ranks x threads [default: 2x1]")
    parser.add_argument("--dtype", choices=AGREEMENT, default="f32")
    parser.add_argument(
        "--isa",
        choices=[instruction_sets.DEFAULT, *instruction_sets.SETS],
        default=instruction_sets.DEFAULT,
        help="hold both sides to an instruction set [default: the widest that each takes by itself]",
    )
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a rank per step")
    parser.add_argument("--steps", type=int, help="measured steps of a run [default: by the preset]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shim", type=Path, help="library to preload into the peer, see mkl_avx512.c")
    parser.add_argument("--results", type=Path, help="file to append a line of JSON to, for each stage")
    chosen = parser.parse_args()
    if chosen.isa == "avx2" and chosen.dtype == "bf16":
        parser.error("--isa avx2 is for f32: oneDNN, held to AVX2, multiplies bf16 by its reference loop, at 2 GFLOP/s")
    return chosen


def main():
    chosen = parse()
    ranks, threads = map(int, chosen.layout.split("x"))
    steps = chosen.steps or max(3, MEASURED_STEPS[chosen.preset] // chosen.accumulation)
    setting = Setting(chosen.preset, chosen.dtype, chosen.accumulation, ranks, threads, steps, chosen.isa)
    theirs, ours = measure(chosen, setting, chosen.stages or [SAME_STAGE[chosen.peer]])
    show(setting, chosen.peer + (", AVX-512 forced" if chosen.shim else ""), theirs, ours)
    if chosen.results:
        with chosen.results.open("a") as file:
            for stage, runs in ours.items():
                line = vars(setting) | {"peer": chosen.peer, "forced": bool(chosen.shim), "stage": stage}
                file.write(json.dumps(line | {"theirs": theirs, "ours": runs}) + "\n")
    worst = max(apart(runs, theirs) for runs in ours.values())
    if not worst <= AGREEMENT[chosen.dtype]:
        sys.exit(f"the losses differ by {worst:.1e}, more than {AGREEMENT[chosen.dtype]:.0e}: not the same training")


if __name__ == "__main__":
    main()
