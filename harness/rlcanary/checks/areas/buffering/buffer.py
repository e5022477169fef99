"""The buffer between sampler and trainer: every group is trained once, whole, in the declared order, or as it was told."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Generator

from rlcanary.checks.asserts import assert_equal, soft
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds.buffers import (
    Step,
    assert_history,
    drawn_history,
    group,
    numbers,
)
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import Completion, Group
from rlcanary.contract.records.buffering import BufferSettings

NEEDS = ("new_buffer", "put_groups", "take_groups")
LENIENT = 99
"""A staleness that no group of a case reaches."""


def _taken(adapter: Adapter, buffer: Any, version: int = 9) -> list[int]:
    return numbers(adapter.take_groups(buffer, version).groups)


def _amounts() -> Iterator[Case]:
    for per_batch, puts in ((1, [1]), (1, [2, 3]), (2, [2, 2]), (2, [1, 2, 1]), (3, [7, 2])):
        yield Case(f"{puts} groups", f"batches of {per_batch}", per_batch=per_batch, puts=puts, item=None)
    yield Case("4 groups of one item", "batches of 2", per_batch=2, puts=[2, 2], item=0)


@check("buffer.every_group_once", needs=NEEDS, cases=_amounts)
def every_group_once(adapter: Adapter, per_batch: int, puts: Sequence[int], item: int | None) -> None:
    """Every group that is fresh enough is trained, and none of them twice.

    Silent because a batch has the right size either way: groups that are lost were sampled for nothing, and groups that come
    again are trained off policy. Look for the surplus of a batch that is thrown away, for a queue that is emptied at each
    update, for a group that is read and not removed, and for groups kept by the id of their item, which may come again.
    """
    buffer = adapter.new_buffer(BufferSettings(per_batch, max_staleness=LENIENT))
    put: list[int] = []
    taken: list[int] = []
    for count in puts:
        new = list(range(len(put), len(put) + count))
        adapter.put_groups(buffer, [group(number, item=item) for number in new])
        put += new
        for _ in range(len(put) // per_batch + 1):
            taken += _taken(adapter, buffer)
    whole = len(put) - len(put) % per_batch
    told = f"of {len(put)} groups, {whole} make whole batches of {per_batch}"
    repeated = sorted({number for number in taken if taken.count(number) > 1})
    with soft():
        assert_equal(repeated, [], f"{told}: groups that are trained again", quantity="groups trained again")
    assert_equal(len(set(taken)), whole, f"{told}: groups that are trained", quantity="groups trained")


def _arrivals() -> Iterator[Case]:
    for per_batch, puts in ((2, [1, 1]), (2, [3, 1, 0]), (3, [2, 2, 0, 2]), (4, [3, 6, 0])):
        yield Case(f"{puts} groups arrive", f"batches of {per_batch}", per_batch=per_batch, puts=puts)


@check("buffer.whole_batches", needs=NEEDS, cases=_arrivals)
def whole_batches(adapter: Adapter, per_batch: int, puts: Sequence[int]) -> None:
    """A batch has as many groups as were set: too few wait for the others, and what is over waits for the next batch.

    Silent because an update of fewer or more groups runs as well, with another noise and another weight of each token. Look
    for a batch that takes all that is there, for a timeout that ends waiting early, and for dynamic sampling that goes on
    with the last round as a whole.
    """
    buffer = adapter.new_buffer(BufferSettings(per_batch, max_staleness=LENIENT))
    waiting, number = 0, 0
    for count in puts:
        adapter.put_groups(buffer, [group(number + each) for each in range(count)])
        number, waiting = number + count, waiting + count
        expected = per_batch if waiting >= per_batch else 0
        waiting -= expected
        told = f"with batches of {per_batch}, after {number} groups were put in {len(puts)} parts, {waiting} of them wait on"
        assert_equal(len(_taken(adapter, buffer)), expected, f"{told}: groups in the batch", quantity="groups")


def _rich(straddles: bool) -> list[Group]:
    """Two groups that differ in every field, with a tool's token; one `straddles` a weight sync or none does."""
    first = [Completion([8, 9, 2], [-0.5, -0.25, -1.0]), Completion([10], [-2.0], "length")]
    second = [
        Completion([11, 12, 13, 2], [-0.5, 0.0, -0.75, -1.5], sampled=[True, False, True, True]),
        Completion([14, 15], [-3.0, -0.125], "length", token_versions=[3, 4] if straddles else None),
        Completion([16, 2], [-4.0, -0.375]),
    ]
    return [
        Group([5, 6], first, [1.0, 0.0], [[-0.5, -0.5, -2.0], [-1.0]], item_id="a", policy_version=2),
        Group(
            [7, 6, 5],
            second,
            [0.0, 0.5, 0.25],
            [[-1.5, -0.5, -0.25, -2.5], [-1.0, -8.0], [-0.75, -6.0]],
            item_id="b",
            policy_version=3,
        ),
    ]


def _rows(groups: Sequence[Group]) -> list[list[object]]:
    """List what a row of each completion trains on, by its ids."""
    return sorted(
        [
            list(map(int, completion.token_ids)),
            list(map(int, group.prompt_ids)),
            float(reward),
            list(map(float, completion.logprobs or ())),
            list(map(float, ref_logprobs)),
            list(map(bool, completion.sampled or [True] * len(completion.token_ids))),
            list(map(int, completion.token_versions or [group.policy_version] * len(completion.token_ids))),
            str(group.item_id),
        ]
        for group in groups
        for completion, reward, ref_logprobs in zip(
            group.completions, group.rewards, group.ref_logprobs or [()] * len(group.rewards), strict=True
        )
    )


def _straddling() -> Iterator[Case]:
    yield Case("one version", straddles=False)
    yield Case("a completion of two versions", straddles=True)


@check("buffer.groups_stay_whole", needs=NEEDS, cases=_straddling)
def groups_stay_whole(adapter: Adapter, straddles: bool) -> None:
    """A group leaves the buffer as it came: all its completions, each with its own reward, logprobs, marks and versions.

    Silent because a batch of rows from torn groups has the right shape, and the mean of a group is then that of some of its
    rows. Look for a buffer of rows instead of groups, for lists that are sorted or filtered one by one, and for fields that
    a record of the queue does not have.
    """
    buffer = adapter.new_buffer(BufferSettings(2, max_staleness=LENIENT))
    adapter.put_groups(buffer, _rich(straddles))
    taken = list(adapter.take_groups(buffer, 4).groups)
    sizes = sorted(len(group.completions) for group in taken)
    with soft():
        assert_equal(
            sizes, [2, 3], "groups of 2 and 3 completions were put: completions of those taken", quantity="sizes"
        )
    columns = ("ids", "prompts", "rewards", "logprobs", "reference logprobs", "marks", "versions", "item ids")
    for name, got, expected in zip(
        columns, zip(*_rows(taken), strict=True), zip(*_rows(_rich(straddles)), strict=True), strict=True
    ):
        with soft():
            assert_equal(list(got), list(expected), f"the {name} of the taken rows are not those put", quantity=name)


def _orders() -> Iterator[Case]:
    yield Case("3 groups, batches of 1", per_batch=1, puts=[2, 1])
    yield Case("7 groups, batches of 2", per_batch=2, puts=[4, 1, 2])


@check(
    "buffer.order",
    needs=NEEDS,
    cases=_orders,
    applies=lambda declared: None if declared.buffer_order else "any group of the buffer may be next",
    alternatives=lambda _: [{"buffer_order": "oldest_first"}, {"buffer_order": "newest_first"}],
)
def order(adapter: Adapter, per_batch: int, puts: Sequence[int]) -> None:
    """The groups that are trained next are those that the declared order says.

    Silent because every order gives whole batches: from the other end of a queue the oldest groups wait until they are too
    old, and the hard prompts, which take longest to sample, are lost with them. Look for `pop()` where `pop(0)` is meant,
    and for a priority queue with the wrong sign.
    """
    buffer = adapter.new_buffer(BufferSettings(per_batch, max_staleness=LENIENT))
    waiting: list[int] = []
    version = 0
    for count in puts:
        # Each group has the version that is its number, so that the first ones are the oldest ones.
        new = list(range(version, version + count))
        adapter.put_groups(buffer, [group(number, number) for number in new])
        version += count
        waiting += new
        is_oldest = adapter.conventions.buffer_order == "oldest_first"
        expected = waiting[:per_batch] if is_oldest else waiting[-per_batch:]
        told = f"groups {waiting} were put in this order: those trained next, {adapter.conventions.buffer_order}"
        assert_equal(sorted(_taken(adapter, buffer, version)), expected, told, quantity="order")
        waiting = [number for number in waiting if number not in expected]


def _capacities() -> Iterator[Case]:
    for capacity, count in ((1, 2), (2, 2), (2, 3), (3, 5)):
        yield Case(f"{count} groups, room for {capacity}", capacity=capacity, count=count)


@check(
    "buffer.full",
    needs=NEEDS,
    cases=_capacities,
    alternatives=lambda _: [{"buffer_full": "refuse"}, {"buffer_full": "drop_oldest"}],
)
def full(adapter: Adapter, capacity: int, count: int) -> None:
    """A full buffer does what is declared: it refuses a group, which the caller keeps, or throws out the oldest one.

    Silent because a bounded queue loses groups without an error: where the newest ones are lost, the trainer is always
    behind, and where the sampler believes that they were taken, their items count as trained. Look for `deque(maxlen=…)`,
    for `put_nowait` whose error is caught, and for a result of `put` that nobody reads.
    """
    buffer = adapter.new_buffer(BufferSettings(1, max_staleness=LENIENT, capacity=capacity))
    took = [int(adapter.put_groups(buffer, [group(number)])) for number in range(count)]
    refuses = adapter.conventions.buffer_full == "refuse"
    told = f"{count} groups are put one by one into a buffer of {capacity}, buffer_full={adapter.conventions.buffer_full!r}"
    with soft():
        expected = [int(number < capacity or not refuses) for number in range(count)]
        assert_equal(took, expected, f"{told}: groups that each put took", quantity="groups taken in")
    kept = list(range(count))[:capacity] if refuses else list(range(count))[-capacity:]
    trained = sorted(number for _ in range(count) for number in _taken(adapter, buffer))
    assert_equal(trained, kept, f"{told}: groups that are trained", quantity="groups trained")
    again = int(adapter.put_groups(buffer, [group(count)]))
    assert_equal(
        (again, _taken(adapter, buffer)), (1, [count]), f"{told}: a group put after all were taken", quantity="room"
    )


def _filtered() -> Iterator[Case]:
    for told, rewards in (
        ("all equal", [[1.0, 1.0], [0.0, 0.0], [0.1, 0.1]]),
        ("some equal", [[1.0, 0.0], [1.0, 1.0], [0.5, 0.0], [0.0, 0.0]]),
        ("more than a batch", [[0.0, 1.0], [0.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.9, 0.9], [0.25, 0.5]]),
        ("a batch and one", [[0.0, 1.0], [1.0, 0.0], [1.0, 0.5]]),
    ):
        yield Case(told, rewards=rewards)


@check("buffer.dynamic_sampling", needs=NEEDS, cases=_filtered)
def dynamic_sampling(adapter: Adapter, rewards: Sequence[Sequence[float]]) -> None:
    """Groups with equal rewards are left out, a batch waits until others fill it, and what is over stays for the next one.

    Silent because a batch that was filled up has the right size, whatever filled it. Groups without signal make the update
    smaller; surplus that is thrown away was sampled for nothing, and its prompts are not seen in this epoch. Look for the
    test of equal rewards, for a count of all groups instead of the kept ones, and for `batch[:n]`.
    """
    buffer = adapter.new_buffer(BufferSettings(2, max_staleness=LENIENT, dynamic_sampling=True))
    kept = [number for number, each in enumerate(rewards) if min(each) < max(each)]
    for number, each in enumerate(rewards):
        adapter.put_groups(buffer, [group(number, rewards=each)])
    batches = [_taken(adapter, buffer) for _ in range(len(rewards))]
    sizes = [2] * (len(kept) // 2)
    told = f"groups with rewards {rewards} were put one by one"
    got = [len(batch) for batch in batches if batch]
    with soft():
        assert_equal(got, sizes, f"{told}: groups in each batch of 2", quantity="groups")
    wrong = sorted({number for batch in batches for number in batch if number not in kept})
    assert_equal(wrong, [], f"{told}: groups without signal that are trained", quantity="groups without signal")


def _stops() -> Iterator[Case]:
    settings = BufferSettings(2, max_staleness=1)
    for told, steps in (
        ("behind a group that waits", [("put", 0), ("save", 0), ("put", 0), ("take", 0)]),
        ("behind a batch", [("put", 0)] * 3 + [("take", 0), ("save", 0), ("put", 1), ("take", 1)]),
        ("while a group grows old", [("put", 0), ("put", 1), ("save", 0), ("take", 2), ("put", 2), ("take", 2)]),
        ("twice", [("put", 0), ("save", 0), ("put", 1), ("put", 1), ("save", 0), ("take", 1), ("put", 1), ("take", 1)]),
    ):
        yield Case(told, settings=settings, steps=steps)
    yield Case("empty", settings=settings, steps=[("save", 0), ("take", 0), ("put", 0), ("put", 0), ("take", 0)])
    older = [("put", 0), ("save", 0), ("put", 1), ("take", 2), ("take", 3), ("take", 3)]
    yield Case("as old as allowed", settings=BufferSettings(1, max_staleness=2), steps=older)
    bounded = [("put", 0), ("save", 0), ("put", 0), ("put", 0), ("take", 0), ("take", 0), ("take", 0)]
    yield Case("with room for one more", settings=BufferSettings(1, max_staleness=1, capacity=2), steps=bounded)


@check("buffer.resumed", needs=(*NEEDS, "save_buffer", "load_buffer"), cases=_stops)
def resumed(adapter: Adapter, settings: BufferSettings, steps: Sequence[Step]) -> None:
    """A buffer that is saved and loaded goes on as it would have: its groups wait, in order, as old as they are.

    Silent because the trainer gets whole batches after a resume, too. Look for a count of groups that were sampled instead
    of those that were trained, for a queue that is left out of the checkpoint while its items count as done, and for
    versions that begin anew, so that nothing is ever too old.
    """
    assert_history(adapter, settings, steps)


def _histories(rng: Generator) -> Iterator[Case]:
    for per_batch, staleness, steps in (
        (1, 0, [("put", 0), ("take", 0), ("take", 1)]),
        (1, 0, [("put", 0), ("take", 1), ("put", 1), ("take", 1)]),
        (1, 1, [("put", 0), ("put", 1), ("take", 2), ("take", 2)]),
        (1, 2, [("put", 0), ("put", 1), ("take", 1), ("take", 2)]),
        (2, 1, [("put", 0), ("take", 0), ("put", 1), ("take", 1), ("put", 1), ("put", 2), ("take", 2), ("take", 3)]),
        (2, 2, [("put", 1), ("put", 0), ("put", 2), ("take", 2), ("put", 3), ("take", 3)]),
    ):
        settings = BufferSettings(per_batch, max_staleness=staleness)
        yield Case(f"{per_batch} a batch, staleness {staleness}, {_told(steps)}", settings=settings, steps=steps)
    for length in (6, 12, 24):
        settings, steps = drawn_history(rng, length)
        yield Case(f"drawn, {length} steps", settings=settings, steps=steps)


def _drawn(rng: Generator, size: int) -> Case:
    settings, steps = drawn_history(rng, size * (size + 1) // 2)
    return Case(settings=settings, steps=steps)


def _told(steps: Sequence[Step]) -> str:
    return " ".join(f"{name}{version}" for name, version in steps)


@check("buffer.any_history", needs=NEEDS, cases=_histories, draws=_drawn)
def any_history(adapter: Adapter, settings: BufferSettings, steps: Sequence[Step]) -> None:
    """After any puts, takes and new versions, a batch is whole, fresh, of groups that still wait, and the next in order.

    Silent because buffers go wrong in a state that only some history reaches: a take that found too few, a group that grew
    old behind one that did not, a straggler from an old version. Look for groups that are dropped or marked before it is
    known that the batch is whole, and for a search that stops at the first stale group.
    """
    assert_history(adapter, settings, steps)
