#!/bin/sh
# Installs the Python libraries that tests compare with into a virtual environment: scripts/install-oracles.sh FOLDER
#
# Then run the tests with ZERO_TRAIN_PYTHON=FOLDER/bin/python. PyTorch takes several GB. To uninstall: rm -r FOLDER.
set -eu

folder=${1:?usage: scripts/install-oracles.sh FOLDER}
python3 -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.15.0 numpy safetensors tokenizers jinja2 transformers==5.24.0 peft==0.21.2 \
    bitsandbytes==0.50.2 trl==1.16.0 schedulefree==1.4.1 datasets==5.2.0 pyarrow pillow boto3 scikit-learn scipy
# mosaicml-streaming asks for versions of PyTorch and of stores that these tests do not need.
"$folder/bin/pip" install --quiet --no-deps mosaicml-streaming==0.13.0 zstd Brotli python-snappy cramjam catalogue \
    torchvision
# timm needs no more than that.
"$folder/bin/pip" install --quiet --no-deps timm==1.0.31
# mup's check of coordinates draws with pandas and seaborn, which tests do not call.
"$folder/bin/pip" install --quiet --no-deps mup==1.0.0 pyyaml tqdm
# Tests use only Megatron's calculator of micro-batches, which needs no package but PyTorch.
"$folder/bin/pip" install --quiet --no-deps megatron-core==0.16.1
# DeepSpeed without its operators, which tests do not call: they need a compiler.
DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "$folder/bin/pip" install --quiet --no-deps --no-build-isolation deepspeed==0.19.8
"$folder/bin/pip" install --quiet --no-deps hjson py-cpuinfo einops ninja msgpack psutil
"$folder/bin/python" -c "import torch, transformers, peft, bitsandbytes, trl, datasets, streaming, torchvision, timm.optim, schedulefree, mup; from transformers import GPT2LMHeadModel"
echo "installed; now: ZERO_TRAIN_PYTHON=$folder/bin/python cargo test --workspace"
