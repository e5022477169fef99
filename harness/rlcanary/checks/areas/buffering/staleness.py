"""Staleness: nothing is trained that is older than declared, and what is as old as declared is."""

from collections.abc import Iterator, Sequence

from rlcanary.checks.asserts import assert_equal, assert_true, soft
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds.buffers import Step, assert_history, group, numbers
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import Completion, Group
from rlcanary.contract.records.buffering import BufferSettings

NEEDS = ("new_buffer", "put_groups", "take_groups")


def _limits() -> Iterator[Case]:
    for max_staleness in (0, 1, 3):
        for behind in sorted({0, max_staleness, max_staleness + 1, 2 * max_staleness + 2}):
            told = f"at most {max_staleness} behind, {behind} behind"
            yield Case(told, max_staleness=max_staleness, behind=behind)


@check("staleness.limit", needs=NEEDS, cases=_limits)
def limit(adapter: Adapter, max_staleness: int, behind: int) -> None:
    """A group that is exactly as old as allowed is trained, and one that is a version older is not.

    Silent because samples that are one version too old look like any others: the run is a little more off policy than its
    config says, or throws away what it waited for. Look for `<` where `<=` is meant, for a version that is counted before or
    after the sync, and for a limit in updates that is compared with syncs.
    """
    buffer = adapter.new_buffer(BufferSettings(1, max_staleness=max_staleness))
    adapter.put_groups(buffer, [group(1, version=2)])
    taken = adapter.take_groups(buffer, 2 + behind)
    expected = [1] if behind <= max_staleness else []
    told = (
        f"a group of version 2 with a trainer of version {2 + behind} and at most {max_staleness} versions between them"
    )
    with soft():
        assert_equal(numbers(taken.groups), expected, f"{told}: groups that are trained", quantity="groups trained")
    if taken.stale is not None:
        reported = numbers(taken.stale)
        missing = [] if expected else [1]
        assert_equal(reported, missing, f"{told}: groups that are reported as too old", quantity="groups reported")
    later = numbers(adapter.take_groups(buffer, 2 + behind).groups)
    assert_equal(later, [], f"{told}: groups of a second batch", quantity="groups of a second batch")


def _of_several_versions() -> Iterator[Case]:
    for told, versions, policy_version in (
        ("one completion is older", [[5, 5], [4, 4]], 4),
        ("a completion straddles two versions", [[5, 5], [4, 5]], 4),
        ("a completion that went on is labelled anew", [[3, 5], [5, 5]], 5),
        ("a completion without versions of its own", [None, [5, 5]], 3),
    ):
        yield Case(told, versions=versions, policy_version=policy_version)


@check("staleness.oldest_token", needs=NEEDS, cases=_of_several_versions)
def oldest_token(adapter: Adapter, versions: Sequence[Sequence[int] | None], policy_version: int) -> None:
    """A group is as old as the oldest of its tokens.

    Silent because a completion that straddles weight syncs is labelled with one version, mostly the last: its first tokens
    come from a policy that is further away than any limit says. Look for a version that is read after the reply, for a
    continued generation that gets a new label, and for the first or the newest completion taken for the whole group.
    """
    oldest = min(min(each) if each else policy_version for each in versions)
    for max_staleness in (5 - oldest, 5 - oldest - 1):
        buffer = adapter.new_buffer(BufferSettings(1, max_staleness=max_staleness))
        completions = [Completion([row, 2], [-0.5, -0.25], token_versions=each) for row, each in enumerate(versions, 1)]
        adapter.put_groups(
            buffer, [Group([5, 6, 7], completions, [1.0, 0.0], item_id="a", policy_version=policy_version)]
        )
        trained = len(adapter.take_groups(buffer, 5).groups)
        told = f"tokens of version {oldest} and a trainer of version 5, at most {max_staleness} versions behind"
        with soft():
            assert_equal(
                trained, int(max_staleness == 5 - oldest), f"{told}: groups trained", quantity="groups trained"
            )


def _waits() -> Iterator[Case]:
    for told, per_batch, max_staleness, steps in (
        (
            "it waits for another group",
            2,
            1,
            [("put", 0), ("take", 0), ("take", 1), ("put", 2), ("put", 2), ("take", 2)],
        ),
        ("it is over", 1, 1, [("put", 0), ("put", 0), ("take", 1), ("take", 2)]),
        ("no batch was asked for", 1, 0, [("put", 0), ("put", 1), ("take", 1), ("take", 1)]),
        ("a newer one is in front of it", 2, 1, [("put", 1), ("put", 0), ("put", 2), ("take", 2)]),
    ):
        settings = BufferSettings(per_batch, max_staleness=max_staleness)
        yield Case(told, settings=settings, steps=steps)


@check("staleness.when_taken", needs=NEEDS, cases=_waits)
def when_taken(adapter: Adapter, settings: BufferSettings, steps: Sequence[Step]) -> None:
    """A group's age is judged when it is trained: one that was fresh when it was put can be too old by then.

    Silent because nothing is too old when it arrives, and the limit then never acts. Look for a test in `put` instead of
    `take`, for the version of the last take instead of this one, for a surplus that skips the test, and for a search
    that stops at the first fresh group.
    """
    assert_history(adapter, settings, steps)


def _runs() -> Iterator[Case]:
    for per_batch, max_staleness, first_version in ((1, 0, 0), (2, 1, 0), (2, 3, 0), (2, 0, 7), (2, 1, 20)):
        told = f"batches of {per_batch}, at most {max_staleness} behind, from version {first_version}"
        yield Case(told, settings=BufferSettings(per_batch, max_staleness, first_version=first_version))


@check(
    "staleness.started_groups",
    needs=(*NEEDS, "groups_to_start"),
    cases=_runs,
    applies=lambda declared: None if declared.buffer_order == "oldest_first" else "groups are not trained as they come",
)
def started_groups(adapter: Adapter, settings: BufferSettings) -> None:
    """The sampler starts as many groups as can be trained before they are too old, and enough for the next batch.

    Silent because a sampler that runs ahead only fills a queue: its groups are trained late, or thrown away when they were
    sampled. Look for a count of started groups that begins at 0 when a run goes on at a high version, for running
    groups that are not counted, and for groups that are counted twice.
    """
    buffer, per_batch = adapter.new_buffer(settings), settings.groups_per_batch
    number, running = 0, [0, 0]
    for version in range(settings.first_version, settings.first_version + 4):
        trained = (version - settings.first_version) * per_batch
        for has_taken in (False, True):
            # What runs since the batch before was taken is of the version before.
            for _ in range(2):
                more = int(adapter.groups_to_start(buffer, version, sum(running)))
                running[1] += max(more, 0)
            under_way = number + sum(running) - trained
            told = f"at version {version}, {'behind' if has_taken else 'before'} its batch, {under_way} groups are under way"
            most = (settings.max_staleness + (not has_taken)) * per_batch
            bound = f"{told}: more than {most}, so that the last one is too old when its turn comes"
            assert_true(under_way <= most, bound, quantity="groups under way", magnitude=under_way - most)
            if not has_taken:
                enough = f"{told}: fewer than a batch of {per_batch}, for which the trainer waits for ever"
                assert_true(under_way >= per_batch, enough, quantity="groups for a batch")
                for age, count in zip((version - 1, version), running, strict=True):
                    adapter.put_groups(buffer, [group(number + each, age) for each in range(count)])
                    number += count
                taken = len(adapter.take_groups(buffer, version).groups)
                assert_equal(taken, per_batch, f"{told}: groups in the batch", quantity="groups in the batch")
                trained, running = trained + per_batch, [0, 0]
        running = [running[1], 0]
