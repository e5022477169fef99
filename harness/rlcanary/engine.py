"""An inference engine in the trainer's own process, small enough that checks of sampling and weight sync take seconds.

It behaves as vLLM does where that matters to training: weights are loaded by name, prefixes are cached across requests and
stay cached when weights change until somebody resets the cache, logprobs are raw or processed, requests run concurrently.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rlcanary.batch import Completion

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled.

    Attributes:
        temperature: 0 is greedy.
        top_k: only the k likeliest tokens can be drawn; 0 is off.
        top_p: only the likeliest tokens that hold this probability together can be drawn; 1 is off.
        max_new_tokens: a completion of this length without an end is truncated, with finish reason "length".
        n: completions per prompt.
        seed: makes the request repeatable; None draws anew each time.
        eos_token_ids: each of them ends a completion and is part of it.
        logprobs: "raw" are those of the model at temperature 1, "processed" those of the distribution that was drawn from.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 16
    n: int = 1
    seed: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    logprobs: Literal["raw", "processed"] = "processed"


class Engine(Protocol):
    """What the checks give to `rollout`, `generate` and `sync_weights`.

    Attributes:
        version: number of weight syncs that were completed.
    """

    version: int

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        """Completions per prompt, in order. `sampling` has the fields of `Sampling`."""

    async def agenerate(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> list[Completion]:
        """The completions of one prompt; concurrent requests end in any order."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Replace the parameters of these names -> the names that were loaded. The prefix cache stays as it is.

        Raises:
            KeyError: the model has no parameter of a name.
            ValueError: a tensor's shape is not the parameter's.
        """

    def reset_prefix_cache(self) -> None:
        """Forget the keys and values of all prefixes."""
