"""Tokenizes one JSON lines file alternately with `datasets.map` and with `zero-train data prepare`, and prints the ratio.

    python prepare_data.py --binary ../../target/release/zero-train --megabytes 200 --rounds 3
    python prepare_data.py --binary ../../target/release/zero-train --folder PATH

Documents are random lines of the sources of Python's standard library or, with `--folder`, the `.py` and `.pyi` files
below it, each once. The tokenizer is a byte-level BPE that is trained on the sources of the standard library. The figure of `datasets` is the time of `map(batched=True, num_proc=2)` alone: its file was
converted to Arrow before. That of zero-train is the time of the whole process, which hashes and parses the file, with
an empty cache. Fails if the numbers of tokens differ.
"""

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

# Each worker process has one core.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import datasets
import tokenizers
import transformers

import corpus


def files(folder):
    """Yields the text of every source file below a folder, without copies."""
    seen = set()
    for path in sorted(path for path in folder.rglob("*.py*") if path.suffix in (".py", ".pyi") and path.is_file()):
        text = path.read_text("utf-8", "ignore")
        if text and hash(text) not in seen:
            seen.add(hash(text))
            yield text


def random_lines(megabytes):
    lines = corpus.text().decode("utf-8", "ignore").splitlines()
    draw = random.Random(1)
    length = 0
    while length < megabytes * 1_000_000:
        text = "\n".join(draw.choices(lines, k=draw.randint(5, 100)))
        length += len(text)
        yield text


def prepare_files(folder, documents, vocabulary):
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([corpus.text().decode("utf-8", "ignore")], vocab_size=vocabulary, show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    with open(folder / "train.jsonl", "w") as file:
        for text in documents:
            file.write(json.dumps({"text": text}) + "\n")
    config = f"""
train_micro_batch_size_per_gpu: 1
model: {{type: gpt2, vocab_size: auto, n_positions: 1024, n_embd: 64, n_layer: 1, n_head: 1}}
data: {{train: {folder}/train.jsonl, tokenizer: {folder}/tokenizer.json, cache_dir: {folder}/cache}}
"""
    (folder / "ds.yaml").write_text(config)


def of_datasets(data, encode, workers):
    started = time.perf_counter()
    mapped = data.map(
        encode, batched=True, num_proc=workers, remove_columns=["text"], load_from_cache_file=False, keep_in_memory=False
    )
    seconds = time.perf_counter() - started
    return seconds, sum(len(ids) for batch in mapped.with_format("arrow").iter(10_000) for ids in batch["input_ids"])


def of_zero_train(binary, folder, newline):
    shutil.rmtree(folder / "cache", ignore_errors=True)
    started = time.perf_counter()
    out = subprocess.run([binary, "data", "prepare", "-c", folder / "ds.yaml"], capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - started
    count, tokens = re.search(r"([\d,]+) documents?, ([\d,]+) tokens", out.stdout).groups()
    count, tokens = (int(number.replace(",", "")) for number in (count, tokens))
    return seconds, tokens - (count - 1) * newline


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--folder", type=Path, help="take the source files below this folder as documents")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    binary = Path(options.binary).resolve()
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        documents = files(options.folder) if options.folder else random_lines(options.megabytes)
        prepare_files(folder, documents, options.vocabulary)
        megabytes = (folder / "train.jsonl").stat().st_size / 1e6
        data = datasets.load_dataset("json", data_files=str(folder / "train.jsonl"), split="train", cache_dir=name)
        plain = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        wrapped = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        peers = {
            "datasets, tokenizers": lambda batch: {
                "input_ids": [encoding.ids for encoding in plain.encode_batch_fast(batch["text"])]
            },
            "datasets, transformers": lambda batch: {"input_ids": wrapped(batch["text"])["input_ids"]},
        }
        runs = {name: lambda encode=encode: of_datasets(data, encode, options.workers) for name, encode in peers.items()}
        runs["zero-train"] = lambda: of_zero_train(binary, folder, len(plain.encode("\n").ids))
        rates, counts = {name: [] for name in runs}, {}
        for round in range(options.rounds):
            for name in list(runs)[:: -1 if round % 2 else 1]:
                seconds, tokens = runs[name]()
                rates[name].append(megabytes / seconds)
                counts[name] = tokens
                print(f"round {round}  {name:<24} {megabytes / seconds:6.2f} MB/s  {tokens:,} tokens", flush=True)
        assert len(set(counts.values())) == 1, counts
        for name in peers:
            ratios = [ours / theirs for ours, theirs in zip(rates["zero-train"], rates[name])]
            spread = f"{min(ratios):.2f} – {max(ratios):.2f}"
            print(f"zero-train / {name}: {statistics.median(ratios):.2f} ({spread})")


if __name__ == "__main__":
    main()
