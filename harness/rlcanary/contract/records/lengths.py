"""The record of lengths, by which rewards are shaped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcanary.contract.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Lengths(Batch):
    """The lengths of prompts and completions, and the limits under which they were sampled, all in tokens.

    Attributes:
        completions: [B] long.
        prompts: [B] long.
        max_new_tokens: the limit of a completion. None of `completions` is above it.
        max_prompt_tokens: the limit of a prompt.
    """

    completions: Tensor
    prompts: Tensor
    max_new_tokens: int
    max_prompt_tokens: int
