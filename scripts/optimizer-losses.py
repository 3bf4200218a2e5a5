#!/usr/bin/env python3
"""Compares the evaluation losses of AdamW, Muon and schedule-free AdamW after equal tokens of the quickstart's text.

    scripts/optimizer-losses.py [--program target/release/zero-train] [--steps 600] [--out DIR] [--plot docs/optimizer-losses.svg]

Each optimizer first trains with several learning rates and a seed of its own, and keeps the one with the lowest last loss. Then it
trains with that rate and three other seeds. AdamW and Muon follow the quickstart's schedule, a warm-up and half a cosine;
schedule-free AdamW only warms up. Prints a table in Markdown and draws the losses. Results that are already in DIR are not measured
again. Takes about 20 minutes on two cores. Needs only Python.
"""

import argparse, json, pathlib, statistics, subprocess

EVERY = 25
SEEDS = [1, 2, 3]
OPTIMIZERS = {
    "AdamW": ("#1f77b4", "{type: AdamW, params: {lr: %g, betas: [0.9, 0.98], weight_decay: 0.1}}", [1e-3, 2e-3, 4e-3, 8e-3], True),
    "Muon": ("#d62728", "{type: Muon, params: {muon_lr: %g, adam_lr: 0.004, betas: [0.9, 0.98], weight_decay: 0.1}}", [0.02, 0.04, 0.08, 0.16, 0.32], True),
    "AdamWScheduleFree": ("#2ca02c", "{type: AdamWScheduleFree, params: {lr: %g, betas: [0.9, 0.98], weight_decay: 0.1, warmup_steps: 50}}", [2e-3, 4e-3, 8e-3, 1.6e-2], False),
}


def train(args, name, rate, seed):
    """Returns the evaluation losses by step."""
    _, optimizer, _, has_schedule = OPTIMIZERS[name]
    folder = args.out / f"{name}-{rate:g}-{seed}"
    if not (folder / "report.json").is_file():
        settings = [f"optimizer={optimizer % rate}", f"training.max_steps={args.steps}", f"training.eval_every={EVERY}", f"training.seed={seed}",
                    f"training.output_dir={folder}", "training.sample=null", "training.save_last=false"]
        settings += [] if has_schedule else ["scheduler=null"]
        command = [args.program, "--config", "configs/quickstart.yaml", "--quiet"]
        subprocess.run(command + [part for setting in settings for part in ("--set", setting)], check=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["eval_loss"] for line in lines if line.get("eval_loss") is not None}


def drawn(curves, steps):
    """Returns an SVG with the mean of each optimizer's seeds as a line and their extent as a band."""
    left, top, width, height = 60, 20, 640, 360
    losses = [loss for runs in curves.values() for run in runs for step, loss in run.items() if step >= 2 * EVERY]
    low, high = min(losses) - 0.05, min(max(losses), 2.5) + 0.05
    x = lambda step: left + width * step / steps
    y = lambda loss: top + height * (1 - (min(loss, high) - low) / (high - low))
    path = lambda points: " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in points)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 20} {top + height + 50}" font-family="sans-serif" font-size="13">',
           '<rect width="100%" height="100%" fill="white"/>']
    for tick in range(6):
        loss, step = low + (high - low) * tick / 5, steps * tick // 5
        out.append(f'<line x1="{left}" x2="{left + width}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
        out.append(f'<text x="{x(step):.1f}" y="{top + height + 20}" text-anchor="middle">{step}</text>')
    out.append(f'<text x="{left + width / 2}" y="{top + height + 40}" text-anchor="middle">steps of 1,024 tokens</text>')
    out.append(f'<text x="16" y="{top + height / 2}" text-anchor="middle" transform="rotate(-90 16 {top + height / 2})">evaluation loss</text>')
    for row, (name, runs) in enumerate(curves.items()):
        color = OPTIMIZERS[name][0]
        at = sorted(step for step in runs[0] if step >= 2 * EVERY)
        of = lambda f: [(step, f([run[step] for run in runs])) for step in at]
        out.append(f'<polygon points="{path(of(max) + of(min)[::-1])}" fill="{color}" opacity="0.2"/>')
        out.append(f'<polyline points="{path(of(statistics.mean))}" fill="none" stroke="{color}" stroke-width="2"/>')
        out.append(f'<rect x="{left + width - 170}" y="{top + 10 + 20 * row}" width="14" height="4" fill="{color}"/>')
        out.append(f'<text x="{left + width - 150}" y="{top + 16 + 20 * row}">{name}</text>')
    return "\n".join(out + ["</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="target/release/zero-train")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/optimizer-losses"))
    parser.add_argument("--plot", type=pathlib.Path, default=pathlib.Path("docs/optimizer-losses.svg"))
    args = parser.parse_args()
    curves, chosen, thirds = {}, {}, [args.steps // 3 // EVERY * EVERY, args.steps * 2 // 3 // EVERY * EVERY, args.steps]
    for name, (_, _, rates, _) in OPTIMIZERS.items():
        last = {rate: train(args, name, rate, 100)[args.steps] for rate in rates}
        chosen[name] = min(last, key=last.get)
        print(f"{name}: last loss by rate {last}", flush=True)
        curves[name] = [train(args, name, chosen[name], seed) for seed in SEEDS]
    print(f"\n| optimizer | rate | {' | '.join(f'after {step} steps' for step in thirds)} |\n|---|---|{'---|' * len(thirds)}")
    for name, runs in curves.items():
        cells = [[run[step] for run in runs] for step in thirds]
        print(f"| {name} | {chosen[name]:g} | " + " | ".join(f"{statistics.mean(c):.4f} ({min(c):.4f} – {max(c):.4f})" for c in cells) + " |")
    args.plot.write_text(drawn(curves, args.steps))


main()
