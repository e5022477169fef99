"""The records of the numbers that people look at: rollouts, parts of a metric, answers of an evaluation, logged samples."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rlcanary.contract.batch import Group

Reduction = Literal["mean", "sum", "min", "max", "last"]


@dataclass(frozen=True)
class RolloutBatch:
    """The rollouts of one update, for the numbers that are logged of them.

    Attributes:
        groups: the groups, which need not be equally large.
        trainer_version: the number of weight syncs that the trainer has made when it trains on them.
        step: the number of the update.
        eos_token_ids: the end-of-sequence ids of the sampler.
    """

    groups: list[Group]
    trainer_version: int = 0
    step: int = 0
    eos_token_ids: Sequence[int] = ()


@dataclass(frozen=True)
class Metric:
    """The value of a metric on one part of the data: a micro-batch, a rank or a step.

    Attributes:
        value: the metric of this part; anything, NaN included, where the count is 0.
        count: the tokens, rows or whatever else the value is taken over, which is its weight in a mean. A part with a count
            of 0 has no value of this metric.
        reduction: what the values of several parts are reduced to: the "mean" weighted by the counts, the "sum", the "min"
            or "max", or the "last" in the order of the parts.
    """

    value: float
    count: float = 1
    reduction: Reduction = "mean"


@dataclass(frozen=True)
class EvaluatedItem:
    """An item of an evaluation and the samples that were drawn for it.

    Attributes:
        item_id: identifies the item within its dataset.
        scores: one score per sample, NaN for a sample without one.
        dataset: the dataset that the item belongs to.
        answers: the answer that each sample gave, as it was extracted for a vote; None if there is no vote. Samples with
            the same answer have the same score.
    """

    item_id: Hashable
    scores: Sequence[float]
    dataset: str = "unknown"
    answers: Sequence[str] | None = None


@dataclass(frozen=True)
class LoggedSample:
    """A row of the table of samples.

    Attributes:
        prompt_ids: the ids of the prompt.
        text: the completion.
        reward: the reward of this completion for this prompt.
        step: the number of the update that the row is shown under.
    """

    prompt_ids: Sequence[int]
    text: str
    reward: float
    step: int
