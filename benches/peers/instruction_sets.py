"""Holds PyTorch, DeepSpeed and zero-train to one instruction set, so that a set can be compared on any processor that has it.

`world.py` and `compare.py` set these variables for the processes that they start: ATen's own loops, MKL (matrix products in f32; the
variable works on Intel's processors alone, on others MKL chooses by itself), oneDNN (products in bf16) and zero-train. gloo has no such
choice. DeepSpeed compiles its operators for the machine; `hold_deepspeed` compiles them for the set instead, in a folder of its own, all but
the sums of its communication on one host, which are AVX-512 by its source where the processor has it.

    python instruction_sets.py              # shows that each variable works: rates of PyTorch with and without it
"""

import os
import statistics
import subprocess
import sys
import time

# What DEFAULT's processes see is what the user has set.
DEFAULT = "default"
SETS = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ZERO_TRAIN_ISA": "avx2",
    },
    "avx512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "ZERO_TRAIN_ISA": "avx512",
    },
}
# What the compiler of DeepSpeed's operators is told in place of -march=native, and their own switch.
OPERATORS = {"avx2": ("-march=x86-64-v3", "-D__AVX256__"), "avx512": ("-march=x86-64-v4", "-D__AVX512__")}
# Tells a process that `held` made which set it is held to.
CHOSEN = "ZERO_TRAIN_PEERS_ISA"


def held(isa):
    """The variables of processes that are held to a set; none for the default."""
    return {} if isa == DEFAULT else SETS[isa] | {CHOSEN: isa}


def chosen():
    return os.environ.get(CHOSEN, DEFAULT)


def hold_deepspeed():
    """Before DeepSpeed loads an operator: it is compiled for the set of this process."""
    if chosen() != DEFAULT:
        from deepspeed.ops.op_builder.builder import OpBuilder

        arch, width = OPERATORS[chosen()]
        OpBuilder.cpu_arch = lambda self: arch
        OpBuilder.simd_width = lambda self: width


def rates():
    """Of one thread of PyTorch: GFLOP/s of products in f32 and bf16, GB/s of GELU, each the median of some."""
    import torch

    torch.set_num_threads(1)

    def median(work):
        work()
        times = []
        for _ in range(15):
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    left, right, wide = torch.randn(1024, 384), torch.randn(384, 1536), torch.randn(1024, 1536)
    operations, moved = 2 * 1024 * 384 * 1536, 8 * wide.numel()
    f32 = operations / median(lambda: left @ right) / 1e9
    left, right = left.bfloat16(), right.bfloat16()
    bf16 = operations / median(lambda: left @ right) / 1e9
    gelu = moved / median(lambda: torch.nn.functional.gelu(wide, approximate="tanh")) / 1e9
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"f32 {f32:7.1f} GFLOP/s   bf16 {bf16:7.1f} GFLOP/s   GELU {gelu:5.1f} GB/s   ATen {capability}")


def main():
    if sys.argv[1:] == ["rates"]:
        return rates()
    for isa, variables in SETS.items():
        names = [name for name in variables if not name.startswith("ZERO")]
        for shown in [[], *([name] for name in names), names]:
            only = {name: variables[name] for name in shown}
            print(f"{isa:<8}{', '.join(shown) or 'as installed':<66}", end="", flush=True)
            subprocess.run([sys.executable, __file__, "rates"], env=os.environ | only, check=True)


if __name__ == "__main__":
    main()
