"""Rollout from an engine that interrupts its requests, as one does to replace its weights."""

from collections.abc import Iterator, Sequence

from rlcanary.checks.asserts import assert_equal, assert_true, unless_raised
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds.scripted_engine import (
    InterruptingEngine,
    ScriptedItem,
    completion_of,
    items_of,
    prompt_of,
    sampling_of,
)
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import Completion
from rlcanary.contract.conventions import Conventions

LIMIT = 10


def _item(text: str, finish_reason: str) -> ScriptedItem:
    """Make an item whose completion is this text, and whose reward is the number of letters that are there."""
    rewards: dict[str, float | None] = {text[:end]: float(end) for end in range(len(text) + 1)}
    return ScriptedItem("a", prompt_of("a"), [completion_of(text, 1, finish_reason)], rewards)


def _interruptions() -> Iterator[Case]:
    for told, text, finish_reason in (
        ("that ends", "abcdefg", "stop"),
        ("at the limit", "abcdefghijklmnopqrst", "length"),
        ("that ends a token behind the limit", "abcdefghijk", "stop"),
        ("that ends behind the limit", "abcdefghijklm", "stop"),
    ):
        for pieces in ([5], [2, 3], [0, 4], [1, 1, 1, 1, 1, 1]):
            yield Case(told, f"after {pieces} tokens", item=_item(text, finish_reason), pieces=pieces)


def _never_syncs(conventions: Conventions) -> str | None:
    return None if conventions.sync_while_sampling else "no weights are synced while sampling"


@check("rollout.interrupted_generation", needs=("rollout",), cases=_interruptions)
def interrupted_generation(adapter: Adapter, item: ScriptedItem, pieces: Sequence[int]) -> None:
    """A completion that the engine interrupted is what it would have been without, or says that it was interrupted.

    Silent because an answer that ends at half of its budget looks like a short one, and is punished for it; one that goes
    on past the limit looks like a long one. Look for the limit of a request that continues (what is left of it, not all of
    it), for a bound of a loop that the loop itself lowers, for the logprobs of the first piece, and for "abort" that is
    taken for any other end. A group that is left out, an error, and the finish reason "abort" are all right.
    """
    engine = InterruptingEngine({item.prompt: item.completions}, pieces)
    groups = unless_raised(adapter.rollout, engine, items_of([item]), sampling_of(max_new_tokens=LIMIT)) or []
    told = "the item whose completion was interrupted has several groups"
    assert_true(len(groups) < 2, told, quantity="number of groups")
    whole = item.completions[0]
    is_cut = len(whole.token_ids) > LIMIT
    expected = _scored(whole, LIMIT), "length" if is_cut else "stop", item.rewards[(whole.text or "")[:LIMIT]]
    for group in groups:
        for completion, reward in zip(group.completions, group.rewards, strict=True):
            count = len(completion.token_ids)
            if completion.finish_reason == "abort":
                told = "an interrupted completion does not begin as it would have without"
                assert_equal(_scored(completion, count), expected[0][:count], told, quantity="its first tokens")
            else:
                got = _scored(completion, count), completion.finish_reason, float(reward)
                told = f"broken off after {list(pieces)} tokens, a completion is not what it would have been without"
                assert_equal(got, expected, told, quantity="tokens, end and reward")


@check("rollout.interrupted_versions", needs=("rollout",), cases=_interruptions, applies=_never_syncs)
def interrupted_versions(adapter: Adapter, item: ScriptedItem, pieces: Sequence[int]) -> None:
    """No token of an interrupted completion counts as sampled by a later policy version than the one that sampled it.

    Silent because a completion that was continued is as good as any: under the version of its last piece the first tokens
    count as fresh, pass the limit on staleness, and are weighted as if the new policy had drawn them. Look for a version
    that is read once the completion is whole, and for one version of all pieces. An older one is all right.
    """
    engine = InterruptingEngine({item.prompt: item.completions}, pieces)
    groups = unless_raised(adapter.rollout, engine, items_of([item]), sampling_of(max_new_tokens=LIMIT)) or []
    told = "the item whose completion was interrupted has several groups"
    assert_true(len(groups) < 2, told, quantity="number of groups")
    for group in groups:
        for completion in group.completions:
            count = len(completion.token_ids)
            versions = [int(version) for version in completion.token_versions or [group.policy_version] * count]
            late = [place for place, version in enumerate(versions) if version > engine.sampled_by.get(place, version)]
            told = f"broken off after {list(pieces)} tokens, with a weight sync each time, these tokens count as later ones"
            assert_equal(late, [], told, quantity="tokens under a later version")


def _scored(completion: Completion, count: int) -> list[tuple[int, str]]:
    """The first ids and their logprobs."""
    logprobs = [float("nan")] * count if completion.logprobs is None else list(completion.logprobs)[:count]
    ids = [int(token) for token in completion.token_ids][:count]
    return [(token, f"{logprob:.4f}") for token, logprob in zip(ids, logprobs, strict=True)]
