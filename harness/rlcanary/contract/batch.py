"""The records passed between sampling, scoring and training. Every part of rlcanary uses these.

Shapes: B rows (completions), S sequence positions, T completion positions, V vocabulary entries.
Logprobs are natural logarithms (nats); NaN marks a token without a logprob.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Completion:
    """One sampled completion.

    Attributes:
        token_ids: the sampled ids, the end-of-sequence id included if it was sampled.
        logprobs: the sampler's logprob of each id, NaN where it returned none; None if it returned none at all.
        finish_reason: "stop" (an end-of-sequence id or a stop string), "length" (truncated) or "abort".
        token_versions: the policy version that sampled each id; None means the group's version throughout.
        text: the ids as the engine decoded them; None if they were not decoded.
        sampled: true on the ids that the policy sampled, false on inserted ids such as a tool's reply; None means all
            were sampled.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    finish_reason: str = "stop"
    token_versions: Sequence[int] | None = None
    text: str | None = None
    sampled: Sequence[bool] | None = None


@dataclass(frozen=True)
class Group:
    """One prompt with its completions, their rewards and where they came from.

    Attributes:
        prompt_ids: the prompt's ids as the sampler saw them.
        completions: the sampled completions, at least one.
        rewards: one reward per completion.
        ref_logprobs: the reference model's logprobs, one row per completion; None if there is no reference.
        item_id: the dataset item that the prompt came from.
        policy_version: the number of weight syncs the sampler had seen when it sampled.
        dataset: the dataset that the item belongs to.
    """

    prompt_ids: Sequence[int]
    completions: Sequence[Completion]
    rewards: Sequence[float]
    ref_logprobs: Sequence[Sequence[float]] | None = None
    item_id: Hashable = None
    policy_version: int = 0
    dataset: str = "unknown"


@dataclass
class Batch:
    """Tensors with one row per completion, example or pair."""

    def to(self, device: Any) -> Self:
        """Copy to this device. Gradients flow back to the tensors of this batch."""
        return replace(self, **{name: value.to(device) for name, value in self._tensors().items()})

    def rows(self, index: Tensor) -> Self:
        """Select rows by `index`, [n] long or [B] bool. Global counts stay those of the whole update."""
        return replace(self, **{name: value[index] for name, value in self._tensors().items()})

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy also what a forward pass has computed, which is no leaf of autograd and which `copy.deepcopy` refuses."""
        return replace(
            self,
            **{
                name: copy.deepcopy(value, memo) if getattr(value, "is_leaf", True) else value.clone()
                for name, value in self._values().items()
            },
        )

    def _tensors(self) -> dict[str, Any]:
        return {name: value for name, value in self._values().items() if hasattr(value, "to")}

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass
class CollatedBatch(Batch):
    """Groups as rectangular tensors, one row per completion, rows of a group together and in order.

    Attributes:
        input_ids: [B, S] prompt and completion of each row, padded.
        attention_mask: [B, S] bool, true on prompt and completion tokens.
        position_ids: [B, S] position of each token in its own sequence, 0 on padding.
        completion_starts: [B] index in input_ids of each row's first completion token.
        completion_ids: [B, T] the completion alone, padded on the right.
        completion_mask: [B, T] bool, true on completion tokens that exist and were sampled, from lengths and never from ids.
        rewards: [B].
        group_ids: [B] index of the group that each row belongs to.
        old_logprobs: [B, T] the sampler's logprobs, NaN on padding; None if no completion has any.
        ref_logprobs: [B, T] likewise for the reference model.
        policy_versions: [B] the oldest version that sampled a token of the row or of its group.
        item_ids: the item id of each row.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    completion_starts: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    rewards: Tensor
    group_ids: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    policy_versions: Tensor | None = None
    item_ids: list[Hashable] = field(default_factory=list)

    def rows(self, index: Tensor) -> Self:
        """Select rows by `index`, [n] long."""
        item_ids = [self.item_ids[row] for row in index.tolist()] if self.item_ids else []
        return replace(super().rows(index), item_ids=item_ids)

    def of_completions(self, values: Tensor) -> Tensor:
        """Cut the completions out of values of whole rows, for code that scores prompt and completion together.

        Args:
            values: [B, S], or [B, S - 1] where the first token of a row has none, as after the shift of a logprob.

        Returns:
            [B, T], anything on padding.
        """
        import torch

        first_B = self.completion_starts - (self.input_ids.shape[1] - values.shape[1])
        index_BT = first_B.unsqueeze(1) + torch.arange(self.completion_ids.shape[1], device=first_B.device)
        return values.gather(1, index_BT.clamp(max=values.shape[1] - 1).to(values.device))

    def padded(self, rows: Sequence[Tensor]) -> Tensor:
        """Pad one value per completion token, [t] for each row, for code that scores one row at a time.

        Returns:
            [B, T], 0 on padding.
        """
        import torch

        width = self.completion_ids.shape[1]
        return torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])

    def groups(self) -> list[Group]:
        """Return the same completions without padding, for code that pads and collates itself.

        The groups are in the order of their first rows. A batch does not tell finish reasons: they are "stop".
        """
        members: dict[int, list[int]] = {}
        for row, group_id in enumerate(self.group_ids.tolist()):
            members.setdefault(group_id, []).append(row)
        return [self._group(rows) for rows in members.values()]

    def _group(self, rows: list[int]) -> Group:
        starts, first = self.completion_starts.tolist(), rows[0]
        lengths = {row: int(self.attention_mask[row, starts[row] :].sum()) for row in rows}

        def of_each_row(values: Tensor) -> list[list[Any]]:
            return [values[row, : lengths[row]].tolist() for row in rows]

        ids, sampled = of_each_row(self.completion_ids), of_each_row(self.completion_mask)
        logprobs = [None] * len(rows) if self.old_logprobs is None else of_each_row(self.old_logprobs)
        prompt = self.input_ids[first, : starts[first]]
        return Group(
            prompt_ids=prompt[self.attention_mask[first, : starts[first]]].tolist(),
            completions=[Completion(*each[:2], sampled=each[2]) for each in zip(ids, logprobs, sampled, strict=True)],
            rewards=self.rewards[rows].tolist(),
            ref_logprobs=None if self.ref_logprobs is None else of_each_row(self.ref_logprobs),
            item_id=self.item_ids[first] if self.item_ids else None,
            policy_version=0 if self.policy_versions is None else int(self.policy_versions[rows].min()),
        )


@dataclass
class PolicyBatch(Batch):
    """The inputs of a policy loss.

    Attributes:
        logprobs: [B, T] of the policy in training; the loss is differentiable with respect to them.
        old_logprobs: [B, T] of the policy that the ratio is taken against (behaviour policy).
        advantages: [B], or [B, T] where they differ along the row.
        mask: [B, T] bool, true on the tokens that are trained. What stands elsewhere, in any field, has no meaning.
        ref_logprobs: [B, T] of the reference model, for the KL term.
        sampler_logprobs: [B, T] of the inference engine, for the correction of sampler/trainer mismatch.
        entropy: [B, T] of the policy in training, for the entropy bonus.
        group_ids: [B], for aggregations over groups.
        global_tokens: number of trained tokens of the whole update that this batch is a part of; None means this batch
            is the whole.
        global_sequences: number of rows of the whole update, counted as the aggregation counts them; None likewise.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    ref_logprobs: Tensor | None = None
    sampler_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    group_ids: Tensor | None = None
    global_tokens: float | None = None
    global_sequences: float | None = None


@dataclass
class LossOutput:
    """A loss and its logged metrics.

    Attributes:
        loss: scalar tensor to be minimised.
        metrics: logged values under the names `kl`, `entropy`, `clip_fraction` and its parts `clip_fraction_low`,
            `clip_fraction_high` and `dual_clip_fraction`, `ratio_mean`, `ratio_min`, `ratio_max`, `mult_prob_error`,
            `policy_loss` (the loss without its KL and entropy terms), `approx_kl` (of the old policy to this one, without
            clamps), and the mean logprobs `logprob`, `old_logprob`, `ref_logprob` and `sampler_logprob`, all over trained
            tokens, and `value_clip_fraction` for a critic's. Further names are free: they may not depend on padding and
            the order of rows, and are compared with nothing else.
    """

    loss: Tensor
    metrics: dict[str, float] = field(default_factory=dict)
