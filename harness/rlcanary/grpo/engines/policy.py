"""The protocol of a policy: it samples completions, as every engine does, and scores given tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rlcanary.contract.sampling import Sampling

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch import Tensor

    from rlcanary.contract.batch import Completion
    from rlcanary.grpo.engines.batching import Batcher
    from rlcanary.grpo.engines.containers import LogProbs, Masks, MaskStrategy, Tokens

Options = Mapping[str, Any] | Sampling


class Policy(Protocol):
    """A `rlcanary.contract.engine.Engine` that can also score. The same calls give the same on every backend.

    Attributes:
        version: number of completed weight syncs; the caller that syncs counts.
        eos_token_ids: ids that end a completion, unless the request names its own.
        batcher: runs the requests of `submit` and `agenerate`.
    """

    version: int
    eos_token_ids: tuple[int, ...]
    batcher: Batcher[Any, list[Completion]]

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Options) -> list[list[Completion]]:
        """Sample completions per prompt, in order; `sampling` as `Sampling.of` takes it.

        Raises:
            ValueError: a parameter is unknown, out of range or not supported here, or a prompt is empty.
        """

    def submit(self, prompt: Sequence[int], sampling: Options) -> Future[list[Completion]]:
        """Queue one prompt -> its future completions; callers in many threads share batches."""

    async def agenerate(self, prompt: Sequence[int], sampling: Options) -> list[Completion]:
        """Sample the completions of one prompt, as `submit` does."""

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

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Replace the parameters of these names -> the names that were loaded.

        Raises:
            KeyError: the model has no parameter of a name.
            ValueError: a tensor's shape is not the parameter's.
        """

    def reset_prefix_cache(self) -> None:
        """Forget the keys and values of all prefixes."""


def check_prompts(prompts: Sequence[Sequence[int]], vocabulary: int) -> None:
    """Check that a model can continue these prompts, so that an error names the prompt and stays with its request.

    Raises:
        ValueError: a prompt is empty, or has an id outside the vocabulary.
    """
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {row} is empty: there is nothing to continue")
        wrong = [token for token in prompt if not 0 <= token < vocabulary]
        if wrong:
            raise ValueError(f"prompt {row} has the id {wrong[0]}, outside the vocabulary of {vocabulary}")
