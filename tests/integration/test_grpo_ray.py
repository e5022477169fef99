"""The bundled trainer with its samplers in Ray actors, on a cluster of two nodes that run on this machine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_grpo_train import a_plan, log_of

from rlcanary.errors import UserError
from rlcanary.grpo.sync import SyncError
from rlcanary.grpo.train import train

ray = pytest.importorskip("ray")

REPLICAS = {
    "runtime__kind": "ray",
    "runtime__sync_timeout_s": 20.0,
    "roles__sampler": {"replicas": 2, "cpus": 1.0, "slots": 4},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head and another node with one CPU each, so that two replicas lie on two nodes."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1, resources={"other": 1})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def live_actors() -> int:
    from rlcanary.cleanup.ray_cluster import actors

    return len(actors())


def test_two_replicas_on_two_nodes_log_what_one_engine_in_this_process_logs(cluster: Any, tmp_path: Path) -> None:
    train(a_plan(tmp_path / "local", 3))
    train(a_plan(tmp_path / "ray", 3, **REPLICAS))
    assert log_of(tmp_path / "ray") == log_of(tmp_path / "local")
    assert live_actors() == 0


def test_more_cpus_than_the_cluster_has_are_refused(cluster: Any, tmp_path: Path) -> None:
    plan = a_plan(tmp_path, **REPLICAS | {"roles__sampler": {"replicas": 3, "cpus": 1.0}})
    with pytest.raises(UserError, match=r"3 replicas of 1\.0 cpus, but the Ray cluster has 2"):
        train(plan)
    assert live_actors() == 0


def test_a_run_that_fails_leaves_no_actor(cluster: Any, tmp_path: Path) -> None:
    def fail(step: int, metrics: Any) -> None:
        assert live_actors() == 2
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(a_plan(tmp_path, **REPLICAS), on_step=fail)
    assert live_actors() == 0


def test_a_node_that_is_removed_ends_the_run_which_is_resumed_to_the_same_numbers(cluster: Any, tmp_path: Path) -> None:
    """The last test of the module: the cluster has one node afterwards."""
    changes = REPLICAS | {"run__checkpoint_every": 1}
    train(a_plan(tmp_path / "whole", 4, **changes))

    def remove(step: int, metrics: Any) -> None:
        if step == 1:
            (node,) = list(cluster.worker_nodes)
            cluster.remove_node(node)

    with pytest.raises(SyncError, match=r"engine . did not take the weights of version 3"):
        train(a_plan(tmp_path / "stopped", 4, **changes), on_step=remove)
    assert [line["step"] for line in log_of(tmp_path / "stopped")] == [0, 1]
    local = {key: value for key, value in changes.items() if not key.startswith(("runtime", "roles"))}
    train(a_plan(tmp_path / "stopped", 4, **local), resume=True)
    assert log_of(tmp_path / "stopped") == log_of(tmp_path / "whole")
