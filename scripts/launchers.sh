#!/usr/bin/env bash
# Trains two ranks under other systems' launchers, kills a rank, and prints the result: scripts/launchers.sh [NAME...]
#
# NAME is torchrun, deepspeed, openmpi, mpich, slurm, sbatch, ray or spark; the default is all of them. Launchers that
# are not installed are skipped with a message; scripts/install-launchers.sh installs them. If their daemons are
# installed and this runs as root, the script runs a Slurm cluster and an ssh server on this machine while it tests
# them.
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
