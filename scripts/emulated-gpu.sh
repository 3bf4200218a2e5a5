#!/usr/bin/env bash
# Builds `zero-train` for the emulated GPU of docs/gpu-kernels.md, and a folder with it and the libraries that stand for NVIDIA's. Prints what finds
# them, so that the shell can take it; a C and a C++ compiler must be there. Arguments go to `cargo build`:
#
#     eval "$(scripts/emulated-gpu.sh)"
#     zero-train doctor
set -euo pipefail
cd "$(dirname "$0")/.."

# The capability tells cargo this build from one by another compiler.
built=$(PATH="$PWD/scripts/emulated-nvcc:$PATH" CUDA_COMPUTE_CAP=80 cargo build -p zero-train-cli --bin zero-train --features cuda \
    --message-format json-render-diagnostics "$@" | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
[[ -x $built ]] || { echo "cargo has built no zero-train" >&2; exit 1; }
folder=$(cd "$(dirname "$built")/.." && pwd)/emulated-gpu
mkdir -p "$folder"
# Where cargo has put it, a build without the feature takes its place.
ln -f "$built" "$folder/zero-train" 2>/dev/null || cp "$built" "$folder/zero-train"
cuda/tests/mock/build.sh "$folder"
printf 'export PATH="%s:$PATH" LD_LIBRARY_PATH="%s${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"\n' "$folder" "$folder"
