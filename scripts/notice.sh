#!/usr/bin/env bash
# Measures how soon ranks notice that one of them is lost, and checks for false alarms: scripts/notice.sh [KILLS]
#
# Kills one of four ranks in each of KILLS small runs (100 by default), and stops one rank in each of KILLS / 10 further
# runs. The runs take turns with five layouts of groups, over TCP and shared memory. Then runs 10,000 steps beside one
# busy process per core; these steps must succeed. Prints a table.
set -euo pipefail
cd "$(dirname "$0")/.."
export ZERO_TRAIN_NOTICE=${1:-100}
cargo test --quiet --package zero-train-cli --test e2e -- notice:: --nocapture --test-threads=1
