"""Parses the output of Rust test programs."""

import re

# The accepted reasons for skipping a test on one card, in the exact words that tests print. Any other skip counts as a
# failure, because it proves nothing.
AGREED = re.compile(r"needs \d+ GPUs|only the mock can do this")
RESULT = re.compile(r"test result: (\w+)\. (\d+) passed; (\d+) failed; (\d+) ignored")


def tests(step, programs, name, *arguments, env, cwd=None, threads=1, most=None):
    """Runs a test program: records counts in the figures, and failures, crashes and unaccepted skips as problems.
    Returns the output."""
    options = ["--test-threads", threads, "--nocapture"]
    done = step.command([programs[name], *arguments, *options], env=env, cwd=cwd, most=most)
    step.details += done.objects()
    results = RESULT.findall(done.output)
    failed = sorted(set(re.findall(r"^    ([\w:]+)$", done.output.rpartition("\nfailures:\n")[2], re.M)))
    if "\nfailures:\n" not in done.output:
        failed = []
    passed, ignored = (sum(int(result[index]) for result in results) for index in (1, 3))
    reasons = [reason.strip() for reason in re.findall(r"skipped: (.*)", done.output)]
    agreed = [reason for reason in reasons if AGREED.fullmatch(reason)]
    counts = step.figures.setdefault("tests", {}).setdefault(name, {"passed": 0, "failed": 0, "skipped": 0})
    counts["passed"] += passed - len(agreed)
    counts["failed"] += len(failed)
    counts["skipped"] += len(agreed)
    if done.status is None:
        step.fail(f"{name} ran out of its {most:.0f} s{in_test(done.output)}")
    elif failed:
        step.fail(f"{name}: {len(failed)} failed: {', '.join(failed)}: {panic(done.output)}")
    elif done.status or not results:
        step.fail(f"{name} {done.how()}{in_test(done.output)}: {panic(done.output)}")
    elif not passed:
        step.fail(f"{name} {' '.join(arguments)}: no test ran")
    for reason in sorted(set(reasons) - set(agreed)):
        step.fail(f"{name}: skipped: {reason}")
    return done


def in_test(output):
    started = re.findall(r"^test (\S+) \.\.\. ", output, re.M)
    return f", in {started[-1]}" if started else ""


def panic(output):
    """The first panic's message, or the last line."""
    if found := re.search(r"panicked at ([^\n]*):\n(.*)", output):
        return f"{found[2]} ({found[1]})"
    return (output.strip().splitlines() or ["it printed nothing"])[-1]


def names(step, program, env):
    """Lists the tests of a program."""
    done = step.command([program, "--list"], env=env)
    return re.findall(r"^(\S+): test$", done.output, re.M)
