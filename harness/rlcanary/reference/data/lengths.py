"""Rewards shaped by the length of completions."""

from torch import Tensor

from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.lengths import Lengths


def shape_rewards(rewards_B: Tensor, lengths: Lengths, conventions: Conventions) -> Tensor:
    """Take the soft punishment of overlong completions off their rewards (DAPO, 2503.14476, eq. 13).

    With L the limit and C `overlong_buffer`, a completion of n tokens loses `overlong_penalty` times (n - (L - C)) / C,
    which is no less than 0 and no more than 1.

    Args:
        rewards_B: [B] rewards.
        lengths: those of their completions.
        conventions: `overlong_buffer` and `overlong_penalty`.

    Returns:
        [B] rewards, those given where `overlong_buffer` is None.
    """
    buffer = conventions.overlong_buffer
    if buffer is None:
        return rewards_B
    used_B = (lengths.completions - (lengths.max_new_tokens - buffer)).to(rewards_B.dtype) / buffer
    return rewards_B - conventions.overlong_penalty * used_B.clamp(0, 1)
