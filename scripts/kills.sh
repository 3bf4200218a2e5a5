#!/usr/bin/env bash
# Kills ranks at random moments and asks that each kill is recovered from on the first try: scripts/kills.sh [KILLS]
#
# Small runs of two ranks with --max-restarts, twenty kills each (1000 in all by default), must end well with the very bits of an
# undisturbed run. Prints a table. ZERO_TRAIN_KILLS_SEED repeats the moments of an earlier sweep, as far as a machine repeats itself.
set -euo pipefail
cd "$(dirname "$0")/.."
export ZERO_TRAIN_KILLS=${1:-1000}
cargo test --quiet --package zero-train-cli --test e2e -- --exact --nocapture \
    recovery::restart::a_killed_rank_is_recovered_from_whenever_it_is_killed
