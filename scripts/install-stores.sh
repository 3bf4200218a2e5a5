#!/bin/sh
# Installs servers with the interfaces of S3 (moto) and of Azure Blob Storage (Azurite) for tests, and their own clients:
# scripts/install-stores.sh FOLDER
#
# Then run the tests with ZERO_TRAIN_STORES=FOLDER. Needs python3 and npm. To uninstall: rm -r FOLDER.
set -eu

folder=${1:?usage: scripts/install-stores.sh FOLDER}
python3 -m venv "$folder"
"$folder/bin/pip" install --quiet 'moto[server,s3]==5.2.5' boto3 azure-storage-blob huggingface_hub
npm install --silent --no-fund --no-audit --prefix "$folder" azurite
"$folder/bin/moto_server" --version >/dev/null 2>&1 || "$folder/bin/moto_server" --help >/dev/null
"$folder/node_modules/.bin/azurite-blob" --version >/dev/null
echo "installed; now: ZERO_TRAIN_STORES=$folder cargo test --workspace --test e2e stores"
