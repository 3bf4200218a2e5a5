"""Tokens per second of generation, GPT-2 124M with random weights on the CPU: zero-train and transformers in turn.

    python benches/peers/generate.py target/release/zero-train [ROUNDS] [THREADS]

Both continue a prompt of 16 tokens greedily by 128 tokens with a key-value cache, in f32, and must give the same tokens.
The time is that of the generation alone, prompt included, without loading the model.
"""

import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

program = sys.argv[1]
rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
threads = int(sys.argv[3]) if len(sys.argv) > 3 else 2
NEW = 128

torch.set_num_threads(threads)
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(bos_token_id=None, eos_token_id=None)).eval()
folder = tempfile.TemporaryDirectory()
model.save_pretrained(folder.name)
vocabulary = {f"w{i}": i for i in range(model.config.vocab_size)}
tokenizer = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None, "decoder": None,
    "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"},
    "model": {"type": "WordLevel", "unk_token": "w0", "vocab": vocabulary},
}
pathlib.Path(folder.name, "tokenizer.json").write_text(json.dumps(tokenizer))
prompt = [7 * i + 3 for i in range(16)]
records = pathlib.Path(folder.name, "prompts.jsonl")
records.write_text(json.dumps({"prompt": " ".join(f"w{i}" for i in prompt)}) + "\n")


def ours():
    args = [program, "generate", folder.name, "--input", str(records), "-n", str(NEW), "--threads", str(threads)]
    done = subprocess.run(args, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["tokens"], float(re.search(r"([\d.]+) tokens/s", done.stderr)[1])


def theirs():
    started = time.perf_counter()
    with torch.inference_mode():
        got = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, pad_token_id=0)
    return got[0, len(prompt):].tolist(), NEW / (time.perf_counter() - started)


theirs()
rates = {"zero-train": [], "transformers": []}
for _ in range(rounds):
    (mine, rate), (yours, their_rate) = ours(), theirs()
    assert mine == yours, "the tokens differ"
    rates["zero-train"].append(rate)
    rates["transformers"].append(their_rate)
for name, all_rates in rates.items():
    print(f"{name:13} median {statistics.median(all_rates):.1f} tokens/s ({min(all_rates):.1f} - {max(all_rates):.1f})")
