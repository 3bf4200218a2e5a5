"""Measures what reading tokens from the cache costs: the speed against tokens in memory, and the resident set.

    python loading.py speed --binary ../../target/release/zero-train --pairs 15
    python loading.py memory --binary ../../target/release/zero-train --gigabytes 1 10

`speed` alternates runs on a corpus of a gigabyte, which are read from the token cache, with runs on 4 MB of it, which
are below the size from which tokens are cached. It compares the medians of `step_ms`, without the first ten steps.
`memory` prepares corpora of several sizes and prints the peak resident sets of `data prepare` and of a run of 20 steps.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
from pathlib import Path

MODEL = "{type: gpt2, vocab_size: 256, n_positions: 256, n_embd: 128, n_layer: 2, n_head: 4}"


def write_corpus(path, size):
    """Writes JSON lines of random words: blocks of a megabyte, each shuffled differently."""
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(5000)]
    with open(path, "w") as file:
        lines = [json.dumps({"text": " ".join(draw.choices(words, k=draw.randint(20, 400)))}) + "\n" for _ in range(2000)]
        written = 0
        while lines:
            draw.shuffle(lines)
            block = "".join(lines)[: size - written]
            block = block[: block.rfind("\n") + 1]
            if not block:
                return
            written += file.write(block)


def configure(folder, name, size):
    corpus = folder / f"{name}.jsonl"
    write_corpus(corpus, size)
    config = folder / f"{name}.yaml"
    config.write_text(
        f"train_micro_batch_size_per_gpu: 8\nmodel: {MODEL}\n"
        f"data: {{train: {corpus}, cache_dir: {folder}/cache, eval_fraction: 0}}\n"
        f"training: {{save_last: false, output_dir: {folder}/{name}}}\n"
    )
    return config


def peak(command):
    """Runs a command and returns its peak resident set in MB."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, command
    return usage.ru_maxrss / 1000


def speed(binary, pairs, steps):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        configs = {name: configure(folder, name, size) for name, size in [("cached", 10**9), ("memory", 4 * 10**6)]}
        subprocess.run([binary, "data", "prepare", "--config", configs["cached"]], check=True)

        def step_ms(name):
            subprocess.run([binary, "--config", configs[name], "--quiet", "--max-steps", str(steps)], check=True)
            lines = [json.loads(line) for line in open(folder / name / "metrics.jsonl")]
            waits = [line["data_wait_ms"] for line in lines[10:]]
            return statistics.median(line["step_ms"] for line in lines[10:]), statistics.median(waits)

        ratios, medians = [], {"cached": [], "memory": []}
        for pair in range(pairs):
            for name in ["cached", "memory"][:: 1 if pair % 2 else -1]:
                medians[name].append(step_ms(name))
            ratios.append(medians["memory"][-1][0] / medians["cached"][-1][0])
        for name, found in medians.items():
            print(name, f"step {statistics.median(ms for ms, _ in found):.2f} ms, "
                  f"wait {statistics.median(wait for _, wait in found):.3f} ms")
        print(f"speed from the cache / in memory: {statistics.median(ratios):.4f} ({min(ratios):.4f} - {max(ratios):.4f})")
        # The middle half of the pairs, because other programs disturb some.
        lower, _, upper = statistics.quantiles(ratios, n=4)
        print(f"quartiles {lower:.4f} - {upper:.4f}")


def memory(binary, gigabytes):
    for size in gigabytes:
        with tempfile.TemporaryDirectory() as folder:
            config = configure(Path(folder), "corpus", int(size * 10**9))
            prepare = peak([binary, "data", "prepare", "--config", config])
            runs = [peak([binary, "--config", config, "--quiet", "--max-steps", "20"]) for _ in range(3)]
            print(f"{size} GB: data prepare {prepare:.1f} MB, runs {min(runs):.1f} - {max(runs):.1f} MB", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["speed", "memory"])
    parser.add_argument("--binary", default="zero-train")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1, 10])
    arguments = parser.parse_args()
    if arguments.what == "speed":
        speed(arguments.binary, arguments.pairs, arguments.steps)
    else:
        memory(arguments.binary, arguments.gigabytes)


if __name__ == "__main__":
    main()
