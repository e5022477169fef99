"""The settings of a run of verl, in the words of its configuration, and what they mean in conventions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

from rlcanary.adapters.frameworks import quiet, usable
from rlcanary.adapters.verl.losses.options import (
    conventions_of,
    critic_words,
    data_settings,
    data_words,
    require_words,
    settings_for,
)
from rlcanary.adapters.verl.rewards import overlong_settings, overlong_words
from rlcanary.adapters.verl.workers.run_config import composed, run_config
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.conventions import Conventions

WRITTEN_FOR = "verl 0.7 to 0.9 and the development tree of 0.10"


class Configured(Adapter):
    """An adapter of verl under some settings, by default its own with the GRPO advantage estimator."""

    name = "verl"

    def __init__(
        self,
        actor: Mapping[str, Any] | None = None,
        algorithm: Mapping[str, Any] | None = None,
        temperature: float = 1.0,
        critic: Mapping[str, Any] | None = None,
        overlong_buffer: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Set up the adapter with settings of verl's configuration groups.

        Args:
            actor: fields of `ActorConfig`; `policy_loss` and others that are groups themselves as mappings.
            algorithm: fields of `AlgoConfig`; `rollout_correction` as a mapping.
            temperature: the rollouts' temperature.
            critic: fields of `CriticConfig`.
            overlong_buffer: `len` and `penalty_factor` of that of the reward manager `dapo`; none without it.
            data: settings of the group `data`.

        Raises:
            UserError: verl is not installed, or the conventions cannot express a setting.
        """
        with usable("verl", "pip install 'rlcanary[verl]'", WRITTEN_FOR, at_least="0.7"), quiet():
            import verl.trainer.ppo.ray_trainer
            import verl.workers.engine.fsdp.transformer_impl
            import verl.workers.utils.losses  # noqa: F401
        self.actor = dict(actor or {})
        self.temperature = temperature
        self.algorithm = {"adv_estimator": "grpo", **(algorithm or {})}
        self.critic = dict(critic or {})
        self.overlong_buffer = dict(overlong_buffer or {})
        self.data = dict(data or {})
        require_words(self._actor_config)
        critic_words(self._critic_config)

    @cached_property
    def conventions(self) -> Conventions:  # type: ignore[override]
        """Translate the settings into conventions."""
        sizes = composed().data.train_batch_size
        found = conventions_of(self._actor_config, self._algorithm_config, self.temperature, sizes)
        others = critic_words(self._critic_config) | data_words(self._data) | overlong_words(self.overlong_buffer)
        return found.replace(best_at_k="resampled", **others)

    def configured(self, **changes: Any) -> Self:
        of_data = {"data_order", "long_prompt"}
        others = {
            name: value for name, value in changes.items() if not name.startswith("overlong_") and name not in of_data
        }
        sizes = composed().data.train_batch_size
        actor, algorithm, critic = settings_for(
            self.actor, self.algorithm, self.critic, self.conventions, sizes, others
        )
        data = self.data | data_settings({name: changes[name] for name in of_data & changes.keys()})
        overlong_buffer = overlong_settings(self.conventions.replace(**changes))
        temperature = changes.get("temperature", self.temperature)
        return type(self)(actor, algorithm, temperature, critic, overlong_buffer, data)

    @cached_property
    def _data(self) -> Any:
        return run_config(data=self.data).data

    @cached_property
    def _actor_config(self) -> Any:
        from verl.workers.config import FSDPActorConfig, FSDPOptimizerConfig, PolicyLossConfig

        settings = {"rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1, **self.actor}
        groups = {
            "policy_loss": PolicyLossConfig(**settings.get("policy_loss", {})),
            "optim": FSDPOptimizerConfig(**{"lr": 1e-6, **settings.get("optim", {})}),
        }
        return FSDPActorConfig(**settings | groups)

    @cached_property
    def _critic_config(self) -> Any:
        """Compose the critic's settings, which follow the actor's where nothing else is said."""
        followed = {"loss_agg_mode", "loss_scale_factor"}
        reduction = {name: value for name, value in self.actor.items() if name in followed}
        return run_config(actor_rollout_ref__actor=reduction, critic=self.critic).critic

    @cached_property
    def _algorithm_config(self) -> Any:
        from verl.trainer.config import AlgoConfig, KLControlConfig, RolloutCorrectionConfig

        correction = self.algorithm.get("rollout_correction")
        groups = {
            "rollout_correction": correction and RolloutCorrectionConfig(**correction),
            "kl_ctrl": KLControlConfig(**self.algorithm.get("kl_ctrl", {})),
        }
        return AlgoConfig(**self.algorithm | groups)
