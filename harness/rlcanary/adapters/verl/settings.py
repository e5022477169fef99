"""verl's settings, and the values that a run uses: those of its optimizer, its objective, its requests and its loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.verl.syncing import Syncing
from rlcanary.adapters.verl.workers.engine import new_engine
from rlcanary.adapters.verl.workers.run_config import default_config

if TYPE_CHECKING:
    from rlcanary.contract.records.preparation import Setting

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


class Settings(Syncing):
    """The settings of a run."""

    def list_settings(self) -> list[Setting]:
        from rlcanary.contract.records.preparation import Setting

        return [
            Setting(f"{ACTOR}.optim.lr", (3e-6,)),
            Setting(f"{ACTOR}.optim.betas", ([0.9, 0.95],)),
            Setting(f"{ACTOR}.grad_clip", (0.5,)),
            Setting(f"{ACTOR}.clip_ratio", (0.1,)),
            Setting(f"{ACTOR}.loss_agg_mode", ("seq-mean-token-mean",)),
            Setting(f"{ACTOR}.use_kl_loss", (True, False)),
            Setting(f"{ROLLOUT}.temperature", (0.7, 0.0)),
        ]

    def effective(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        """Read the values from the optimizer, the loss's bounds, the dataclasses of the workers and the configuration."""
        import torch
        from omegaconf import OmegaConf
        from verl.utils.config import omega_conf_to_dataclass

        config = default_config()
        # Without one of these a run is refused.
        for name, value in {f"{ROLLOUT}.name": "vllm", f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1, **written}.items():
            OmegaConf.update(config, name, value, merge=False)
        with quiet():
            actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        engine, rollout = new_engine(actor, None), config.actor_rollout_ref.rollout
        (group,) = engine._build_optimizer(torch.nn.Linear(1, 1)).param_groups
        # A text raises where the run computes with it.
        return {
            f"{ACTOR}.optim.lr": group["lr"],
            f"{ACTOR}.optim.betas": list(group["betas"]),
            f"{ACTOR}.grad_clip": 0 + engine.optimizer_config.clip_grad,
            f"{ACTOR}.clip_ratio": clip_bound(actor),
            f"{ACTOR}.loss_agg_mode": actor.loss_agg_mode,
            f"{ACTOR}.use_kl_loss": actor.use_kl_loss,
            f"{ROLLOUT}.temperature": 0 + rollout.temperature,
        }


def clip_bound(actor: Any) -> float:
    """Find how far below 1 the ratio is clipped, by the loss of a token of ratio 0 and advantage -1: minus what is left."""
    import torch
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    loss, _ = get_policy_loss_fn(actor.policy_loss.loss_mode)(
        old_log_prob=torch.zeros(1, 1),
        log_prob=torch.full((1, 1), -20.0),
        advantages=-torch.ones(1, 1),
        response_mask=torch.ones(1, 1),
        loss_agg_mode=actor.loss_agg_mode,
        config=actor,
    )
    return round(1 - float(loss), 6)
