"""TRL's trainers as an adapter: real trainers on tiny models, whose own methods are called. Written for TRL 1.16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcanary.adapters.trl.conversations import TrlConversations
from rlcanary.adapters.trl.data import TrlData
from rlcanary.adapters.trl.layouts import TrlLayouts
from rlcanary.adapters.trl.objective import TrlObjective
from rlcanary.adapters.trl.preparation import TrlPreparation
from rlcanary.adapters.trl.reporting import TrlReporting
from rlcanary.adapters.trl.sampling import TrlSampling
from rlcanary.adapters.trl.splitting import TrlSplitting
from rlcanary.adapters.trl.training import TrlTraining
from rlcanary.contract.adapter import Adapter


class TrlAdapter(
    TrlObjective,
    TrlTraining,
    TrlData,
    TrlSampling,
    TrlConversations,
    TrlSplitting,
    TrlReporting,
    TrlPreparation,
    TrlLayouts,
):
    """Adapter of TRL's trainers under some `GRPOConfig` settings, by default TRL's."""

    def configurations(self) -> Mapping[str, Adapter]:
        """Return the loss types, ways to scale rewards, corrections for vLLM, and accumulation over four micro-batches."""
        settings: dict[str, dict[str, Any]] = {
            "default": {},
            "grpo": {"loss_type": "grpo"},
            "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
            "bnpo": {"loss_type": "bnpo"},
            "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
            "sapo": {"loss_type": "sapo"},
            "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
            "scale_batch": {"scale_rewards": "batch"},
            "kl": {"beta": 0.04},
            "vllm_token_truncate": {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
            "vllm_sequence_mask": {"use_vllm": True, "vllm_importance_sampling_mode": "sequence_mask"},
            "accumulate_4": {"gradient_accumulation_steps": 4},
        }
        return {name: type(self)(**{**self._all_settings, **changes}) for name, changes in settings.items()}
