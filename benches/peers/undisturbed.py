"""Detects whether other processes used the machine during a measurement."""

import os
import resource
import sys
import time
from pathlib import Path

# The share of all cores that others may use. A starting program leaves cores idle, which others may use.
LIMIT = 0.2


def undisturbed(run):
    """Returns the result of a run, or None if others used too much of the machine meanwhile. The run works in child
    processes."""
    others, started = busy_seconds() - childrens_seconds(), time.monotonic()
    result = run()
    others = busy_seconds() - childrens_seconds() - others
    share = others / ((time.monotonic() - started) * os.cpu_count())
    if share > LIMIT:
        print(f"a round does not count: others took {share:.0%} of the machine", file=sys.stderr)
        return None
    return result


def busy_seconds():
    """Busy seconds of all cores since the machine was started."""
    user, nice, system, _idle, _wait, *interrupts = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def childrens_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
