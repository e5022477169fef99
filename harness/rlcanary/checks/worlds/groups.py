"""Drawn groups: uneven and of one, constant, huge and tiny rewards, prompts that repeat, tool tokens in completions."""

import math

import torch
from torch import Generator, Tensor

from rlcanary.checks.worlds.inputs import uniform
from rlcanary.checks.worlds.rows import one_of, sizes, whole
from rlcanary.contract.batch import Completion, Group
from rlcanary.tiny_models import EOS_ID, VOCABULARY

# Padding: an ordinary id, the id 0, or the end of sequence, each of which may be sampled.
PADDING_IDS = (0, EOS_ID, 21)


def rewards(rng: Generator, size: int) -> tuple[Tensor, Tensor]:
    """[B] rewards of groups of unequal size, and [B] group ids with gaps; the rows of a group need not be together."""
    drawn, ids = [], []
    for index, rows in enumerate(sizes(rng, size)):
        drawn.append(_of_one_group(rng, rows))
        ids += [3 * index + 1] * rows
    rewards_B, group_ids_B = torch.cat(drawn), torch.tensor(ids)
    if one_of(rng, (True, False)):
        order = torch.randperm(len(ids), generator=rng)
        rewards_B, group_ids_B = rewards_B[order], group_ids_B[order]
    return rewards_B, group_ids_B


def _of_one_group(rng: Generator, rows: int) -> Tensor:
    kinds = {
        "right or wrong": torch.randint(2, (rows,), generator=rng).float(),
        "graded": uniform(rng, rows, low=-2, high=5),
        "constant": torch.full((rows,), one_of(rng, (1.0, 0.0, 0.5, -0.25))),
        "equal but for one": torch.tensor([0.0, *[one_of(rng, (0.1, 0.7, 0.9, 0.95))] * (rows - 1)]),
        "huge": uniform(rng, rows, low=-1, high=1) * 1e4,
        "tiny": uniform(rng, rows, low=-1, high=1) * 1e-4,
    }
    return kinds[one_of(rng, list(kinds))].clone()


def sampled(rng: Generator, size: int, *, logprobs: bool = False, empty: bool = False) -> list[Group]:
    """Draw groups as a rollout returns them, of unequal size and with prompts of unequal length, some of them equal.

    Completions are truncated, or end with the end of sequence, which may also stand within; some hold tool tokens, which
    the policy did not sample. Rewards of the first group differ.

    Args:
        rng: the generator.
        size: the order of magnitude of rows and lengths.
        logprobs: whether completions carry the sampler's logprobs.
        empty: whether a completion may have no token.
    """
    groups: list[Group] = []
    for index, rows in enumerate(sizes(rng, size)):
        prompt = _ids(rng, whole(rng, 1, 2 * size))
        if groups and whole(rng, 0, 3) == 0:
            prompt = list(groups[-1].prompt_ids)
        completions = [_completion(rng, size, logprobs, empty) for _ in range(max(rows, 2 if index == 0 else 1))]
        # Eighths, which float32 holds exactly.
        earned = torch.randint(-8, 9, (len(completions),), generator=rng) / 8
        if index == 0:
            earned[0] = earned[1:].max() + 0.5
        groups.append(
            Group(prompt, completions, earned.tolist(), item_id=f"item {index}", policy_version=whole(rng, 0, 3))
        )
    return groups


def _completion(rng: Generator, size: int, has_logprobs: bool, empty: bool) -> Completion:
    length = whole(rng, 0 if empty else 1, 2 * size)
    ids = _ids(rng, length)
    is_truncated = length == 0 or one_of(rng, (True, False))
    if not is_truncated:
        ids[-1] = EOS_ID
    marks = None
    if length and whole(rng, 0, 2) == 0:
        # The policy sampled the last id, which ends its turn.
        marks = [*(torch.rand(length - 1, generator=rng) < 0.6).tolist(), True]
    logprobs = None
    if has_logprobs:
        # A sampler gives no logprob of what it did not sample.
        drawn = uniform(rng, length, low=-4, high=-0.1).tolist()
        logprobs = [each if is_own else math.nan for each, is_own in zip(drawn, marks or [True] * length, strict=True)]
    return Completion(ids, logprobs, "length" if is_truncated else "stop", sampled=marks)


def _ids(rng: Generator, length: int) -> list[int]:
    """Draw ids, ever so often one that serves as padding."""
    ordinary, special = torch.randint(3, VOCABULARY, (length,), generator=rng), one_of(rng, PADDING_IDS)
    return torch.where(torch.rand(length, generator=rng) < 0.15, special, ordinary).tolist()
