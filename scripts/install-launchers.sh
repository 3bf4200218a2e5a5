#!/bin/sh
# Installs the launchers that scripts/launchers.sh tests: scripts/install-launchers.sh FOLDER, then
# ZERO_TRAIN_LAUNCHERS=FOLDER scripts/launchers.sh
#
# Installs OpenMPI, MPICH, Slurm, pdsh with ssh and a Java for Spark from Debian's packages, as root; and torchrun,
# DeepSpeed's launcher, Ray and Spark into a virtual environment, several GB with PyTorch. To remove the latter: rm -r
# FOLDER.
set -eu

folder=${1:?usage: scripts/install-launchers.sh FOLDER}

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    # Their services are not needed: scripts/slurm-here.sh and scripts/ssh-here.sh start their own.
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        openmpi-bin mpich slurmctld slurmd slurm-client munge pdsh openssh-server openssh-client default-jre-headless
else
    echo "without root and apt-get: OpenMPI, MPICH, Slurm, pdsh with ssh and Java must be there already" >&2
fi

python3 -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.15.0 numpy setuptools wheel
"$folder/bin/pip" install --quiet "ray[default]==2.60.0" pyspark==4.3.0
# DeepSpeed's launcher needs none of its compiled operators.
DS_BUILD_OPS=0 "$folder/bin/pip" install --quiet --no-build-isolation deepspeed==0.19.8
echo "installed; now: ZERO_TRAIN_LAUNCHERS=$folder scripts/launchers.sh"
