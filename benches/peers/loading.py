"""Measures what reading tokens from the cache costs: the speed against tokens in memory, and the resident set.

    python loading.py speed --binary ../../target/release/zero-train --pairs 15
    python loading.py memory --binary ../../target/release/zero-train --gigabytes 1 10
    python loading.py max-tokens --binary ../../target/release/zero-train --pairs 7

`speed` alternates runs on a corpus of a gigabyte, which are read from the token cache, with runs on 4 MB of it, which
are below the size from which tokens are cached. It compares the medians of `step_ms`, without the first ten steps.
`memory` prepares corpora of several sizes and prints the peak resident sets of `data prepare` and of a run of 20 steps.
`max-tokens` alternates runs on 16 conversations a step, padded to 512 tokens, with runs that deal them by their lengths.
Two ranks of stage 3 train. The lengths are log-normal with a median of 90 tokens, as those of short instructions.
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


def write_chats(folder):
    """Writes 4,000 conversations, a tokenizer of one token per word, and a template."""
    draw = random.Random(1)
    words = [f"w{number}" for number in range(1000)]
    special = {"id": 0, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
               "special": True}
    names = ["</s>", "user", "assistant", *words]
    model = {"type": "WordLevel", "unk_token": "user", "vocab": {name: number for number, name in enumerate(names)}}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
                 "decoder": None, "pre_tokenizer": {"type": "WhitespaceSplit"}, "added_tokens": [special], "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (folder / "template.jinja").write_text("{% for m in messages %}{{ m.role + ' ' + m.content + ' </s> ' }}{% endfor %}")
    with open(folder / "chats.jsonl", "w") as file:
        for _ in range(4000):
            length = min(int(draw.lognormvariate(4.5, 0.8)), 500)
            asked, answered = draw.choices(words, k=length // 4 + 1), draw.choices(words, k=length * 3 // 4 + 1)
            messages = [{"role": "user", "content": " ".join(asked)},
                        {"role": "assistant", "content": " ".join(answered)}]
            file.write(json.dumps({"messages": messages}) + "\n")


def max_tokens(binary, pairs, steps):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        write_chats(folder)
        for name, more in [("padded", ""), ("dealt", ", max_tokens: 1024")]:
            (folder / f"{name}.yaml").write_text(
                "train_batch_size: 16\ntrain_micro_batch_size_per_gpu: 2\nzero_optimization: {stage: 3}\n"
                "model: {type: gpt2, vocab_size: 1024, n_positions: 512, n_embd: 256, n_layer: 4, n_head: 4}\n"
                f"data: {{train: {folder}/chats.jsonl, format: chat, tokenizer: {folder}/tokenizer.json, "
                f"sequence_length: 512, chat: {{chat_template: {folder}/template.jinja}}{more}}}\n"
                f"training: {{save_last: false, output_dir: {folder}/{name}}}\n"
            )

        def run(name):
            command = [binary, "-n", "2", "--config", folder / f"{name}.yaml", "--quiet", "--max-steps", str(steps)]
            subprocess.run(command, check=True)
            lines = [json.loads(line) for line in open(folder / name / "metrics.jsonl")][5:]
            of = lambda key: statistics.mean(line.get(key, 8) for line in lines)
            return of("step_ms"), of("tokens"), of("micro_batches"), lines[-1]["loss"]

        found = {"padded": [], "dealt": []}
        for pair in range(pairs):
            for name in ["padded", "dealt"][:: 1 if pair % 2 else -1]:
                found[name].append(run(name))
        for name, runs in found.items():
            ms, tokens, count, loss = (statistics.median(column) for column in zip(*runs))
            print(f"{name}: step {ms:.1f} ms, {tokens:.0f} positions, {count:.1f} micro-batches, last loss {loss:.5f}")
        ratios = [padded[0] / dealt[0] for padded, dealt in zip(found["padded"], found["dealt"])]
        print(f"faster by {statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["speed", "memory", "max-tokens"])
    parser.add_argument("--binary", default="zero-train")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1, 10])
    arguments = parser.parse_args()
    if arguments.what == "speed":
        speed(arguments.binary, arguments.pairs, arguments.steps)
    elif arguments.what == "memory":
        memory(arguments.binary, arguments.gigabytes)
    else:
        max_tokens(arguments.binary, arguments.pairs, arguments.steps)


if __name__ == "__main__":
    main()
