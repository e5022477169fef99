"""The bundled trainer with its samplers in Ray actors, on a cluster of two nodes that run on this machine."""

import asyncio
import itertools
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_grpo_ahead import groups_of, require_balance, used
from test_grpo_train import a_plan, log_of
from waiting import HANG_S

from rlcanary.cleanup.ray_cluster import actors
from rlcanary.cleanup.ray_start import start_ray
from rlcanary.contract.batch import Completion
from rlcanary.contract.sampling import Sampling
from rlcanary.errors import UserError
from rlcanary.grpo.engines.engine_pool import EnginesLost, RequestRefused
from rlcanary.grpo.engines.ray_actors import RemoteEngine, start_on_ray
from rlcanary.grpo.plan.models import ScratchSettings, character_tokenizer, save_model, scratch_model
from rlcanary.grpo.rollout.buffer import BufferClosed
from rlcanary.grpo.train import train

ray = pytest.importorskip("ray")

REPLICAS = {
    "runtime__kind": "ray",
    "runtime__sync_timeout_s": HANG_S,
    "runtime__start_timeout_s": HANG_S,
    "roles__sampler": {"replicas": 2, "cpus": 1.0, "slots": 4},
}
# Each engine is a process that imports torch and transformers.
REPLICA = REPLICAS | {"roles__sampler": {"cpus": 1.0, "slots": 4}}


def two_nodes() -> Any:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1, resources={"other": 1})
    return cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head and another node with one CPU each, so that two replicas lie on two nodes."""
    cluster = start_ray(two_nodes)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def numbers_of(folder: Path) -> list[Any]:
    """The log, up to rounding: BLAS promises the last bit of a product to no second process."""
    return [pytest.approx(line, rel=1e-6, abs=1e-7) for line in log_of(folder)]


def live_actors() -> int:
    return len(actors())


def test_two_replicas_on_two_nodes_log_what_one_engine_in_this_process_logs(cluster: Any, tmp_path: Path) -> None:
    train(a_plan(tmp_path / "local", 3))
    train(a_plan(tmp_path / "ray", 3, **REPLICAS))
    assert log_of(tmp_path / "ray") == numbers_of(tmp_path / "local")
    assert live_actors() == 0


def test_more_cpus_than_the_cluster_has_are_refused(cluster: Any, tmp_path: Path) -> None:
    plan = a_plan(tmp_path, **REPLICAS | {"roles__sampler": {"replicas": 3, "cpus": 1.0}})
    with pytest.raises(UserError, match=r"3 replicas .* has 2"):
        train(plan)
    assert live_actors() == 0


def test_a_run_that_fails_leaves_no_actor(cluster: Any, tmp_path: Path) -> None:
    def fail(step: int, metrics: Any) -> None:
        assert live_actors() == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(a_plan(tmp_path, **REPLICA), on_step=fail)
    assert live_actors() == 0


def test_engines_that_do_not_start_in_time_end_the_run_and_leave_no_actor(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(EnginesLost, match=r"runtime\.start_timeout_s"):
        train(a_plan(tmp_path, **REPLICA | {"runtime__start_timeout_s": 0.001}))
    assert live_actors() == 0


def test_an_engine_that_cannot_start_ends_the_run_in_a_line(cluster: Any, tmp_path: Path) -> None:
    plan = a_plan(tmp_path, **REPLICA)
    started = start_on_ray(plan.roles.sampler, plan.runtime, plan.sampling, "float32", tmp_path / "nowhere")
    with pytest.raises(EnginesLost, match=r"^an engine did not start: .*nowhere.*$"), started:
        pass
    assert live_actors() == 0


def test_a_request_that_an_engine_refuses_is_told_in_one_line(cluster: Any, tmp_path: Path) -> None:
    settings = ScratchSettings()
    save_model(scratch_model(settings, seed=0), character_tokenizer(settings.characters), tmp_path)
    plan = a_plan(tmp_path, **REPLICA)
    with (
        start_on_ray(plan.roles.sampler, plan.runtime, Sampling(eos_token_ids=()), "float32", tmp_path) as (
            (engine,),
            _,
        ),
        pytest.raises(RequestRefused) as refused,
    ):
        asyncio.run(engine.agenerate([99], {}))
    assert str(refused.value) == "prompt 0 has the id 99, outside the vocabulary of 17"


LONG = {"sampling__max_new_tokens": 50, "sampling__eos_token_ids": [], "run__checkpoint_every": 1}


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine that is given the ninth request is killed while it answers: in the third step, each having four."""
    send, requests = RemoteEngine.agenerate, itertools.count(1)

    async def send_and_kill(engine: RemoteEngine, *request: Any) -> list[Completion]:
        answer = asyncio.ensure_future(send(engine, *request))
        if next(requests) == 9:
            await asyncio.sleep(0.05)
            os.kill(actors()[engine.actor._actor_id.hex()].pid, signal.SIGKILL)
        return await answer

    monkeypatch.setattr(RemoteEngine, "agenerate", send_and_kill)


def test_an_engine_killed_while_it_generates_is_given_up_and_the_run_goes_on(
    cluster: Any, killed: None, tmp_path: Path
) -> None:
    outcome = train(a_plan(tmp_path, 4, schedule__max_staleness=1, **REPLICAS | LONG))
    assert [line["step"] for line in log_of(tmp_path)] == list(range(4))
    fates = require_balance(tmp_path, outcome)
    assert fates["failed"] >= 1
    assert fates["used"] == 4 * 4
    epochs = Counter(line["epoch"] for line in log_of(tmp_path))
    assert max(Counter(used(tmp_path)).values()) <= len(epochs)
    assert live_actors() == 0


def test_the_only_engine_killed_while_it_generates_ends_the_run_which_is_resumed_to_the_same_numbers(
    cluster: Any, killed: None, tmp_path: Path
) -> None:
    train(a_plan(tmp_path / "whole", 4, **LONG))
    alone = {"runtime__kind": "ray", "roles__sampler": {"cpus": 1.0}}
    with pytest.raises(EnginesLost, match="no engine is left: EngineDied"):
        train(a_plan(tmp_path / "stopped", 4, **alone | LONG))
    assert [line["step"] for line in log_of(tmp_path / "stopped")] == [0, 1]
    assert {group["fate"] for group in groups_of(tmp_path / "stopped") if group["step"] == 2} == {"failed"}
    outcome = train(a_plan(tmp_path / "stopped", 4, **LONG), resume=True)
    assert log_of(tmp_path / "stopped") == numbers_of(tmp_path / "whole")
    assert require_balance(tmp_path / "stopped", outcome) == {"used": 4 * 4}


def test_a_buffer_whose_actor_is_killed_ends_the_run(cluster: Any, tmp_path: Path) -> None:
    def kill(step: int, metrics: Any) -> None:
        (buffer,) = [actor for actor in actors().values() if actor.class_name == "GroupBuffer"]
        os.kill(buffer.pid, signal.SIGKILL)

    with pytest.raises(BufferClosed, match="the buffer's actor is gone"):
        train(a_plan(tmp_path, 4, schedule__max_staleness=1, **REPLICA), on_step=kill)
    assert [line["step"] for line in log_of(tmp_path)] == [0]
    assert live_actors() == 0


def test_a_run_goes_on_without_a_node_that_is_removed(cluster: Any, tmp_path: Path) -> None:
    """The last test of the module: the cluster has one node afterwards."""

    def remove(step: int, metrics: Any) -> None:
        if step == 1:
            (node,) = list(cluster.worker_nodes)
            cluster.remove_node(node)

    outcome = train(a_plan(tmp_path, 4, **REPLICAS), on_step=remove)
    assert [line["step"] for line in log_of(tmp_path)] == [0, 1, 2, 3]
    assert require_balance(tmp_path, outcome)["used"] == 4 * 4
