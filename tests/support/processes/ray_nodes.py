"""A Ray cluster of several nodes on this machine, in a process of its own.

`python ray_nodes.py NODES` prints the address of the cluster, then the process of its head's
raylet, and lives until its input ends. Each node has one CPU. A line of input is JSON, the
environment of one more node, and is answered by its number.
"""

import json
import os
import sys

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_METRICS_COLLECTION": "0"}

from ray.cluster_utils import Cluster

NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}
# As docs/how-to/several-hosts.md: a node that does not answer is dead after 6 s.
HEALTH = {
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
HEAD = NODE | {"include_dashboard": False, "_system_config": HEALTH}


def pid_of(node) -> int:
    """Return the process of a node's raylet."""
    return node.all_processes["raylet"][0].process.pid


def main(nodes: int) -> None:
    """See above."""
    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    try:
        for _ in range(nodes - 1):
            cluster.add_node(**NODE)
        print(cluster.address, flush=True)
        print(pid_of(cluster.head_node), flush=True)
        for count, line in enumerate(sys.stdin, nodes):
            cluster.add_node(**NODE, env_vars=json.loads(line))
            print(count, flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
