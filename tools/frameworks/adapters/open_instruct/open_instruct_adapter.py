"""open-instruct as an adapter: GRPO of `grpo_fast.py` in one process, without Ray, vLLM, DeepSpeed or a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

import open_instruct_run as run
from open_instruct_conversations import Conversations
from open_instruct_data import Datasets
from open_instruct_other_losses import OtherLosses
from open_instruct_reporting import Reporting
from open_instruct_rollouts import Rollouts
from open_instruct_settings import conventions_of, preference_for, settings_for
from open_instruct_training import Training

from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.conventions import Conventions


class OpenInstructAdapter(Training, Rollouts, Conversations, Datasets, Reporting, OtherLosses):
    """Adapter of open-instruct under some of its options, by default their defaults but for those of `OPTIONS`."""

    name = "open-instruct"

    def __init__(self, settings: Mapping[str, Any] | None = None, dpo: Mapping[str, Any] | None = None) -> None:
        """Import open-instruct and make its configuration.

        Args:
            settings: options of `grpo_fast.py` by name, such as `{"clip_lower": 0.1}`.
            dpo: options of its `DPOConfig`.
        """
        run.imported()
        self.settings = {**OPTIONS, **(settings or {})}
        self.dpo = dict(dpo or {})

    @cached_property
    def conventions(self) -> Conventions:  # type: ignore[override]
        return conventions_of(self.configs(), self.dpo)

    def configured(self, **changes: Any) -> Self:
        wanted = self.conventions.replace(**changes)
        dpo = {**self.dpo, **preference_for(wanted, changes)}
        made = type(self)({**self.settings, **settings_for(wanted, changes)}, dpo)
        for name in changes:
            if getattr(made.conventions, name) != getattr(wanted, name):
                raise NotProvided(f"this adapter has no option of open-instruct for {name}={changes[name]!r}")
        if made.conventions != wanted:
            raise NotProvided("open-instruct has this option together with others alone")
        return made


# The reward of a group is whatever a check gives, the group is trained whatever it is, and there is no reference model.
OPTIONS = {"filter_zero_std_samples": False, "verification_reward": 1.0, "beta": 0.0, "load_ref_policy": False}
