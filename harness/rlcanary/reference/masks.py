"""Masks of the tokens of a completion that exist, and of those of a conversation that are trained.

Shapes: B rows, S sequence positions, T completion positions. Masks are bool tensors, true on tokens that count.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MessageTokens:
    """Token counts of one message in the rendered conversation, in their order there.

    Attributes:
        role: its author; only "assistant" is ever trained.
        header: tokens that the chat template puts in front, such as `<|im_start|>assistant`: given to the model.
        body: tokens of the message itself, with the end-of-turn token that the author ended it with. A turn that the
            sampler truncated has none.
        trailer: tokens that the template puts behind the end of turn, such as a line break.
        is_history: the message came with the prompt; the policy in training did not sample it in this rollout.
    """

    role: str
    header: int
    body: int
    trailer: int = 0
    is_history: bool = False

    def __post_init__(self) -> None:
        if min(self.header, self.body, self.trailer) < 0:
            raise ValueError(f"{self} has a negative number of tokens")

    @property
    def is_trained(self) -> bool:
        """True if the policy in training sampled the body."""
        return self.role == "assistant" and not self.is_history


def lengths_to_mask(lengths_B: Tensor, width: int) -> Tensor:
    """[B] lengths -> [B, width] bool mask, true on the first `length` positions of each row.

    Raises:
        ValueError: a length is negative or above the width.
    """
    if ((lengths_B < 0) | (lengths_B > width)).any():
        raise ValueError(f"lengths {lengths_B.tolist()} do not all lie between 0 and the width {width}")
    return torch.arange(width, device=lengths_B.device) < lengths_B.unsqueeze(1)


def completion_mask(completion_ids_BT: Tensor, eos_token_ids: Sequence[int]) -> Tensor:
    """True up to and including the first end-of-sequence token of each row, and on the whole of a row without one.

    The first EOS was sampled and is trained; the ids after it were not. A row without EOS was truncated by the sampler
    and is taken to be full. The id of the padding plays no part, so it may equal an EOS id or any other id. Where
    lengths are known, `lengths_to_mask` is the better choice: ids alone cannot tell a row that was cut short from its
    padding.

    Args:
        completion_ids_BT: [B, T] sampled ids, padded on the right.
        eos_token_ids: every id that ends generation in the sampler.

    Returns:
        [B, T] bool.
    """
    eos = torch.as_tensor(list(eos_token_ids), device=completion_ids_BT.device, dtype=completion_ids_BT.dtype)
    is_eos_BT = torch.isin(completion_ids_BT, eos)
    eos_before_BT = is_eos_BT.long().cumsum(dim=1) - is_eos_BT.long()
    return eos_before_BT == 0


def assistant_mask(conversations: Sequence[Sequence[MessageTokens]], width: int | None = None) -> Tensor:
    """The tokens that the policy in training sampled, over multi-turn conversations.

    True on the bodies of the assistant's turns of this rollout, their end-of-turn tokens included. System and user
    messages, tool results, assistant turns that came with the prompt, and everything that the chat template adds are
    false. Built from lengths alone: the same id can be sampled, quoted by a tool and used as padding.

    Args:
        conversations: the messages of each row, in order.
        width: S, in tokens; None takes the longest conversation's.

    Returns:
        [B, S] bool, padded on the right with false.

    Raises:
        ValueError: a conversation is longer than the width.
    """
    rows = [_trained_tokens(messages) for messages in conversations]
    longest = max((len(row_S) for row_S in rows), default=0)
    width = longest if width is None else width
    if longest > width:
        raise ValueError(f"a conversation of {longest} tokens does not fit into a width of {width}")
    mask_BS = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row_S in enumerate(rows):
        mask_BS[index, : len(row_S)] = row_S
    return mask_BS


def _trained_tokens(messages: Sequence[MessageTokens]) -> Tensor:
    parts = [
        part
        for message in messages
        for part in ((message.header, False), (message.body, message.is_trained), (message.trailer, False))
    ]
    counts = torch.tensor([count for count, _ in parts], dtype=torch.long)
    return torch.tensor([is_trained for _, is_trained in parts], dtype=torch.bool).repeat_interleave(counts)


def masked(values_BT: Tensor, mask_BT: Tensor, name: str, allow_nan: bool = False) -> Tensor:
    """Replace values outside the mask by zero, so that neither value nor gradient leaks from there, not even NaN.

    Args:
        values_BT: [B, T].
        mask_BT: [B, T] bool.
        name: the values' name in errors.
        allow_nan: let NaN inside the mask pass, for values that are logged and not trained on.

    Raises:
        ValueError: shapes differ, or a value inside the mask is NaN, which marks a token without a logprob.
    """
    if values_BT.shape != mask_BT.shape:
        raise ValueError(f"{name} of shape {tuple(values_BT.shape)} and mask of shape {tuple(mask_BT.shape)} differ")
    kept_BT = values_BT.masked_fill(~mask_BT, 0)
    if not allow_nan and kept_BT.isnan().any():
        row, position = kept_BT.isnan().nonzero()[0].tolist()
        raise ValueError(f"{name} is NaN (not scored) at row {row}, position {position}, which is trained")
    return kept_BT
