#!/bin/sh
# Runs all comparisons of docs/benchmarks.md, one call each: suite.sh PYTHON ZERO-TRAIN RESULTS
#
# PREFIX="chrt -f 20" gives each call real-time priority on a machine that is not idle, for both sides. ISA=avx2
# restricts both sides of each call to that instruction set, and the comparisons to f32.
set -eu

python=$1 binary=$2 results=$3
here=$(dirname "$0")

compare() {
    # shellcheck disable=SC2086 # PREFIX is a command with its options
    ${PREFIX:-} "$python" "$here/compare.py" --binary "$binary" --results "$results" --isa "${ISA:-default}" "$@"
}

for preset in 10m 124m; do
    compare --preset $preset --peer ddp --stages 0 1 2 3
    compare --preset $preset --peer fsdp2
    for stage in 0 1 2 3; do
        compare --preset $preset --peer deepspeed-$stage
    done
    for layout in 1x1 1x2; do
        compare --preset $preset --peer plain --layout $layout
    done
    for peer in ddp fsdp2 deepspeed-1 deepspeed-2 deepspeed-3; do
        [ "${ISA:-default}" = avx2 ] || compare --preset $preset --peer $peer --dtype bf16
        compare --preset $preset --peer $peer --accumulation 4
    done
done
