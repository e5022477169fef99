"""TRL with the team's rewards in it: what they judge and what length costs are checked, beside the trainer's own code."""

import torch
from rewards import correct, overlong

from rlcanary import NotProvided
from rlcanary.adapters.trl import TrlAdapter


class Canary(TrlAdapter):
    name = "trl-custom-reward"

    def verify(self, answer):
        if (answer.kind, answer.format) != ("number", "tag"):
            raise NotProvided("rewards.py reads numbers in an <answer> tag")
        return correct([answer.text], [answer.reference]) == [1.0]

    def shape_rewards(self, rewards, lengths):
        buffer = self.conventions.overlong_buffer
        if buffer is None:
            return rewards
        completion_ids = [range(length) for length in lengths.completions.tolist()]
        cost = overlong(lengths.max_new_tokens, buffer)(completion_ids=completion_ids)
        return rewards + torch.tensor(cost, dtype=rewards.dtype)
