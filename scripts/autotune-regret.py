#!/usr/bin/env python3
"""Measures how close `zero-train autotune` comes to the best configuration, and the errors of its predictions.

    scripts/autotune-regret.py [--passes 1] [--searches 3] [--config benches/autotune.yaml] [--program target/release/zero-train] [--out DIR]

First measures every configuration of the space in several passes; this is the oracle. The oracle's figure for a configuration is the median over the
passes of its step time relative to the mean of the pass. Then searches as a user would, with at most a fifth of the trials, and reports how much slower
the found configuration is than the oracle's best, by the oracle's figures. A pass takes ten minutes on two cores. Results that are already in DIR are not
measured again. Needs only Python.
"""

import argparse, json, math, pathlib, statistics, subprocess, sys, tempfile


def rows(folder):
    lines = (folder / "results.jsonl").read_text().splitlines()
    return json.loads(lines[-1])


def runs(folder):
    """Median step seconds by configuration and round."""
    found = {}
    for line in (folder / "results.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "run":
            found.setdefault(event["id"], {})[event["round"]] = statistics.median(event["step_seconds"])
    return found


def evened(found):
    """Logarithms of step seconds, adjusted for the speed of each round: least squares with a term per configuration
    and a term per round."""
    of_round = {round: 0.0 for times in found.values() for round in times}
    for _ in range(60):
        of_row = {id: statistics.mean(math.log(t) - of_round[r] for r, t in times.items()) for id, times in found.items()}
        by_round = {}
        for id, times in found.items():
            for r, t in times.items():
                by_round.setdefault(r, []).append(math.log(t) - of_row[id])
        of_round = {r: statistics.mean(values) for r, values in by_round.items()}
    return of_row


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--searches", type=int, default=3)
    parser.add_argument("--config", default="benches/autotune.yaml")
    parser.add_argument("--program", default="target/release/zero-train")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    out = pathlib.Path(args.out or tempfile.mkdtemp(prefix="autotune-regret-"))
    out.mkdir(parents=True, exist_ok=True)

    def search(name, *settings):
        # Reuse a search that an earlier call completed.
        if (out / name / "report.html").exists() and not rows(out / name)["interrupted"]:
            return rows(out / name)
        command = [args.program, "autotune", "--config", args.config, "--plain", "--out", str(out / name)]
        for setting in settings:
            command += ["--set", setting]
        done = subprocess.run(command, stdout=(out / f"{name}.txt").open("w"), check=False)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}; {out / name}.txt")
        return rows(out / name)

    passes = []
    for index in range(args.passes):
        search(f"oracle-{index}", "autotuning.tuner_type=gridsearch", "autotuning.tuner_num_trials=100000",
               "autotuning.tuner_early_stopping=0", "autotuning.repeats=1")
        passes.append(evened(runs(out / f"oracle-{index}")))
    # Passes can only be compared on the configurations that all of them ran.
    common = set.intersection(*(set(found) for found in passes))
    middle = [statistics.mean(found[id] for id in common) for found in passes]
    oracle = {id: statistics.median(found[id] - m for found, m in zip(passes, middle)) for id in common}
    best = min(oracle, key=oracle.get)
    last = rows(out / "oracle-0")["rows"]
    spread = statistics.median(abs(passes[i][id] - middle[i] - oracle[id]) for i in range(len(passes)) for id in common)
    fell = [row["id"] for row in last if row["state"] not in ("measured", "too large", "refused")]
    print(f"{len(common)} configurations measured in {args.passes} passes; a pass is off by {spread:.1%} in the median; "
          f"the slowest takes {math.exp(max(oracle.values()) - oracle[best]):.2f} times as long as the best")
    print(f"planned to fit, but failed: {len(fell)}")
    print(f"oracle's best: {last[best]['settings'] or 'as configured'}")
    for index in range(args.searches):
        trials = len(common) // 5
        found = search(f"search-{index}", f"autotuning.tuner_num_trials={trials}")
        tried = [row for row in found["rows"] if row["runs"] > 0 or row["state"] in ("failed", "timed out", "out of memory")]
        regret = math.exp(oracle[found["best"]] - oracle[best]) - 1
        # Errors of the initial predictions of all configurations, against the oracle scaled to the speed of this
        # search.
        own = evened(runs(out / f"search-{index}"))
        shift = statistics.mean(own[id] - oracle[id] for id in own if id in oracle)
        errors = [abs(row["predicted_seconds"] / math.exp(oracle[row["id"]] + shift) - 1)
                  for row in found["rows"] if row["predicted_seconds"] and row["id"] in oracle]
        of_tried = [abs(row["predicted_seconds"] / row["seconds"]["median"] - 1) for row in tried if row["seconds"] and row["predicted_seconds"]]
        gain = found["gain"]
        print(f"search {index}: {len(tried)} trials ({len(tried) / len(common):.0%}), regret {regret:.1%}; predictions off by "
              f"{statistics.median(errors):.1%} in the median of all, {statistics.median(of_tried):.1%} of those tried; "
              f"gain {gain['ratio']:.2f} ({gain['low']:.2f} - {gain['high'] or math.inf:.2f}); {found['rows'][found['best']]['settings'] or 'as configured'}")
    print(f"files: {out}")


main()
