#!/bin/sh
# Installs what `cargo build --features cuda` needs on machines without a CUDA toolkit: eval
# "$(scripts/install-cuda-build.sh [FOLDER])"
#
# Installs NVIDIA's wheels of the compiler and its headers (104 MB to download, 271 MB on disk) into FOLDER (default
# `target/cuda`), and prints the lines to evaluate. Building needs neither a driver nor a GPU. To uninstall: rm -r
# FOLDER.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-${CARGO_TARGET_DIR:-$root/target}/cuda}
# All parts are from one release: drivers from 580 on support 13.0, and the bindings do not know newer releases.
release=13.0.2

python3 -m venv "$folder" >&2
"$folder/bin/pip" install --quiet "cuda-toolkit[nvcc,nvvm,crt,cccl,cudart]==$release" >&2
home=$(echo "$folder"/lib/python3*/site-packages/nvidia/cu13)
home=$(cd "$home" && pwd)
# The compiler looks for libraries in lib64.
ln -sfn lib "$home/lib64"
"$home/bin/nvcc" --version >&2

echo "export CUDA_HOME=$home"
echo "export PATH=\$CUDA_HOME/bin:\$PATH"
# The capability: 90 for H100 and H200, 80 for A100, 89 for L4 and RTX 40, 100 for B200. All kernels are compiled for
# it.
echo "export CUDA_COMPUTE_CAP=\${CUDA_COMPUTE_CAP:-90}"
