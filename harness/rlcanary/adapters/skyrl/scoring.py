"""SkyRL's model wrapper scoring tokens, and its collation of rollouts, whose rows end together."""

from __future__ import annotations

from inspect import signature
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.batches import prompts_of, tokens_of_completions
from rlcanary.adapters.skyrl.base import SkyrlBase
from rlcanary.adapters.skyrl.workers import on_cpu
from rlcanary.contract.adapter import NotProvided

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, Group


class Scoring(SkyrlBase):
    """Logprobs, entropies and batches."""

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        from skyrl.backends.skyrl_train.utils.torch_utils import logprobs_from_logits

        if temperature != 1.0:
            raise NotProvided("the forward pass divides the logits by the temperature, before they are scored")
        return logprobs_from_logits(logits, token_ids)  # type: ignore[no-any-return]

    def entropy(self, logits: Tensor) -> Tensor:
        from skyrl.backends.skyrl_train.utils.torch_utils import chunked_entropy_from_logits

        return chunked_entropy_from_logits(logits, requires_grad=True)  # type: ignore[no-any-return]

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        import torch

        sequences, attention_mask, action_mask, *_ = collated(rows_of(batch), pad_token_id=0)
        with on_cpu():
            logprobs_BA = wrapped(model)(
                sequences, action_mask.shape[1], attention_mask, temperature=temperature, return_output=False
            )
        width = batch.completion_ids.shape[1]
        lengths = action_mask.sum(dim=1).tolist()
        completions = [row[len(row) - length :] for row, length in zip(logprobs_BA, lengths, strict=True)]
        return torch.stack(
            [torch.nn.functional.pad(row, (0, width - len(row)), value=torch.nan) for row in completions]
        )

    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        import torch

        from rlcanary.contract.batch import CollatedBatch

        pairs = [(group, index) for group in groups for index in range(len(group.completions))]
        given = [(group, group.completions[index], group.rewards[index]) for group, index in pairs]
        if not all(len(completion.token_ids) for _, completion, _ in given):
            raise NotProvided("an empty response ends a run of SkyRL with an IndexError")
        scored = [completion.logprobs is not None for _, completion, _ in given]
        if any(scored) != all(scored):
            raise NotProvided("all completions have logprobs, or none")
        if any(group.ref_logprobs is not None for group in groups):
            raise NotProvided("the trainer computes the reference's logprobs itself")
        rows = Rows(
            prompts=[list(group.prompt_ids) for group, _, _ in given],
            responses=[list(completion.token_ids) for _, completion, _ in given],
            rewards=[[0.0] * (len(completion.token_ids) - 1) + [float(reward)] for _, completion, reward in given],
            loss_masks=[
                [1] * len(each.token_ids) if each.sampled is None else list(map(int, each.sampled))
                for _, each, _ in given
            ],
            logprobs=[list(each.logprobs or ()) for _, each, _ in given] if all(scored) else None,
        )
        sequences, attention_mask, action_mask, rewards, loss_mask, logprobs, _ = collated(rows, pad_token_id)
        width = action_mask.shape[1]
        return CollatedBatch(
            input_ids=sequences,
            attention_mask=attention_mask.bool(),
            position_ids=_positions(sequences, attention_mask),
            completion_starts=sequences.shape[1] - action_mask.sum(dim=1),
            completion_ids=sequences[:, -width:],
            completion_mask=loss_mask.bool(),
            rewards=rewards.sum(dim=1),
            group_ids=torch.arange(len(groups)).repeat_interleave(
                torch.tensor([len(group.completions) for group in groups])
            ),
            old_logprobs=logprobs,
            item_ids=[group.item_id for group, _, _ in given],
        )


class Rows(SimpleNamespace):
    """Rollouts as lists, in SkyRL's names: prompts, responses, rewards and loss_masks of tokens, and logprobs or None."""


def rows_of(batch: CollatedBatch) -> Rows:
    """Return the rows of a batch as the generator gives them."""
    kept_BT = tokens_of_completions(batch)

    def lists(values: Tensor) -> list[Any]:
        return [row[kept].tolist() for row, kept in zip(values, kept_BT, strict=True)]

    responses = lists(batch.completion_ids)
    return Rows(
        prompts=[ids.tolist() for ids in prompts_of(batch)],
        responses=responses,
        rewards=[[0.0] * len(ids) for ids in responses],
        loss_masks=lists(batch.completion_mask.long()),
        logprobs=None if batch.old_logprobs is None else lists(batch.old_logprobs),
    )


def collated(rows: Rows, pad_token_id: int) -> tuple[Any, ...]:
    """Run SkyRL's collation."""
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors

    takes_the_id = "pad_token_id" in signature(convert_prompts_responses_to_batch_tensors).parameters  # behind 0.3.0
    padding: Any = pad_token_id if takes_the_id else SimpleNamespace(pad_token_id=pad_token_id)
    found: tuple[Any, ...] = convert_prompts_responses_to_batch_tensors(padding, **vars(rows))
    return found


def wrapped(model: Any) -> Any:
    """Make the wrapper of a model that workers call."""
    from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper

    return HFModelWrapper(model)


def _positions(sequences: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the positions that the wrapper gives the model."""
    import torch

    seen: list[Tensor] = []

    def model(ids: Tensor, position_ids: Tensor, **_: Tensor) -> dict[str, Tensor]:
        seen.append(position_ids)
        return {"logits": torch.zeros(*ids.shape, 1)}

    with on_cpu():
        wrapped(model)(torch.zeros_like(sequences), 1, attention_mask)
    return seen[0]
