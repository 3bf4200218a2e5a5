"""Compares gloo's collectives with `zero-train bench comm`, alternating: two processes on this host, f32.

    python comm.py --binary ../../target/release/zero-train --megabytes 64

A time is that of one operation, started after a barrier: on rank 0 for gloo, on the slower rank for zero-train. The size
is that of the whole vector.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time

import world
from undisturbed import undisturbed

LARGE = ["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
SMALL_BYTES = [4, 1024]


def gloo_rank(megabytes, repeats):
    """Runs one of gloo's two ranks; rank 0 prints [operation, bytes, median milliseconds] for each operation."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    elements = megabytes * 250_000
    whole, part = torch.ones(elements), torch.ones(elements // 2)
    run = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    cases = [(name, whole, run[name], repeats) for name in LARGE]
    for bytes in SMALL_BYTES:
        small = torch.ones(bytes // 4)
        cases.append(("all_reduce", small, lambda small=small: dist.all_reduce(small), 100 * repeats))
    medians = []
    for name, vector, operation, count in cases:
        operation()
        times = []
        for _ in range(count):
            # Repeated sums would overflow, and infinities may change the timing.
            vector.fill_(1.0)
            dist.barrier()
            started = time.perf_counter()
            operation()
            times.append(1e3 * (time.perf_counter() - started))
        medians.append([name, vector.nbytes, statistics.median(times)])
    if dist.get_rank() == 0:
        print(json.dumps(medians))
    dist.barrier()
    dist.destroy_process_group()


def gloo(megabytes, repeats):
    """Milliseconds by (operation, bytes)."""
    output = world.run([__file__, "--megabytes", str(megabytes), "--repeats", str(repeats)], ranks=2, threads=1)
    return {(name, bytes): milliseconds for name, bytes, milliseconds in json.loads(output.splitlines()[-1])}


def ours(binary, megabytes, repeats):
    """Like `gloo`, parsed from the printed table: milliseconds, and microseconds after the line that mentions µs."""
    command = [binary, "bench", "comm", "--megabytes", str(megabytes), "--repeats", str(repeats)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=world.LIMIT_SECONDS).stdout
    large, _, small = text.partition("µs")
    found = {}
    for part, milliseconds in [(large, 1.0), (small, 1e-3)]:
        for name, bytes, time in re.findall(r"^\s+(\w+)\s+(\d+)\s+([\d.]+) \(", part, re.MULTILINE):
            found[name, int(bytes)] = float(time) * milliseconds
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", help="zero-train, a release build")
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    if "RANK" in os.environ:
        return gloo_rank(chosen.megabytes, chosen.repeats)
    if not chosen.binary:
        parser.error("--binary is missing")
    theirs, own = [], []
    for _ in range(2 * chosen.rounds):
        peer = undisturbed(lambda: gloo(chosen.megabytes, chosen.repeats))
        mine = peer and undisturbed(lambda: ours(chosen.binary, chosen.megabytes, chosen.repeats))
        if mine:
            theirs.append(peer)
            own.append(mine)
        if len(own) == chosen.rounds:
            break
    if not own:
        sys.exit("the machine is too busy to measure on")
    print(f"two processes, f32, {len(own)} rounds of {chosen.repeats}")
    for name, bytes in theirs[0]:
        of_round = [(peer[name, bytes], mine[name, bytes]) for peer, mine in zip(theirs, own)]
        peer, mine = (statistics.median(times) for times in zip(*of_round))
        faster = sorted(peer / mine for peer, mine in of_round)
        print(
            f"  {name:<15}{bytes:>10} bytes   gloo {peer:9.3f} ms   zero-train {mine:9.3f} ms"
            f"   {statistics.median(faster):6.1f} x as fast ({faster[0]:.1f} – {faster[-1]:.1f})"
        )


if __name__ == "__main__":
    main()
