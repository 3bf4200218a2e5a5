#!/usr/bin/env python3
"""Times the steps of layouts on four ranks of two hosts with a throttled link, and compares them with the planner's predictions.

    scripts/two-hosts.py [--program target/release/zero-train] [--config FILE] [--links 100mbit 1gbit] [--repeats 3] [--plot FILE]
                         [--keep FOLDER] [--tensor]

The hosts are two network namespaces of this machine, and a virtual cable that `tc` throttles connects them. Each has half of the cores, and
two ranks of one thread. On a machine with less than four cores, control groups give each rank half of a core. With `--tensor`, each host
has one rank, and the two cut layers, with and without `tp_overlap_comm`. For each link the script times the layouts in alternation, and
measures a cost table in the middle of these rounds. A time of local steps is the mean of steps from one outer step to the next. Prints a
table in Markdown: medians, smallest and largest steps, the rate against the first layout, and the prediction. `--plot` draws times over
link speeds, and `--keep` keeps cost tables and the times of all steps. Must run as root on Linux with two cores or more, with `ip` and `tc`
(iproute2), and `taskset` and `nsenter` (util-linux). The configuration must train at four ranks.
"""

import argparse, contextlib, json, os, pathlib, secrets, signal, statistics, subprocess, sys, tempfile

EACH = "zero_optimization.stage3_max_reuse_distance=0"
KEPT = "zero_optimization.stage3_max_reuse_distance=1000000000"
LAYOUTS = {
    "stage 3": [KEPT],
    "stage 2": ["zero_optimization.stage=2"],
    "HSDP 2 × 2, stage 3": ["mesh={data_parallel_replicate_degree: 2}", KEPT],
    "HSDP 2 × 2, stage 2": ["mesh={data_parallel_replicate_degree: 2}", "zero_optimization.stage=2"],
    "stage 3, gathered for each use": [EACH],
    "stage 3, gathered for each use, hpZ": [EACH, "zero_optimization.zero_hpz_partition_size=2"],
    "stage 3, gathered for each use, hpZ, qwZ, qgZ": [
        EACH, "zero_optimization.zero_hpz_partition_size=2", "zero_optimization.zero_quantized_weights=true", "zero_optimization.zero_quantized_gradients=true"],
    "2 pipeline stages, stage 2": ["pipeline={stages: 2}", "zero_optimization.stage=2"],
    "HSDP 2 × 2, stage 2, 4 local steps": [
        "mesh={data_parallel_replicate_degree: 2}", "zero_optimization.stage=2", "training.local_steps={steps: 4}"],
}
TENSOR = {
    "`autotp_size: 2`": ["tensor_parallel={autotp_size: 2}"],
    "the same with `tp_overlap_comm`": ["tensor_parallel={autotp_size: 2, tp_overlap_comm: true}"],
}
COLORS = ["#1f77b4", "#aec7e8", "#d62728", "#ff9896", "#2ca02c", "#98df8a", "#9467bd", "#8c564b", "#17becf"]
HOSTS = ["zero-train-host-0", "zero-train-host-1"]
# Control groups of version 1 or 2.
CGROUPS = pathlib.Path("/sys/fs/cgroup")
VERSION_1 = (CGROUPS / "cpu").exists()
GROUPS = CGROUPS / "cpu" if VERSION_1 else CGROUPS
PERIOD = 2000  # microseconds, twice the shortest time that Linux can give to a group
ADDRESSES = ["10.231.1.1", "10.231.1.2"]


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True)


@contextlib.contextmanager
def hosts():
    """Two namespaces, connected by a cable named eth0 on both."""
    try:
        for host in HOSTS:
            ip("netns", "add", host)
            ip("-n", host, "link", "set", "lo", "up")
        ip("link", "add", "eth0", "netns", HOSTS[0], "type", "veth", "peer", "name", "eth0", "netns", HOSTS[1])
        for host, address in zip(HOSTS, ADDRESSES):
            ip("-n", host, "address", "add", f"{address}/30", "dev", "eth0")
            ip("-n", host, "link", "set", "eth0", "up")
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "delete", host], stderr=subprocess.DEVNULL)


def cores(host):
    """Half of this machine's cores for each host, since hosts share none."""
    all = sorted(os.sched_getaffinity(0))
    half = len(all) // 2
    return ",".join(map(str, all[host * half : (host + 1) * half]))


@contextlib.contextmanager
def shares(args):
    """Gives each rank an equal part of its host's cores, if there are more ranks than cores. Without this limit, a rank computes faster while the
    other rank of its core waits for the link, and no cost table could predict its time."""
    ranks = args.ranks // len(HOSTS)
    cores_of_host = len(os.sched_getaffinity(0)) // len(HOSTS)
    args.groups = [GROUPS / f"{host}-{rank}" for host in HOSTS for rank in range(ranks)] if cores_of_host < ranks else []
    try:
        if args.groups and not VERSION_1:
            (CGROUPS / "cgroup.subtree_control").write_text("+cpu")
        quota = PERIOD * cores_of_host // ranks
        limits = {"cpu.cfs_period_us": PERIOD, "cpu.cfs_quota_us": quota} if VERSION_1 else {"cpu.max": f"{quota} {PERIOD}"}
        for group in args.groups:
            group.mkdir()
            for name, value in limits.items():
                (group / name).write_text(str(value))
        yield
    finally:
        for group in args.groups:
            if group.exists():
                group.rmdir()


def throttle(rate):
    """Limits both directions of the cable to a rate of tc, such as 100mbit."""
    for host in HOSTS:
        limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
        subprocess.run(["ip", "netns", "exec", host, "tc", "qdisc", "replace", "dev", "eth0", *limit], check=True)


def on_both(args, *command):
    """Runs a program on the ranks of both hosts. Returns what rank 0 printed."""
    running = []
    for index, host in enumerate(HOSTS):
        launch = [args.program, "launch", "--nnodes", "2", "--node-rank", str(index), "--nproc-per-node", str(args.ranks // 2), "--master-addr", ADDRESSES[0]]
        join = ["sh", "-c", 'echo $$ >"$0-$LOCAL_RANK/cgroup.procs" && exec "$@"', str(GROUPS / host)] if args.groups else []
        line = ["taskset", "--cpu-list", cores(index), "nsenter", f"--net=/var/run/netns/{host}", *launch, "--", *join, args.program, *command]
        environment = os.environ | {"ZERO_TRAIN_TOKEN_FILE": args.token}
        running.append(subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment))
    try:
        outputs = [process.communicate() for process in running]
    finally:
        for process in running:
            process.terminate()
            process.wait()
    for process, (out, errors) in zip(running, outputs):
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{out}{errors}")
    return outputs[0][0]


def settings(layout):
    # By default, the planner chooses `overlap_comm` from the cost table, and a run without a cost table does not.
    fixed = ["zero_optimization.stage=3", "zero_optimization.overlap_comm=true", "launcher={threads_per_rank: 1, interface: eth0}"]
    return [part for setting in fixed + layout for part in ("--set", setting)]


def predicted(args, costs, layout):
    """Seconds that the planner predicts, or NaN if the table lacks something."""
    command = [args.program, "plan", "--json", "--config", args.config, "-n", str(args.ranks), "--costs", costs, *settings(layout)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    time = json.loads(done.stdout)["time"]
    if "missing" in time:
        print(f"  no prediction: {time['missing']}")
    return time.get("step_seconds", float("nan"))


def measured(args, link, folder):
    """Returns the rows of one link: name, step times and predicted seconds."""
    throttle(link)
    costs = str(folder / f"{link}.json")
    layouts = TENSOR if args.tensor else LAYOUTS
    first = next(iter(layouts.values()))
    times = {name: [] for name in layouts}
    for round in range(args.repeats):
        if round == args.repeats // 2:
            on_both(args, "bench", "costs", "--config", args.config, "--steps", str(args.table_steps), "--out", costs, *settings(first))
        for name, layout in layouts.items():
            each = 4 if any("local_steps" in setting for setting in layout) else 1
            count = str(-(-args.steps // each) * each)
            out = on_both(args, "bench", "step", "--config", args.config, "--json", "--warm-up", str(each), "--steps", count, *settings(layout))
            of_steps = json.loads(out.splitlines()[-1])["step_ms"]
            times[name] += [statistics.mean(of_steps[at : at + each]) for at in range(0, len(of_steps), each)]
            (folder / f"{link}-steps.json").write_text(json.dumps({name: {"step_ms": of} for name, of in times.items()}, indent=1))
    return [(name, times[name], predicted(args, costs, layout)) for name, layout in layouts.items()]


def table(link, rows):
    first = statistics.median(rows[0][1])
    print(f"\n| {link} | ms a step | rate against the first | predicted ms | off by |\n|---|---|---|---|---|")
    for name, times, seconds in rows:
        median = statistics.median(times)
        predicted, off = (f"{seconds * 1e3:,.0f}", f"{seconds * 1e3 / median - 1:+.0%}") if seconds == seconds else ("", "")
        print(f"| {name} | {median:,.0f} ({min(times):,.0f} – {max(times):,.0f}) | {first / median:.2f} | {predicted} | {off} |", flush=True)


def readable(link):
    """100 Mb/s for tc's 100mbit."""
    return link.replace("mbit", " Mb/s").replace("gbit", " Gb/s")


def drawn(results):
    """Returns an SVG of step times over links, both logarithmic by their order of magnitude."""
    import math

    left, top, width, height = 70, 20, 560, 340
    links = list(results)
    every = [statistics.median(times) for rows in results.values() for _, times, _ in rows]
    low, high = math.log10(min(every)) - 0.05, math.log10(max(every)) + 0.05
    x = lambda index: left + width * (index + 0.5) / len(links)
    y = lambda ms: top + height * (high - math.log10(ms)) / (high - low)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 330} {top + height + 60}" font-family="sans-serif" font-size="13">',
           '<rect width="100%" height="100%" fill="white"/>']
    marks = [digit * 10**power for power in range(math.floor(low), math.ceil(high)) for digit in (1, 2, 5)]
    for ms in (mark for mark in marks if low <= math.log10(mark) <= high):
        out.append(f'<line x1="{left}" x2="{left + width}" y1="{y(ms):.1f}" y2="{y(ms):.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 8}" y="{y(ms) + 4:.1f}" text-anchor="end">{ms:,.0f} ms</text>')
    for index, link in enumerate(links):
        out.append(f'<text x="{x(index):.1f}" y="{top + height + 20}" text-anchor="middle">{readable(link)}</text>')
    out.append(f'<text x="{left + width / 2}" y="{top + height + 45}" text-anchor="middle">link between the hosts, each way; times are medians of a step</text>')
    for row, (name, color) in enumerate(zip((name for name, *_ in next(iter(results.values()))), COLORS)):
        of = [statistics.median(rows[row][1]) for rows in results.values()]
        path = " ".join(f"{x(index):.1f},{y(ms):.1f}" for index, ms in enumerate(of))
        out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        out.append(f'<rect x="{left + width + 10}" y="{top + 10 + 20 * row}" width="14" height="4" fill="{color}"/>')
        out.append(f'<text x="{left + width + 30}" y="{top + 16 + 20 * row}">{name}</text>')
    return "\n".join(out) + "\n</svg>\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="target/release/zero-train")
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--links", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="steps of each run")
    parser.add_argument("--table-steps", type=int, default=8, help="steps in which a cost table is measured")
    parser.add_argument("--tensor", action="store_true", help="compares tensor groups instead of layouts")
    parser.add_argument("--plot", type=pathlib.Path)
    parser.add_argument("--keep", type=pathlib.Path, metavar="FOLDER", help="writes LINK.json, a cost table, and LINK-steps.json")
    args = parser.parse_args()
    args.ranks = 2 if args.tensor else 4
    results = {}
    # Ends the blocks below, which delete the namespaces and the groups.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with hosts(), shares(args), tempfile.TemporaryDirectory() as folder:
        args.token = f"{folder}/token"
        os.close(os.open(args.token, os.O_CREAT, 0o600))
        pathlib.Path(args.token).write_text(secrets.token_hex())
        for link in args.links:
            tables = args.keep or pathlib.Path(folder)
            tables.mkdir(parents=True, exist_ok=True)
            results[link] = measured(args, link, tables.resolve())
            if args.keep:
                rows = {name: {"step_ms": times, "predicted_ms": seconds * 1e3} for name, times, seconds in results[link]}
                (tables / f"{link}-steps.json").write_text(json.dumps(rows, indent=1))
            table(link, results[link])
    if args.plot:
        args.plot.write_text(drawn(results))


if __name__ == "__main__":
    main()
