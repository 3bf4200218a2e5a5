"""Reads the trace of one rank: the GPU's work in a step after warm-up, its idle gaps, and the host's time per layer."""

import json
import statistics


def read(path):
    """Spans by process and thread: (start, end, name, category, arguments), in µs and in time order."""
    names, spans = {}, {}
    for event in json.loads(path.read_text())["traceEvents"]:
        at = (event["pid"], event["tid"])
        if event["ph"] == "M" and event["name"] in ("process_name", "thread_name"):
            names[at if event["name"] == "thread_name" else event["pid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            span = (event["ts"], event["ts"] + event["dur"], event["name"], event["cat"], event["args"])
            spans.setdefault(at, []).append(span)
    return {(names.get(at[0], ""), names.get(at, "")): sorted(own, key=lambda span: span[0]) for at, own in spans.items()}


def steps(spans):
    """Splits the spans into steps, without the first ones, which touch all memory for the first time."""
    found = []
    for span in spans:
        if not found or span[2] == spans[0][2]:
            found.append([])
        found[-1].append(span)
    return found[3:] or found[-1:]


def gaps(spans):
    """Gaps between spans in which the GPU's compute stream was idle, longest first."""
    found = [(after[0] - before[1], before[2], after[2]) for before, after in zip(spans, spans[1:])]
    return sorted(found, reverse=True)


def layers(spans, category):
    """The median time of the layers between the first and the last in a category, in µs."""
    most = max((span[4].get("layer", 0) for span in spans), default=0)
    inner = [span[1] - span[0] for span in spans if span[3] == category and 0 < span[4].get("layer", 0) < most]
    return round(statistics.median(inner), 1) if inner else None


def figures(path):
    spans = read(path)
    gpu = next(own for (process, thread), own in spans.items() if process.endswith("its GPU") and thread == "compute")
    host = next(own for (process, thread), own in spans.items() if process == "rank 0, measured" and thread == "compute")
    # Spans of the GPU have no arguments; the host's spans of the same name have them.
    arguments = {span[2]: span[4] for span in host}
    gpu = [(*span[:4], arguments.get(span[2], {})) for span in gpu]
    of_gpu, of_host = steps(gpu), steps(host)
    every = [span for step in of_gpu for span in step]
    by_kind = {}
    for start, end, _, category, _ in every:
        by_kind[category] = by_kind.get(category, 0) + (end - start) / len(of_gpu)
    length = lambda step: step[-1][1] - step[0][0]  # noqa: E731
    return {
        "steps": len(of_gpu),
        "gpu_step_us": round(statistics.median(map(length, of_gpu)), 1),
        "host_step_us": round(statistics.median(map(length, of_host)), 1),
        "gpu_us_by_kind": {kind: round(us, 1) for kind, us in sorted(by_kind.items(), key=lambda item: -item[1])},
        "gpu_us_a_layer": {kind: layers(every, kind) for kind in ("forward", "backward")},
        "host_us_a_layer": {kind: layers([s for step in of_host for s in step], kind) for kind in ("forward", "backward")},
        "longest_gaps_us": [[round(us, 1), before, after] for us, before, after in gaps(every)[:8]],
        "gaps_us_a_step": round(sum(max(0, us) for us, _, _ in gaps(every)) / len(of_gpu), 1),
    }
