#!/usr/bin/env python3
"""Fine-tunes a model of 1.3 billion parameters with QLoRA on the CPU, and prints its peak memory.

    cargo build --release
    scripts/qlora-1.3b.py [FOLDER] [--binary target/release/zero-train] [--steps 3]

It writes a Llama with random weights into FOLDER (2.7 GB, in pieces, so that this takes little memory), a text to train
on, and runs `zero-train` on one rank. It exits with 1 if the peak resident memory of a process reaches 3 GiB. It needs
Python's standard library only. docs/fine-tuning.md has the figures.
"""

import argparse
import json
import os
import pathlib
import resource
import struct
import subprocess
import sys

HIDDEN, INNER, LAYERS, VOCABULARY = 2048, 5504, 24, 32000
LIMIT = 3 << 30
PIECE = 1 << 22


def tensors():
    yield "model.embed_tokens.weight", [VOCABULARY, HIDDEN]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in "qkvo":
            yield f"{prefix}.self_attn.{name}_proj.weight", [HIDDEN, HIDDEN]
        yield f"{prefix}.mlp.gate_proj.weight", [INNER, HIDDEN]
        yield f"{prefix}.mlp.up_proj.weight", [INNER, HIDDEN]
        yield f"{prefix}.mlp.down_proj.weight", [HIDDEN, INNER]
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", [HIDDEN]
    yield "model.norm.weight", [HIDDEN]
    yield "lm_head.weight", [VOCABULARY, HIDDEN]


def elements(shape):
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def random_bf16(count):
    """Numbers of either sign between 2^-7 and 2^-5: the exponent's upper bits are fixed, all others are random."""
    both_signs = bytes([0x3C] * 128 + [0xBC] * 128)
    out = bytearray(2 * count)
    out[0::2] = os.urandom(count)
    out[1::2] = os.urandom(count).translate(both_signs)
    return out


def write_model(folder):
    header, end = {}, 0
    for name, shape in tensors():
        start, end = end, end + 2 * elements(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unfinished = folder / "unfinished"
    with open(unfinished, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, shape in tensors():
            if len(shape) == 1:
                file.write(bytes([0x80, 0x3F]) * elements(shape))
                continue
            for start in range(0, elements(shape), PIECE):
                file.write(random_bf16(min(PIECE, elements(shape) - start)))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 16, "num_key_value_heads": 16,
        "vocab_size": VOCABULARY, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    unfinished.rename(folder / "model.safetensors")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default="qlora-1.3b", type=pathlib.Path)
    parser.add_argument("--binary", default="target/release/zero-train")
    parser.add_argument("--steps", default=3, type=int)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if not (args.folder / "model.safetensors").exists():
        write_model(args.folder)
    generating = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (args.folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 500)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "model": {"pretrained": str(args.folder)},
        "adapter": {"type": "lora", "r": 16, "lora_alpha": 32},
        "quantization_config": {
            "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
        },
        "activation_checkpointing": {},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-4}},
        "data": {"train": str(args.folder / "text.txt"), "tokenizer": "byte", "sequence_length": 128},
        "training": {"max_steps": args.steps, "output_dir": str(args.folder / "run")},
    }
    (args.folder / "qlora.yaml").write_text(json.dumps(config, indent=1))
    subprocess.run([args.binary, "--config", str(args.folder / "qlora.yaml"), "-n", "1"], check=True)
    training = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    count = sum(elements(shape) for _, shape in tensors())
    print(f"parameters: {count:,}")
    print(f"peak resident memory: {training / 2**30:.2f} GiB to train, {generating / 2**30:.2f} GiB to write the weights")
    return 0 if max(training, generating) < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
