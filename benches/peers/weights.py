"""Writes the initial weights of a preset in the format that zero-train reads: `python weights.py 10m FILE.safetensors`.

Tensors have the names and layouts of Hugging Face's GPT2LMHeadModel, whose linear weights are [inputs, outputs]. The
head is the embedding and is not stored. The format needs no library: it is the length of a JSON header, the header, and
the bytes.
"""

import ctypes
import json
import struct
import sys
from pathlib import Path

from gpt import build
from presets import PRESETS

RENAMED = {
    "blocks.": "h.",
    ".qkv.": ".attn.c_attn.",
    ".proj.": ".attn.c_proj.",
    ".fc.": ".mlp.c_fc.",
    ".out.": ".mlp.c_proj.",
}


def hugging_face(name):
    for ours, theirs in RENAMED.items():
        name = name.replace(ours, theirs)
    return f"transformer.{name}"


def write(preset, path):
    header, tensors, offset = {}, [], 0
    for name, parameter in build(preset).named_parameters():
        name, values = hugging_face(name), parameter.detach()
        values = (values.t() if ".c_" in name and name.endswith("weight") else values).contiguous()
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [offset, offset + values.nbytes]}
        offset += values.nbytes
        tensors.append(values)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for values in tensors:
            # The tensor's bytes, without NumPy, which may not be installed.
            file.write(ctypes.string_at(values.data_ptr(), values.nbytes))


if __name__ == "__main__":
    write(PRESETS[sys.argv[1]], Path(sys.argv[2]))
