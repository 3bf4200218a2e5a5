"""Trains with zero-train on a Spark cluster, with one barrier task per rank.

    spark-submit --conf spark.task.cpus=4 zero_spark.py -n 2 [--max-restarts 3] -- zero-train --config ds.yaml

The files and folders that the configuration names must exist on all hosts. After a restart, the ranks resume from the newest
checkpoint. Ranks on several hosts need `launcher.interface` in their configuration. The exit status is 1 if a rank fails;
the message names the rank and its error.
"""

import argparse
import os
import secrets
import socket
import subprocess
import sys

from py4j.protocol import Py4JJavaError
from pyspark import BarrierTaskContext
from pyspark.sql import SparkSession

LAST_LINES = 20


def numbered(hosts):
    """Returns the tasks in the order of their ranks, given the host of each task. Consecutive ranks share a host, although
    Spark spreads consecutive tasks over the hosts. Task 0 is rank 0."""
    return sorted(range(len(hosts)), key=lambda task: (hosts.index(hosts[task]), task))


def train_as(command, attempt, token):
    """Returns the function of a task: it determines its rank and runs the command as that rank."""

    def task(_):
        context = BarrierTaskContext.get()
        hosts = [info.address.rsplit(":", 1)[0] for info in context.getTaskInfos()]
        order = numbered(hosts)
        rank = order.index(context.partitionId())
        hosts = [hosts[task] for task in order]
        with socket.socket() as free:
            free.bind(("", 0))
            port = context.allGather(str(free.getsockname()[1]))[0]
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(hosts)),
            "LOCAL_RANK": str(hosts[:rank].count(hosts[rank])),
            "LOCAL_WORLD_SIZE": str(hosts.count(hosts[rank])),
            "MASTER_ADDR": "127.0.0.1" if len(set(hosts)) == 1 else hosts[0],
            "MASTER_PORT": port,
            "ZERO_TRAIN_TOKEN": token,
            "ZERO_TRAIN_ATTEMPT": str(attempt),
        }
        process = subprocess.Popen(command, env={**os.environ, **variables}, stderr=subprocess.PIPE, text=True)
        last = []
        for line in process.stderr:
            sys.stderr.write(line)
            last = [*last, line][-LAST_LINES:]
        status = process.wait()
        if status:
            raise RuntimeError(f"rank {rank} exited with status {status}: {''.join(last)}")
        yield rank

    return task


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, required=True, help="ranks")
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- zero-train --config ds.yaml")
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        parser.error("what shall the ranks run?")
    # This script restarts the ranks itself, with `--resume auto` and the number of the attempt. Spark must not retry a
    # failed stage.
    spark = SparkSession.builder.appName("zero-train").config("spark.stage.maxConsecutiveAttempts", "1").getOrCreate()
    ranks = spark.sparkContext.parallelize(range(arguments.n), arguments.n).barrier()
    token, failure = secrets.token_hex(32), None
    for attempt in range(arguments.max_restarts + 1):
        again = ["--resume", "auto"] if attempt else []
        try:
            ranks.mapPartitions(train_as(command + again, attempt, token)).collect()
            failure = None
            break
        except Py4JJavaError as error:
            failure = str(error.java_exception)
            told = [line for line in failure.splitlines() if "exited with status" in line or line.startswith("error:")]
            print("\n".join(dict.fromkeys(told)) or failure, file=sys.stderr)
    spark.stop()
    sys.exit(1 if failure else 0)


if __name__ == "__main__":
    main()
