"""Read GPU memory on the other machines of the Ray cluster that this process is connected to.

Every Ray node serves its metrics over HTTP (Prometheus text), GPU memory among them, measured every few seconds. This
module reads those. It starts nothing on the nodes and never imports Ray: a process that has not imported Ray is in no
cluster.
"""

import re
import sys
import time
from typing import Any, NamedTuple

from rlcanary.errors import UserError

USED = "ray_node_gram_used"
BYTES_PER_UNIT = 2**20  # Ray reports MiB
NODES_FOR_S = 5.0  # the list of nodes is asked for this seldom
READ_FOR_S = 1.0  # a node is read this seldom: it measures less often still
ANSWER_WITHIN_S = 2.0
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Node(NamedTuple):
    node_id: str
    address: str
    metrics_port: int


class Reading(NamedTuple):
    used_bytes: int  # on the node's fullest GPU
    gpu_names: frozenset[str]


class RayNodes:
    """Tracks the GPU nodes of the cluster on other machines, and the most memory in use on any of their GPUs."""

    def __init__(self) -> None:
        self.gpu_names: set[str] = set()
        self._nodes: list[Node] = []
        self._nodes_until = 0.0
        self._read_next: dict[str, float] = {}
        self._highest: dict[str, int] = {}
        self._problems: dict[str, str] = {}

    def sample(self) -> None:
        """Reads the nodes that are due."""
        now = time.monotonic()
        if now >= self._nodes_until:
            self._nodes = other_gpu_nodes()
            self._nodes_until = now + NODES_FOR_S
        due = [node for node in self._nodes if now >= self._read_next.get(node.node_id, 0.0)]
        for node, reading in zip(due, read_nodes(due), strict=True):
            self._read_next[node.node_id] = now + READ_FOR_S
            if isinstance(reading, str):
                self._problems[node.node_id] = f"GPU memory of Ray node {node.address} is not known: {reading}"
            else:
                self.gpu_names |= reading.gpu_names
                self._highest[node.node_id] = max(reading.used_bytes, self._highest.get(node.node_id, 0))

    def highest_used_bytes(self) -> int | None:
        """Returns the maximum so far over all nodes, or None if there are none.

        Raises:
            UserError: if a node has never answered.
        """
        for node_id, problem in self._problems.items():
            if node_id not in self._highest:
                raise UserError(f"{problem} (nodes serve their metrics where ray[default] is installed)")
        return max(self._highest.values(), default=None)


def other_gpu_nodes() -> list[Node]:
    """Lists the live nodes with GPUs on other machines."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not hasattr(ray, "is_initialized") or not ray.is_initialized():
        return []
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        own_id = ray.get_runtime_context().get_node_id()
    except Exception as error:
        if ray.is_initialized():
            raise UserError(f"Ray does not list its nodes: {error}") from error
        return []  # it was shut down meanwhile
    # A connection through Ray Client is to a node of the cluster, and this machine is none.
    client: Any = sys.modules.get("ray.util.client")
    remote = client is not None and client.ray.is_connected()
    own_addresses = {node["NodeManagerAddress"] for node in nodes if node["NodeID"] == own_id and not remote}
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], node["MetricsExportPort"])
        for node in nodes
        if node["Resources"].get("GPU") and node["NodeManagerAddress"] not in own_addresses
    ]


def read_nodes(nodes: list[Node]) -> list[Reading | str]:
    """Reads each node's metrics, or the reason why it does not answer."""
    if not nodes:
        return []
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max_workers=min(len(nodes), 16)) as pool:
        return list(pool.map(read_node, nodes))


def read_node(node: Node) -> Reading | str:
    """Reads one node's metrics, or the reason why it does not answer."""
    import http.client  # 30 ms at every start of pytest otherwise
    import urllib.request

    if node.metrics_port <= 0:
        return "it serves no metrics"
    address = f"[{node.address}]" if ":" in node.address else node.address
    # The nodes of a cluster are reached directly, whatever proxy leads out of it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{address}:{node.metrics_port}/metrics", timeout=ANSWER_WITHIN_S) as answer:
            return parse_metrics(answer.read().decode())
    except (OSError, http.client.HTTPException, ValueError) as error:
        return str(error)


def parse_metrics(text: str) -> Reading:
    """Parses GPU memory from a node's metrics, such as `ray_node_gram_used{GpuIndex="0",…} 4096.0`.

    Raises:
        ValueError: if there is none.
    """
    used = []
    names = set()
    for line in text.splitlines():
        if not line.startswith(f"{USED}{{"):
            continue
        labels, _, value = line[len(USED) + 1 :].rpartition("} ")
        used.append(int(float(value.split()[0]) * BYTES_PER_UNIT))
        name = dict(LABEL.findall(labels)).get("GpuDeviceName")
        if name:
            names.add(name)
    if not used:
        raise ValueError(f"its metrics have no {USED}")
    return Reading(max(used), frozenset(names))
