"""`card.sh correct|speed|extra`: finds the programs and their libraries, runs the steps of one part, and prints the
results."""

import argparse
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness
import programs
from programs import ROOT

PACK = ROOT / "target" / "card" / "card.tar.xz"


class Card:
    """The environment of the steps: programs, environment variables, and a work folder."""

    def __init__(self, chosen, work):
        self.mock, self.work = bool(os.environ.get("CARD_MOCK")), work
        # A card gets new random inputs each time; CI must be deterministic.
        self.seed = int(os.environ.get("ZERO_TRAIN_TEST_SEED") or (0 if self.mock else secrets.randbelow(1 << 31)))
        self.pack = chosen.pack
        first = [str(self.mock_libraries())] if self.mock else []
        self.env = programs.environment(programs.library_folders(), first)
        self.test_env = programs.environment([] if self.mock else programs.library_folders())
        if not self.mock:
            self.test_env["ZERO_TRAIN_CUDA_TESTS"] = "1"
        # One test at a time on a card, since timings and counters there are per process. Emulated kernels can run in
        # parallel.
        self.threads = (os.cpu_count() or 1) if self.mock else 1
        self.programs = self.found(chosen)
        self.binary = self.wrapped(self.programs["zero-train"])
        # The folder for files of benches/peers. PyTorch keeps its own libraries; ours are set by the wrapper.
        self.peers = work / "peers"
        self.torch_env = os.environ | {"ZERO_TRAIN_PEERS": str(self.peers), "PYTHONWARNINGS": "ignore"}

    def mock_libraries(self):
        folder = ROOT / "target" / "card" / "mock"
        done = subprocess.run([ROOT / "cuda/emulator/mock/build.sh", folder], stderr=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"the mock of the driver does not compile:\n{done.stderr}")
        return folder

    def found(self, chosen):
        if chosen.programs:
            return programs.within(chosen.programs.resolve())
        if not self.mock:
            return programs.unpacked(chosen.pack, self.work / "programs")
        return programs.emulated()

    def wrapped(self, binary):
        """A script that runs `zero-train` with its libraries, for callers with another environment."""
        wrapper = self.work / "zero-train"
        wrapper.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH="{self.env["LD_LIBRARY_PATH"]}" exec "{binary}" "$@"\n')
        wrapper.chmod(0o755)
        return wrapper

    def has_torch(self):
        return programs.of_python("torch")

    def needs_torch(self):
        if not self.has_torch():
            raise harness.Skipped(f"{sys.executable} has no PyTorch")


def arguments():
    parser = argparse.ArgumentParser(prog="card.sh", description=__doc__)
    parser.add_argument("part", choices=["correct", "speed", "extra"])
    parser.add_argument("--pack", type=Path, default=PACK, help="what card-pack.sh wrote [default: target/card/card.tar.xz]")
    parser.add_argument("--out", type=Path, default=ROOT / "target" / "card" / "out", help="folder of the results")
    parser.add_argument("--steps", type=int, nargs="+", help="only these")
    parser.add_argument("--programs", type=Path, help="a folder of the programs, instead of a pack or cargo's")
    parser.add_argument("--limit", type=float, help="seconds for each step, instead of its own")
    return parser.parse_args()


def main():
    chosen = arguments()
    part = __import__(chosen.part)
    steps = [step for step in part.STEPS if not chosen.steps or step[0] in chosen.steps]
    if os.environ.get("CARD_MOCK"):
        if not shutil.which(os.environ.get("CXX", "c++")):
            print("skipped: no C++ compiler for the emulated GPU")
            return
        # The emulator is slow, and its machine may be shared.
        steps = [(number, name, 5 * seconds, function) for number, name, seconds, function in steps]
    started = time.monotonic()
    folder = harness.Folder(chosen.out)
    with tempfile.TemporaryDirectory(prefix="card-") as work:
        card = Card(chosen, Path(work))
        seconds = time.monotonic() - started
        title = f"{chosen.part}{' on the emulated GPU' if card.mock else ''} (programs after {seconds:.0f} s)"
        bound = [(number, name, limit, lambda step, run=run: run(card, step)) for number, name, limit, run in steps]
        # Such machines limit a command to ten minutes.
        most = None if card.mock else 580 - seconds
        good = harness.run(title, bound, folder, chosen.limit, most)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
