#!/usr/bin/env bash
# Fuzzes what is read from files and from peers: scripts/fuzz.sh [SECONDS] [TARGET]
#
# Builds the targets in fuzz/ and runs each of them, or the one that is named, for SECONDS (60). Prints how many inputs were
# tried; fails where one of them panics, takes 10 seconds or 2 GiB, and leaves it in fuzz/artifacts. What was found to be worth
# keeping is in fuzz/corpus, where the next run begins. Needs cargo-fuzz and a C++ compiler; without them it says so and ends well.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-60}
[[ $seconds =~ ^[1-9][0-9]*$ ]] || { echo "error: \`$seconds\` is no number of seconds" >&2; exit 2; }
skip() { echo "skipped: $1"; exit 0; }
cargo fuzz --version >/dev/null 2>&1 || skip "cargo-fuzz is not installed (cargo install cargo-fuzz)"
command -v "${CXX:-c++}" >/dev/null || skip "there is no C++ compiler, which libFuzzer is built with"

# AddressSanitizer and coverage are switched on by flags that a stable compiler takes only so.
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
