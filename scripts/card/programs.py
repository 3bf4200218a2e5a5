"""The programs that run on a card, how they are built, and the libraries that they use.

`python3 programs.py release` builds them with the compiler of kernels in the PATH and prints the name and path of each, for `card-pack.sh`.
"""

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# By name in the pack: folder of the crate, kind and name of the target.
PROGRAMS = {
    "zero-train": ("cli", "bin", "zero-train"),
    "kernels-device": ("cuda/kernels", "test", "device"),
    "kernels": ("cuda/kernels", "test", "kernels"),
    "candle_device": ("ops", "test", "candle_device"),
    "ops": ("ops", "test", "ops"),
    "gpu_blocks": ("model", "test", "gpu_blocks"),
    "gpu": ("trainer", "test", "gpu"),
    "nccl-device": ("comm/nccl", "test", "device"),
}
# The packages built with the feature `cuda`. .ci/run uses the same selection: another one would change candle's
# features and recompile it.
PACKAGES = (ROOT / "scripts/card/packages.txt").read_text().split()


def build(*options, env=None):
    """Builds all programs with one command; returns their paths."""
    command = ["cargo", "test", "--no-run", "--message-format", "json-render-diagnostics", *options]
    for package in PACKAGES:
        command += ["-p", package]
    command += ["--features", ",".join(f"{package}/cuda" for package in PACKAGES)]
    # Cargo builds the binary along with a test of its crate; `architecture` is the smallest test.
    for test in sorted({name for _, kind, name in PROGRAMS.values() if kind == "test"} | {"architecture"}):
        command += ["--test", test]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"cargo ended with status {done.returncode}")
    built = {}
    for line in done.stdout.splitlines():
        message = json.loads(line) if line.startswith("{") else {}
        if message.get("executable"):
            folder = Path(message["manifest_path"]).parent.relative_to(ROOT)
            built[str(folder), message["target"]["kind"][0], message["target"]["name"]] = Path(message["executable"])
    missing = [name for name, target in PROGRAMS.items() if target not in built]
    if missing:
        sys.exit(f"cargo has built no {', '.join(missing)}")
    return {name: built[target] for name, target in PROGRAMS.items()}


def emulated():
    """Builds the programs for the emulated GPU."""
    # The emulator's compiler replaces nvcc; the capability makes cargo keep the builds of the two apart.
    folder = ROOT / "cuda/emulator/nvcc"
    path = f"{folder}:{os.environ['PATH']}"
    return build(env=os.environ | {"PATH": path, "NVCC": str(folder / "nvcc"), "CUDA_COMPUTE_CAP": "80"})


def unpacked(pack, folder):
    """Unpacks the programs of a pack."""
    with tarfile.open(pack) as archive:
        archive.extractall(folder, filter="data")
    return within(folder)


def within(folder):
    return {name: Path(folder) / name for name in PROGRAMS}


def of_python(name):
    """Whether this Python has a module; does not import it."""
    return importlib.util.find_spec(name) is not None


def library_folders():
    """Folders where NVIDIA's libraries may be: PyTorch's wheels in either layout, a toolkit, a mounted driver."""
    sites = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    if found := importlib.util.find_spec("torch"):
        sites.append(Path(found.origin).parents[1])
    found = []
    for site in sites:
        # CUDA 13's wheels have nvidia/cu13/lib and nvidia/nccl/lib, CUDA 12's have nvidia/cublas/lib and so on.
        found += sorted(site.glob("nvidia/*/lib"), key=lambda path: (path.parent.name != "cu13", path))
    found += [Path("/usr/local/nvidia/lib64"), Path("/usr/local/nvidia/lib"), Path("/usr/local/cuda/lib64")]
    return list(dict.fromkeys(str(path) for path in found if path.is_dir()))


def environment(folders, first=()):
    """The environment of our programs: appends these folders to LD_LIBRARY_PATH, which may already name the driver's
    folder."""
    own = os.environ.get("LD_LIBRARY_PATH", "")
    path = [*first, *filter(None, own.split(":")), *folders]
    return os.environ | {"LD_LIBRARY_PATH": ":".join(path), "RUST_BACKTRACE": "1", "NO_COLOR": "1"}


if __name__ == "__main__":
    for name, path in build("--release" if sys.argv[1:] == ["release"] else "--profile=dev").items():
        print(f"{name}\t{path}")
