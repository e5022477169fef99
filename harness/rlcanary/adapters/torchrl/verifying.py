"""torchrl's reward parsers of GSM8K and MATH as verifiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.torchrl.base import TorchrlBase
from rlcanary.adapters.torchrl.rollouts import answered
from rlcanary.contract.adapter import NotProvided

if TYPE_CHECKING:
    from rlcanary.contract.records.preparation import Answer


class Verifying(TorchrlBase):
    """Verdicts on final answers."""

    def verify(self, answer: Answer) -> bool:
        from torchrl.envs.llm import GSM8KRewardParser, MATHRewardParser

        if answer.format != "tag" or answer.kind not in ("number", "math"):
            raise NotProvided("torchrl's parsers read numbers and mathematics in an <answer> tag")
        # As the rows of the two datasets give the right answer.
        row = f"#### {answer.reference}" if answer.kind == "number" else f"\\boxed{{{answer.reference}}}"
        with quiet():
            parser = GSM8KRewardParser() if answer.kind == "number" else MATHRewardParser()
            turn = answered([{"query": "", "answer": row}], [answer.text], parser)
        return bool(turn["next", "success"])
