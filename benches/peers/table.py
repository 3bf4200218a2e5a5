"""Prints Markdown tables of the results of `compare.py --results FILE`: `python table.py FILE`.

Calls with the same settings count as rounds of one comparison.
"""

import json
import statistics
import sys

from compare import apart, peaks, rate, ratio_of_fastest, ratios, sets, spread

NAMES = {"plain": "PyTorch", "peft": "PEFT", "ddp": "DDP", "fsdp2": "FSDP2", **{f"deepspeed-{n}": f"DeepSpeed {n}" for n in range(4)}}

COLUMNS = [
    "ranks × threads",
    "peer",
    "instruction sets: peer, zero-train",
    "peer tokens/s",
    "peer peak MB",
    "ZeRO stage",
    "tokens/s",
    "peak MB",
    "ratio",
    "ratio of the fastest steps",
    "difference of losses",
]


def grouped(lines, keys):
    groups = {}
    for line in lines:
        groups.setdefault(tuple(line[key] for key in keys), []).append(line)
    return groups


def row(lines):
    """One table row from all runs of the same comparison."""
    first = lines[0]
    theirs, ours = ([run for line in lines for run in line[side]] for side in ("theirs", "ours"))
    middle, rest = spread(ratios(ours, theirs), 2).split(" ", 1)
    cells = [
        f"{first['ranks']} × {first['threads']}",
        NAMES[first["peer"]] + (", AVX-512 forced" if first["forced"] else ""),
        f"{sets(theirs)}, {sets(ours)}",
        f"{statistics.median(map(rate, theirs)):.0f}",
        peaks(theirs, "peak_mb"),
        str(first["stage"]),
        f"{statistics.median(map(rate, ours)):.0f}",
        peaks(ours, "peak_mb"),
        f"**{middle}** {rest}",
        f"{ratio_of_fastest(ours, theirs):.2f}",
        f"{apart(ours, theirs):.0e}",
    ]
    return f"| {' | '.join(cells)} |"


def main():
    with open(sys.argv[1]) as file:
        # Results from before `--isa` existed have no instruction set.
        lines = [{"isa": "default"} | json.loads(line) for line in file]
    for (preset, dtype, accumulation), of_table in grouped(lines, ["preset", "dtype", "accumulation"]).items():
        print(f"\n{preset}, {dtype}, accumulation {accumulation}\n")
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
        for of_row in grouped(of_table, ["ranks", "threads", "peer", "forced", "isa", "stage"]).values():
            print(row(of_row))


if __name__ == "__main__":
    main()
