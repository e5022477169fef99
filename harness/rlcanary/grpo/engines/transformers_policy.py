"""A policy on a transformers model in this process, which needs nothing else.

Shapes: B rows, S sequence positions, T = S - 1, V vocabulary entries.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlcanary.contract.batch import Completion
from rlcanary.contract.engine import InProcessEngine
from rlcanary.contract.sampling import Options, Sampling
from rlcanary.grpo.engines.batching import Batcher
from rlcanary.grpo.engines.policy import Policy, Request, check_ids, ends_of
from rlcanary.reference.logprobs import token_logprobs


class TransformersPolicy(InProcessEngine, Policy):
    """The in-process engine as a `Policy`: by default on the model itself, with dropout off while it is used.

    Calls of `generate`, `submit` and `logprobs` run one at a time, loading weights included, so that none of their
    completions straddles two versions of the weights.

    Attributes:
        tokenizer: decodes completions, and finds stop sequences.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        eos_token_ids: Sequence[int] | None = None,
        copies: bool = False,
        max_batch_size: int = 64,
        min_batch_size: int = 1,
        batching_timeout: float = 0.0,
        seed: int | None = None,
    ) -> None:
        """Wrap a model.

        Args:
            model: a transformers causal language model.
            tokenizer: its tokenizer.
            eos_token_ids: None takes those of the model's generation config and of the tokenizer.
            copies: as `InProcessEngine` takes it.
            max_batch_size: rows per forward pass.
            min_batch_size: requests that `submit` waits for, at most `batching_timeout` seconds.
            batching_timeout: see `Batcher`.
            seed: seed of the requests that have none of their own; None draws one.

        Raises:
            ValueError: no end-of-sequence id is known, or `max_batch_size` is below 1.
        """
        ends = ends_of(eos_token_ids, model.generation_config.eos_token_id, tokenizer)
        super().__init__(model, eos_token_ids=ends, copies=copies, max_batch_size=max_batch_size)
        self.tokenizer = tokenizer
        if seed is not None:
            self._random.manual_seed(seed)
        self._lock = threading.RLock()
        self.batcher: Batcher[Request, list[Completion]] = Batcher(
            self._answer, min_batch_size=min_batch_size, timeout=batching_timeout, key=lambda request: request[1]
        )

    def accepted(self, prompts: Sequence[Sequence[int]], sampling: Options) -> Sampling:
        """Check a request as `Policy.accepted` does."""
        check_ids(prompts, int(self.model.get_input_embeddings().num_embeddings))
        return Sampling.of(sampling).with_ends(self.eos_token_ids)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Options) -> list[list[Completion]]:
        """Sample completions per prompt, in order, as `InProcessEngine.generate` does."""
        with self._lock:
            return super().generate(prompts, sampling)

    def score(self, rows: Sequence[Tensor], temperature: float) -> list[Tensor]:
        """Score rows as `Policy.score` does. Differentiable in the model's parameters, unless under `torch.no_grad`."""
        scored: list[Tensor] = []
        with self._lock, self._evaluating():
            for first in range(0, len(rows), self._max_batch_size):
                scored += self._score(rows[first : first + self._max_batch_size], temperature)
        return scored

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load weights as `InProcessEngine.load_weights` does."""
        with self._lock:
            return super().load_weights(weights)

    def next_logits(self, token_ids: Tensor, cache: Any, padding_N1: Tensor | None = None) -> Tensor:
        """Run the model as `InProcessEngine.next_logits` does, without dropout."""
        with self._lock, self._evaluating():
            return super().next_logits(token_ids, cache, padding_N1)

    def text(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Decode with the tokenizer."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def _answer(self, requests: Sequence[Request]) -> list[list[Completion]]:
        return self.generate([prompt for prompt, _ in requests], requests[0][1])

    def _score(self, rows: Sequence[Tensor], temperature: float) -> list[Tensor]:
        ids_BS = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True).to(self.model.device)
        lengths_B = torch.tensor([len(row) for row in rows], device=ids_BS.device)
        positions_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
        attended_BS = positions_S < lengths_B.unsqueeze(1)
        logits_BSV = self.model(
            input_ids=ids_BS,
            attention_mask=attended_BS.long(),
            position_ids=positions_S.expand_as(ids_BS).masked_fill(~attended_BS, 0),
        ).logits
        scored_BT = token_logprobs(logits_BSV[:, :-1], ids_BS[:, 1:], temperature).cpu()
        # Nothing precedes the first token.
        scored_BS = torch.cat([torch.full((len(rows), 1), math.nan), scored_BT], dim=1)
        return [scored_S[: len(row)] for scored_S, row in zip(scored_BS, rows, strict=True)]

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        training = [module for module in self.model.modules() if module.training]
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True
