#!/usr/bin/env python3
"""Compares the learning rates that fit models of several widths, with AdamW and with MuAdamW, on the quickstart's text.

    scripts/mup-transfer.py [--program target/release/zero-train] [--steps 150] [--out DIR]

Trains the quickstart's model with each width, each optimizer and each rate, at a constant rate after a short warm-up. The narrowest
width is the base model of MuAdamW, where the two optimizers are the same. Heads have the same size at all widths. Prints a table
of the last evaluation losses in Markdown. Results that are already in DIR are not measured again. Needs only Python.
"""

import argparse, json, math, pathlib, subprocess

WIDTHS = [64, 128, 256]
HEAD = 32
RATES = [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2]


def train(args, name, width, rate):
    """Returns the last evaluation loss, NaN if there is none because the run diverged."""
    folder = args.out / f"{name}-{width}-{rate:g}-{args.steps}"
    if not (folder / "report.json").is_file():
        model = f"{{type: gpt2, vocab_size: auto, n_positions: 128, n_embd: {width}, n_layer: 2, n_head: {width // HEAD}}}"
        settings = [f"model={model}", f"optimizer={{type: {name}, params: {{lr: {rate}, betas: [0.9, 0.98], weight_decay: 0.1}}}}",
                    "scheduler={type: constant_with_warmup, params: {num_warmup_steps: 15}}", f"training.max_steps={args.steps}",
                    f"training.eval_every={args.steps}", "training.seed=1", f"training.output_dir={folder}", "training.sample=null",
                    "training.save_last=false"]
        settings += [f"mup={{base: {{n_embd: {WIDTHS[0]}, n_head: {WIDTHS[0] // HEAD}}}}}"] if name == "MuAdamW" else []
        command = [args.program, "--config", "configs/quickstart.yaml", "--quiet"]
        subprocess.run(command + [part for setting in settings for part in ("--set", setting)])
    # A run that did not even begin has no such file, which ends the script.
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["eval_loss"] for line in lines if line.get("eval_loss") is not None and line["step"] == args.steps]
    return losses[-1] if losses else math.nan


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="target/release/zero-train")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/mup-transfer"))
    args = parser.parse_args()
    print(f"| optimizer | width | {' | '.join(f'{rate:g}' for rate in RATES)} |\n|---|---|{'---|' * len(RATES)}")
    for name in ["AdamW", "MuAdamW"]:
        for width in WIDTHS if name == "AdamW" else WIDTHS[1:]:
            losses = [train(args, name, width, rate) for rate in RATES]
            best = min((loss for loss in losses if math.isfinite(loss)), default=None)
            cell = lambda loss: f"{loss:.4f}" if math.isfinite(loss) else "diverged"
            cells = [f"**{cell(loss)}**" if loss == best else cell(loss) for loss in losses]
            print(f"| {name} | {width} | {' | '.join(cells)} |", flush=True)


main()
