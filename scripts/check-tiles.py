#!/usr/bin/env python3
"""Checks that the inner loops of matrix products keep their sums in registers: check-tiles.py [PROGRAM]

Compiles ops/src/product/tile/ alone, as a release build does, and disassembles it; with a PROGRAM, such as
target/release/zero-train, it disassembles that instead. In every innermost loop that multiplies and adds vectors, an instruction that
moves a vector to or from the stack is an error: a sum without a register waits for a store and a load in every iteration, which halved
the speed of the AVX2 tile of 4 x 24. The loop of a full tile may have few other instructions than multiplications: with AVX2, ten for
twelve; with AVX-512, sixteen for 24. Of these, eight load operands with AVX2, and fourteen load or prefetch them with AVX-512. Further ones,
which compute addresses, slowed the AVX2 tile down by a third while another program ran on the second hardware thread of the core. It is also
an error if the loops of the full tiles are not found. Supports x86-64 only.
"""

import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TILE = Path(__file__).resolve().parent.parent / "ops/src/product/tile/mod.rs"
# The module's dependencies, and calls that keep its functions from being removed.
AROUND = """
extern crate self as zero_isa;

#[derive(Clone, Copy, PartialEq)]
pub enum Vectors { Baseline, Avx2, Avx512 }

#[allow(dead_code)]
pub mod ops {
    pub mod kernel {
        #[derive(Clone, Copy)]
        pub struct Isa(pub zero_isa::Vectors);
        impl Isa {
            pub fn current() -> Self { Isa(zero_isa::Vectors::Avx512) }
            pub fn vectors(self) -> zero_isa::Vectors { self.0 }
        }
    }
    pub mod product {
        #[path = "TILE"]
        pub(crate) mod tile;
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn keep(tile: *const std::ffi::c_void, isa: *const ops::kernel::Isa) {
    unsafe {
        (*tile.cast::<ops::product::tile::Tile>()).compute(*isa);
        (*tile.cast::<ops::product::tile::Tile>()).compute_pairs();
    }
}
"""

MODULE = "ops7product4tile"
MULTIPLIES = re.compile(r"^(vfn?m(add|sub)\w*p[sd]|vdpbf16ps)\b")
VECTOR = re.compile(r"%[xyz]mm\d")
JUMP = re.compile(r"^j\w+\s+([0-9a-f]+)\b")
# Full tiles: the multiply instruction, the registers, the multiplications of a step, and the most other instructions. An iteration has
# four steps.
STEPS = 4
FULL = {
    "AVX2": ("vfmadd", "%ymm", 12, 10),
    "AVX-512": ("vfmadd", "%zmm", 24, 16),
    "AVX512_BF16": ("vdpbf16ps", "%zmm", 24, 16),
}


def output(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def compiled(folder):
    """Compiles a library with only the tiles."""
    source, library = Path(folder, "tiles.rs"), Path(folder, "libtiles.so")
    source.write_text(AROUND.replace("TILE", str(TILE)))
    options = ["--edition=2024", "--crate-type=cdylib", "-Copt-level=3", "-o", str(library)]
    output("rustc", *options, str(source))
    return str(library)


def functions(program):
    """Name, start and end address of each function of the module, in address order."""
    found = set()
    for line in output("nm", "--print-size", "--defined-only", program).splitlines():
        address, size, kind, name = (line.split(None, 3) + [""])[:4]
        if kind in "tT" and MODULE in name:
            start = int(address, 16)
            found.add((start, start + int(size, 16), name))
    return sorted(found)


def instructions(program, functions):
    """The text of each instruction by address; functions that are close together are disassembled in one go."""
    stretches = []
    for start, end, _ in functions:
        if stretches and start - stretches[-1][1] < 1 << 16:
            stretches[-1][1] = max(end, stretches[-1][1])
        else:
            stretches.append([start, end])
    found = {}
    for start, end in stretches:
        addresses = [f"--start-address={start:#x}", f"--stop-address={end:#x}"]
        for line in output("objdump", "-d", "--no-show-raw-insn", *addresses, program).splitlines():
            address, colon, text = line.partition(":\t")
            if colon:
                found[int(address, 16)] = " ".join(text.split())
    return found


def innermost_loops(code):
    """The instructions of each innermost loop; `code` is a list of (address, text) of one function."""
    back = []
    first = code[0][0] if code else 0
    for address, text in code:
        jump = JUMP.match(text)
        if jump and first <= int(jump[1], 16) <= address:
            back.append((int(jump[1], 16), address))
    for start, end in back:
        if not any((start, end) != other and start <= other[0] and other[1] <= end for other in back):
            yield [text for address, text in code if start <= address <= end]


def on_stack(loop, frame_pointer):
    """Instructions that read or write a vector on the stack."""
    base = r"\(%r[sb]p" if frame_pointer else r"\(%rsp"
    return [text for text in loop if re.search(base, text) and VECTOR.search(text)]


def check(program):
    """Returns the numbers of loops and functions, the problems, and the full tiles found."""
    found, wrong, full, loops = functions(program), [], set(), 0
    code = instructions(program, found)
    for start, end, name in found:
        body = [(address, code[address]) for address in sorted(code) if start <= address < end]
        frame_pointer = any(text in ("mov %rsp,%rbp", "movq %rsp, %rbp") for _, text in body)
        for loop in innermost_loops(body):
            products = [text for text in loop if MULTIPLIES.match(text) and VECTOR.search(text)]
            loops += bool(products)
            for tile, (operation, register, least, others) in FULL.items():
                if sum(text.startswith(operation) and register in text for text in products) >= STEPS * least:
                    full.add(tile)
                    if len(loop) - len(products) > STEPS * others:
                        wrong.append(f"{name}: {len(loop)} instructions for {len(products)} multiplications")
            wrong += [f"{name}: {text}" for text in on_stack(loop, frame_pointer) if products]
    return loops, len(found), wrong, full


def main():
    if len(sys.argv) > 2 or sys.argv[1:2] == ["--help"]:
        sys.exit(__doc__)
    programs = sys.argv[1:]
    missing = [tool for tool in ("nm", "objdump", *([] if programs else ["rustc"])) if not shutil.which(tool)]
    if missing:
        return print(f"skipped: no {' and no '.join(missing)}")
    if platform.machine() != "x86_64":
        return print("skipped: not an x86-64 machine")
    with tempfile.TemporaryDirectory() as folder:
        loops, functions, wrong, full = check(programs[0] if programs else compiled(folder))
    wrong += [f"no loop of a full tile with {tile} was found" for tile in FULL if tile not in full]
    if wrong:
        sys.exit("inner loops of products use the stack, have too many instructions, or are missing:\n  " + "\n  ".join(wrong))
    print(f"{loops} inner loops of products in {functions} functions, no vector on the stack")


if __name__ == "__main__":
    main()
