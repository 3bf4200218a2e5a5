#!/usr/bin/env bash
# Runs a command with an ssh server that is local to this machine, configured for pdsh: scripts/ssh-here.sh COMMAND
# [ARGUMENTS...]
#
# Starts sshd as root on the loopback interface, with keys in a temporary folder, and runs the command with
# PDSH_SSH_ARGS_APPEND set, so that `pdsh -w localhost,127.0.0.1` reaches two hosts. Needs the packages openssh-server,
# openssh-client and pdsh. Does not read or write ~/.ssh.
set -euo pipefail

for program in sshd ssh ssh-keygen pdsh; do
    command -v "$program" >/dev/null || { echo "ssh-here: there is no $program" >&2; exit 69; }
done
[[ $(id -u) == 0 ]] || { echo "ssh-here: only root can start it" >&2; exit 69; }

folder=$(mktemp -d -t ssh-here.XXXXXX)
server=
stop() {
    [[ -z $server ]] || kill "$server" 2>/dev/null || true
    rm -rf "$folder"
}
trap stop EXIT

port=${SSH_HERE_PORT:-26822}
ssh-keygen -q -t ed25519 -N '' -f "$folder/key"
ssh-keygen -q -t ed25519 -N '' -f "$folder/host"
cat >"$folder/server" <<CONF
ListenAddress 127.0.0.1:$port
HostKey $folder/host
AuthorizedKeysFile $folder/key.pub
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PidFile none
CONF
cat >"$folder/client" <<CONF
Host *
  Port $port
  IdentityFile $folder/key
  IdentitiesOnly yes
  BatchMode yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
CONF
# sshd's empty privilege-separation folder, which a service would create.
mkdir -p /run/sshd
"$(command -v sshd)" -D -f "$folder/server" -E "$folder/log" &
server=$!
export PDSH_RCMD_TYPE=ssh PDSH_SSH_ARGS_APPEND="-F $folder/client"
for ((i = 0; i < 100; i++)); do
    pdsh -S -w localhost,127.0.0.1 true 2>/dev/null && break
    kill -0 "$server" 2>/dev/null || { cat "$folder/log" >&2; exit 1; }
    sleep 0.1
done
pdsh -S -w localhost,127.0.0.1 true || { echo "ssh-here: the server does not answer" >&2; cat "$folder/log" >&2; exit 1; }
"$@"
