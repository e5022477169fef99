"""Nothing that a test leaves in a real Ray cluster reaches the next test."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from inner_session import Run, run_session
from waiting import HANG_S, wait_for

from rlcanary.cleanup.ray_start import start_ray

pytestmark = pytest.mark.ray

SOAK_TESTS = int(os.environ.get("RLCANARY_SOAK", "24"))

LEAKING = """
import subprocess, sys, time, weakref
import pytest, ray
from ray.util.placement_group import placement_group
from rlcanary.cleanup import ray_cluster as state
from rlcanary.system import processes

kept = []

@pytest.fixture(scope="session")
def ray_options():
    return {"num_cpus": 2, "include_dashboard": False}

@ray.remote(num_cpus=2)
class Greedy:
    def answer(self):
        return 42

@ray.remote(num_cpus=0)
class Server:
    def answer(self):
        return 42
    def start_helper(self):
        self.helper = Server.remote()
        return ray.get(self.helper.answer.remote())
    def ask_helper(self):
        return ray.get(self.helper.answer.remote())

@pytest.fixture(scope="module")
def server(ray_cluster):
    server = Server.remote()
    ray.get(server.answer.remote())
    return server

@pytest.fixture(scope="module")
def impatient(ray_cluster):
    return Server.remote()

def test_actor_that_is_still_starting(impatient):
    pass

def test_actor_that_was_still_starting_is_kept(impatient):
    assert ray.get(impatient.answer.remote()) == 42

class Tensor:
    pass

def test_fails_and_leaves_an_actor(server):
    actor = Greedy.remote()
    ray.get(actor.answer.remote())
    kept.append(actor)
    tensor = Tensor()
    kept.append(weakref.ref(tensor))
    ray.get(server.start_helper.remote())
    assert tensor is None

def test_cpus_of_the_failed_test_are_free(server):
    while ray.available_resources().get("CPU", 0) < 2:
        time.sleep(0.002)

def test_traceback_of_the_failed_test_holds_nothing():
    assert kept[1]() is None

def test_actor_that_a_shared_actor_started_is_kept(server):
    assert ray.get(server.ask_helper.remote()) == 42

def test_leaves_a_placement_group(server):
    kept.append(placement_group([{"CPU": 2}]))
    ray.get(kept[-1].ready())

def test_leaves_a_detached_actor(server):
    ray.get(Greedy.options(name="left", lifetime="detached").remote().answer.remote())

def test_leaves_an_actor_that_restarts(server):
    kept.append(Greedy.options(max_restarts=-1).remote())
    ray.get(kept[-1].answer.remote())

def test_cluster_is_free_again(server):
    assert ray.get(Greedy.remote().answer.remote()) == 42

@pytest.mark.leak_check(ray_actors=1)
def test_may_leave_one_actor(server):
    kept.append(Server.remote())

@pytest.mark.leak_check
def test_may_leave_nothing(server):
    kept.append(Server.remote())

@pytest.mark.parametrize("index", range(SOAK))
def test_soak(server, index):
    assert len(state.actors()) == 3  # the server, its helper, and the one that was not waited for
    assert not state.placement_groups()
    assert "sleep 999" not in [processes.command_line(child.pid) for child in processes.children()]
    kept.append(Server.remote())
    if index % 3 == 0:
        subprocess.Popen(["sleep", "999"])
    if index % 10 == 0:
        kept.append(placement_group([{"CPU": 2}]))
        ray.get(kept[-1].ready())
    assert index % 4
"""


@pytest.fixture(scope="module")
def leaking(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("leaking")
    return run_session(folder, LEAKING.replace("SOAK", str(SOAK_TESTS)), "--leak-report")


@pytest.mark.parametrize(
    "claim",
    [
        "actor_that_was_still_starting_is_kept",
        "cpus_of_the_failed_test_are_free",
        "traceback_of_the_failed_test_holds_nothing",
        "actor_that_a_shared_actor_started_is_kept",
        "cluster_is_free_again",
        "may_leave_one_actor",
    ],
)
def test_after_a_test_that_leaks(leaking: Run, claim: str) -> None:
    case = leaking.cases[f"test_{claim}"]
    assert case.outcome == "passed", case.text


def test_what_was_left_is_named_with_its_test(leaking: Run) -> None:
    for left in ("Ray actor Greedy (", "Ray actor Greedy named 'left'", "Ray placement group"):
        assert left in leaking.output.partition("left behind, and ended or put back")[2]


def test_leak_check_fails_the_test_that_leaves_more_than_it_allows(leaking: Run) -> None:
    case = leaking.cases["test_may_leave_nothing"]
    assert case.outcome == "error"
    assert "+1 Ray actors: Server" in case.text


def test_leak_report_does_not_blame_the_first_test_for_the_shared_cluster(leaking: Run) -> None:
    report = leaking.output.partition("grew during a test")[2]
    first = report.partition("test_fails_and_leaves_an_actor")[2].partition("test_inner.py::")[0]
    assert "+2 Ray actors" in first
    assert "raylet" not in first


def test_leak_reaches_no_later_test_in_a_soak(leaking: Run) -> None:
    soak = {name: case for name, case in leaking.cases.items() if name.startswith("test_soak")}
    assert len(soak) == SOAK_TESTS
    for name, case in soak.items():
        fails_on_purpose = int(name.partition("[")[2].rstrip("]")) % 4 == 0
        assert case.outcome == ("failed" if fails_on_purpose else "passed"), case.text
        assert not fails_on_purpose or "assert (" in case.text, case.text


CLUSTERS = """
import os, time
from pathlib import Path
import pytest, ray
from rlcanary.cleanup.ray_start import start_ray

@pytest.mark.parametrize("index", [0, 1])
def test_own_cluster(index):
    start_ray(lambda: ray.init(num_cpus=1, include_dashboard=False))
    address = ray.get_runtime_context().gcs_address
    here = Path(f"cluster-{index}")
    here.write_text(f"{address} {os.environ['CUDA_VISIBLE_DEVICES']}")
    other = Path(f"cluster-{1 - index}")
    while not other.exists() or not other.read_text():
        time.sleep(0.05)
    assert other.read_text().split()[0] != address

def test_ray_session_has_a_namespace_and_a_folder_of_its_own(ray_session):
    assert ray_session.get_runtime_context().namespace.startswith("rlcanary-gw")
    assert f"/rlc-" in ray_session._private.worker._global_node.get_session_dir_path()
"""


def test_workers_of_xdist_have_clusters_and_gpus_of_their_own(tmp_path: Path) -> None:
    run = run_session(tmp_path, CLUSTERS, "-n", "2", CUDA_VISIBLE_DEVICES="4,7")
    assert [case.outcome for case in run.cases.values()] == ["passed"] * 3, run.output
    gpus = {(tmp_path / f"cluster-{index}").read_text().split()[1] for index in (0, 1)}
    assert gpus == {"4", "7"}


ON_A_HOST_WITH_A_CLUSTER = """
import os
import pytest, ray
from rlcanary.cleanup.ray_start import start_ray

HOST = os.environ["HOST_CLUSTER"]

def test_own_cluster_by_default():
    start_ray(lambda: ray.init(num_cpus=1, include_dashboard=False))
    assert ray.get_runtime_context().gcs_address != HOST

def test_own_cluster_from_the_fixture(ray_session):
    assert ray.get_runtime_context().gcs_address != HOST
"""

IN_THE_HOSTS_CLUSTER = """
import os
import ray

HOST = os.environ["HOST_CLUSTER"]

@ray.remote(num_cpus=1)
class Actor:
    def answer(self):
        return 42

def test_is_attached_and_leaves_an_actor(ray_session):
    assert ray.get_runtime_context().gcs_address == HOST
    assert ray.get(Actor.options(lifetime="detached", name="left").remote().answer.remote()) == 42

def test_cpu_is_free_again(ray_session):
    assert ray.get(Actor.remote().answer.remote()) == 42
"""


@pytest.fixture
def host_cluster(tmp_path: Path) -> Iterator[str]:
    """The address of a cluster that somebody runs on this machine, as `ray start` leaves it: found by `ray.init()`."""
    known = Path("/tmp/ray/ray_current_cluster")  # where ray.init() looks
    if known.exists():
        pytest.skip(f"a cluster runs on this machine already ({known})")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--num-cpus=1"]
    log = tmp_path / "ray.log"

    def start() -> psutil.Popen:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = [f"--port={port}", "--include-dashboard=false"]
        with log.open("w") as output:
            process = psutil.Popen(
                [*command, *options], env=environment | {"RAY_AUTH_MODE": "disabled"}, stdout=output, stderr=output
            )
        wait_for(lambda: process.poll() is not None or (known.exists() and known.read_text().endswith(f":{port}")))
        if process.poll() is not None:
            raise RuntimeError(log.read_text())
        return process

    process = start_ray(start, HANG_S)
    try:
        yield known.read_text()
    finally:
        for member in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()
        known.unlink(missing_ok=True)


def test_cluster_of_the_host_is_used_only_when_asked_for(host_cluster: str, tmp_path: Path) -> None:
    apart = run_session(tmp_path, ON_A_HOST_WITH_A_CLUSTER, HOST_CLUSTER=host_cluster)
    assert [case.outcome for case in apart.cases.values()] == ["passed"] * 2, apart.output
    inside = run_session(tmp_path, IN_THE_HOSTS_CLUSTER, "--ray-address", host_cluster, HOST_CLUSTER=host_cluster)
    assert [case.outcome for case in inside.cases.values()] == ["passed"] * 2, inside.output
    assert "Ray actor Actor named 'left'" in inside.output
    again = run_session(tmp_path, IN_THE_HOSTS_CLUSTER, "--ray-address", host_cluster, HOST_CLUSTER=host_cluster)
    assert again.code == 0, again.output  # the cluster outlived the session
