"""Bugs in rewards by length."""

from torch import Tensor

from rlcanary.bugs.museum import Bug
from rlcanary.contract.records.lengths import Lengths


class PenaltyStartsLate(Bug):
    id = "skyrl.overlong-penalty-late"
    source = "SkyRL 600315c75, #755"
    effect = "the penalty starts later the shorter the prompt is, for most prompts never"

    def shape_rewards(self, rewards: Tensor, lengths: Lengths) -> Tensor:
        total = lengths.max_prompt_tokens + lengths.max_new_tokens
        later_B = lengths.completions - (total - lengths.prompts - lengths.max_new_tokens)
        return super().shape_rewards(rewards, Lengths(later_B, lengths.prompts, lengths.max_new_tokens, total))
