"""Trains with zero-train on a Ray cluster, with one actor per rank.

    RAY_DEDUP_LOGS=0 python zero_ray.py -n 2 [--cpus 4] [--max-restarts 3] -- zero-train --config ds.yaml
    ray job submit --working-dir . -- python zero_ray.py -n 2 -- ./zero-train --config ds.yaml

The exit status is that of the rank that failed first. After a restart, the ranks resume from the newest checkpoint, which
all hosts must be able to read. Ranks on several hosts need `launcher.interface` in their configuration.
"""

import argparse
import collections
import os
import secrets
import signal
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

LOST_PEER = 4
GRACE_SECONDS = 3
LAST_LINES = 20


@ray.remote(max_concurrency=2)
class Rank:
    """One rank. Ray forwards the output of its process to the driver."""

    process = None

    def where(self):
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), free.getsockname()[1]

    def run(self, command, variables):
        environment = {**os.environ, **variables}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        last = collections.deque(maxlen=LAST_LINES)
        for line in self.process.stderr:
            sys.stderr.write(line)
            last.append(line)
        return self.process.wait(), "".join(last)

    def stop(self):
        if self.process and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()


def status_of(reference):
    """Waits for a rank and returns its exit status, in the convention of a shell. If its actor or host died, the status is
    that of a killed process. Prints the error of a failed rank, as the output of actors may reach the driver too late."""
    try:
        status, last = ray.get(reference)
    except ray.exceptions.RayError as error:
        status, last = -signal.SIGKILL, f"error: {error}\n"
    if status:
        print(last, end="", file=sys.stderr)
    return status if status >= 0 else 128 - status


def attempt(ranks, cpus, command, number, token):
    """Starts all ranks and waits for them. Returns 0, or the status of the first rank that failed by itself rather than
    because it lost a peer."""
    group = placement_group([{"CPU": cpus}] * ranks, strategy="PACK")
    ray.get(group.ready())
    actors = [
        Rank.options(num_cpus=cpus, scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote()
        for index in range(ranks)
    ]
    # Sorted by node, so that consecutive ranks share a host.
    placed = sorted(zip(ray.get([actor.where.remote() for actor in actors]), range(ranks)))
    nodes = [node for (node, _, _), _ in placed]
    _, address, port = placed[0][0]
    common = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1" if len(set(nodes)) == 1 else address,
        "MASTER_PORT": str(port),
        "ZERO_TRAIN_TOKEN": token,
        "ZERO_TRAIN_ATTEMPT": str(number),
    }
    running = []
    for rank, (_, index) in enumerate(placed):
        local = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank - nodes.index(nodes[rank])),
            "LOCAL_WORLD_SIZE": str(nodes.count(nodes[rank])),
        }
        running.append(actors[index].run.remote(command, {**common, **local}))
    names = {reference: rank for rank, reference in enumerate(running)}
    failed = []
    while running:
        done, running = ray.wait(running, timeout=GRACE_SECONDS if failed else None)
        if not done:
            for actor in actors:
                actor.stop.remote()
            done, running = running, []
        failed += [(status, names[reference]) for reference in done if (status := status_of(reference))]
    for actor in actors:
        ray.kill(actor)
    remove_placement_group(group)
    if not failed:
        return 0
    status, rank = next((it for it in failed if it[0] != LOST_PEER), failed[0])
    print(f"error: rank {rank} exited with status {status}; it failed first, and the other ranks were stopped", file=sys.stderr)
    return status


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, required=True, help="ranks")
    parser.add_argument("--cpus", type=int, default=1, help="cores of each")
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- zero-train --config ds.yaml")
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        parser.error("what shall the ranks run?")
    ray.init(log_to_driver=True)
    token = secrets.token_hex(32)
    for number in range(arguments.max_restarts + 1):
        again = ["--resume", "auto"] if number else []
        status = attempt(arguments.n, arguments.cpus, command + again, number, token)
        if status in (0, 2, 3, 5, 130, 143):
            break
    ray.shutdown()
    sys.exit(status)


if __name__ == "__main__":
    main()
