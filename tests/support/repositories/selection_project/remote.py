"""Copied as tests/test_remote.py."""

import subprocess
import sys
import time

import pytest
import ray
from pkg import config, processes, registry
from pkg.constants import UNUSED
from pkg.scaling import other
from pkg.workers import Counter, Outer, Spawner, Streamer, Threaded, stream_task, task


def test_plain():
    assert other(1) == 2


def test_actor_a(cluster):
    assert ray.get(Counter.remote().a.remote()) == 2


def test_long_a(shared):
    assert ray.get(shared.a.remote())


def test_long_b(shared):
    assert ray.get(shared.b.remote())


def test_task(cluster):
    assert ray.get(task.remote(1)) == 5


def test_task_again(cluster):
    assert ray.get(task.remote(1)) == 5


def test_async(shared_async):
    assert ray.get(shared_async.m.remote()) == 1


def test_async_other(shared_async):
    assert ray.get(shared_async.n.remote()) == 3


def test_lazy_first(lazy):
    assert ray.get(lazy.predict.remote(1)) == 2


def test_lazy_again(lazy):
    assert ray.get(lazy.predict.remote(2)) == 3


def test_error(lazy):
    with pytest.raises(ValueError, match="wrong") as error:
        ray.get(lazy.fail.remote())
    assert "rlc" not in str(error.value) + repr(error.value.args)


def test_threaded(cluster):
    actor = Threaded.remote()
    assert ray.get([actor.work.remote(i) for i in range(4)]) == [0, 1, 2, 3]


def test_background_thread(cluster):
    assert ray.get(Threaded.remote().background.remote()) == [1]


def test_nested(cluster):
    assert ray.get(Outer.remote().call.remote()) == 6


def test_stream_actor(cluster):
    assert [ray.get(r) for r in Streamer.remote().stream.options(num_returns="streaming").remote(2)] == [0, 1]


def test_stream_task(cluster):
    assert [ray.get(r) for r in stream_task.options(num_returns="streaming").remote(2)] == [0, 1]


def test_fire_and_forget(shared):
    shared.late.remote()


def test_after_fire_and_forget(shared):
    assert ray.get(shared.quick.remote()) == 1


def test_killed(cluster):
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(Counter.remote().die.remote())


def test_ray_kill(cluster, tmp_path):
    actor = Counter.remote()
    ray.get(actor.quick.remote())
    begun = tmp_path / "begun"
    actor.hang.remote(begun)
    while not begun.exists():
        time.sleep(0.01)
    ray.kill(actor)


def test_subprocess():
    assert subprocess.run([sys.executable, "-m", "pkg.script"], capture_output=True, check=True).stdout == b"5\n"


def test_subprocess_in_actor(cluster):
    assert ray.get(Spawner.remote().run.remote()) == b"5\n"


def test_shell_in_actor(cluster):
    assert ray.get(Spawner.remote().shell.remote()) == 0


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_process(method):
    assert processes.run(method) == 5


def test_pool():
    assert processes.run_pool() == [2, 4]


def test_process_pool_executor():
    assert processes.run_executor() == 10


def test_first_user_of_a_fixture(prepared):
    assert prepared == [1]


def test_second_user_of_a_fixture(prepared):
    assert prepared


def test_requested_by_name(request):
    assert request.getfixturevalue("prepared")


def test_constant():
    assert UNUSED == 5


def test_import_inside():
    from pkg.late import VALUE

    assert VALUE == 1


def test_import_inside_again():
    from pkg.late import VALUE

    assert VALUE == 1


def test_registered():
    assert registry.NAMES == ["plugin"]


def test_thread():
    assert processes.run_thread() == [7]


def test_data():
    assert config.load() == {"a": 1}
