"""Tells whether other processes used the machine while something was measured."""

import os
import resource
import sys
import time
from pathlib import Path

# What they may take of all cores. While a program starts it leaves cores idle, which they may have.
LIMIT = 0.2


def undisturbed(run):
    """What a run gives, or None if others took too much of the machine meanwhile. It works in child processes."""
    others, started = busy_seconds() - childrens_seconds(), time.monotonic()
    result = run()
    others = busy_seconds() - childrens_seconds() - others
    share = others / ((time.monotonic() - started) * os.cpu_count())
    if share > LIMIT:
        print(f"a round does not count: others took {share:.0%} of the machine", file=sys.stderr)
        return None
    return result


def busy_seconds():
    """Of all cores, since the machine was started."""
    user, nice, system, _idle, _wait, *interrupts = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def childrens_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
