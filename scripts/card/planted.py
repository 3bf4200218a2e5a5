"""Checks that `CARD_MOCK=1 card.sh correct` detects faults in kernels: runs the tests of its step 3 on copies of the sources with planted faults.

`python3 scripts/card/planted.py`
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import harness
import libtest
import programs

SOURCES = programs.ROOT / "cuda" / "kernels" / "cu"
# Groups of faults: file, original text (which occurs once), replacement, and the test that must fail.
PLANTED = {
    "a wrong fragment": [
        (
            "attention_tensor.cu",
            "Factors values = transposed(now.second, 16 * part, 16 * s);",
            "Factors values = columns(now.second, 16 * part, 16 * s);",
            "attention::every_dtype_and_head_size",
        ),
    ],
    "a missing wait for copies, and a missing barrier": [
        (
            "attention_tiles.cuh",
            "    end_copies();\n    __syncthreads();",
            "    __syncthreads();",
            "attention::every_dtype_and_head_size",
        ),
        (
            "norm.cu",
            "    room[threadIdx.x] = sum;\n    __syncthreads();",
            "    room[threadIdx.x] = sum;",
            "norm::norms_and_their_gradients",
        ),
    ],
}


def plant(folder, faults):
    """Copies the sources and plants these faults."""
    folder.mkdir()
    for path in SOURCES.iterdir():
        text = path.read_text()
        for file, right, wrong, _ in faults:
            if file == path.name:
                if text.count(right) != 1:
                    sys.exit(f"{path}: {text.count(right)} places where a fault is to be planted, not 1: {right}")
                text = text.replace(right, wrong)
        (folder / path.name).write_text(text)
    missing = {file for file, *_ in faults} - {path.name for path in SOURCES.iterdir()}
    if missing:
        sys.exit(f"{SOURCES} has no {', '.join(sorted(missing))}")


def main():
    if not shutil.which(os.environ.get("CXX", "c++")):
        print("skipped: no C++ compiler for the emulated GPU")
        return
    built = programs.emulated()
    with tempfile.TemporaryDirectory() as work:
        for number, (what, faults) in enumerate(PLANTED.items()):
            folder, tests = Path(work) / str(number), [test for *_, test in faults]
            plant(folder, faults)
            step = harness.Step(number, what, 300, harness.Folder(Path(work) / "out"))
            env = programs.environment([]) | {"ZERO_TRAIN_KERNEL_SOURCES": str(folder)}
            libtest.tests(step, built, "kernels", *tests, env=env, threads=os.cpu_count() or 1)
            said = "; ".join(step.problems)
            if unseen := [test for test in tests if test not in said]:
                sys.exit(f"{what}: {', '.join(unseen)} did not fail: {said or 'all is well'}")
            print(f"{what}: found: {said}")


if __name__ == "__main__":
    main()
