"""A test that hangs in Ray ends with the stack of the worker that it waits for, and leaves a cluster that works."""

import re

import pytest
from inner_session import Run, run_session

pytestmark = pytest.mark.ray

HANGING_IN_RAY = """
import asyncio, time
from pathlib import Path
import pytest, ray

@pytest.fixture(scope="session")
def ray_options():
    return {"num_cpus": 2, "include_dashboard": False}

@ray.remote(num_cpus=0)
class Server:
    def answer(self):
        return 42
    def hang(self):
        Path("hangs-server").touch()
        time.sleep(9999)

@ray.remote(num_cpus=2)
class Stuck:
    def hang(self):
        Path("hangs-get").touch()
        time.sleep(9999)
    def spin(self):
        Path("hangs-wait").touch()
        while True:
            pass
    def answer(self):
        return 42

@ray.remote(num_cpus=0)
class AsyncStuck:
    async def hang(self):
        Path("hangs-async").touch()
        await asyncio.sleep(9999)

@ray.remote(num_cpus=2)
def stuck_task():
    Path("hangs-task").touch()
    time.sleep(9999)

@pytest.fixture(scope="module")
def server(ray_cluster):
    server = Server.remote()
    ray.get(server.answer.remote())
    return server

def test_server_answers(server):
    assert ray.get(server.answer.remote()) == 42

@pytest.mark.timeout(LIMIT)
def test_get(ray_cluster, server):
    actor = Stuck.remote()
    ray.get(actor.answer.remote())
    ray.get(actor.hang.remote())

@pytest.mark.timeout(LIMIT)
def test_wait(ray_cluster):
    actor = Stuck.remote()
    ray.get(actor.answer.remote())
    ray.wait([actor.spin.remote()])

@pytest.mark.timeout(LIMIT)
def test_task(ray_cluster):
    ray.get(stuck_task.remote())

@pytest.mark.timeout(LIMIT)
def test_async(ray_cluster):
    ray.get(AsyncStuck.remote().hang.remote())

@pytest.mark.timeout(1)
def test_actor_that_cannot_be_placed(ray_cluster):
    ray.get(Stuck.options(num_cpus=64).remote().answer.remote())

@pytest.mark.timeout(0)
def test_next_test_on_the_shared_cluster(ray_cluster, server):
    assert ray.get(server.answer.remote()) == 42
    assert ray.get(Stuck.remote().answer.remote()) == 42

@pytest.mark.timeout(LIMIT / 12)
def test_actor_of_a_shared_fixture(server):
    ray.get(server.hang.remote())
"""


@pytest.fixture(scope="module")
def hanging_in_ray(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A session whose workers were hanging when the limits passed: on a busy machine they start late."""
    for limit in (12, 60, 240):
        run = run_session(tmp_path_factory.mktemp("ray"), f"LIMIT = {limit}\n{HANGING_IN_RAY}")
        if len(list(run.folder.glob("hangs-*"))) == 5:
            break
    return run


@pytest.mark.parametrize(
    ("name", "stack"),
    [("get", "in hang"), ("wait", "in spin"), ("task", "in stuck_task"), ("async", "ray::AsyncStuck.hang")],
)
def test_test_hung_in_ray_fails_with_the_stack_of_the_busy_worker(hanging_in_ray: Run, name: str, stack: str) -> None:
    case = hanging_in_ray.cases[f"test_{name}"]
    assert case.outcome == "failed"
    assert re.search(r"still running after (12|60|240) seconds", case.text)
    assert stack in case.text


def test_actor_that_cannot_be_placed_is_no_hang(hanging_in_ray: Run) -> None:
    case = hanging_in_ray.cases["test_actor_that_cannot_be_placed"]
    assert case.outcome == "failed"


def test_shared_cluster_can_be_used_after_hung_tests(hanging_in_ray: Run) -> None:
    assert hanging_in_ray.cases["test_next_test_on_the_shared_cluster"].outcome == "passed"


def test_hung_actor_of_a_shared_fixture_is_named_and_left_to_its_fixture(hanging_in_ray: Run) -> None:
    case = hanging_in_ray.cases["test_actor_of_a_shared_fixture"]
    assert case.outcome == "failed"
    assert "ray::Server.hang" in case.text
    assert "left running" in case.text
    assert "hang (" in case.text  # a line of py-spy's
