#!/usr/bin/env bash
# Runs a command with a Slurm cluster that is local to this machine: scripts/slurm-here.sh COMMAND [ARGUMENTS...]
#
# Starts munged, slurmctld and slurmd as root, with their configuration in a temporary folder, runs the command with
# SLURM_CONF set, and stops them. Needs the packages slurmctld, slurmd, slurm-client and munge. Does not affect other
# clusters.
set -euo pipefail

for program in munged slurmctld slurmd srun; do
    command -v "$program" >/dev/null || { echo "slurm-here: there is no $program" >&2; exit 69; }
done
[[ $(id -u) == 0 ]] || { echo "slurm-here: only root can start it" >&2; exit 69; }

folder=$(mktemp -d -t slurm-here.XXXXXX)
chmod 755 "$folder"
mkdir "$folder/state" "$folder/spool" "$folder/munge"
started=()
stop() {
    # Steps end first: slurmd waits for them, and they report to slurmctld.
    for ((i = 0; i < 100; i++)); do [[ -z $(squeue -h 2>/dev/null) ]] && break; sleep 0.1; done
    for ((i = ${#started[@]} - 1; i >= 0; i--)); do
        kill "${started[i]}" 2>/dev/null || true
        for ((n = 0; n < 50; n++)); do kill -0 "${started[i]}" 2>/dev/null || break; sleep 0.1; done
        kill -KILL "${started[i]}" 2>/dev/null || true
    done
    # Processes that slurmd left behind, recognized by this cluster's configuration.
    for environment in /proc/[0-9]*/environ; do
        process=${environment//[!0-9]/}
        [[ $process != $$ ]] && grep -qzx "SLURM_CONF=$folder/slurm.conf" "$environment" 2>/dev/null &&
            grep -q slurmstepd "/proc/$process/cmdline" && kill -KILL "$process"
    done
    rm -rf "$folder"
}
trap stop EXIT

host=$(hostname -s)
cores=$(nproc)
(umask 077; head -c 128 /dev/urandom >"$folder/munge/key")
cat >"$folder/slurm.conf" <<CONF
ClusterName=here
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=26817
SlurmdPort=26818
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmctldTimeout=600
SlurmdTimeout=600
KillWait=5
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cores State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
export SLURM_CONF=$folder/slurm.conf

munged --foreground --force --key-file="$folder/munge/key" --socket="$folder/munge/socket" --num-threads=2 \
    --log-file="$folder/munged.log" --pid-file="$folder/munged.pid" --seed-file="$folder/munge/seed" >/dev/null 2>&1 &
started+=($!)
for ((i = 0; i < 300; i++)); do [[ -S $folder/munge/socket ]] && break; sleep 0.1; done
slurmctld -D -f "$SLURM_CONF" >/dev/null 2>&1 &
started+=($!)
slurmd -D -f "$SLURM_CONF" -N "$host" >/dev/null 2>&1 &
started+=($!)
for ((i = 0; i < 600; i++)); do
    [[ $(sinfo -h -o %T 2>/dev/null) == idle ]] && break
    sleep 0.1
done
[[ $(sinfo -h -o %T) == idle ]] || { echo "slurm-here: the node does not come up" >&2; tail -n 5 "$folder"/*.log >&2; exit 1; }
"$@"
