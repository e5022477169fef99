"""Batches, sampling requests and completions in torchrl's containers and names."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.batches import tokens_of_completions
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
    """Return the sequences as torchrl's rollouts hold them: ragged, without padding."""
    import torch
    from tensordict import TensorDict, lazy_stack

    lengths = tokens_of_completions(batch).sum(dim=1).tolist()
    rows = zip(batch.input_ids, batch.attention_mask, lengths, strict=True)
    return lazy_stack(
        [
            TensorDict(
                {
                    "tokens": {"full": ids[kept], "prompt": ids[kept][: int(kept.sum()) - length]},
                    "masks": {"all_attention_mask": torch.ones(int(kept.sum()), dtype=torch.bool)},
                }
            )
            for ids, kept, length in rows
        ]
    )


def full_length(values: Tensor, batch: CollatedBatch) -> list[Tensor]:
    """[B, T] of the completions -> one tensor per row over prompt and completion, NaN on the unscored prompt."""
    import torch

    rows = zip(values, tokens_of_completions(batch), batch.attention_mask.sum(dim=1).tolist(), strict=True)
    return [
        torch.nn.functional.pad(row[kept], (total - int(kept.sum()), 0), value=torch.nan) for row, kept, total in rows
    ]


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
    ids = row["tokens", "response"].tolist()
    return Completion(
        ids,
        logprobs=row["log_probs", "response"].tolist(),
        finish_reason="stop" if ids and ids[-1] in request.ends else "length",
    )
