"""The buffer as a real Ray actor: processes meet in it, nobody waits for ever, and errors arrive as what they are."""

import pytest
from waiting import HANG_S

from rlcanary.contract.batch import Completion, Group
from rlcanary.grpo.rollout.buffer import BufferClosed, start_buffer

pytestmark = pytest.mark.ray


def group_of(id, version=0):
    completion = Completion([5, 6], [-0.1, -0.2], token_versions=[version, version], text="56")
    return Group([1], [completion], [1.0], item_id=id, policy_version=version)


@pytest.fixture
def ray(ray_cluster):
    return ray_cluster


def test_producers_in_other_processes_and_a_trainer_share_the_buffer(ray):
    @ray.remote(num_cpus=0.5)
    def produce(buffer, groups):
        for group in groups:
            ray.get(buffer.put.remote(group))

    buffer = start_buffer(capacity=4, max_staleness=0)
    producing = [produce.remote(buffer, [group_of(start + index) for index in range(10)]) for start in (0, 100)]
    seen = []
    for _ in range(5):
        seen += ray.get(buffer.take.remote(4, 0, HANG_S), timeout=HANG_S).groups
    ray.get(producing, timeout=HANG_S)
    assert sorted(group.item_id for group in seen) == [*range(10), *range(100, 110)]
    assert [group.item_id for group in seen if group.item_id < 100] == list(range(10))
    assert seen[0] == group_of(seen[0].item_id)
    account = ray.get(buffer.account.remote())
    assert (account.entered, account.waiting, account.fates["used"]) == (20, 0, 20)


def test_producer_waits_in_the_actor_while_others_are_served(ray):
    buffer = start_buffer(capacity=1, max_staleness=0)
    ray.get(buffer.put.remote(group_of("a")), timeout=HANG_S)
    second = buffer.put.remote(group_of("b", 1))
    assert ray.wait([second], timeout=0.3)[0] == []
    taken = ray.get(buffer.take.remote(1, 1), timeout=HANG_S)
    assert [group.item_id for group in taken.stale] == ["a"]
    ray.get(second, timeout=HANG_S)
    assert [group.item_id for group in ray.get(buffer.take.remote(1, 1), timeout=HANG_S).groups] == ["b"]


def test_errors_arrive_as_what_they_are(ray):
    buffer = start_buffer(capacity=1, max_staleness=0)
    with pytest.raises(TimeoutError):
        ray.get(buffer.take.remote(1, 0, 0.05), timeout=HANG_S)
    ray.get(buffer.put.remote(group_of("a", 5)), timeout=HANG_S)
    with pytest.raises(ValueError, match=r"version 5, .* at 0"):
        ray.get(buffer.take.remote(1, 0), timeout=HANG_S)
    waiting = buffer.put.remote(group_of("b"))
    ray.get(buffer.close.remote(), timeout=HANG_S)
    with pytest.raises(BufferClosed):
        ray.get(waiting, timeout=HANG_S)
    with pytest.raises(ValueError, match="out of range"):
        start_buffer(capacity=0, max_staleness=0)


def test_buffer_that_dies_is_an_error_to_all_who_wait(ray):
    buffer = start_buffer(capacity=1, max_staleness=0)
    ray.get(buffer.account.remote(), timeout=HANG_S)
    waiting = buffer.take.remote(1, 0)
    ray.kill(buffer)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(waiting, timeout=HANG_S)
