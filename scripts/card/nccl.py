"""Shrinks a newer NCCL so that it can be shipped beside the pack, for several ranks on one card: `python3 nccl.py [WHEEL] [OUT]`.

    python3 -m pip download --no-deps --dest . nvidia-nccl-cu13
    python3 scripts/card/nccl.py nvidia_nccl_cu13-*.whl

OUT defaults to target/card/libnccl.so.2.xz. The library has code for every chip; all code except that for compute
capability 90 is zeroed, which compresses to nothing. `strip`, of binutils, removes the debugging information.
"""

import lzma
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

OUT = Path(__file__).resolve().parents[2] / "target" / "card" / "libnccl.so.2.xz"
KEPT = 90
SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
MAGIC = 0xBA55ED50


def sections(library):
    """Yields (name, offset, size) of each section of an ELF file."""
    (table,) = struct.unpack_from("<Q", library, 40)
    size, count, names = struct.unpack_from("<HHH", library, 58)
    found = [struct.unpack_from("<IIQQQQ", library, table + index * size) for index in range(count)]
    for name, _, _, _, offset, length in found:
        at = found[names][4] + name
        yield bytes(library[at : library.index(b"\0", at)]), offset, length


def cleared(library, offset, length):
    """Zeroes the code of other chips in a section; returns the number of bytes."""
    at, end, total = offset, offset + length, 0
    while at < end:
        magic, _, header, size = struct.unpack_from("<IHHQ", library, at)
        if magic != MAGIC:
            # Padding before the next fat binary.
            at += 8
            continue
        entry, at = at + header, at + header + size
        while entry < at:
            _, _, header, size = struct.unpack_from("<HHIQ", library, entry)
            (chip,) = struct.unpack_from("<I", library, entry + 28)
            if chip != KEPT:
                library[entry + header : entry + header + size] = bytes(size)
                total += size
            entry += header + size
    return total


def main():
    if not shutil.which("strip"):
        sys.exit("there is no `strip`: install binutils")
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("/libnccl.so.2"))
        library = bytearray(wheel.read(name))
    total = sum(cleared(library, offset, length) for name, offset, length in sections(library) if name in SECTIONS)
    if not total:
        sys.exit("there is no code of other chips in it")
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else OUT
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=out.parent) as file:
        file.write(library)
        file.flush()
        subprocess.run(["strip", file.name], check=True)
        stripped = Path(file.name).read_bytes()
    out.write_bytes(lzma.compress(stripped, preset=9))
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB; {total / 1e6:.0f} of {len(library) / 1e6:.0f} MB were code of other chips")


if __name__ == "__main__":
    main()
