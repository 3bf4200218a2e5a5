#!/usr/bin/env python3
"""Trains a GPT-2 with PyTorch from weights and tokens written by this project, and prints its losses as JSON.

    ZERO_TRAIN_PEER_OUT=FOLDER cargo test -p zero-engine --test library torch
    python scripts/peer_trajectory.py FOLDER > engine/tests/fixtures/torch_10m.json

FOLDER holds weights.safetensors (the names and layouts of Hugging Face's GPT2LMHeadModel), tokens.u16.bin (little
endian) and settings.json. Needs only torch and numpy. Step times go to standard error.
"""

import json
import statistics
import struct
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F


def load_safetensors(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    tensors = {}
    for name, info in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        start, end = info["data_offsets"]
        values = np.frombuffer(data[8 + length + start : 8 + length + end], "<f4").reshape(info["shape"])
        tensors[name.removeprefix("transformer.")] = torch.tensor(values, requires_grad=True)
    return tensors


def loss(weights, settings, inputs, targets):
    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    def conv1d(x, name):
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    batch, length = inputs.shape
    x = weights["wte.weight"][inputs] + weights["wpe.weight"][:length]
    for i in range(settings["n_layer"]):
        qkv = conv1d(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")
        q, k, v = (t.view(batch, length, settings["n_head"], -1).transpose(1, 2) for t in qkv.chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + conv1d(mixed, f"h.{i}.attn.c_proj")
        inner = F.gelu(conv1d(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"), approximate="tanh")
        x = x + conv1d(inner, f"h.{i}.mlp.c_proj")
    logits = norm(x, "ln_f") @ weights["wte.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    folder = Path(sys.argv[1])
    settings = json.loads((folder / "settings.json").read_text())
    weights = load_safetensors(folder / "weights.safetensors")
    tokens = torch.from_numpy(np.fromfile(folder / "tokens.u16.bin", "<u2").astype(np.int64))
    rows, length = settings["batch_size"], settings["n_positions"]
    optimizer = torch.optim.AdamW(
        weights.values(),
        lr=settings["lr"],
        betas=settings["betas"],
        eps=settings["eps"],
        weight_decay=settings["weight_decay"],
    )
    losses, seconds = [], []
    for step in range(settings["steps"]):
        started = time.perf_counter()
        span = tokens[step * rows * length : (step + 1) * rows * length + 1]
        value = loss(weights, settings, span[:-1].view(rows, length), span[1:].view(rows, length))
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), settings["clip"])
        optimizer.step()
        losses.append(value.item())
        seconds.append(time.perf_counter() - started)
    print(f"median step {statistics.median(seconds) * 1e3:.0f} ms, {torch.get_num_threads()} threads", file=sys.stderr)
    print(json.dumps({"settings": settings, "torch": torch.__version__, "losses": losses}, indent=1))


if __name__ == "__main__":
    main()
