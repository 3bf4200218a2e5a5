#!/usr/bin/env bash
# Kills ranks at random moments and checks that each run recovers on the first try: scripts/kills.sh [KILLS]
#
# Small runs of two ranks with --max-restarts and twenty kills each (1000 in all by default) must finish with results
# bit-identical to an undisturbed run. Prints a table. ZERO_TRAIN_KILLS_SEED repeats the moments of an earlier run, as
# far as timing is reproducible.
set -euo pipefail
cd "$(dirname "$0")/.."
export ZERO_TRAIN_KILLS=${1:-1000}
cargo test --quiet --package zero-train-cli --test e2e -- --exact --nocapture \
    recovery::restart::a_run_recovers_from_a_rank_killed_at_any_time
