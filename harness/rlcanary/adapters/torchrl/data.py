"""Batches, sampling requests and completions in torchrl's containers and names."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.batches import prompts_of, tokens_of_completions
from rlcanary.contract.batch import Completion
from rlcanary.contract.sampling import Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch


@cache
def given_actor() -> Any:
    """Make an actor whose distribution over the response tokens is the batch's."""
    import torch

    class GivenActor(torch.nn.Module):
        def _get_sft_dist(self, data: Any) -> Any:
            # torchrl's wrapper pads ragged rows on the left.
            how = {"as_padded_tensor": True, "padding_side": "left", "padding_value": 0}
            given = {name: data.get(("given", name), None, **how) for name in ("log_prob", "mask", "entropy")}
            return _given_distribution_class()(given)

        _get_rlhf_dist = _get_generic_dist = get_dist = _get_sft_dist

    return GivenActor()


@cache
def _given_distribution_class() -> Any:
    import torch

    class GivenDistribution(torch.distributions.Distribution):
        arg_constraints: dict[str, Any] = {}  # noqa: RUF012 - torch wants it on the class

        def __init__(self, given: Any) -> None:
            super().__init__(batch_shape=given["mask"].shape, validate_args=False)
            self.given = given
            self.mask = given["mask"]

        def log_prob(self, value: Tensor) -> Tensor:
            return self.given["log_prob"]  # type: ignore[no-any-return]

        def entropy(self) -> Tensor:
            entropy = self.given["entropy"]
            return torch.zeros_like(self.given["log_prob"]) if entropy is None else entropy

    return GivenDistribution


def ragged_rows(batch: CollatedBatch) -> Any:
    """Return the sequences as torchrl's rollouts hold them: ragged, with the mask of what the policy wrote."""
    from tensordict import TensorDict, lazy_stack

    from rlcanary.adapters.torchrl.containers import to_torchrl
    from rlcanary.grpo.engines.containers import Masks, Tokens

    prompts, kept = prompts_of(batch), tokens_of_completions(batch)
    tokens = Tokens(prompts, _completions(batch.completion_ids, kept))
    masks = Masks([row != row for row in prompts], _completions(batch.completion_mask, kept))
    rows = zip(to_torchrl(tokens).unbind(0), to_torchrl(masks).unbind(0), strict=True)
    return lazy_stack([TensorDict({"tokens": row, "masks": its_masks}) for row, its_masks in rows])


def ragged_logprobs(values: Tensor, batch: CollatedBatch) -> Any:
    """[B, T] of the completions -> torchrl's `LogProbs` of each row, NaN on the unscored prompt."""
    import torch

    from rlcanary.adapters.torchrl.containers import to_torchrl
    from rlcanary.grpo.engines.containers import LogProbs

    unscored = [torch.full(row.shape, torch.nan) for row in prompts_of(batch)]
    return to_torchrl(LogProbs(unscored, _completions(values, tokens_of_completions(batch)))).unbind(0)


def _completions(values_BT: Tensor, kept_BT: Tensor) -> list[Tensor]:
    return [row[kept] for row, kept in zip(values_BT, kept_BT, strict=True)]


def generate_kwargs(request: Sampling) -> dict[str, Any]:
    """Translate sampling parameters to torchrl's, which accept neither temperature 0 for greedy nor top_k 0 for off."""
    kwargs: dict[str, Any] = {"max_new_tokens": request.max_new_tokens, "num_return_sequences": request.n}
    if request.ends:
        kwargs["eos_token_id"] = list(request.ends)
    if request.temperature == 0:
        return kwargs | {"do_sample": False}
    kwargs |= {"do_sample": True, "temperature": request.temperature, "top_p": request.top_p}
    # Without it transformers takes the 50 likeliest.
    return kwargs | {"top_k": request.top_k or 2**31 - 1}


def completion_of(row: Any, request: Sampling) -> Completion:
    """Return the completion of a row. torchrl keeps no finish reason: an end is told from the last id."""
    from rlcanary.adapters.torchrl.containers import from_torchrl

    tokens, scored = from_torchrl(row[None])
    (ids,), (logprobs,) = tokens.response, scored.response
    return Completion(
        ids.tolist(),
        logprobs.tolist() if len(logprobs) else None,
        "stop" if len(ids) and ids[-1] in request.ends else "length",
    )
