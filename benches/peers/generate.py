"""Tokens per second of generation on the CPU, with random weights: zero-train, transformers and candle in turn.

    python benches/peers/generate.py target/release/zero-train --model gpt2
    python benches/peers/generate.py target/release/zero-train --model llama --candle target/release/examples/candle_generate

All continue a prompt of 16 tokens greedily by 128 tokens with a key-value cache, in f32, and must give the same tokens.
The time is that of the generation alone, prompt included, without loading the model. `gpt2` is GPT-2 124M, `llama` has the
shape of SmolLM-135M. candle is `examples/examples/candle_generate.rs`, which runs candle-transformers' Llama.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import tempfile
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("program", help="zero-train, a release build")
parser.add_argument("--model", choices=["gpt2", "llama"], default="gpt2")
parser.add_argument("--candle", help="candle_generate, a release build, for --model llama")
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--threads", type=int, default=2)
chosen = parser.parse_args()
threads = chosen.threads
NEW = 128

torch.set_num_threads(threads)
torch.manual_seed(0)
if chosen.model == "gpt2":
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=None, eos_token_id=None)).eval()
else:
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
folder = tempfile.TemporaryDirectory()
model.save_pretrained(folder.name)
if chosen.model == "llama":
    # candle reads the base of the angles under its older name.
    path = pathlib.Path(folder.name, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 10000.0}))
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
    args = [chosen.program, "generate", folder.name, "--input", str(records), "-n", str(NEW), "--threads", str(threads)]
    done = subprocess.run(args, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["tokens"], float(re.search(r"([\d.]+) tokens/s", done.stderr)[1])


def theirs():
    started = time.perf_counter()
    with torch.inference_mode():
        got = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, pad_token_id=0)
    return got[0, len(prompt):].tolist(), NEW / (time.perf_counter() - started)


def candles():
    args = [chosen.candle, folder.name, str(NEW), *map(str, prompt)]
    held = os.environ | {"RAYON_NUM_THREADS": str(threads)}
    done = subprocess.run(args, capture_output=True, text=True, check=True, env=held)
    return json.loads(done.stdout), float(done.stderr.split()[0])


theirs()
programs = {"zero-train": ours, "transformers": theirs} | ({"candle": candles} if chosen.candle else {})
rates = {name: [] for name in programs}
for turn in range(chosen.rounds):
    expected = None
    for name in list(programs) if turn % 2 == 0 else reversed(programs):
        tokens, rate = programs[name]()
        assert expected in (None, tokens), f"the tokens of {name} differ"
        expected = tokens
        rates[name].append(rate)
for name, all_rates in rates.items():
    print(f"{name:13} median {statistics.median(all_rates):.1f} tokens/s ({min(all_rates):.1f} - {max(all_rates):.1f})")
