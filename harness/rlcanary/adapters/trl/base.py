"""The base of all capabilities of the TRL adapter: settings, conventions and a real trainer."""

from __future__ import annotations

import copy
import os
import pickle
import sys
from functools import cache, cached_property, lru_cache
from importlib import import_module
from typing import Any, Self

from rlcanary.adapters.frameworks import forget, hidden, quiet, usable
from rlcanary.adapters.trl import releases
from rlcanary.adapters.trl.conventions import conventions_of, other_conventions, settings_for
from rlcanary.adapters.trl.trainer.trainers import grpo_trainer
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.conventions import Conventions


class TrlBase(Adapter):
    """TRL's trainer under some `GRPOConfig` settings, by default TRL's."""

    name = "trl"

    def __init__(self, **settings: Any) -> None:
        _import_trl()
        # The trainer is built without its engine: the correction by the engine's logprobs is switched on afterwards.
        self.use_vllm = bool(settings.pop("use_vllm", False))
        # The soft punishment is a reward function beside the others, no setting.
        self.overlong_buffer = settings.pop("overlong_buffer", None)
        # The settings of the trainers beside GRPO's: `SFTConfig`, `DPOConfig`, `DistillationConfig`.
        self.sft: dict[str, Any] = settings.pop("sft", {})
        self.dpo: dict[str, Any] = settings.pop("dpo", {})
        self.distillation: dict[str, Any] = settings.pop("distillation", {})
        self.settings = settings

    @cached_property
    def conventions(self) -> Conventions:  # type: ignore[override]
        """Translate the settings into conventions."""
        return conventions_of(self._trainer.args, self.use_vllm).replace(
            overlong_buffer=self.overlong_buffer, **other_conventions(self.sft, self.dpo, self.distillation)
        )

    def configured(self, **changes: Any) -> Self:
        return type(self)(**settings_for(self._all_settings, self.conventions, changes))

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        """Make the adapter that another process has, without trainers."""
        return type(self)(**self._all_settings)

    @property
    def _all_settings(self) -> dict[str, Any]:
        others = ("use_vllm", "overlong_buffer", "sft", "dpo", "distillation")
        return {**self.settings, **{name: getattr(self, name) for name in others}}

    @property
    def _trainer(self) -> Any:
        """Return a trainer in the state in which its constructor left it."""
        trainer = copy.copy(self._built_trainer)
        trainer.args = copy.copy(trainer.args)
        trainer.model = copy.copy(trainer.model)
        trainer.model_wrapped = trainer.model
        if hasattr(trainer, "_tokenizer"):
            trainer._tokenizer = copy.deepcopy(trainer._tokenizer)  # a copy would share the map of its special tokens
        trainer.use_vllm = self.use_vllm
        return trainer

    @cached_property
    def _built_trainer(self) -> Any:
        return _built(pickle.dumps(self.settings))


@lru_cache(maxsize=64)  # the checks ask for the same few settings over and over
def _built(settings: bytes) -> Any:
    return grpo_trainer(pickle.loads(settings))


@cache
def _import_trl() -> None:
    with usable("trl", "pip install 'rlcanary[trl]'", "TRL 0.22 to 1.16", at_least="0.22"), quiet():
        if releases.scores_by_triton_alone() and "triton" not in sys.modules:
            os.environ["TRITON_INTERPRET"] = "1"  # its kernels run on the CPU, slowly
        try:
            import_module("trl.trainer.grpo_trainer")
        except ImportError as error:
            if "vllm" not in str(error):
                raise
            forget("trl")
            with hidden("vllm"), releases.packages_as_flags():
                import_module("trl.trainer.grpo_trainer")
