"""Measures the card's ceilings with PyTorch: bytes per second of a large copy, and operations per second of large
bf16 products."""

import json
import statistics

import torch


def timed(run, times):
    """Median seconds, measured with events."""
    for _ in range(3):
        run()
    seconds = []
    for _ in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def main():
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / timed(lambda: target.copy_(source), 10)
    del source, target
    found = {"copy_gb_per_s": round(copy / 1e9, 1)}
    # A square product, and those of GPT-2 124M and 1.5B with 8,192 and 4,096 rows: the first feed-forward layer and the
    # head.
    for m, n, k in [(8192, 8192, 8192), (8192, 3072, 768), (4096, 6400, 1600), (8192, 50304, 768)]:
        a, b = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
        found[f"product_{m}x{n}x{k}_tflop_per_s"] = round(2 * m * n * k / timed(lambda: a @ b, 20) / 1e12, 1)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
