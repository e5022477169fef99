"""A policy on a transformers model in this process, which needs nothing else.

Shapes: B rows (prompts × completions), P prompt positions, S sequence positions, T = S - 1, V vocabulary entries.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlcanary.contract.batch import Completion
from rlcanary.contract.engine import load_parameters
from rlcanary.contract.sampling import Sampling
from rlcanary.grpo.engines.batching import Batcher
from rlcanary.grpo.engines.containers import LogProbs, Masks, MaskStrategy, Tokens
from rlcanary.grpo.engines.policy import Options, check_prompts
from rlcanary.grpo.engines.transformers_sampling import Draw, Ends
from rlcanary.reference.logprobs import token_logprobs

Request = tuple[Sequence[int], Sampling]


class TransformersPolicy:
    """A `Policy` that samples with `generate` and scores with a forward pass, dropout off in both.

    One call runs at a time, loading weights included, so that no completion straddles two versions of the weights.

    Attributes:
        model: the model itself, no copy: training it changes the samples.
        tokenizer: decodes completions, and finds stop sequences.
        version: number of completed weight syncs; the caller that syncs counts.
        eos_token_ids: ids that end a completion, unless the request names its own.
        batcher: runs the requests of `submit` and `agenerate`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        eos_token_ids: Sequence[int] | None = None,
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
            max_batch_size: rows per forward pass.
            min_batch_size: requests that `submit` and `agenerate` wait for, at most `batching_timeout` seconds.
            batching_timeout: see `Batcher`.
            seed: seed of the requests that have none of their own; None draws one.

        Raises:
            ValueError: no end-of-sequence id is known, or `max_batch_size` is below 1.
        """
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size={max_batch_size} has to be at least 1")
        self.model, self.tokenizer, self.version = model, tokenizer, 0
        self.eos_token_ids = tuple(_ends(model, tokenizer) if eos_token_ids is None else eos_token_ids)
        self._max_batch_size = max_batch_size
        self._lock = threading.RLock()
        # A generator of its own: sampling leaves the trainer's random state as it is.
        self._random = torch.Generator()
        _ = self._random.seed() if seed is None else self._random.manual_seed(seed)
        self.batcher: Batcher[Request, list[Completion]] = Batcher(
            self._answer, min_batch_size=min_batch_size, timeout=batching_timeout, key=lambda request: request[1]
        )

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Options) -> list[list[Completion]]:
        """Sample completions per prompt, in order: see `Policy.generate`.

        With a seed each prompt has a generator of its own, so that the prompts beside it change nothing but roundings.
        """
        parameters = Sampling.of(sampling).with_ends(self.eos_token_ids)
        check_prompts(prompts, self._vocabulary)
        at_once = max(1, self._max_batch_size // parameters.n)
        groups: list[list[Completion]] = []
        with self._lock:
            for first in range(0, len(prompts), at_once):
                groups += self._sample(prompts[first : first + at_once], parameters)
        return groups

    def submit(self, prompt: Sequence[int], sampling: Options) -> Future[list[Completion]]:
        """Queue one prompt -> its future completions, for callers in threads. Equal parameters share a batch."""
        parameters = Sampling.of(sampling)
        check_prompts([prompt], self._vocabulary)
        return self.batcher.submit((prompt, parameters))

    async def agenerate(self, prompt: Sequence[int], sampling: Options) -> list[Completion]:
        """Sample the completions of one prompt, as `submit` does."""
        return await asyncio.wrap_future(self.submit(prompt, sampling))

    def logprobs(
        self,
        tokens: Tokens,
        masks: Masks | None = None,
        strategy: MaskStrategy | Sequence[Tensor] = "response",
        temperature: float = 1.0,
    ) -> LogProbs:
        """Score tokens, see `Policy.logprobs`. Differentiable in the model's parameters, unless under `torch.no_grad`."""
        masks = Masks.of(tokens) if masks is None else masks
        masks.check_like(tokens)
        selected = masks.select(strategy)
        full, scored = tokens.full, []
        with self._lock, self._evaluating():
            for first in range(0, len(full), self._max_batch_size):
                batch = slice(first, first + self._max_batch_size)
                scored += self._score(full[batch], selected[batch], temperature)
        pairs = list(zip(scored, tokens.lengths, strict=True))
        return LogProbs([row[:prompt] for row, (prompt, _) in pairs], [row[prompt:] for row, (prompt, _) in pairs])

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load weights, see `Policy.load_weights`. Tensors loaded before an error stay loaded."""
        with self._lock:
            return load_parameters(self.model, weights, "policy")

    def reset_prefix_cache(self) -> None:
        """Do nothing: no keys and values outlive a call."""

    @property
    def _vocabulary(self) -> int:
        return int(self.model.get_input_embeddings().num_embeddings)

    def _answer(self, requests: Sequence[Request]) -> list[list[Completion]]:
        return self.generate([prompt for prompt, _ in requests], requests[0][1])

    def _sample(self, prompts: Sequence[Sequence[int]], parameters: Sampling) -> list[list[Completion]]:
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

        n, device = parameters.n, self.model.device
        tokens = Tokens.of(prompts)
        # Any id will do for padding, 0 included: it is masked by position and never told by its id.
        pad = self.tokenizer.pad_token_id or 0
        ids_BP = tokens.padded(pad)[0].to(device).repeat_interleave(n, dim=0)
        attended_BP = Masks.of(tokens).attention()[0].to(device).repeat_interleave(n, dim=0)
        draw = Draw(attended_BP, parameters, [self._generator(parameters.seed) for _ in prompts])
        ends = Ends(len(ids_BP), ids_BP.shape[1], parameters, self.tokenizer)
        config = GenerationConfig(max_new_tokens=parameters.max_new_tokens, pad_token_id=pad, do_sample=False)
        with self._generation_config(config), self._evaluating(), torch.no_grad():
            ids_BS = self.model.generate(
                inputs=ids_BP,
                attention_mask=attended_BP.long(),
                logits_processor=LogitsProcessorList([draw]),
                stopping_criteria=StoppingCriteriaList([ends]),
            )
        rows = ends.completions(ids_BS[:, ids_BP.shape[1] :], draw, self.version)
        return [rows[first : first + n] for first in range(0, len(rows), n)]

    def _generator(self, seed: int | None) -> torch.Generator:
        return self._random if seed is None else torch.Generator().manual_seed(seed)

    def _score(self, rows: Sequence[Tensor], selected: Sequence[Tensor], temperature: float) -> list[Tensor]:
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
        return [
            scored_S[: len(mask)].masked_fill(~mask, math.nan)
            for scored_S, mask in zip(scored_BS, selected, strict=True)
        ]

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        before = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            yield
        finally:
            for module, was_training in before:
                module.training = was_training

    @contextmanager
    def _generation_config(self, config: Any) -> Iterator[None]:
        """Replace the model's own generation config, from which `generate` would fill in missing parameters."""
        before = self.model.generation_config
        self.model.generation_config = config
        try:
            yield
        finally:
            self.model.generation_config = before


def _ends(model: Any, tokenizer: Any) -> list[int]:
    configured = model.generation_config.eos_token_id
    ends = [] if configured is None else [configured] if isinstance(configured, int) else list(configured)
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ends:
        ends.append(int(tokenizer.eos_token_id))
    if not ends:
        raise ValueError("neither the model nor the tokenizer has an end-of-sequence id: give eos_token_ids")
    return ends
