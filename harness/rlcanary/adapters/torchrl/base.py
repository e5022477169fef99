"""torchrl under some settings, and what every group of its capabilities is made with."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from rlcanary.adapters.frameworks import quiet, usable
from rlcanary.adapters.torchrl.data import given_actor
from rlcanary.adapters.torchrl.options import (
    AGGREGATIONS,
    INTERVALS,
    SUPERVISED,
    TRAINER,
    advantage_words,
    exact,
    gae_defaults,
    loss_words,
    new_critic_loss,
    new_supervised_loss,
    settings_for,
)
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.conventions import Conventions
from rlcanary.errors import UserError

if TYPE_CHECKING:
    pass


class TorchrlBase(Adapter):
    """The settings, and the objects of torchrl that they make."""

    def __init__(
        self,
        loss: Mapping[str, Any] | None = None,
        advantage: Mapping[str, Any] | None = None,
        loss_class: str = "GRPOLoss",
        estimator: Mapping[str, Any] | None = None,
        critic: Mapping[str, Any] | None = None,
        supervised: Mapping[str, Any] | None = None,
        trainer: Mapping[str, Any] | None = None,
    ) -> None:
        """Set up the adapter with settings of torchrl's classes.

        Args:
            loss: keyword arguments of the loss.
            advantage: keyword arguments of `MCAdvantage`, except for the group's size and the keys.
            loss_class: `GRPOLoss`, `DAPO` or `CISPOLoss`.
            estimator: keyword arguments of `GAE`, which gives the advantages in the place of `MCAdvantage`; None keeps that.
            critic: keyword arguments of `ClipPPOLoss` for the critic. The conventions know squared errors, so that
                `loss_critic_type` is "l2" here.
            supervised: `reduction` and `normalize_by_seq_length` of `SFTLoss`.
            trainer: `num_epochs` of `GRPOTrainer`, the `mini_batches` that its replay buffer gives in each of them, and the
                `interval` of its `LRSchedulerHook`.

        Raises:
            UserError: torchrl is not installed, or the conventions cannot express a setting.
        """
        with usable("torchrl", "pip install 'rlcanary[torchrl]'", "torchrl 0.12 to 0.14", at_least="0.12"), quiet():
            import torchrl.modules.llm
            import torchrl.objectives.llm
            import torchrl.trainers  # noqa: F401
        self.loss = dict(loss or {})
        self.advantage = dict(advantage or {})
        self.loss_class = loss_class
        self.estimator = None if estimator is None else dict(estimator)
        self.critic = dict(critic or {})
        self.supervised = dict(supervised or {})
        self.trainer = {**TRAINER, **(trainer or {})}
        unknown = sorted({"kl_to_inference_coeff", "kl_mask_threshold", "reduction"} & set(self.loss))
        if unknown:
            raise UserError(f"the conventions cannot express {', '.join(unknown)} of {loss_class}")
        if self._loss_module.aggregation not in AGGREGATIONS:
            known = ", ".join(AGGREGATIONS)
            raise UserError(f"aggregation={self._loss_module.aggregation!r}: this adapter knows {known}")

    @cached_property
    def conventions(self) -> Conventions:  # type: ignore[override]
        """Translate the settings into conventions."""
        loss = self._loss_module
        gae = {**gae_defaults(), **(self.estimator or {})}
        return Conventions(
            **advantage_words(),
            **loss_words(loss),
            max_grad_norm=1.0,
            token_credit="outcome" if self.estimator is None else "gae",
            discount=gae["gamma"],
            gae_lambda=gae["lmbda"],
            whitening="mean_std" if gae["average_gae"] else "none",
            whitening_singleton="nan",
            value_clip=self._critic_loss.clip_value and exact(self._critic_loss.clip_value),
            value_coef=exact(self._critic_loss.critic_coeff),
            epochs_per_rollout=self.trainer["num_epochs"],
            mini_batches=self.trainer["mini_batches"],
            schedule_advances=INTERVALS[self.trainer["interval"]],
            answer_taken="first",
            supervised_aggregation=SUPERVISED[self._supervised_settings],
        )

    def configured(self, **changes: Any) -> Self:
        declared = self.conventions
        return type(self)(**settings_for(self.settings, declared, declared.replace(**changes), changes))

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that this adapter was made with."""
        names = ("loss", "advantage", "loss_class", "estimator", "critic", "supervised", "trainer")
        return {name: getattr(self, name) for name in names}

    def _wrapped(self, model: Any, **settings: Any) -> Any:
        from torchrl.modules.llm import TransformersWrapper

        from rlcanary.tiny_models import tiny_tokenizer

        forward = getattr(model, "forward", None)  # a model that only generates has none
        if forward is not None and list(inspect.signature(forward).parameters)[1:2] != ["attention_mask"]:
            raise NotProvided(
                "torchrl passes the attention mask as second argument, where this model takes another one"
            )
        return TransformersWrapper(model, tokenizer=tiny_tokenizer(), input_mode="tokens", **settings)

    @cached_property
    def _loss_module(self) -> Any:
        return self._new_loss(given_actor())

    def _new_loss(self, actor: Any, **settings: Any) -> Any:
        import torchrl.objectives.llm

        return getattr(torchrl.objectives.llm, self.loss_class)(actor, **self.loss, **settings)

    @cached_property
    def _critic_loss(self) -> Any:
        return new_critic_loss(self.critic)

    @property
    def _supervised_settings(self) -> tuple[str, bool]:
        loss = new_supervised_loss(self.supervised, given_actor())
        return loss.reduction, loss.normalize_by_seq_length
