#!/usr/bin/env bash
# Builds `zero-train` for the emulated GPU of docs/gpu-kernels.md, in a folder with the libraries that stand in for
# NVIDIA's. Prints shell commands that add the folder to PATH and LD_LIBRARY_PATH. Needs a C and a C++ compiler.
# Arguments are passed to `cargo build`:
#
#     eval "$(cuda/emulator/emulated-gpu.sh)"
#     zero-train doctor
set -euo pipefail
cd "$(dirname "$0")/../.."

# The capability makes cargo distinguish this build from one with another compiler.
built=$(PATH="$PWD/cuda/emulator/nvcc:$PATH" CUDA_COMPUTE_CAP=80 cargo build -p zero-train-cli --bin zero-train --features cuda \
    --message-format json-render-diagnostics "$@" | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
[[ -x $built ]] || { echo "cargo has built no zero-train" >&2; exit 1; }
folder=$(cd "$(dirname "$built")/.." && pwd)/emulated-gpu
mkdir -p "$folder"
# A build without the feature overwrites cargo's own copy.
ln -f "$built" "$folder/zero-train" 2>/dev/null || cp "$built" "$folder/zero-train"
cuda/emulator/mock/build.sh "$folder"
printf 'export PATH="%s:$PATH" LD_LIBRARY_PATH="%s${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"\n' "$folder" "$folder"
