#!/bin/sh
# Builds or updates a folder of libraries that stand in for NVIDIA's: `build.sh FOLDER`. The C compiler is cc, or the
# one that CC names.
set -eu
from=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
cd "$1"
compile() {
    name=$1
    source=$2
    shift 2
    [ ! -e "$name" ] || [ -n "$(find "$from" -type f -newer "$name")" ] || return 0
    ${CC:-cc} -std=gnu11 -O3 -ffp-contract=off -fPIC -shared -pthread "-Wl,-soname,$name" '-Wl,-rpath,$ORIGIN' \
        -o "$name.$$" "$from/$source" "$@"
    # Renamed atomically: another program may be loading the old file.
    mv "$name.$$" "$name"
}
compile libcuda.so.1 driver.c -ldl
# These libraries use the driver's streams.
compile libnccl.so.2 nccl.c ./libcuda.so.1
compile libcublas.so.13 cublas.c ./libcuda.so.1
compile libcublasLt.so.13 cublaslt.c ./libcuda.so.1 -lm
compile libcurand.so.10 curand.c ./libcuda.so.1 -lm
