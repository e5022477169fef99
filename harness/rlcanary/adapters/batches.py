"""Parts of a policy batch, in which frameworks take it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlcanary.contract.adapter import NotProvided

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, PolicyBatch


def micro_batches(batch: PolicyBatch, n_micro: int) -> list[PolicyBatch]:
    """Split a batch into micro-batches of equal size.

    Raises:
        NotProvided: the rows cannot be divided.
    """
    import torch

    if len(batch.mask) % n_micro:
        raise NotProvided("micro-batches have to be of equal size")
    return [batch.rows(index) for index in torch.arange(len(batch.mask)).chunk(n_micro)]


def kl_of_each_token(loss: Callable[[PolicyBatch], Tensor], logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Compute each token's KL [B, T] as a loss of that token alone, with advantage zero.

    Args:
        loss: a loss whose KL term has coefficient 1.
        logprobs: [B, T] of the policy.
        ref_logprobs: [B, T] of the reference.
    """
    import torch

    from rlcanary.contract.batch import PolicyBatch

    def one(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
        token = PolicyBatch(
            logprobs=logprob.view(1, 1),
            old_logprobs=logprob.detach().view(1, 1),
            advantages=torch.zeros(1),
            mask=torch.ones(1, 1, dtype=torch.bool),
            ref_logprobs=ref_logprob.view(1, 1),
        )
        return loss(token)

    pairs = zip(logprobs.flatten(), ref_logprobs.flatten(), strict=True)
    return torch.stack([one(*pair) for pair in pairs]).view(logprobs.shape)


def prompts_of(batch: CollatedBatch) -> list[Tensor]:
    """Return the prompt of each row without padding."""
    starts = batch.completion_starts.tolist()
    rows = zip(batch.input_ids, batch.attention_mask, starts, strict=True)
    return [ids[:start][kept[:start]] for ids, kept, start in rows]


def tokens_of_completions(batch: CollatedBatch) -> Tensor:
    """[B, T] bool, true on the tokens of a completion, those of tools included, which are read and not trained."""
    import torch

    rows = zip(batch.attention_mask, batch.completion_starts.tolist(), strict=True)
    lengths_B = torch.tensor([int(kept[start:].sum()) for kept, start in rows])
    return torch.arange(batch.completion_mask.shape[1]) < lengths_B.unsqueeze(1)


def table_of(values: Tensor) -> Any:
    """Make a critic that looks values [B, T] up: its input ids are the numbers of the places of [B, T + 1] rows."""
    from types import SimpleNamespace

    import torch

    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.nn.functional.pad(values.detach(), (0, 1)).reshape(-1, 1))

        def forward(self, input_ids: Tensor, **_: Tensor) -> Any:
            return SimpleNamespace(logits=self.weight[input_ids])

    return Table()
