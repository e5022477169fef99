"""SkyRL under some settings. Written for SkyRL 0.3."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

from rlcanary.adapters.frameworks import quiet, usable
from rlcanary.adapters.skyrl.options import conventions_of, settings_for
from rlcanary.adapters.skyrl.workers import config_of
from rlcanary.adapters.stubs import ANNOTATIONS, KERNELS, newer_typed_dicts, stubbed
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.conventions import Conventions


class SkyrlBase(Adapter):
    """The settings, and the configuration of SkyRL that they make."""

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        """Import SkyRL and check its settings.

        Args:
            settings: fields of `AlgorithmConfig`, nested ones with dots (`sapo.tau_pos`), `update_epochs_per_batch` of the
                trainer, and the number of `mini_batches` of a batch.

        Raises:
            UserError: SkyRL is not installed, or the conventions cannot express a setting.
        """
        install = "put the unpacked wheel of skyrl on PYTHONPATH, beside loguru and omegaconf"
        with (
            usable("skyrl", install, "SkyRL 0.3", at_least="0.3"),
            stubbed(KERNELS, ANNOTATIONS),
            newer_typed_dicts(),
            quiet(),
        ):
            import skyrl.backends.skyrl_train.distributed.fsdp_strategy
            import skyrl.backends.skyrl_train.workers.model_wrapper
            import skyrl.train.trainer  # noqa: F401
        self.settings = dict(settings or {})
        self.mini_batches: int = self.settings.get("mini_batches", 1)
        self.config = config_of(self.settings)

    @property
    def algorithm(self) -> Any:
        """SkyRL's `AlgorithmConfig`."""
        return self.config.trainer.algorithm

    @cached_property
    def conventions(self) -> Conventions:  # type: ignore[override]
        """Translate the settings into conventions."""
        trainer = self.config.trainer
        max_grad_norm = trainer.policy.optimizer_config.max_grad_norm
        return conventions_of(trainer.algorithm, max_grad_norm, trainer.update_epochs_per_batch, self.mini_batches)

    def configured(self, **changes: Any) -> Self:
        wanted = self.conventions.replace(**changes)
        made = type(self)(settings_for(self.settings, self.conventions, wanted, changes))
        for name in changes if made.conventions.importance_mode != "truncate" else set(changes) - {"importance_low"}:
            if getattr(made.conventions, name) != getattr(wanted, name):
                raise NotProvided(f"this adapter has no setting of SkyRL for {name}={changes[name]!r}")
        if made.conventions.replace(**{**changes, "importance_low": wanted.importance_low}) != wanted:
            raise NotProvided("SkyRL has this setting together with others alone")
        return made
