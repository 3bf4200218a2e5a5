#!/bin/sh
# Installs what the tests of the monitors need: scripts/install-monitors.sh FOLDER, then
#   ZERO_TRAIN_PYTHON=FOLDER/bin/python cargo test --workspace --test e2e -- training::monitors training::wandb
#
# Installs MLflow's server and client, W&B's client, TensorBoard's reader and Prometheus's parser into a virtual
# environment. To uninstall: rm -r FOLDER.
set -eu

folder=${1:?usage: scripts/install-monitors.sh FOLDER}

python3 -m venv "$folder"
# The server of the tests does not answer all requests of later versions of wandb, such as 0.31.
"$folder/bin/pip" install --quiet 'mlflow==3.*' 'wandb==0.17.9' 'tensorboard==2.*' 'prometheus-client==0.*'
echo "installed; now: ZERO_TRAIN_PYTHON=$folder/bin/python cargo test --workspace --test e2e -- training::monitors training::wandb"
