"""A Ray cluster on loopback: a head without CPUs and some nodes, until stdin ends. Run by a Python that has ray.

The argument is a list of nodes: the CPUs and the PYTHONPATH of each. Prints the cluster's address and the process
id of each node's raylet. Both are JSON.
"""

from __future__ import annotations

import json
import sys

from ray.cluster_utils import Cluster

SMALL = {"object_store_memory": 80_000_000, "include_dashboard": False}

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **SMALL})
nodes = [
    cluster.add_node(wait=False, num_cpus=cpus, env_vars={"PYTHONPATH": path}, **SMALL)
    for cpus, path in json.loads(sys.argv[1])
]
cluster.wait_for_nodes()
raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
sys.stdout.write(json.dumps({"address": cluster.address, "raylets": raylets}) + "\n")
sys.stdout.flush()
sys.stdin.read()
cluster.shutdown()
