"""Which tokens of a completion exist, and which of a conversation are trained.

Shapes: B rows, T completion positions. Masks are bool tensors, true on tokens that count.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def lengths_to_mask(lengths_B: Tensor, width: int) -> Tensor:
    """The mask of rows that are filled from the left: [B] lengths -> [B, width] bool."""
    return torch.arange(width, device=lengths_B.device) < lengths_B.unsqueeze(1)


def completion_mask(completion_ids_BT: Tensor, eos_token_ids: Sequence[int]) -> Tensor:
    """True up to and including the first end-of-sequence token of each row, and on the whole of a row without one.

    The first EOS was sampled and is trained; what follows was not. A row without EOS was truncated by the sampler and is
    taken to be full. The id of the padding plays no part, so it may equal an EOS id or any other id. Where lengths are
    known, `lengths_to_mask` is the better choice: ids alone cannot tell a row that was cut short from its padding.

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
