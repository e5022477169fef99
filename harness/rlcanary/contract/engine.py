"""An inference engine in the trainer's own process, small enough that checks of sampling and weight sync take seconds.

It behaves like vLLM where that matters to training: weights are loaded by name, prefixes are cached across requests and
stay cached after a weight change until the cache is reset, logprobs are raw or processed, requests run concurrently.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rlcanary.contract.batch import Completion
from rlcanary.contract.filtering import processed_logprobs
from rlcanary.contract.layers import copied, layers_besides_attention
from rlcanary.contract.sampling import Options, Sampling

if TYPE_CHECKING:
    from torch import Generator, Tensor

# Tokens per block of the prefix cache; only whole blocks are shared between requests, as in vLLM.
BLOCK = 16
# Tokens that a character of a stop sequence can take, in byte-level vocabularies.
TOKENS_PER_CHARACTER = 4


class Engine(Protocol):
    """The engine that the checks pass to `rollout`, `generate` and `sync_weights`.

    Attributes:
        version: number of completed weight syncs of this engine.
    """

    version: int

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        """Sample completions for each prompt, in order. `sampling` has the fields of `Sampling`."""

    async def agenerate(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> list[Completion]:
        """Sample the completions of one prompt from the weights of `generate`. Concurrent requests finish in any order."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Replace the named parameters and buffers -> the names that were loaded. The prefix cache is kept.

        Raises:
            KeyError: the model has neither a parameter nor a buffer of that name.
            ValueError: a tensor's shape is not that of the one it replaces.
        """

    def reset_prefix_cache(self) -> None:
        """Drop the cached keys and values of all prefixes."""


class InProcessEngine:
    """`Engine` on a causal language model of transformers, by default on a copy of it on the CPU.

    Greedy requests always report raw logprobs, because temperature 0 leaves no distribution to report.

    Attributes:
        model: the engine's model.
        version: number of completed weight syncs, counted by the code that syncs.
        decode: ids to text.
        eos_token_ids: ids that end a completion, unless the request names its own.
        caches_keys: whether a row continues from cached keys and values.
    """

    def __init__(
        self,
        model: Any,
        decode: Callable[[Sequence[int]], str] | None = None,
        *,
        eos_token_ids: Sequence[int] = (),
        copies: bool = True,
        max_batch_size: int = 1,
    ) -> None:
        """Take the model.

        Args:
            model: a transformers causal language model.
            decode: ids to text; None writes the ids down, separated by spaces.
            eos_token_ids: ids that end a completion, unless the request names its own.
            copies: sample from a copy. Without one training the model changes the samples, and no prefixes are cached.
            max_batch_size: rows per forward pass; the completions of one prompt always share theirs.

        Raises:
            ValueError: `max_batch_size` is below 1.
        """
        import torch

        if max_batch_size < 1:
            raise ValueError(f"max_batch_size={max_batch_size} has to be at least 1")
        self.model = copied(model).cpu().eval().requires_grad_(False) if copies else model
        self.version = 0
        self.decode = decode or (lambda token_ids: " ".join(map(str, token_ids)))
        self.eos_token_ids = tuple(eos_token_ids)
        # A model outside transformers, or with a state besides keys and values, reads each row from its start.
        self.caches_keys = not layers_besides_attention(model) and not getattr(model, "_is_stateful", True)
        self._caches_prefixes = copies
        self._max_batch_size = max_batch_size if self.caches_keys else 1
        # A generator of its own: sampling leaves the trainer's random state as it is.
        self._random = torch.Generator()
        self._random.seed()
        self._blocks: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Options) -> list[list[Completion]]:
        """Sample completions for each prompt, in order.

        With a seed each prompt has a generator of its own, so that the prompts beside it change nothing but roundings.

        Raises:
            TypeError: `sampling` has a field that `Sampling` does not have.
            ValueError: a field's value is out of range, or a prompt is empty.
        """
        accepted = self.accepted(prompts, sampling)
        return self.generate_seeded(prompts, accepted, [accepted.seed] * len(prompts))

    def generate_seeded(
        self, prompts: Sequence[Sequence[int]], accepted: Sampling, seeds: Sequence[int | None]
    ) -> list[list[Completion]]:
        """Sample as `generate` does, with a seed per prompt in the place of the parameters' own."""
        at_once = max(1, self._max_batch_size // accepted.n)
        groups = []
        for first in range(0, len(prompts), at_once):
            chosen = slice(first, first + at_once)
            batch = _Batch(self, prompts[chosen], accepted, seeds[chosen])
            while not batch.is_done:
                batch.step()
            groups += batch.completions()
        return groups

    async def agenerate(self, prompt: Sequence[int], sampling: Options) -> list[Completion]:
        """Sample the completions of one prompt. Other requests and weight syncs run between any two tokens."""
        accepted = self.accepted([prompt], sampling)
        batch = _Batch(self, [prompt], accepted, [accepted.seed])
        while not batch.is_done:
            batch.step()
            await asyncio.sleep(0)
        return batch.completions()[0]

    def accepted(self, prompts: Sequence[Sequence[int]], sampling: Options) -> Sampling:
        """Check a request -> its parameters, as `generate` does."""
        for row, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise ValueError(f"prompt {row} is empty: there is nothing to continue")
        parameters = sampling if isinstance(sampling, Sampling) else Sampling(**sampling)
        return parameters.with_ends(self.eos_token_ids)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Replace the named parameters and buffers -> the names that were loaded. The prefix cache is kept.

        Those loaded before an error stay loaded, as in engines that load weights as they arrive.

        Raises:
            KeyError: the model has neither a parameter nor a buffer of that name.
            ValueError: a tensor's shape is not that of the one it replaces.
        """
        import torch

        own = dict(self.model.named_buffers(remove_duplicate=False))
        own |= dict(self.model.named_parameters(remove_duplicate=False))
        loaded = set()
        with torch.no_grad():
            for name, weight in weights:
                if name not in own:
                    raise KeyError(f"the engine's model has no parameter or buffer {name!r}")
                if own[name].shape != weight.shape:
                    raise ValueError(
                        f"{name} of shape {tuple(weight.shape)} does not fit the engine's {tuple(own[name].shape)}"
                    )
                own[name].copy_(weight.detach())
                loaded.add(name)
        return loaded

    def reset_prefix_cache(self) -> None:
        """Drop the cached keys and values of all prefixes. Requests under way keep theirs."""
        self._blocks.clear()

    def next_logits(self, token_ids: Tensor, cache: Any, padding_N1: Tensor | None = None) -> Tensor:
        """Run the model on [N, L] further ids -> [N, V] next-token logits on the CPU. The cache grows by L positions.

        Args:
            token_ids: the ids.
            cache: keys and values of the positions before.
            padding_N1: number of positions on the left of the cache that hold no token; None where there are none.
        """
        import torch

        device = next(self.model.parameters()).device
        positions = torch.arange(cache.get_seq_length(), cache.get_seq_length() + token_ids.shape[1])
        options: dict[str, Any] = {}
        if padding_N1 is not None:
            attended = torch.arange(int(positions[-1]) + 1) >= padding_N1
            options["attention_mask"] = attended.long().to(device)
            positions = positions - padding_N1
        with torch.no_grad():
            output = self.model(
                input_ids=token_ids.to(device),
                position_ids=positions.expand(token_ids.shape).to(device),
                past_key_values=cache,
                use_cache=True,
                **options,
            )
        logits_NV: Tensor = output.logits[:, -1].float().cpu()
        return logits_NV

    def last_logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Run the model on [N, L] ids from their start -> [N, V] next-token logits on the CPU."""
        import torch

        ids_NL = torch.tensor(rows, device=next(self.model.parameters()).device)
        positions_NL = torch.arange(ids_NL.shape[1], device=ids_NL.device).expand(ids_NL.shape)
        with torch.no_grad():
            output = self.model(input_ids=ids_NL, attention_mask=torch.ones_like(ids_NL), position_ids=positions_NL)
        logits_NV: Tensor = output.logits[:, -1].float().cpu()
        return logits_NV

    def read_prompt(self, prompt: Sequence[int]) -> tuple[Tensor, Any]:
        """Return the [1, V] logits after a prompt, and its keys and values, from the prefix cache where possible."""
        import torch
        from transformers import DynamicCache

        ids = tuple(int(token) for token in prompt)
        cached = 0
        # At least one token is computed, because the cache holds no logits.
        while cached + BLOCK < len(ids) and ids[: cached + BLOCK] in self._blocks:
            cached += BLOCK
        cache = DynamicCache()
        for end in range(BLOCK, cached + 1, BLOCK):
            for layer, (keys, values) in enumerate(self._blocks[ids[:end]]):
                cache.update(keys, values, layer)
        logits_1V = self.next_logits(torch.tensor([ids[cached:]]), cache)
        for end in range(cached + BLOCK, len(ids) + 1, BLOCK) if self._caches_prefixes else ():
            block = slice(end - BLOCK, end)
            self._blocks[ids[:end]] = [
                (layer.keys[:, :, block].clone(), layer.values[:, :, block].clone()) for layer in cache.layers
            ]
        return logits_1V, cache

    def generator(self, seed: int | None) -> Generator:
        """Return the source of a request's random numbers."""
        import torch

        return self._random if seed is None else torch.Generator().manual_seed(seed)

    def text(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the ids as text; `decode` decides about special tokens."""
        return self.decode(token_ids)


class _Batch:
    """Prompts with their n completions each under way. Shapes: N unfinished rows, V vocabulary entries."""

    def __init__(
        self,
        engine: InProcessEngine,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int | None],
    ) -> None:
        self.engine, self.prompts, self.sampling = engine, prompts, sampling
        self.random = [engine.generator(seed) for seed in seeds]
        n_rows = len(prompts) * sampling.n
        self.token_ids: list[list[int]] = [[] for _ in range(n_rows)]
        self.logprobs: list[list[float]] = [[] for _ in range(n_rows)]
        self.versions: list[list[int]] = [[] for _ in range(n_rows)]
        self.has_stopped = [False] * n_rows
        self.unfinished = list(range(n_rows))
        self.cache: Any = None
        self.padding_N1: Tensor | None = None
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")
        self.is_penalised = any(getattr(sampling, name) != getattr(Sampling, name) for name in names)
        self.window = TOKENS_PER_CHARACTER * max((len(stop) + 1 for stop in sampling.stop_sequences), default=0)

    @property
    def is_done(self) -> bool:
        return not self.unfinished

    def step(self) -> None:
        """Sample the next token of every unfinished row."""
        import torch

        if not self.engine.caches_keys:
            logits_NV = self.engine.last_logits([self._row(row) for row in self.unfinished])
        elif self.cache is None:
            logits_NV = self._read_prompts()
        else:
            last_N1 = torch.tensor([[self.token_ids[row][-1]] for row in self.unfinished])
            logits_NV = self.engine.next_logits(last_N1, self.cache, self.padding_N1)
        self._draw(logits_NV)
        kept = [index for index, row in enumerate(self.unfinished) if not self._has_ended(row)]
        if len(kept) < len(self.unfinished):
            self.unfinished = [self.unfinished[index] for index in kept]
            self.padding_N1 = None if self.padding_N1 is None else self.padding_N1[kept]
            if self.cache is not None:
                self.cache.batch_select_indices(torch.tensor(kept, dtype=torch.long))

    def completions(self) -> list[list[Completion]]:
        rows = [
            Completion(
                token_ids=token_ids,
                logprobs=logprobs if self.sampling.logprobs else None,
                finish_reason="stop" if has_stopped else "length",
                token_versions=versions,
                text=self.engine.text(token_ids, self.sampling.skip_special_tokens),
            )
            for token_ids, logprobs, has_stopped, versions in zip(
                self.token_ids, self.logprobs, self.has_stopped, self.versions, strict=True
            )
        ]
        return [rows[first : first + self.sampling.n] for first in range(0, len(rows), self.sampling.n)]

    def _read_prompts(self) -> Tensor:
        """Read each prompt alone, and join their keys and values, padded on the left."""
        import torch
        from transformers import DynamicCache

        logits, caches = zip(*map(self.engine.read_prompt, self.prompts), strict=True)
        lengths = [len(prompt) for prompt in self.prompts]
        padding = [max(lengths) - length for length in lengths]
        self.cache = caches[0]
        if len(caches) > 1:
            self.cache = DynamicCache()
            for index, layers in enumerate(zip(*(cache.layers for cache in caches), strict=True)):
                parts = [layer.keys for layer in layers], [layer.values for layer in layers]
                self.cache.update(*map(_joined, parts), index)
        self.cache.batch_repeat_interleave(self.sampling.n)
        if any(padding):
            self.padding_N1 = torch.tensor(padding).unsqueeze(1).repeat_interleave(self.sampling.n, dim=0)
        return torch.cat(logits).repeat_interleave(self.sampling.n, dim=0)

    def _draw(self, logits_NV: Tensor) -> None:
        import torch

        raw_NV = logits_NV.log_softmax(dim=-1)
        scores_NV = self._penalised(logits_NV)
        if self.sampling.do_sample:
            processed_NV = processed_logprobs(scores_NV, self.sampling)
            rows_of = Counter(row // self.sampling.n for row in self.unfinished)
            parts = zip(rows_of, processed_NV.exp().split(list(rows_of.values())), strict=True)
            drawn = [torch.multinomial(part, 1, generator=self.random[prompt]) for prompt, part in parts]
            drawn_N = torch.cat(drawn).squeeze(1)
        else:
            processed_NV = raw_NV
            drawn_N = scores_NV.argmax(dim=-1)
        reported_NV = raw_NV if self.sampling.logprobs == "raw" else processed_NV
        reported_N = reported_NV.gather(1, drawn_N.unsqueeze(1)).squeeze(1)
        for row, token, logprob in zip(self.unfinished, drawn_N.tolist(), reported_N.tolist(), strict=True):
            self.token_ids[row].append(token)
            self.logprobs[row].append(logprob)
            self.versions[row].append(self.engine.version)

    def _penalised(self, logits_NV: Tensor) -> Tensor:
        """Make tokens that a row has seen less likely, and ends impossible in a row that is too short for one."""
        import torch

        if not self.is_penalised:
            return logits_NV
        wanted = self.sampling
        penalised_NV = logits_NV.clone()
        for index, row in enumerate(self.unfinished):
            own = self.token_ids[row]
            if wanted.repetition_penalty != 1:
                seen = self._row(row)
                logits = logits_NV[index, seen]
                factor = float(wanted.repetition_penalty)
                penalised_NV[index, seen] = torch.where(logits < 0, logits * factor, logits / factor)
            for token, count in Counter(own).items() if wanted.presence_penalty or wanted.frequency_penalty else ():
                penalised_NV[index, token] -= wanted.presence_penalty + wanted.frequency_penalty * count
            if len(own) < wanted.min_tokens:
                penalised_NV[index, list(wanted.ends)] = -torch.inf
        return penalised_NV

    def _row(self, row: int) -> list[int]:
        return [*self.prompts[row // self.sampling.n], *self.token_ids[row]]

    def _has_ended(self, row: int) -> bool:
        token_ids, stops = self.token_ids[row], self.sampling.stop_sequences
        # Of a stop sequence that began in the prompt only the rest is here.
        text = self.engine.text(token_ids[-self.window :], False) if stops else ""
        self.has_stopped[row] = token_ids[-1] in self.sampling.ends or any(stop in text for stop in stops)
        self.has_stopped[row] &= len(token_ids) >= self.sampling.min_tokens
        return self.has_stopped[row] or len(token_ids) == self.sampling.max_new_tokens


def _joined(parts_1HLD: Sequence[Tensor]) -> Tensor:
    """Join keys or values of several prompts -> [B, heads, longest, features], zeros on the left of short ones."""
    from torch.nn.utils.rnn import pad_sequence

    rows_LHD = [part[0].transpose(0, 1) for part in parts_1HLD]
    return pad_sequence(rows_LHD, batch_first=True, padding_side="left").transpose(1, 2)
