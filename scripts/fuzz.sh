#!/usr/bin/env bash
# Fuzzes the parsers of files and of peers' messages: scripts/fuzz.sh [SECONDS] [TARGET]
#
# Builds the targets in fuzz/ and runs each of them, or only TARGET, for SECONDS (default 60). Prints the number of
# inputs tried. Fails if an input panics, takes 10 seconds or needs 2 GiB, and leaves the input in fuzz/artifacts.
# Inputs that reach new code are kept in fuzz/corpus, and the next run starts from them. Needs cargo-fuzz and a C++
# compiler; without them it prints a message and exits with 0.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-60}
[[ $seconds =~ ^[1-9][0-9]*$ ]] || { echo "error: \`$seconds\` is no number of seconds" >&2; exit 2; }
skip() { echo "skipped: $1"; exit 0; }
cargo fuzz --version >/dev/null 2>&1 || skip "cargo-fuzz is not installed (cargo install cargo-fuzz)"
command -v "${CXX:-c++}" >/dev/null || skip "there is no C++ compiler, which libFuzzer is built with"

# A stable compiler accepts the flags for AddressSanitizer and coverage only this way.
export RUSTC_BOOTSTRAP=1
mapfile -t targets < <(cargo fuzz list)
if [[ $# -gt 1 ]]; then
    [[ " ${targets[*]} " == *" $2 "* ]] || { echo "error: no target \`$2\`; there are ${targets[*]}" >&2; exit 2; }
    targets=("$2")
fi
cargo fuzz build ${2:+"$2"}

log=$(mktemp)
trap 'rm -f "$log"' EXIT
for target in "${targets[@]}"; do
    folders=("fuzz/corpus/$target" "fuzz/seeds/$target")
    mkdir -p "${folders[0]}"
    # The resolved presets have every key.
    [[ $target != config ]] || folders+=(configs/golden)
    cargo fuzz run "$target" "${folders[@]}" -- -max_total_time="$seconds" -max_len=16384 -timeout=10 -rss_limit_mb=2048 \
        -print_final_stats=1 >"$log" 2>&1 || { tail -n 60 "$log"; echo "error: the target \`$target\` failed" >&2; exit 1; }
    stat() { sed -n "s/^stat::$1: *//p" "$log"; }
    echo "$target: $(stat number_of_executed_units) inputs in $seconds s, $(stat average_exec_per_sec) a second, no failure"
done
