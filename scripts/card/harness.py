"""Runs steps one after another, each with its own time limit, and records their results.

A step is a function that takes a `Step`: it runs commands, records figures and reports problems. Whatever happens in it, the next step runs.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

SUMMARY_LINES = 60
# Bytes of a command's output that the log keeps: from its beginning, and from its end.
HEAD, TAIL = 24 << 10, 96 << 10
LOG_BYTES = 12 << 20
# Each command is a process group, so that nothing that it starts outlives it.
ALONE = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}


class Skipped(Exception):
    """The rest of the step needs something that is missing; this is not a failure."""


class TimedOut(Exception):
    """The step exceeded its time limit."""


class Done:
    """A command that has ended."""

    def __init__(self, status, output, seconds):
        self.status, self.output, self.seconds = status, output, seconds

    def how(self):
        if self.status >= 0:
            return f"ended with status {self.status}"
        return f"was ended by {signal.Signals(-self.status).name}"

    def objects(self):
        """The JSON objects that it printed, one per line; libtest may have written at the start of the line."""
        found = []
        for line in self.output.splitlines():
            if "{" in line:
                try:
                    value = json.loads(line[line.index("{") :])
                except ValueError:
                    continue
                if isinstance(value, dict):
                    found.append(value)
        return found


class Step:
    """A running step: its commands, figures, and problems."""

    def __init__(self, number, name, seconds, run_folder):
        self.number, self.name, self.folder = number, name, run_folder
        self.deadline = time.monotonic() + seconds
        self.figures, self.problems, self.lines, self.details = {}, [], [], []

    def left(self):
        return self.deadline - time.monotonic()

    def fail(self, problem):
        self.problems.append(problem)

    def say(self, line):
        """Adds a line to the summary."""
        self.lines.append(line)

    def command(self, command, env=None, cwd=None, text=None, most=None):
        """Runs a command until it ends or the step's time is up, and keeps its output.

        `most` limits the command to that many seconds; a command stopped by this limit has the status None.
        """
        self.folder.log(f"\n== step {self.number}: {' '.join(map(str, command))}\n")
        limit = max(0.1, min(self.left(), most or self.left()))
        started = time.monotonic()
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as given:
            given.write((text or "").encode())
            given.seek(0)
            try:
                running = subprocess.Popen(
                    list(map(str, command)), stdin=given, stdout=output, stderr=subprocess.STDOUT, env=env, cwd=cwd, **ALONE
                )
            except OSError as error:
                self.folder.log(f"   {error}\n")
                raise RuntimeError(f"{Path(command[0]).name} does not start: {error.strerror}") from None
            self.folder.running = running
            try:
                status = running.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                end(running)
                self.folder.running = None
            seconds = time.monotonic() - started
            output.seek(0)
            printed = output.read().decode(errors="replace")
        said = "ran out of time" if status is None else Done(status, "", 0).how()
        self.folder.log(f"{cut(printed)}\n   {said} after {seconds:.1f} s\n")
        if status is None and not most:
            self.details += Done(0, printed, seconds).objects()
            raise TimedOut(f"{Path(command[0]).name} ran out of time{last_test(printed)}")
        return Done(status, printed, seconds)


def end(running):
    """Kills a command and all that it started. A signal that can be handled would make a training run write a
    checkpoint."""
    try:
        os.killpg(running.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    running.wait()


def cut(text):
    if len(text) <= HEAD + TAIL:
        return text
    return f"{text[:HEAD]}\n[… {len(text) - HEAD - TAIL} characters are left out …]\n{text[-TAIL:]}"


def last_test(output):
    tests = re.findall(r"^test (\S+) \.\.\. ", output, re.M)
    return f", in {tests[-1]}" if tests else ""


class Folder:
    """The output folder: card.jsonl, details.jsonl (JSON printed by programs), card.log, summary.txt."""

    def __init__(self, path):
        self.path, self.logged, self.running = path, 0, None
        path.mkdir(parents=True, exist_ok=True)
        for name in ["card.jsonl", "details.jsonl", "card.log", "summary.txt"]:
            (path / name).write_text("")

    def append(self, name, text):
        with (self.path / name).open("a") as file:
            file.write(text)

    def log(self, text):
        # A full log still lists the commands that ran.
        text = text if self.logged < LOG_BYTES else text[:200]
        self.logged += len(text.encode())
        self.append("card.log", text)


def run(title, steps, folder, limit=None, most=None):
    """Runs all steps, each a (number, name, seconds, function); returns whether none failed. `limit` overrides the
    seconds of each step, `most` limits all together."""
    started, results, interrupted = time.monotonic(), [], []

    def stop(number, _frame):
        # The remaining steps are skipped, but the results so far are reported.
        interrupted.append(signal.Signals(number).name)
        raise KeyboardInterrupt

    for number in [signal.SIGTERM, signal.SIGINT]:
        signal.signal(number, stop)
    for number, name, seconds, function in steps:
        began = time.monotonic()
        left = started + (most or float("inf")) - began
        step = Step(number, name, min(limit or seconds, max(left, 1)), folder)
        if interrupted:
            status, reason = "skipped", f"the run was ended by {interrupted[0]}"
        else:
            status, reason = outcome(step, function)
        line = {"step": number, "name": name, "status": status, "seconds": round(time.monotonic() - began, 2)}
        if reason:
            line["reason"] = reason
        line["figures"] = step.figures
        folder.append("card.jsonl", json.dumps(line) + "\n")
        folder.append("details.jsonl", "".join(json.dumps({"step": number, **d}) + "\n" for d in step.details))
        results.append((line, step.lines))
    text = summary(title, results, time.monotonic() - started)
    folder.append("summary.txt", text)
    sys.stdout.write(text)
    sys.stdout.flush()
    return all(line["status"] in ("ok", "skipped") for line, _ in results) and not interrupted


def outcome(step, function):
    """Runs a step; returns its status, and the reason if it is not ok."""
    try:
        function(step)
    except Skipped as reason:
        if not step.problems:
            return "skipped", str(reason)
        step.fail(str(reason))
    except TimedOut as reason:
        return "timeout", "; ".join([*step.problems, str(reason)])
    except KeyboardInterrupt:
        return "failed", "interrupted"
    except Exception as error:
        step.folder.log(traceback.format_exc())
        step.fail(str(error) or type(error).__name__)
    return ("failed", "; ".join(step.problems)) if step.problems else ("ok", None)


def summary(title, results, seconds):
    counts = {}
    for line, _ in results:
        counts[line["status"]] = counts.get(line["status"], 0) + 1
    lines = [f"{title}: {', '.join(f'{n} {status}' for status, n in counts.items())}, {seconds:.0f} s"]
    room = SUMMARY_LINES - 1 - 2 * len(results)
    # An equal share of lines for each step; unused lines go to the others, in order.
    share = room // max(1, len(results))
    spare = room - sum(min(share, len(said)) for _, said in results)
    for line, said in results:
        lines.append(f"{line['step']:>3}  {line['status']:<8}{line['seconds']:>7.1f} s  {line['name']}")
        if "reason" in line:
            lines.append(f"       {shortened(line['reason'])}")
        shown = said[: share + spare]
        spare -= max(0, len(shown) - share)
        lines += [f"       {shortened(text)}" for text in shown]
    return "\n".join(lines[:SUMMARY_LINES]) + "\n"


def shortened(text, most=220):
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"
