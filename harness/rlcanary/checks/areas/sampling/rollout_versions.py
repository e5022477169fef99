"""Rollout while weights are synced: groups and tokens carry the version of the policy that sampled them."""

import math
from collections.abc import Iterator

from rlcanary.checks.asserts import assert_equal
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds.scripted_engine import ScriptedItem, engine_of, items_of, sampling_of, scripted_items
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import Completion
from rlcanary.contract.conventions import Conventions


def _syncs_between_rollouts(conventions: Conventions) -> str | None:
    return None if conventions.sync_while_sampling else "no weights are synced while sampling"


def _few_scripts() -> Iterator[Case]:
    for items, completions in ((1, 1), (3, 2)):
        told = f"{items} items, {completions} completions each"
        yield Case(told, scripted=scripted_items(items, completions))


@check("rollout.policy_version", needs=("rollout",), cases=_few_scripts, applies=_syncs_between_rollouts)
def policy_version(adapter: Adapter, scripted: list[ScriptedItem]) -> None:
    """A group's policy version is the one at the start of its sampling, not at the end.

    Silent because the tag is only used to judge staleness: a group that straddled a weight sync counts as fresh, stays in
    training beyond its limit, and is corrected as if the new policy had sampled it. Look for a version that is read after
    the engine's answer arrived, or when the group is stored. Code that never syncs during sampling declares
    `sync_while_sampling=False`.
    """
    engine = engine_of(scripted, version=3, syncing=True)
    timely = []
    for group in adapter.rollout(engine, items_of(scripted), sampling_of(n=len(scripted[0].completions))):
        asked = [each.version for each in engine.requests if each.prompt == tuple(map(int, group.prompt_ids))]
        timely.append(3 <= group.policy_version <= min(asked, default=math.inf))
    told = "with a weight sync during every request, groups carry a later version than that of their request"
    assert_equal(timely, [True] * len(scripted), told)


@check("rollout.token_versions", needs=("rollout",), cases=_few_scripts, applies=_syncs_between_rollouts)
def token_versions(adapter: Adapter, scripted: list[ScriptedItem]) -> None:
    """A completion keeps the policy version of each token if the engine reports it.

    Silent because one version per group is enough elsewhere: tokens from before a weight sync are then treated as
    tokens of the policy after it, or the reverse. Look at the fields that are copied from the engine's answer.
    """
    engine = engine_of(scripted, version=3, syncing=True)
    is_reported = []
    for group in adapter.rollout(engine, items_of(scripted), sampling_of(n=len(scripted[0].completions))):
        served = list(map(_versions, engine.served.get(tuple(map(int, group.prompt_ids)), [])))
        is_reported += [_versions(completion) in served for completion in group.completions]
    told = "the versions of a completion's tokens are not those that the engine reported"
    assert_equal(is_reported, [True] * sum(len(item.completions) for item in scripted), told)


def _versions(completion: Completion) -> tuple[list[int], list[int]]:
    return [*map(int, completion.token_ids)], [*map(int, completion.token_versions or ())]
