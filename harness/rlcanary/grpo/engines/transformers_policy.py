"""A policy on a transformers model in this process, which needs nothing else.

Shapes: B rows, S sequence positions, T = S - 1, V vocabulary entries.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical

from rlcanary.contract.batch import Completion
from rlcanary.contract.engine import InProcessEngine
from rlcanary.contract.sampling import Options, Sampling
from rlcanary.grpo.engines.batching import Batcher
from rlcanary.grpo.engines.containers import Masks, MaskStrategy, Tokens
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
        self._settings = {"eos_token_ids": ends, "max_batch_size": max_batch_size, "seed": seed}
        self._settings |= {"min_batch_size": min_batch_size, "batching_timeout": batching_timeout}
        self.tokenizer = tokenizer
        if seed is not None:
            self._random.manual_seed(seed)
        self._lock = threading.RLock()
        self._is_batching = min_batch_size > 1
        self.batcher: Batcher[Request, list[Completion]] = Batcher(
            self._answer,
            min_batch_size=min_batch_size,
            timeout=batching_timeout,
            key=lambda request: replace(request[1], seed=None),
        )

    def get_new_version(self, **settings: Any) -> TransformersPolicy:
        """Make another policy on the same model, with some settings of the constructor changed."""
        other = TransformersPolicy(self.model, self.tokenizer, **{**self._settings, **settings})
        other._lock, other.version = self._lock, self.version
        return other

    def accepted(self, prompts: Sequence[Sequence[int]], sampling: Options) -> Sampling:
        """Check a request as `Policy.accepted` does."""
        check_ids(prompts, int(self.model.get_input_embeddings().num_embeddings))
        return Sampling.of(sampling).with_ends(self.eos_token_ids)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Options) -> list[list[Completion]]:
        """Sample completions per prompt, in order, as `InProcessEngine.generate` does."""
        with self._lock:
            return super().generate(prompts, sampling)

    async def agenerate(self, prompt: Sequence[int], sampling: Options) -> list[Completion]:
        """Sample the completions of one prompt.

        With a `min_batch_size` above 1 requests share batches, as those of `submit` do; else they take turns token by token.
        """
        if self._is_batching:
            return await asyncio.wrap_future(self.submit(prompt, sampling))
        return await super().agenerate(prompt, sampling)

    def distributions(
        self,
        tokens: Tokens,
        masks: Masks | None = None,
        strategy: MaskStrategy | Sequence[Tensor] = "response",
        temperature: float = 1.0,
    ) -> list[Categorical]:
        """Return the distribution of each token that the strategy selects, given all that precedes it.

        Args:
            tokens: the tokens.
            masks: as for `logprobs`.
            strategy: as for `logprobs`. A row's first token has no distribution.
            temperature: logits are divided by it; above 0.

        Returns:
            One [K_i, V] distribution per row. Differentiable in the model's parameters.

        Raises:
            ValueError: masks do not fit the tokens.
        """
        selected = self.selected(tokens, masks, strategy)
        with self._lock, self._evaluating():
            rows = zip(tokens.full, selected, strict=True)
            return [Categorical(logits=self._logits([row])[0, :-1][mask[1:]] / temperature) for row, mask in rows]

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
        with self._lock:
            return self.generate_seeded(
                [prompt for prompt, _ in requests], requests[0][1], [sampling.seed for _, sampling in requests]
            )

    def _score(self, rows: Sequence[Tensor], temperature: float) -> list[Tensor]:
        ids_BS = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
        logits_BSV = self._logits(rows)
        scored_BT = token_logprobs(logits_BSV[:, :-1], ids_BS[:, 1:].to(logits_BSV.device), temperature).cpu()
        # Nothing precedes the first token.
        scored_BS = torch.cat([torch.full((len(rows), 1), math.nan), scored_BT], dim=1)
        return [scored_S[: len(row)] for scored_S, row in zip(scored_BS, rows, strict=True)]

    def _logits(self, rows: Sequence[Tensor]) -> Tensor:
        """Run the model on whole rows -> [B, S, V], behind each position."""
        ids_BS = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True).to(self.model.device)
        lengths_B = torch.tensor([len(row) for row in rows], device=ids_BS.device)
        positions_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
        attended_BS = positions_S < lengths_B.unsqueeze(1)
        logits_BSV: Tensor = self.model(
            input_ids=ids_BS,
            attention_mask=attended_BS.long(),
            position_ids=positions_S.expand_as(ids_BS).masked_fill(~attended_BS, 0),
        ).logits
        return logits_BSV

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
