#!/bin/sh
# Installs what benches/peers needs into a virtual environment: scripts/install-peers.sh FOLDER
#
# PyTorch and DeepSpeed with their dependencies take several GB. DeepSpeed compiles its operators with g++ on first use;
# this script does so now (several minutes on one core), so that no benchmark waits for it. To uninstall: rm -r FOLDER.
set -eu

folder=${1:?usage: scripts/install-peers.sh FOLDER}
peers=$(cd "$(dirname "$0")/../benches/peers" && pwd)

python3 -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.15.0 transformers==5.24.0 peft==0.21.2 numpy psutil ninja setuptools wheel
# Without build isolation its setup finds the torch that it will run with.
"$folder/bin/pip" install --quiet --no-build-isolation deepspeed==0.19.8

# On processors that are not Intel's, MKL takes its AVX2 path unless this is preloaded; see benches/peers/README.md.
mkdir -p "$folder/peers"
cc -shared -fPIC -o "$folder/peers/mkl_avx512.so" "$peers/mkl_avx512.c"

"$folder/bin/python" "$peers/adam.py" --compile-only
echo "installed; now: $folder/bin/python $peers/compare.py --help"
