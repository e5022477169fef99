"""An inference engine in the trainer's own process, small enough that checks of sampling and weight sync take seconds.

It behaves like vLLM where that matters to training: weights are loaded by name, prefixes are cached across requests and
stay cached after a weight change until the cache is reset, logprobs are raw or processed, requests run concurrently.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rlcanary.contract.batch import Completion
from rlcanary.contract.sampling import Sampling

if TYPE_CHECKING:
    from torch import Generator, Tensor

# Tokens per block of the prefix cache; only whole blocks are shared between requests, as in vLLM.
BLOCK = 16


class Engine(Protocol):
    """The engine that the checks pass to `rollout`, `generate` and `sync_weights`.

    Attributes:
        version: number of completed weight syncs.
    """

    version: int

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        """Sample completions for each prompt, in order. `sampling` has the fields of `Sampling`."""

    async def agenerate(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> list[Completion]:
        """Sample the completions of one prompt. Concurrent requests finish in any order."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Replace the named parameters -> the names that were loaded. The prefix cache is kept.

        Raises:
            KeyError: the model has no parameter of that name.
            ValueError: a tensor's shape is not the parameter's.
        """

    def reset_prefix_cache(self) -> None:
        """Drop the cached keys and values of all prefixes."""


class InProcessEngine:
    """`Engine` on a copy of a causal language model, on the CPU.

    Greedy requests always report raw logprobs, because temperature 0 leaves no distribution to report.

    Attributes:
        model: the engine's own copy, in evaluation mode.
        version: number of completed weight syncs, counted by the code that syncs.
        decode: ids to text.
    """

    def __init__(self, model: Any, decode: Callable[[Sequence[int]], str] | None = None) -> None:
        """Copy the model.

        Args:
            model: a transformers causal language model.
            decode: ids to text; None writes the ids down, separated by spaces.
        """
        import torch

        self.model = copy.deepcopy(model).cpu().eval().requires_grad_(False)
        self.version = 0
        self.decode = decode or (lambda token_ids: " ".join(map(str, token_ids)))
        # A generator of its own: sampling leaves the trainer's random state as it is.
        self._random = torch.Generator()
        self._random.seed()
        self._blocks: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        """Sample completions for each prompt, in order.

        Raises:
            TypeError: `sampling` has a field that `Sampling` does not have.
            ValueError: a field's value is out of range or not supported here, or a prompt is empty.
        """
        requests = [_Request(self, prompt, _parameters(sampling)) for prompt in prompts]
        for request in requests:
            while not request.is_done:
                request.step()
        return [request.completions() for request in requests]

    async def agenerate(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> list[Completion]:
        """Sample the completions of one prompt. Other requests and weight syncs run between any two tokens."""
        request = _Request(self, prompt, _parameters(sampling))
        while not request.is_done:
            request.step()
            await asyncio.sleep(0)
        return request.completions()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Replace the named parameters -> the names that were loaded. The prefix cache is kept.

        Parameters loaded before an error stay loaded, as in engines that load weights as they arrive.

        Raises:
            KeyError: the model has no parameter of that name.
            ValueError: a tensor's shape is not the parameter's.
        """
        return load_parameters(self.model, weights, "engine")

    def reset_prefix_cache(self) -> None:
        """Drop the cached keys and values of all prefixes. Requests under way keep theirs."""
        self._blocks.clear()

    def next_logits(self, token_ids: Tensor, cache: Any) -> Tensor:
        """Run the model on [N, L] further ids -> [N, V] next-token logits. The cache grows by L positions."""
        import torch

        with torch.no_grad():
            positions = torch.arange(cache.get_seq_length(), cache.get_seq_length() + token_ids.shape[1])
            output = self.model(
                input_ids=token_ids,
                position_ids=positions.expand(token_ids.shape),
                past_key_values=cache,
                use_cache=True,
            )
        logits_NV: Tensor = output.logits[:, -1].float()
        return logits_NV

    def read_prompt(self, prompt: Sequence[int]) -> tuple[Tensor, Any]:
        """Return the [1, V] logits after a prompt, and its keys and values, from the prefix cache where possible."""
        import torch
        from transformers import DynamicCache

        ids = tuple(int(token) for token in prompt)
        if not ids:
            raise ValueError("an empty prompt has nothing to continue")
        cached = 0
        # At least one token is computed, because the cache holds no logits.
        while cached + BLOCK < len(ids) and ids[: cached + BLOCK] in self._blocks:
            cached += BLOCK
        cache = DynamicCache()
        for end in range(BLOCK, cached + 1, BLOCK):
            for layer, (keys, values) in enumerate(self._blocks[ids[:end]]):
                cache.update(keys, values, layer)
        logits_1V = self.next_logits(torch.tensor([ids[cached:]]), cache)
        for end in range(cached + BLOCK, len(ids) + 1, BLOCK):
            block = slice(end - BLOCK, end)
            self._blocks[ids[:end]] = [
                (layer.keys[:, :, block].clone(), layer.values[:, :, block].clone()) for layer in cache.layers
            ]
        return logits_1V, cache

    def generator(self, seed: int | None) -> Generator:
        """Return the source of a request's random numbers."""
        import torch

        return self._random if seed is None else torch.Generator().manual_seed(seed)


def load_parameters(model: Any, weights: Iterable[tuple[str, Tensor]], owner: str) -> set[str]:
    """Copy weights into the named parameters -> the names that were loaded. Those before an error stay loaded.

    Args:
        model: a torch module.
        weights: names and tensors.
        owner: the model's owner, for error messages.

    Raises:
        KeyError: the model has no parameter of that name.
        ValueError: a tensor's shape is not the parameter's.
    """
    import torch

    parameters = dict(model.named_parameters(remove_duplicate=False))
    loaded = set()
    with torch.no_grad():
        for name, weight in weights:
            if name not in parameters:
                raise KeyError(f"the {owner}'s model has no parameter {name!r}")
            if parameters[name].shape != weight.shape:
                raise ValueError(
                    f"{name} of shape {tuple(weight.shape)} does not fit the {owner}'s {tuple(parameters[name].shape)}"
                )
            parameters[name].copy_(weight.detach())
            loaded.add(name)
    return loaded


def _parameters(given: Mapping[str, Any]) -> Sampling:
    sampling = Sampling(**given).with_ends(())
    if sampling.repetition_penalty != 1 or sampling.stop_sequences:
        raise ValueError("the in-process engine has neither repetition_penalty nor stop_sequences")
    return sampling


class _Request:
    """One prompt with its n completions under way. Shapes: N unfinished completions, V vocabulary entries."""

    def __init__(self, engine: InProcessEngine, prompt: Sequence[int], sampling: Sampling) -> None:
        self.engine = engine
        self.prompt = prompt
        self.sampling = sampling
        self.random = engine.generator(sampling.seed)
        self.token_ids: list[list[int]] = [[] for _ in range(sampling.n)]
        self.logprobs: list[list[float]] = [[] for _ in range(sampling.n)]
        self.versions: list[list[int]] = [[] for _ in range(sampling.n)]
        self.unfinished = list(range(sampling.n))
        self.cache: Any = None

    @property
    def is_done(self) -> bool:
        return not self.unfinished

    def step(self) -> None:
        """Sample the next token of every unfinished completion."""
        import torch

        if self.cache is None:
            logits_1V, self.cache = self.engine.read_prompt(self.prompt)
            self.cache.batch_repeat_interleave(self.sampling.n)
            logits_NV = logits_1V.expand(self.sampling.n, -1)
        else:
            last_N1 = torch.tensor([[self.token_ids[row][-1]] for row in self.unfinished])
            logits_NV = self.engine.next_logits(last_N1, self.cache)
        self._draw(logits_NV)
        kept = [index for index, row in enumerate(self.unfinished) if not self._has_ended(row)]
        if len(kept) < len(self.unfinished):
            self.unfinished = [self.unfinished[index] for index in kept]
            self.cache.batch_select_indices(torch.tensor(kept, dtype=torch.long))

    def completions(self) -> list[Completion]:
        return [
            Completion(
                token_ids=token_ids,
                logprobs=logprobs if self.sampling.logprobs else None,
                finish_reason="stop" if token_ids[-1] in self.sampling.ends else "length",
                token_versions=versions,
                text=self.engine.decode(token_ids),
            )
            for token_ids, logprobs, versions in zip(self.token_ids, self.logprobs, self.versions, strict=True)
        ]

    def _draw(self, logits_NV: Tensor) -> None:
        import torch

        raw_NV = logits_NV.log_softmax(dim=-1)
        if self.sampling.temperature == 0:
            processed_NV = raw_NV
            drawn_N = raw_NV.argmax(dim=-1)
        else:
            processed_NV = processed_logprobs(logits_NV, self.sampling)
            drawn_N = torch.multinomial(processed_NV.exp(), 1, generator=self.random).squeeze(1)
        reported_NV = raw_NV if self.sampling.logprobs == "raw" else processed_NV
        reported_N = reported_NV.gather(1, drawn_N.unsqueeze(1)).squeeze(1)
        for row, token, logprob in zip(self.unfinished, drawn_N.tolist(), reported_N.tolist(), strict=True):
            self.token_ids[row].append(token)
            self.logprobs[row].append(logprob)
            self.versions[row].append(self.engine.version)

    def _has_ended(self, row: int) -> bool:
        token_ids = self.token_ids[row]
        return token_ids[-1] in self.sampling.ends or len(token_ids) == self.sampling.max_new_tokens


def processed_logprobs(logits_NV: Tensor, sampling: Sampling) -> Tensor:
    """Logprobs after temperature (above 0), then top_k, then top_p; -inf marks tokens that cannot be drawn.

    Args:
        logits_NV: [N, V].
        sampling: its temperature, top_k and top_p are used.

    Returns:
        [N, V], normalised.
    """
    import torch

    scores_NV = logits_NV / sampling.temperature
    if 0 < sampling.top_k < scores_NV.shape[-1]:
        smallest_N1 = scores_NV.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores_NV = scores_NV.masked_fill(scores_NV < smallest_N1, -torch.inf)
    if sampling.top_p < 1:
        sorted_NV, order_NV = scores_NV.sort(dim=-1, descending=True)
        softmax_NV = sorted_NV.softmax(dim=-1)
        # The token with which the sum passes top_p is the last one kept.
        is_out_NV = softmax_NV.cumsum(dim=-1) - softmax_NV >= sampling.top_p
        scores_NV = scores_NV.masked_fill(is_out_NV.gather(1, order_NV.argsort(dim=-1)), -torch.inf)
    return scores_NV.log_softmax(dim=-1)
