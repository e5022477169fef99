"""OpenRLHF under some settings, without Ray, DeepSpeed or a GPU. Written for OpenRLHF of mid-2026."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

from rlcanary.adapters.frameworks import quiet, usable
from rlcanary.adapters.openrlhf.options import DEFAULTS, args_of, check_settings, conventions_of, settings_for
from rlcanary.adapters.stubs import KERNELS, absent, stubbed
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.conventions import Conventions


class OpenrlhfBase(Adapter):
    """The settings, and the options of OpenRLHF that they make."""

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        """Import OpenRLHF and check its settings.

        Args:
            settings: options of `openrlhf.cli.train_ppo_ray`, such as `{"actor.dual_clip": 3.0}`.

        Raises:
            UserError: OpenRLHF is not installed, or the conventions cannot express a setting.
        """
        install = "pip install openrlhf, beside rlcanary"
        with usable("openrlhf", install, "OpenRLHF of mid-2026"), stubbed(KERNELS), absent("deepspeed"), quiet():
            import openrlhf.trainer.dpo_trainer
            import openrlhf.trainer.ppo_trainer
            import openrlhf.trainer.ray.ppo_actor
            import openrlhf.trainer.ray.ppo_critic
            import openrlhf.trainer.sft_trainer  # noqa: F401
        self.settings = dict(settings or {})
        check_settings({**DEFAULTS, **self.settings})

    @cached_property
    def conventions(self) -> Conventions:  # type: ignore[override]
        """Translate the settings into conventions."""
        return conventions_of({**DEFAULTS, **self.settings})

    def configured(self, **changes: Any) -> Self:
        return type(self)(settings_for(self.settings, self.conventions, changes))

    def args(self, more: Mapping[str, Any] | None = None) -> Any:
        """Return the parsed options of a run, with some more of them."""
        return args_of({**self.settings, **(more or {})})
