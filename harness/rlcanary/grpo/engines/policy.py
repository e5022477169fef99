"""A policy: an engine that also scores given tokens, and runs the requests of many threads together."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from rlcanary.contract.batch import Completion
from rlcanary.contract.sampling import Options, Sampling
from rlcanary.grpo.data.templates import end_of_turn
from rlcanary.grpo.engines.batching import Batcher
from rlcanary.grpo.engines.containers import LogProbs, Masks, MaskStrategy, Tokens
from rlcanary.grpo.engines.engine_pool import RequestRefused

if TYPE_CHECKING:
    from torch import Tensor

Request = tuple[Sequence[int], Sampling]


class Policy(ABC):
    """A `rlcanary.contract.engine.Engine` that can also score. The same calls give the same on every backend.

    Attributes:
        batcher: runs the requests of `submit`.
    """

    batcher: Batcher[Request, list[Completion]]

    @abstractmethod
    def accepted(self, prompts: Sequence[Sequence[int]], sampling: Options) -> Sampling:
        """Check a request -> its parameters, with the policy's end-of-sequence ids where it names none.

        Raises:
            ValueError: a parameter is unknown, out of range or not supported here, or, as `RequestRefused`, a prompt is
                empty, has an id outside the vocabulary or is too long.
        """

    def submit(self, prompt: Sequence[int], sampling: Options) -> Future[list[Completion]]:
        """Queue one prompt -> its future completions; callers in many threads share batches."""
        return self.batcher.submit((prompt, self.accepted([prompt], sampling)))

    def logprobs(
        self,
        tokens: Tokens,
        masks: Masks | None = None,
        strategy: MaskStrategy | Sequence[Tensor] = "response",
        temperature: float = 1.0,
    ) -> LogProbs:
        """Score each token that the strategy selects, given all that precedes it; NaN elsewhere.

        Args:
            tokens: the tokens to score.
            masks: author of each token; None means that the assistant wrote all responses.
            strategy: as `Masks.select` takes it. A row's first token has nothing before it and is never scored.
            temperature: logits are divided by it; above 0.

        Raises:
            ValueError: masks do not fit the tokens, or the temperature is not supported here.
        """
        selected = self.selected(tokens, masks, strategy)
        rows = [
            row.masked_fill(~mask, math.nan)
            for row, mask in zip(self.score(tokens.full, temperature), selected, strict=True)
        ]
        pairs = list(zip(rows, tokens.lengths, strict=True))
        return LogProbs([row[:prompt] for row, (prompt, _) in pairs], [row[prompt:] for row, (prompt, _) in pairs])

    @staticmethod
    def selected(tokens: Tokens, masks: Masks | None, strategy: MaskStrategy | Sequence[Tensor]) -> list[Tensor]:
        """Select tokens as `logprobs` does: B tensors [P_i + R_i] bool."""
        masks = Masks.of(tokens) if masks is None else masks
        masks.check_like(tokens)
        return masks.select(strategy)

    @abstractmethod
    def score(self, rows: Sequence[Tensor], temperature: float) -> list[Tensor]:
        """Score every token of each row -> one tensor per row, NaN at its first token."""


def check_ids(prompts: Sequence[Sequence[int]], vocabulary: int, room: float = math.inf) -> None:
    """Check that a model can continue these prompts, so that an error names the prompt and stays with its request.

    Args:
        prompts: the prompts.
        vocabulary: ids of the model.
        room: most ids of a prompt and its completion.

    Raises:
        RequestRefused: a prompt is empty, has an id outside the vocabulary, or leaves no room for a completion.
    """
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise RequestRefused(f"prompt {row} is empty: there is nothing to continue")
        wrong = [token for token in prompt if not 0 <= token < vocabulary]
        if wrong:
            raise RequestRefused(f"prompt {row} has the id {wrong[0]}, outside the vocabulary of {vocabulary}")
        if len(prompt) >= room:
            raise RequestRefused(
                f"prompt {row} has {len(prompt)} ids, which leaves no room for a completion among the engine's {room}"
            )


def eos_ids(configured: int | Sequence[int] | None, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that end a completion: of a model's generation config, of its tokenizer and of the chat template."""
    ids = [configured] if isinstance(configured, int) else list(configured or ())
    own = (tokenizer.eos_token_id, end_of_turn(tokenizer))
    return tuple(dict.fromkeys([*ids, *(int(each) for each in own if each is not None)]))


def ends_of(given: Sequence[int] | None, configured: int | Sequence[int] | None, tokenizer: Any) -> tuple[int, ...]:
    """Return the given ids or, for None, `eos_ids`.

    Raises:
        ValueError: there is none.
    """
    if given is not None:
        return tuple(given)
    if not (found := eos_ids(configured, tokenizer)):
        raise ValueError("neither the model nor the tokenizer has an end-of-sequence id: give eos_token_ids")
    return found
