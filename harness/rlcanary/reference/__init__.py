"""The oracle: a GRPO core in pure torch, against which the checks compare other implementations."""

from rlcanary.reference.data.batching import BatchStats, RewardStats, make_batch
from rlcanary.reference.data.filters import has_signal, is_overlong, is_stale
from rlcanary.reference.data.lengths import shape_rewards
from rlcanary.reference.data.reward_parts import combine_rewards
from rlcanary.reference.fused import fused_linear_logprobs, fused_linear_logprobs_and_entropy
from rlcanary.reference.logprobs import completion_logprobs, completion_scores, entropy, packed_logprobs, token_logprobs
from rlcanary.reference.masks import MessageTokens, assistant_mask, completion_mask, lengths_to_mask
from rlcanary.reference.objective.advantages import advantages, token_level_advantages
from rlcanary.reference.objective.aggregation import aggregate, count_sequences
from rlcanary.reference.objective.credit import gae, returns_to_go, token_advantages, whitened
from rlcanary.reference.objective.critic import value_loss, values
from rlcanary.reference.objective.distillation import distillation_advantages, distillation_loss
from rlcanary.reference.objective.kl import kl, rewards_with_kl
from rlcanary.reference.objective.losses import (
    accumulated_loss,
    importance_ratio,
    importance_weights,
    policy_loss,
    split,
)
from rlcanary.reference.objective.other_losses import accumulated_other_loss, other_loss, other_pieces
from rlcanary.reference.objective.preference import preference_loss
from rlcanary.reference.objective.supervised import supervised_loss
from rlcanary.reference.rl_step import frozen_batch, mini_batch, rl_step
from rlcanary.reference.step import descend, policy_batch, train_step

__all__ = [
    "BatchStats",
    "MessageTokens",
    "RewardStats",
    "accumulated_loss",
    "accumulated_other_loss",
    "advantages",
    "aggregate",
    "assistant_mask",
    "combine_rewards",
    "completion_logprobs",
    "completion_mask",
    "completion_scores",
    "count_sequences",
    "descend",
    "distillation_advantages",
    "distillation_loss",
    "entropy",
    "frozen_batch",
    "fused_linear_logprobs",
    "fused_linear_logprobs_and_entropy",
    "gae",
    "has_signal",
    "importance_ratio",
    "importance_weights",
    "is_overlong",
    "is_stale",
    "kl",
    "lengths_to_mask",
    "make_batch",
    "mini_batch",
    "other_loss",
    "other_pieces",
    "packed_logprobs",
    "policy_batch",
    "policy_loss",
    "preference_loss",
    "returns_to_go",
    "rewards_with_kl",
    "rl_step",
    "shape_rewards",
    "split",
    "supervised_loss",
    "token_advantages",
    "token_level_advantages",
    "token_logprobs",
    "train_step",
    "value_loss",
    "values",
    "whitened",
]
