"""Rollouts whose numbers are known: groups made from rewards and lengths, and drawn ones."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Generator

from rlcanary.checks.worlds.groups import sampled
from rlcanary.checks.worlds.rows import one_of, whole
from rlcanary.contract.batch import Completion, Group
from rlcanary.contract.records.reporting import RolloutBatch
from rlcanary.tiny_models import EOS_ID


def group(
    rewards: Sequence[float],
    lengths: Sequence[int] = (),
    reasons: Sequence[str] = (),
    *,
    dataset: str = "math",
    version: int = 0,
    prompt: Sequence[int] = (11, 12),
) -> Group:
    """Make a group of completions with these rewards, of two tokens by default, which stop with the end of sequence."""
    given = zip(lengths or [2] * len(rewards), reasons or ["stop"] * len(rewards), strict=True)
    completions = [completion(length, reason, place) for place, (length, reason) in enumerate(given)]
    return Group(list(prompt), completions, list(rewards), item_id=dataset, policy_version=version, dataset=dataset)


def completion(length: int, reason: str, place: int = 0) -> Completion:
    """Make a completion of this length, whose text tells its place."""
    ids = [21 + place] * (length - 1) + [EOS_ID if reason == "stop" else 20]
    return Completion(ids, finish_reason=reason, text=f"completion {place}")


def batch_of(*groups: Group, trainer_version: int = 0, step: int = 0) -> RolloutBatch:
    """Make the rollouts of an update."""
    return RolloutBatch(list(groups), trainer_version, step, [EOS_ID])


def drawn(rng: Generator, size: int) -> RolloutBatch:
    """Draw rollouts of two datasets, at least two completions of each prompt; an end of sequence ends its completion."""
    groups = [each for each in sampled(rng, size) if len(each.completions) > 1]
    groups = [
        replace(
            each, completions=list(map(_without_early_ends, each.completions)), dataset=one_of(rng, ("math", "code"))
        )
        for each in groups
    ]
    return batch_of(*groups, trainer_version=whole(rng, 3, 5))


def _without_early_ends(completion: Completion) -> Completion:
    """Replace end-of-sequence ids that no sampler would have gone on after."""
    *ids, last = [20 if token == EOS_ID else token for token in completion.token_ids]
    return replace(completion, token_ids=[*ids, EOS_ID if completion.finish_reason == "stop" else last])
