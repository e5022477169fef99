"""The task: go on with numbers of the kind asked for, even or odd. Token NUMBERS + n stands for the number n."""

import torch

PAD, BOS, EOS, EVEN, ODD = range(5)
NUMBERS = 8
VOCAB_SIZE = 64


def make_prompts(count, generator):
    """[count, 3]: begin, the kind asked for, a number to start from."""
    kind = torch.randint(EVEN, ODD + 1, (count,), generator=generator)
    first = torch.randint(NUMBERS, VOCAB_SIZE, (count,), generator=generator)
    return torch.stack([torch.full_like(kind, BOS), kind, first], dim=1)


def reward(prompt_ids, completion_ids, mask):
    """[B]: the share of each completion's tokens that are numbers of the kind asked for."""
    asked_odd = prompt_ids[:, 1:2] == ODD
    right = (completion_ids >= NUMBERS) & ((completion_ids % 2 == 1) == asked_odd) & mask
    return right.sum(dim=1) / mask.sum(dim=1)
