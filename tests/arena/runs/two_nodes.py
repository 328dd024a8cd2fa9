"""A Ray cluster of two nodes on this machine, for as long as somebody holds its standard input.

Prints the address; a line `kill` ends the second node as if its power had gone.
"""

import os
import sys

# Before ray is imported: nothing is sent anywhere, and no proxy stands between local processes.
os.environ.update(
    RAY_USAGE_STATS_ENABLED="0",
    RAY_grpc_enable_http_proxy="0",
    no_proxy="*",
    NO_PROXY="*",
)

from ray.cluster_utils import Cluster

NODE = {
    "num_cpus": 2,
    "object_store_memory": 80 << 20,
    "include_dashboard": False,
}
#: No nodes are added to this cluster, and what its workers print is not read.
HEAD = {**NODE, "no_monitor": True, "include_log_monitor": False}


def main() -> None:
    """Everything that Ray writes goes below RAY_TMPDIR."""
    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    second = cluster.add_node(**{k: v for k, v in NODE.items() if k != "include_dashboard"})
    cluster.wait_for_nodes(timeout=300)
    print("address", cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "kill":
            cluster.remove_node(second, allow_graceful=False)
            print("killed", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
