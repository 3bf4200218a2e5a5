#!/usr/bin/env bash
# How soon ranks notice that one of them is lost, and that they do not when none is: scripts/notice.sh [KILLS]
#
# Kills a rank of three in 100 small runs by default, and stops one in a tenth as many, over shared memory and TCP in turn; then 10,000
# steps beside as many busy processes as there are cores, which must end well. Prints a table.
set -euo pipefail
cd "$(dirname "$0")/.."
export ZERO_TRAIN_NOTICE=${1:-100}
cargo test --quiet --package zero-train-cli --test e2e -- notice:: --nocapture --test-threads=1
