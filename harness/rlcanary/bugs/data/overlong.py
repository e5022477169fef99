"""Bugs in rewards by length."""

from dataclasses import replace

from torch import Tensor

from rlcanary.bugs.museum import Bug
from rlcanary.contract.records.lengths import Lengths


class PenaltyStartsLate(Bug):
    id = "skyrl.overlong-penalty-late"
    source = "SkyRL 600315c75, #755"
    effect = "the penalty starts later the shorter the prompt is, for most prompts never"

    def shape_rewards(self, rewards: Tensor, lengths: Lengths) -> Tensor:
        room_B = lengths.max_prompt_tokens - lengths.prompts
        return super().shape_rewards(rewards, replace(lengths, completions=lengths.completions - room_B))
