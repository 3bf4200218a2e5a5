#!/usr/bin/env bash
# Trains two ranks under the launchers of other systems, kills one, and prints what became of it: scripts/launchers.sh [NAME...]
#
# Names are torchrun, deepspeed, openmpi, mpich, slurm, sbatch, ray and spark; all by default. What is not installed is skipped, and said:
# scripts/install-launchers.sh installs it. A Slurm and an ssh server of this machine alone run meanwhile, where their
# daemons are there and this is root.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${ZERO_TRAIN_LAUNCHERS:-}
if [[ -n $folder ]]; then
    export PATH="$folder/bin:$PATH" ZERO_TRAIN_PYTHON="$folder/bin/python"
fi
names=("${@/#/launchers::}")
run=(cargo test --quiet --workspace --test e2e -- --nocapture --test-threads=1 "${names[@]:-launchers::}")
echo "| launcher | version | command | 20 steps | status when a rank is killed | after |"
echo "|---|---|---|---|---|---|"
if [[ $(id -u) == 0 && -z ${PDSH_SSH_ARGS_APPEND:-} ]] && command -v sshd pdsh >/dev/null; then
    run=(scripts/ssh-here.sh "${run[@]}")
fi
if [[ $(id -u) == 0 && -z ${SLURM_CONF:-} ]] && command -v slurmctld slurmd munged >/dev/null; then
    scripts/slurm-here.sh "${run[@]}"
else
    "${run[@]}"
fi
