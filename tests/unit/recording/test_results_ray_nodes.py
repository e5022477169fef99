"""GPU memory of a Ray cluster's other nodes, from stand-ins for them: real HTTP servers with what real nodes serve. The test
machines have no GPU and are one node each.
"""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import wait_for

from rlcanary.errors import UserError
from rlcanary.recording import ray_nodes
from rlcanary.recording.assembly import assemble
from rlcanary.recording.memory import MemorySampler
from rlcanary.recording.ray_nodes import other_gpu_nodes, parse_metrics
from rlcanary.recording.records import Records
from rlcanary.recording.tracker import tracking


def metrics(*used_mib: float, name: str = "NVIDIA H100 80GB HBM3") -> str:
    lines = ["# HELP ray_node_gram_used Total GPU RAM usage on a ray node", "# TYPE ray_node_gram_used gauge"]
    lines += [
        f'ray_node_gram_used{{GpuDeviceName="{name}",GpuIndex="{index}",SessionName="session_1",ip="10.0.0.2"}} {used}'
        for index, used in enumerate(used_mib)
    ]
    return "\n".join([*lines, 'ray_node_gram_used_ratio{GpuIndex="0"} 9e9', 'ray_node_mem_used{ip="10.0.0.2"} 9e9', ""])


class FakeNode:
    """A node that serves `text` as its metrics."""

    def __init__(self, number: int, text: str) -> None:
        node = self
        self.text = text
        self.status = 200

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(node.status if self.path == "/metrics" else 404)
                self.end_headers()
                self.wfile.write(node.text.encode())

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.entry = {
            "NodeID": f"node{number}",
            "Alive": True,
            "NodeManagerAddress": "127.0.0.1",
            "MetricsExportPort": self.server.server_port,
            "Resources": {"CPU": 8.0, "GPU": 8.0},
        }


class FakeRay:
    """Ray as a driver on a machine without a GPU sees it."""

    def __init__(self) -> None:
        self.up = True
        self.listed: list[dict[str, Any]] = [
            {
                "NodeID": "here",
                "Alive": True,
                "NodeManagerAddress": "10.0.0.1",
                "MetricsExportPort": -1,
                "Resources": {"CPU": 2.0, "GPU": 2.0},
            }
        ]

    def is_initialized(self) -> bool:
        return self.up

    def nodes(self) -> list[dict[str, Any]]:
        return self.listed

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "here")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.delitem(sys.modules, "ray.util.client", raising=False)
    monkeypatch.setattr(ray_nodes, "READ_FOR_S", 0.0)
    monkeypatch.setattr(ray_nodes, "NODES_FOR_S", 0.0)
    return fake


@pytest.fixture
def add_node(ray: FakeRay) -> Iterator[Callable[[str], FakeNode]]:
    with ExitStack() as servers:

        def add(text: str) -> FakeNode:
            node = FakeNode(len(ray.listed), text)
            servers.callback(node.server.server_close)
            servers.callback(node.server.shutdown)
            ray.listed.append(node.entry)
            return node

        yield add


@contextmanager
def sampling() -> Iterator[MemorySampler]:
    sampler = MemorySampler(None)
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.stop()


def test_highest_of_all_gpus_of_all_nodes_counts(add_node: Callable[[str], FakeNode]) -> None:
    add_node(metrics(1024, 3 * 1024))
    add_node(metrics(5 * 1024, 2 * 1024, name="NVIDIA L4"))
    with sampling() as sampler:
        assert sampler.max_gb() == 5.0
        assert sampler.gpu_names() == ["NVIDIA H100 80GB HBM3", "NVIDIA L4"]


def test_trouble_of_ray_is_told_to_the_test_that_asks_for_memory_alone(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise RuntimeError("the cluster restarts")

    monkeypatch.setattr(ray, "nodes", broken)
    records = Records()
    with tracking("test_a.py::test_b", records, MemorySampler(None)) as tracker:
        tracker.track("loss", 1.0)
        with pytest.raises(UserError, match="Ray does not list its nodes"):
            tracker.get_max_mem()
    assert any('"loss"' in text for text in records.missing())


def test_models_of_other_nodes_are_in_the_results(add_node: Callable[[str], FakeNode]) -> None:
    add_node(metrics(1024, name="NVIDIA L4"))
    records = Records()
    with tracking("test_a.py::test_b", records, MemorySampler(None)) as tracker:
        tracker.log_max_mem("mem_gb")
    names = ("git_commit", "start_time", "start_time_utc", "run_id", "host", "dirty", "versions", "environment")
    header = {**dict.fromkeys(names), "gpu_types": ["NVIDIA H200"]}
    document = assemble(header, [json.loads(text) for text in records.missing()], 0, None)
    assert document["gpu_types"] == ["NVIDIA H200", "NVIDIA L4"]
    assert document["metrics"]["test_a::test_b"]["mem_gb"] == 1.0


def test_maximum_outlasts_the_moment_and_the_node(ray: FakeRay, add_node: Callable[[str], FakeNode]) -> None:
    node = add_node(metrics(1024))
    with sampling() as sampler:
        node.text = metrics(7 * 1024)
        sampler.max_gb()
        node.text = metrics(1024)
        assert sampler.max_gb() == 7.0
        node.entry["Alive"] = False
        assert sampler.max_gb() == 7.0


def test_cluster_that_comes_up_during_the_test_is_seen(ray: FakeRay, add_node: Callable[[str], FakeNode]) -> None:
    add_node(metrics(9 * 1024))
    ray.up = False
    with sampling() as sampler:
        assert sampler.max_gb() < 9.0
        ray.up = True
        wait_for(sampler.gpu_names)
        assert sampler.max_gb() == 9.0


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [("", 200, "have no ray_node_gram_used"), ("", 500, "HTTP Error 500"), (None, 0, "it serves no metrics")],
    ids=["no GPU among the metrics", "an error", "no metrics"],
)
def test_gpus_that_do_not_answer_are_an_error_and_not_zero(
    add_node: Callable[[str], FakeNode], text: str | None, status: int, reason: str
) -> None:
    node = add_node(text or "")
    node.status = status
    if text is None:
        node.entry["MetricsExportPort"] = -1
    with sampling() as sampler, pytest.raises(UserError, match=rf"Ray node 127\.0\.0\.1 is not known: .*{reason}"):
        sampler.max_gb()


def test_missed_answer_is_made_up_for_by_another(add_node: Callable[[str], FakeNode]) -> None:
    node = add_node(metrics(2048))
    with sampling() as sampler:
        node.status = 500
        assert sampler.max_gb() == 2.0


def test_nodes_on_this_machine_are_left_to_the_driver(ray: FakeRay, add_node: Callable[[str], FakeNode]) -> None:
    node = add_node("")
    node.entry["NodeManagerAddress"] = "10.0.0.1"
    assert other_gpu_nodes() == []
    with sampling() as sampler:
        assert 0 < sampler.max_gb() < 1024


def test_ray_client_is_on_no_node(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    client = SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: True))
    monkeypatch.setitem(sys.modules, "ray.util.client", client)
    assert [node.node_id for node in other_gpu_nodes()] == ["here"]


def test_shutdown_while_nodes_are_listed_is_no_error(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    def nodes() -> None:
        ray.up = False
        raise RuntimeError("Ray has not been started yet")

    monkeypatch.setattr(ray, "nodes", nodes)
    assert other_gpu_nodes() == []


def test_label_with_quotes_and_braces_is_read() -> None:
    reading = parse_metrics('ray_node_gram_used{GpuDeviceName="A \\"B\\" {x} y",GpuIndex="0"} 1.5 1700000000\n')
    assert reading.used_bytes == 1.5 * 2**20
    assert reading.gpu_names == {'A \\"B\\" {x} y'}
