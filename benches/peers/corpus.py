"""The training text of all trainers, as token files, and the tokens that each rank takes at a step.

The text is 8 MB of sources of Python's standard library, which every machine that runs these scripts has without a
download. With a vocabulary of 256 a token is a byte; a larger vocabulary adds the most frequent words.
"""

import array
import collections
import re
import sys
import sysconfig
from pathlib import Path

BYTES = 8_000_000
WORD = re.compile(rb" ?[A-Za-z_]+| +|\n+|[0-9]+|[^A-Za-z_0-9 \n]")
LEFT_OUT = ("site-packages", "test", "tests", "idlelib", "lib2to3")


def text():
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(f for f in root.rglob("*.py") if not any(part in LEFT_OUT for part in f.relative_to(root).parts))
    pieces, length = [], 0
    for file in files:
        pieces.append(file.read_bytes())
        length += len(pieces[-1])
        if length >= BYTES:
            break
    return b"".join(pieces)[:BYTES]


def write(vocabulary, path):
    """Writes the tokens as little-endian u16."""
    if vocabulary == 256:
        return save(text(), path)
    words = WORD.findall(text())
    counts = collections.Counter(word for word in words if len(word) > 1)
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - 256]
    tokens = {word: 256 + index for index, word in enumerate(frequent)}
    ids = []
    for word in words:
        ids.extend([tokens[word]] if word in tokens else word)
    save(ids, path)


def save(ids, path):
    values = array.array("H")
    values.extend(ids)
    if sys.byteorder == "big":
        values.byteswap()
    with open(path, "wb") as file:
        values.tofile(file)


class Batches:
    """Sample i is tokens[i·T .. i·T + T]; its targets are shifted by one. At step s, micro-batch m of M, rank r of R takes
    the samples ((s·M + m)·R + r)·B + 0 .. B: the same as zero-train without `data.shuffle`."""

    def __init__(self, path, length, micro_batch, micro_batches, rank, ranks):
        import torch

        # PyTorch's 16-bit integer type is signed.
        self.tokens = torch.from_file(str(path), size=Path(path).stat().st_size // 2, dtype=torch.int16)
        self.length, self.rows, self.micro_batches = length, micro_batch, micro_batches
        self.rank, self.ranks = rank, ranks
        self.samples = (len(self.tokens) - 1) // length

    def get(self, step, micro_batch):
        import torch

        first = ((step * self.micro_batches + micro_batch) * self.ranks + self.rank) * self.rows
        starts = [(first + row) % self.samples * self.length for row in range(self.rows)]
        both = torch.stack([self.tokens[start : start + self.length + 1] for start in starts]).long() & 0xFFFF
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()
