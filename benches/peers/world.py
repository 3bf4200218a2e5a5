"""Starts the ranks of a PyTorch program on this host, like torchrun but without a supervisor."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import instruction_sets

# The folder for tokens, weights and compiled operators: inside the virtual environment, or the folder that
# ZERO_TRAIN_PEERS names.
WORK = Path(os.environ.get("ZERO_TRAIN_PEERS", Path(sys.prefix) / "peers"))
LIMIT_SECONDS = 600


def environment(threads, isa=instruction_sets.DEFAULT):
    """The environment that PyTorch and DeepSpeed read on import: CPU only, over loopback."""
    held = instruction_sets.held(isa)
    return {
        # DeepSpeed needs ninja in the path.
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        # A separate folder for the operators of each instruction set.
        "TORCH_EXTENSIONS_DIR": str(WORK / ("torch_extensions" + (f"-{isa}" if held else ""))),
        "PYTHONWARNINGS": "ignore",
        **held,
    }


def run(arguments, ranks, threads, preload=None, isa=instruction_sets.DEFAULT):
    """Runs `python arguments…` as `ranks` ranks with `threads` threads each; returns the output of rank 0, and exits
    if a rank fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = os.environ | environment(threads, isa)
    world |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if preload:
        world["LD_PRELOAD"] = str(preload.resolve())
    # A signal to this program must also end the ranks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        processes = [
            subprocess.Popen(
                [sys.executable, *arguments],
                env=world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=output if rank == 0 else errors,
                stderr=errors,
            )
            for rank in range(ranks)
        ]
        try:
            failed = any([process.wait(LIMIT_SECONDS) for process in processes])
        finally:
            for process in processes:
                process.kill()
        output.seek(0)
        errors.seek(0)
        if failed:
            sys.exit(f"{' '.join(arguments)} failed:\n{errors.read()[-4000:]}")
        return output.read()
