"""The oracle: a GRPO core in pure torch that everything else is measured against."""

from rlcanary.reference.advantages import advantages, token_level_advantages
from rlcanary.reference.batching import BatchStats, RewardStats, make_batch
from rlcanary.reference.filters import has_signal, is_overlong, is_stale
from rlcanary.reference.kl import kl
from rlcanary.reference.logprobs import completion_logprobs, entropy, packed_logprobs, token_logprobs
from rlcanary.reference.losses import (
    accumulated_loss,
    aggregate,
    importance_ratio,
    importance_weights,
    policy_loss,
    split,
)
from rlcanary.reference.masks import completion_mask, lengths_to_mask

__all__ = [
    "BatchStats",
    "RewardStats",
    "accumulated_loss",
    "advantages",
    "aggregate",
    "completion_logprobs",
    "completion_mask",
    "entropy",
    "has_signal",
    "importance_ratio",
    "importance_weights",
    "is_overlong",
    "is_stale",
    "kl",
    "lengths_to_mask",
    "make_batch",
    "packed_logprobs",
    "policy_loss",
    "split",
    "token_level_advantages",
    "token_logprobs",
]
