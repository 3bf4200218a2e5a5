"""Starts the ranks of a PyTorch program on this host, as torchrun does, without its supervisor."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import instruction_sets

# Tokens, weights and compiled operators lie in the virtual environment, one folder to delete, or where ZERO_TRAIN_PEERS says.
WORK = Path(os.environ.get("ZERO_TRAIN_PEERS", Path(sys.prefix) / "peers"))
LIMIT_SECONDS = 600


def environment(threads, isa=instruction_sets.DEFAULT):
    """What PyTorch and DeepSpeed read when they are imported: CPU only, over loopback."""
    held = instruction_sets.held(isa)
    return {
        # DeepSpeed looks for ninja.
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        # Operators of each instruction set in a folder of their own.
        "TORCH_EXTENSIONS_DIR": str(WORK / ("torch_extensions" + (f"-{isa}" if held else ""))),
        "PYTHONWARNINGS": "ignore",
        **held,
    }


def run(arguments, ranks, threads, preload=None, isa=instruction_sets.DEFAULT):
    """What rank 0 of `python arguments…` prints, run as so many ranks with so many threads each; ends if one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = os.environ | environment(threads, isa)
    world |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if preload:
        world["LD_PRELOAD"] = str(preload.resolve())
    # Whoever ends this program ends the ranks too.
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
