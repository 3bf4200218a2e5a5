"""Restricts PyTorch, DeepSpeed and zero-train to one instruction set, so that it can be compared on any processor that has it.

`world.py` and `compare.py` set these variables for the processes that they start. They control ATen's own loops, MKL (f32 matrix products; the
variable works only on Intel's processors), oneDNN (bf16 products) and zero-train. gloo has no such variable. DeepSpeed compiles its operators
for the machine; `hold_deepspeed` compiles them for the set instead, in a separate folder. The exception is the sum in its communication on one
host: its source uses AVX-512 wherever the processor has it.

    python instruction_sets.py              # shows that each variable works: rates of PyTorch with and without it
"""

import os
import statistics
import subprocess
import sys
import time

# DEFAULT leaves the user's variables as they are.
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
# The compiler flags for DeepSpeed's operators in place of -march=native, and the operators' own switch.
OPERATORS = {"avx2": ("-march=x86-64-v3", "-D__AVX256__"), "avx512": ("-march=x86-64-v4", "-D__AVX512__")}
# The variable that tells a process started with `held` its instruction set.
CHOSEN = "ZERO_TRAIN_PEERS_ISA"


def held(isa):
    """The environment variables for processes restricted to a set; none for the default."""
    return {} if isa == DEFAULT else SETS[isa] | {CHOSEN: isa}


def chosen():
    return os.environ.get(CHOSEN, DEFAULT)


def hold_deepspeed():
    """Makes DeepSpeed compile its operators for this process's set. Call it before DeepSpeed loads an operator."""
    if chosen() != DEFAULT:
        from deepspeed.ops.op_builder.builder import OpBuilder

        arch, width = OPERATORS[chosen()]
        OpBuilder.cpu_arch = lambda self: arch
        OpBuilder.simd_width = lambda self: width


def rates():
    """Rates of one PyTorch thread: GFLOP/s of f32 and bf16 products, GB/s of GELU; each the median of several runs."""
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
