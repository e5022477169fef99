"""SkyRL's environment of GSM8K as a verifier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcanary.adapters.skyrl.base import SkyrlBase
from rlcanary.contract.adapter import NotProvided

if TYPE_CHECKING:
    from rlcanary.contract.records.preparation import Answer


class Verifying(SkyrlBase):
    """Verdicts on final answers."""

    def verify(self, answer: Answer) -> bool:
        from skyrl_gym.envs.gsm8k.env import GSM8kEnv

        if (answer.kind, answer.format) != ("number", "hash"):
            raise NotProvided("the environment of GSM8K reads numbers behind ####")
        environment = GSM8kEnv(extras={"reward_spec": {"ground_truth": answer.reference}})
        return bool(environment.step(answer.text)["reward"] == 1)
