"""Refuse plans that could run but not learn what they say, before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcanary.contract.sampling import Sampling

if TYPE_CHECKING:
    from rlcanary.contract.conventions import Conventions
    from rlcanary.grpo.plan.schedule import Schedule


def require_one_distribution(sampling: Sampling, conventions: Conventions) -> None:
    """Check that the trainer scores completions under the distribution that the sampler reports logprobs of.

    Raises:
        ValueError: the two differ, so that their ratio is not 1 for the same weights; named by the keys of the plan.
    """
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        if (penalty := getattr(sampling, name)) != getattr(Sampling, name):
            raise ValueError(f"sampling.{name} is {penalty}, but the trainer scores without one: leave it out")
    if conventions.old_logprobs == "sampler":
        reader = "old_logprobs"
    elif conventions.importance_level != "none":
        reader = "importance_level"
    else:
        return
    taken = f"conventions.{reader} takes the ratio against the sampler's logprobs"
    if sampling.logprobs is None:
        raise ValueError(f"sampling.logprobs is empty, but {taken}")
    if sampling.logprobs == "raw" and sampling.temperature != 1:
        raise ValueError(
            f"sampling.logprobs is raw, which is at temperature 1, but {taken} and the trainer scores at "
            f"{sampling.temperature}: leave logprobs out"
        )
    for name in ("top_k", "top_p", "min_p", "min_tokens"):
        if (value := getattr(sampling, name)) != getattr(Sampling, name) and sampling.logprobs == "processed":
            raise ValueError(
                f"sampling.{name} is {value}, but {taken}, which are those of the tokens that it leaves, "
                "while the trainer scores among all: leave it out, or set sampling.logprobs to raw at temperature 1"
            )


def require_signal(schedule: Schedule, conventions: Conventions) -> None:
    """Check that completions can have an advantage.

    Raises:
        ValueError: no group can have one, whatever its rewards; named by the keys of the plan.
    """
    is_relative = conventions.advantage_baseline != "none" or conventions.advantage_scale == "group"
    if schedule.group_size == 1 and conventions.token_credit == "outcome":
        if is_relative and conventions.singleton_group != "reward":
            raise ValueError(
                "schedule.group_size is 1, but conventions.advantage_baseline and advantage_scale compare the completions "
                "of a group, and there is nothing to compare: raise group_size, or set both conventions to none"
            )
        if schedule.dynamic_sampling:
            raise ValueError(
                "schedule.dynamic_sampling drops groups whose rewards are alike, which every group of group_size 1 is"
            )


def require_room(prompt_tokens: int, item: object, schedule: Schedule) -> None:
    """Check that a batch has room for the completion of a prompt.

    Raises:
        ValueError: the largest bucket is full with the prompt alone.
    """
    if schedule.seq_len_buckets and prompt_tokens >= schedule.seq_len_buckets[-1]:
        raise ValueError(
            f"schedule.seq_len_buckets end at {schedule.seq_len_buckets[-1]}, which the prompt of {item} fills with "
            f"{prompt_tokens} tokens: nothing of its completions would be trained"
        )
