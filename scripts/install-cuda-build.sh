#!/bin/sh
# Installs what `cargo build --features cuda` needs where there is no CUDA toolkit: eval "$(scripts/install-cuda-build.sh [FOLDER])"
#
# NVIDIA's wheels of the compiler and its headers, 104 MB to fetch and 271 MB on the disk, go into FOLDER (`target/cuda` unless one is
# given), and the lines to be evaluated are printed. Neither a driver nor a GPU is needed to build. To be rid of all: rm -r FOLDER.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-${CARGO_TARGET_DIR:-$root/target}/cuda}
# All parts of one release: 13.0 is what a driver from 580 on takes, and the newest that there is is newer than the bindings know.
release=13.0.2

python3 -m venv "$folder" >&2
"$folder/bin/pip" install --quiet "cuda-toolkit[nvcc,nvvm,crt,cccl,cudart]==$release" >&2
home=$(echo "$folder"/lib/python3*/site-packages/nvidia/cu13)
home=$(cd "$home" && pwd)
# The compiler looks for what it links in lib64.
ln -sfn lib "$home/lib64"
"$home/bin/nvcc" --version >&2

echo "export CUDA_HOME=$home"
echo "export PATH=\$CUDA_HOME/bin:\$PATH"
# H100 and H200; 80 for A100, 89 for L4 and RTX 40, 100 for B200. All kernels are compiled for this one.
echo "export CUDA_COMPUTE_CAP=\${CUDA_COMPUTE_CAP:-90}"
