"""The reward functions that judge answers, and the settings that a run really uses."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.frameworks import part, quiet
from rlcanary.adapters.trl.base import TrlBase
from rlcanary.adapters.trl.trainer.trainers import QUIETLY, grpo_trainer, place_kept
from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from rlcanary.contract.records.preparation import Answer, Setting

# What the parser of a configuration is given besides: no reports, on the CPU.
ALWAYS = {**QUIETLY, "report_to": "none"}


class TrlPreparation(TrlBase):
    """A verifier, and the settings that a run really uses."""

    def verify(self, answer: Answer) -> bool:
        accuracy_reward = part("trl.rewards:accuracy_reward")
        if answer.kind not in ("number", "math") or answer.format != "boxed":
            raise NotProvided("accuracy_reward reads numbers and formulas in LaTeX")
        (reward,) = accuracy_reward([[{"role": "assistant", "content": answer.text}]], [answer.reference])
        if reward is None:
            raise NotProvided("accuracy_reward skips a reference that it cannot parse")
        return float(reward) == 1.0

    def list_settings(self) -> list[Setting]:
        from rlcanary.contract.records.preparation import Setting

        return [
            Setting("learning_rate", (1e-5, 0.0)),
            Setting("beta", (0.04, 0.0)),
            Setting("temperature", (0.7,)),
            Setting("top_k", (20, 0)),
            Setting("epsilon", (0.1, 0.0)),
            Setting("epsilon_high", (0.28, 0.0), derived_from=("epsilon",)),
            Setting("loss_type", ("grpo", "dr_grpo")),
        ]

    def effective(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        """Parse a YAML file as TRL's command line does, and read the values from the trainer and what it builds."""
        import yaml
        from trl import GRPOConfig, TrlParser

        sizes = {"per_device_train_batch_size": 2, "num_generations": 2}
        with tempfile.TemporaryDirectory() as folder, quiet(), place_kept(where_it_fails=True):
            file = Path(folder, "config.yaml")
            file.write_text(yaml.safe_dump({**ALWAYS, **sizes, "output_dir": folder, **written}))
            told = io.StringIO()  # what argparse says before it exits
            try:
                with redirect_stderr(told):
                    (args,) = TrlParser((GRPOConfig,)).parse_args_and_config(["--config", str(file)])
            except SystemExit as error:
                raise ValueError(f"the configuration is refused: {told.getvalue()[-200:]}") from error
            trainer = grpo_trainer({}, args=args)
            generation = trainer.generation_config
            return {
                "learning_rate": trainer.create_optimizer().param_groups[0]["lr"],
                "beta": trainer.beta,
                "temperature": generation.temperature,
                "top_k": generation.top_k,
                "epsilon": trainer.epsilon_low,
                "epsilon_high": trainer.epsilon_high,
                "loss_type": trainer.loss_type,
            }
