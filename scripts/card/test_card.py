"""Tests that `card.sh` detects problems, with stand-ins for the programs. `python3 scripts/card/test_card.py`"""

import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest
from pathlib import Path

import harness
import programs

CARD = programs.ROOT / "scripts" / "card.sh"
GOOD = 'echo "running 2 tests"; echo "test one ... ok"; echo "test two ... ok"; echo "test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured"'
LOADS = """echo 'test entries::all ... {"entry": "norm", "registers": 40, "local_bytes": 0}'; """
TRAINS = """case $1 in
doctor) echo "driver        runs CUDA 13.0"; echo "GPU           0: stand-in" ;;
bench) echo '{"losses": [5.5, 5.4], "step_ms": [1.0, 1.0], "peak_gpu_bytes": [1], "tokens_per_step": 8}' ;;
esac"""


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder, self.out = Path(folder.name), Path(folder.name) / "out"
        for name in programs.PROGRAMS:
            self.stand_in(name, GOOD)
        self.stand_in("kernels-device", LOADS + GOOD)
        self.stand_in("zero-train", TRAINS)

    def stand_in(self, name, script):
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def command(self, *arguments, part="correct"):
        return [CARD, part, "--programs", self.folder, "--out", self.out, *map(str, arguments)]

    def run_card(self, *arguments, mock=True, part="correct", **env):
        env = {**os.environ, "ZERO_TRAIN_PYTHON": sys.executable, "CARD_MOCK": "1" if mock else "", **env}
        done = subprocess.run(self.command(*arguments, part=part), env=env, capture_output=True, text=True)
        self.assertNotIn("Traceback", done.stderr)
        self.assertLessEqual(len(done.stdout.splitlines()), harness.SUMMARY_LINES)
        files = list(self.out.iterdir())
        self.assertLessEqual(len(files), 8)
        self.assertTrue(all(file.stat().st_size < 16 << 20 for file in files))
        self.steps = {}
        for line in (self.out / "card.jsonl").read_text().splitlines():
            step = json.loads(line)
            self.steps[step["step"]] = step
        return done

    def check(self, number, status, reason=None):
        self.assertEqual(self.steps[number]["status"], status, self.steps[number])
        if reason:
            self.assertIn(reason, self.steps[number]["reason"])

    def test_what_is_right_is_ok(self):
        done = self.run_card("--steps", 1, 2, 3, 5)
        self.assertEqual(done.returncode, 0, done.stdout)
        for number in (1, 2, 3, 5):
            self.check(number, "ok")
        self.assertEqual(self.steps[5]["figures"]["tests"]["gpu"], {"passed": 2, "failed": 0, "skipped": 0})
        self.assertIn("4 ok", done.stdout.splitlines()[0])

    def test_a_test_that_fails(self):
        self.stand_in("kernels", """echo 'test attention::forward ... '
echo "thread 'attention::forward' panicked at tests/attention.rs:7:5:"; echo "0.5 for 0.25"; echo FAILED; echo "failures:"; echo
echo "failures:"; echo "    attention::forward"; echo; echo "test result: FAILED. 1 passed; 1 failed; 0 ignored"; exit 101""")
        done = self.run_card("--steps", 2, 3, 5)
        self.assertEqual(done.returncode, 1)
        self.check(3, "failed", "attention::forward: 0.5 for 0.25 (tests/attention.rs:7:5)")
        self.check(5, "ok")

    def test_a_test_that_is_skipped(self):
        for reason, status in [("built without kernels", "failed"), ("needs 2 GPUs", "ok"), ("only the mock can do this", "ok")]:
            self.stand_in("ops", f'echo "test one ... skipped: {reason}"; echo ok; {GOOD}')
            done = self.run_card("--steps", 5)
            self.check(5, status, None if status == "ok" else f"ops: skipped: {reason}")
            self.assertEqual(done.returncode == 0, status == "ok")
        self.assertEqual(self.steps[5]["figures"]["tests"]["ops"], {"passed": 1, "failed": 0, "skipped": 1})

    def test_programs_that_crash_do_nothing_or_are_missing(self):
        self.stand_in("candle_device", 'echo "test one ... ok"; echo "test two ... "; kill -SEGV $$')
        self.stand_in("ops", 'echo "test result: ok. 0 passed; 0 failed; 0 ignored"')
        (self.folder / "gpu").unlink()
        self.run_card("--steps", 3, 5)
        self.check(3, "ok")
        self.check(5, "failed", "does not start")
        self.check(5, "failed", "candle_device was ended by SIGSEGV, in two")
        self.check(5, "failed", "ops gpu::: no test ran")

    def test_a_step_that_takes_too_long(self):
        self.stand_in("kernels", f'echo "test one ... "; sleep 60 & echo $! > {self.folder}/pid; wait')
        started = time.monotonic()
        done = self.run_card("--steps", 3, 5, "--limit", 1.5)
        self.assertLess(time.monotonic() - started, 30)
        self.assertEqual(done.returncode, 1)
        self.check(3, "timeout", "in one")
        self.check(5, "ok")
        pid = int((self.folder / "pid").read_text())
        self.assertFalse(Path(f"/proc/{pid}/cmdline").exists() and b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes())

    def test_bits_that_differ(self):
        self.stand_in("zero-train", f"""touch {self.folder}/ran; echo x >> {self.folder}/ran
echo '{{"losses": [5.5, 5.'$(wc -l < {self.folder}/ran)'], "step_ms": [1], "peak_gpu_bytes": null, "tokens_per_step": 8}}'""")
        self.run_card("--steps", 6)
        self.check(6, "failed", "the second run has other losses from step 2 on: 5.2 for 5.1")

    def test_much_output_is_cut(self):
        self.stand_in("kernels", f"head -c 40000000 /dev/zero | tr '\\0' x; echo; echo the end; {GOOD}")
        self.run_card("--steps", 3)
        self.check(3, "ok")
        log = (self.out / "card.log").read_text()
        self.assertTrue(len(log) < 1 << 20 and "the end" in log and "are left out" in log)

    def test_a_run_that_is_ended_tells_what_it_has(self):
        self.stand_in("kernels", "sleep 60")
        running = subprocess.Popen(
            self.command("--steps", 2, 3, 5), env=os.environ | {"CARD_MOCK": "1"}, stdout=subprocess.PIPE, text=True
        )
        while '"step": 2' not in ((self.out / "card.jsonl").read_text() if (self.out / "card.jsonl").exists() else ""):
            time.sleep(0.1)
        time.sleep(0.5)
        running.send_signal(signal.SIGTERM)
        text = running.communicate(timeout=20)[0]
        self.assertEqual(running.returncode, 1)
        self.assertIn("  3  failed", text)
        self.assertIn("  5  skipped", text)

    def test_tools_of_nvidia(self):
        self.run_card("--steps", 12, 14, part="extra", PATH="/usr/bin:/bin")
        self.check(12, "skipped", "compute-sanitizer is not installed")
        self.check(14, "skipped", "ncu is not installed")
        self.stand_in("kernels", 'echo "attention::forward: test"; echo "norm::rows: test"')
        self.stand_in("compute-sanitizer", """shift; tool=$1; shift 3; case "$tool $2" in
"memcheck norm::") echo "========= ERROR SUMMARY: 2 errors"; exit 77 ;;
memcheck*) echo "========= ERROR SUMMARY: 0 errors" ;;
*) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" ;;
esac""")
        rows = [("norm", "us", "1.5"), ("mma", "ns", "2,500"), ("mma", "ns", "500")]
        line = '"1","gpu__time_duration.sum","%s","%s","%s"'
        one, two = (r"\n".join(line % row for row in rows * steps) for steps in (1, 2))
        self.stand_in("ncu", f"""echo "==PROF== Connected"; echo '"ID","Metric Name","Kernel Name","Metric Unit","Metric Value"'
case "$*" in *"--steps 1") printf '{one}\n' ;; *) printf '{two}\n' ;; esac""")
        self.run_card("--steps", 12, 14, part="extra", PATH=f"{self.folder}:{os.environ['PATH']}")
        self.check(12, "failed", "memcheck of norm: 2 errors")
        self.assertEqual(self.steps[12]["figures"]["ran"]["racecheck attention"], "0 hazards displayed (0 errors, 0 warnings)")
        self.check(14, "ok")
        self.assertEqual(self.steps[14]["figures"], {"launches_a_step": 3, "us_a_step": 4.5, "kernels": {"mma": [2, 3.0], "norm": [1, 1.5]}})

    def test_a_pack_is_unpacked_and_the_card_is_asked_for(self):
        pack = self.folder / "card.tar.xz"
        self.stand_in("kernels", f'echo "$ZERO_TRAIN_CUDA_TESTS $LD_LIBRARY_PATH"; {GOOD}')
        with tarfile.open(pack, "w:xz") as archive:
            for name in programs.PROGRAMS:
                archive.add(self.folder / name, name)
        command = [CARD, "correct", "--pack", pack, "--out", self.out, "--steps", "3"]
        done = subprocess.run(command, env=os.environ | {"CARD_MOCK": "", "LD_LIBRARY_PATH": "/driver"}, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex((self.out / "card.log").read_text(), "\n1 /driver")


if __name__ == "__main__":
    unittest.main()
