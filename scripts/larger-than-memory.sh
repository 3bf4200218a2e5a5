#!/usr/bin/env bash
# Trains a model in less memory than its state needs: scripts/larger-than-memory.sh [1.3b|small] [FOLDER]
#
# Parameters, gradients and AdamW's state live in files in FOLDER (default: the current folder), which should be on a
# local SSD. The training process runs in a control group with limited memory and no swap. FOLDER is left unchanged.
#
#   1.3b    a GPT-2 with 1.3 billion parameters, whose state is 21 GB, in 6 GiB
#   small   a GPT with 138 million parameters, whose optimizer state (m and v alone) is 4 times the 256 MiB that it
# trains in
#
# Environment: MEMORY (bytes), STEPS, and ZERO_TRAIN (the program; built here if unset).
set -euo pipefail

what=1.3b
case ${1-} in 1.3b | small) what=$1 && shift ;; esac
case $what in
    1.3b) memory=$((6 << 30)) width=2048 layers=24 heads=16 vocabulary=50257 sequence=256 ;;
    small) memory=$((256 << 20)) width=640 layers=28 heads=10 vocabulary=256 sequence=256 ;;
esac
memory=${MEMORY:-$memory} steps=${STEPS:-3}
folder=$(realpath "${1:-.}")
tree=$(realpath "$(dirname "$0")/..")

# The peak memory of the group; version 2 of control groups, then version 1.
peak_of_group() {
    local path
    path=$(sed -n 's/^0:://p' /proc/self/cgroup)
    cat "/sys/fs/cgroup$path/memory.peak" 2>/dev/null && return
    path=$(sed -n 's/^[0-9]*:memory://p' /proc/self/cgroup)
    cat "/sys/fs/cgroup/memory$path/memory.max_usage_in_bytes" 2>/dev/null || echo 0
}

mebibytes() { echo "$(($1 >> 20)) MiB"; }

# The run within the limit. The script calls itself to start it.
if [ "${LARGER_THAN_MEMORY_INSIDE-}" ]; then
    cd "$LARGER_THAN_MEMORY_INSIDE"
    "$ZERO_TRAIN" --config run.yaml --plain &
    training=$! resident=0
    # SIGTERM would make it save all of the state first.
    trap 'kill -KILL $training; exit 130' INT TERM
    while kill -0 $training 2>/dev/null; do
        # The rank is a separate process.
        now=$(cat /proc/$training/task/*/children 2>/dev/null || true)
        now=$(awk '/^VmHWM/ {print $2}' "/proc/${now%% *}/status" 2>/dev/null || true)
        resident=${now:-$resident}
        sleep 0.2
    done
    status=0
    wait $training || status=$?
    [ $status != 0 ] || sed 's/.*"step":\([0-9]*\),.*"step_ms":\([0-9]*\).*/step \1 took \2 ms/' run/metrics.jsonl
    echo "largest resident set: $(mebibytes $((resident << 10)))"
    peak=$(peak_of_group)
    [ "$peak" = 0 ] || echo "most that the control group held, page cache included: $(mebibytes "$peak")"
    exit $status
fi

if [ -z "${ZERO_TRAIN-}" ]; then
    (cd "$tree" && cargo build --release --quiet --package zero-train-cli)
    ZERO_TRAIN=${CARGO_TARGET_DIR:-$tree/target}/release/zero-train
fi
ZERO_TRAIN=$(realpath "$ZERO_TRAIN")

work=$(mktemp -d "$folder/larger-than-memory.XXXXXX")
group=
clean_up() {
    rm -rf "$work"
    # It takes a while until a killed process has returned its memory.
    [ -z "$group" ] || rmdir "$group" 2>/dev/null || { sleep 2 && rmdir "$group"; }
}
trap clean_up EXIT
# A process killed by a signal does not run its EXIT trap.
trap 'exit 130' INT
trap 'exit 143' TERM

parameters=$((layers * (12 * width * width + 13 * width) + (vocabulary + sequence + 2) * width))
# Parameters, gradients, m and v, 4 bytes each.
state=$((16 * parameters)) free=$(($(df --output=avail -B1 "$folder" | tail -n 1)))
echo "$parameters parameters, $(mebibytes $state) of state, $(mebibytes $((8 * parameters))) of it m and v; memory: $(mebibytes "$memory")"
if [ $free -lt $((state + (1 << 30))) ]; then
    echo "$folder has $(mebibytes "$free") free, $(mebibytes $((state + (1 << 30)))) are needed" >&2
    exit 1
fi

# Random text: nothing can be learned but the frequency of letters.
head -c 150000 /dev/urandom | base64 -w 0 >"$work/text"
cat >"$work/run.yaml" <<YAML
train_micro_batch_size_per_gpu: 1
model:
  {type: gpt2, vocab_size: $vocabulary, n_positions: $sequence, n_embd: $width, n_layer: $layers, n_head: $heads}
data: {train: text, format: text}
optimizer: {type: AdamW, params: {lr: 1.0e-4}}
zero_optimization:
  stage: 3
  stage3_max_reuse_distance: 0   # keeps no gathered parameters for reuse
  stage3_prefetch_bucket_size: 0 # no prefetch by gathers: the disk reads ahead by itself
  offload_param: {device: nvme, nvme_path: .}
  offload_optimizer: {device: nvme, nvme_path: .}
activation_checkpointing: {}
training: {max_steps: $steps, output_dir: run, save_last: false}
steps_per_print: 1
YAML

export ZERO_TRAIN LARGER_THAN_MEMORY_INSIDE=$work

# Limits memory with a systemd scope, or a control group created below our own, or a limit on the writable memory of a
# process.
own() { sed -n "s/^[0-9]*:$1://p" /proc/self/cgroup; }
make_group() { # FOLDER LIMIT-FILE
    mkdir "$1" 2>/dev/null || return 1
    group=$1
    # Outside of a control-group tree, this is a plain folder.
    [ -e "$1/$2" ] && echo "$memory" >"$1/$2" && return
    rmdir "$1" && group= && return 1
}
run_in_group() { bash -c 'echo $$ >"$1/cgroup.procs" && exec "$2"' - "$group" "$0"; }
scope=(systemd-run --scope --quiet -p "MemoryMax=$memory" -p MemorySwapMax=0)
if "${scope[@]}" --user true 2>/dev/null; then
    echo "limited by a scope of systemd"
    "${scope[@]}" --user "$0"
elif make_group "/sys/fs/cgroup$(own '')/larger-than-memory-$$" memory.max; then
    echo "limited by the control group $group"
    echo 0 >"$group/memory.swap.max"
    run_in_group
elif make_group "/sys/fs/cgroup/memory$(own memory)/larger-than-memory-$$" memory.limit_in_bytes; then
    echo "limited by the control group $group"
    echo 0 >"$group/memory.swappiness"
    run_in_group
else
    echo "no control group can be made here: limited by \`ulimit -d\`, which counts allocated memory, not resident memory"
    (ulimit -d $((memory >> 10)) && "$0")
fi
