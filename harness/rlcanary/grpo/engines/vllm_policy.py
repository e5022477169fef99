"""A policy on a real vLLM engine that this process started.

Sampling and scoring use only what all versions since 0.10 share: prompts are plain dictionaries, since `TokensPrompt` has
moved, and compilation is left to `enforce_eager`, since `CompilationConfig` has changed. New weights need 0.16.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlcanary.contract.batch import Completion
from rlcanary.contract.sampling import Options, Sampling
from rlcanary.grpo.engines.batching import Batcher
from rlcanary.grpo.engines.policy import Policy, Request, check_ids, ends_of
from rlcanary.grpo.engines.vllm_liveness import while_alive
from rlcanary.grpo.engines.vllm_worker import checkpoint_shapes, load_into, receive
from rlcanary.grpo.sync.sync import Expected
from rlcanary.grpo.sync.transports import Transport, pack

if TYPE_CHECKING:
    from torch import Tensor

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
WORKER = "rlcanary.grpo.engines.vllm_worker.WeightReceiver"


def engine_options(model: str, *, processed_logprobs: bool = True, **options: Any) -> dict[str, Any]:
    """Build the arguments of `vllm.LLM` for an engine that weights can be loaded into.

    Args:
        model: the folder of a model and its tokenizer.
        processed_logprobs: sampled logprobs are those of the distribution that was drawn from.
        options: further arguments of `vllm.LLM`, which go before these.
    """
    return {
        "model": model,
        "worker_extension_cls": WORKER,
        "logprobs_mode": "processed_logprobs" if processed_logprobs else "raw_logprobs",
        "enforce_eager": True,
        **options,
    }


def arguments(sampling: Sampling) -> dict[str, Any]:
    """Build the arguments of `vllm.SamplingParams`, the same names in all versions. `eos_token_ids` have to be set.

    Raw or processed logprobs are a setting of vLLM's engine: `VllmPolicy` refuses requests that differ from it.
    """
    return {
        "n": sampling.n,
        "max_tokens": sampling.max_new_tokens,
        "temperature": float(sampling.temperature),
        "top_p": float(sampling.top_p),
        "top_k": sampling.top_k or -1,
        **{name: float(getattr(sampling, name)) for name in ("min_p", *PENALTIES)},
        "min_tokens": sampling.min_tokens,
        "stop": list(sampling.stop_sequences),
        "include_stop_str_in_output": True,
        # The model's own end would otherwise be added to those of the request.
        "ignore_eos": True,
        "stop_token_ids": list(sampling.ends),
        "seed": sampling.seed,
        "logprobs": None if sampling.logprobs is None else 0,
        "skip_special_tokens": sampling.skip_special_tokens,
    }


class VllmPolicy(Policy):
    """A `Policy` on a `vllm.LLM`, and its endpoint for weight sync. One call runs at a time; concurrent requests share it.

    Attributes:
        llm: the engine.
        tokenizer: the engine's tokenizer, which decodes completions.
        version: number of completed weight syncs; the caller that syncs counts.
        eos_token_ids: ids that end a completion, unless the request names its own.
        batcher: runs the requests of `submit` and `agenerate`.
    """

    def __init__(
        self,
        llm: Any,
        *,
        eos_token_ids: Sequence[int] | None = None,
        min_batch_size: int = 1,
        batching_timeout: float = 0.0,
    ) -> None:
        """Wrap an engine.

        Args:
            llm: a `vllm.LLM`, see `engine_options`.
            eos_token_ids: None takes those of the model's generation config and of the tokenizer.
            min_batch_size: requests that `submit` and `agenerate` wait for, at most `batching_timeout` seconds.
            batching_timeout: see `Batcher`.

        Raises:
            ValueError: no end-of-sequence id is known.
        """
        self.llm, self.tokenizer, self.version = llm, llm.get_tokenizer(), 0
        configured = llm.llm_engine.model_config.try_get_generation_config().get("eos_token_id")
        self.eos_token_ids = ends_of(eos_token_ids, configured, self.tokenizer)
        self._vocabulary = int(llm.llm_engine.model_config.get_vocab_size())
        self._lock = threading.RLock()
        self._settings: dict[str, Any] = {"eos_token_ids": self.eos_token_ids, "min_batch_size": min_batch_size}
        self._settings |= {"batching_timeout": batching_timeout}
        self.batcher: Batcher[Request, list[Completion]] = Batcher(
            self._answer, min_batch_size=min_batch_size, timeout=batching_timeout
        )

    def get_new_version(self, **settings: Any) -> VllmPolicy:
        """Make another policy on the same engine, with some settings of the constructor changed."""
        other = VllmPolicy(self.llm, **{**self._settings, **settings})
        other._lock, other.version = self._lock, self.version
        return other

    def accepted(self, prompts: Sequence[Sequence[int]], sampling: Options) -> Sampling:
        """Check a request as `Policy.accepted` does.

        Raises:
            ValueError: as there; or the engine reports raw logprobs where processed ones are asked for and differ from
                them, or the other way round.
        """
        check_ids(prompts, self._vocabulary, self.llm.llm_engine.model_config.max_model_len)
        parameters = Sampling.of(sampling).with_ends(self.eos_token_ids)
        filters = ("temperature", "top_p", "top_k", "min_p")
        is_unfiltered = all(getattr(parameters, name) == getattr(Sampling, name) for name in filters)
        is_unchanged = all(getattr(parameters, name) == getattr(Sampling, name) for name in ("min_tokens", *PENALTIES))
        is_raw = is_unchanged and (is_unfiltered or not parameters.do_sample)
        mode = self.llm.llm_engine.model_config.logprobs_mode
        # An enumeration before 0.11.
        mode = getattr(mode, "value", mode)
        # For an unchanged distribution and for greedy requests, vLLM's logprobs are raw in either mode.
        if parameters.logprobs is None or is_raw or mode == f"{parameters.logprobs}_logprobs":
            return parameters
        raise ValueError(
            f"logprobs={parameters.logprobs!r}, but the engine was started with logprobs_mode={mode!r}: they would be those "
            "of another distribution"
        )

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Options) -> list[list[Completion]]:
        """Sample completions per prompt, in order.

        Raises:
            RuntimeError: the engine is asleep, where vLLM would wait for ever.
            ValueError: as for `accepted`.
        """
        accepted = self.accepted(prompts, sampling)
        return self._answer([(prompt, accepted) for prompt in prompts])

    async def agenerate(self, prompt: Sequence[int], sampling: Options) -> list[Completion]:
        """Sample the completions of one prompt, as `submit` does. Requests of any parameters share a batch."""
        return await asyncio.wrap_future(self.submit(prompt, sampling))

    def score(self, rows: Sequence[Tensor], temperature: float) -> list[Tensor]:
        """Score rows as `Policy.score` does. Without gradient.

        Raises:
            RuntimeError: the engine is asleep.
            ValueError: the temperature is not 1, but vLLM scores at 1 always.
        """
        if temperature != 1:
            raise ValueError(
                f"temperature={temperature!r}: vLLM scores given tokens at temperature 1 only; "
                "TransformersPolicy scores at others"
            )
        return self._score([row.tolist() for row in rows])

    def expected(self) -> Mapping[str, Expected]:
        """Return the parameters of the engine's checkpoint, as `Endpoint.expected` does."""
        dtype = str(self.llm.llm_engine.model_config.dtype).removeprefix("torch.")
        return {name: Expected(shape, dtype) for name, shape in checkpoint_shapes(self.llm).items()}

    def receive(self, transport: Transport, parcel: Any) -> dict[str, str]:
        """Have the workers load a parcel, as `Endpoint.receive` does."""
        # They open bytes and files themselves; parcels that only this process can open go to them as bytes.
        if not isinstance(parcel, str):
            parcel = [pack(name, weight) for name, weight in transport.deliver(parcel)]
        return receive(self.llm, parcel)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Replace all parameters, by the names of the checkpoint that the engine was started from -> these names.

        Names and shapes are compared before anything is sent, because the engine does not survive an unknown name.

        Raises:
            KeyError: the checkpoint has no parameter of a name.
            ValueError: a shape is not the checkpoint's, or a parameter is missing, which would keep its old weights.
            RuntimeError: the engine is asleep, or its workers cannot receive weights (`engine_options`).
        """
        given = dict(weights)
        expected = checkpoint_shapes(self.llm)
        for name, weight in given.items():
            if name not in expected:
                raise KeyError(f"the engine's checkpoint has no parameter {name!r}")
            if tuple(weight.shape) != expected[name]:
                raise ValueError(f"{name} of shape {tuple(weight.shape)} does not fit the engine's {expected[name]}")
        if missing := sorted(set(expected) - set(given)):
            raise ValueError(f"{len(missing)} parameters would keep their old weights: {', '.join(missing[:3])}")
        with self._lock:
            self._require_awake()
            load_into(self.llm, given)
        return set(given)

    def reset_prefix_cache(self) -> None:
        """Reset the prefix cache, see `Policy.reset_prefix_cache`.

        Raises:
            RuntimeError: the engine did not do it, because requests are under way.
        """
        with self._lock:
            # Versions before 0.11 return nothing.
            if while_alive(self.llm, self.llm.reset_prefix_cache) is False:
                raise RuntimeError("vLLM did not reset its prefix cache: requests are under way")

    def sleep(self, level: int = 1) -> None:
        """Free the engine's memory; requests are refused until `wake_up`. Level 2 forgets the weights."""
        with self._lock:
            self.llm.sleep(level=level)

    def wake_up(self) -> None:
        """Take requests again."""
        with self._lock:
            self.llm.wake_up()

    def _answer(self, requests: Sequence[Request]) -> list[list[Completion]]:
        from vllm import SamplingParams

        with self._lock:
            self._require_awake()
            version = self.version
            prompts = [{"prompt_token_ids": list(prompt)} for prompt, _ in requests]
            asked = [SamplingParams(**arguments(parameters)) for _, parameters in requests]
            outputs = while_alive(self.llm, lambda: self.llm.generate(prompts, asked, use_tqdm=False))
        return [
            [self._completion(output, parameters, version) for output in request.outputs]
            for request, (_, parameters) in zip(outputs, requests, strict=True)
        ]

    def _completion(self, output: Any, parameters: Sampling, version: int) -> Completion:
        token_ids = list(output.token_ids)
        if output.finish_reason not in ("stop", "length", "abort"):
            raise ValueError(
                f"vLLM ended a completion for the reason {output.finish_reason!r}, which is not known here"
            )
        return Completion(
            token_ids=token_ids,
            logprobs=None if parameters.logprobs is None else _reported(token_ids, output.logprobs),
            finish_reason=output.finish_reason,
            token_versions=[version] * len(token_ids),
            text=self.tokenizer.decode(token_ids, skip_special_tokens=parameters.skip_special_tokens),
        )

    def _score(self, rows: Sequence[list[int]]) -> list[Tensor]:
        """Score every token of each row except its first."""
        from vllm import SamplingParams

        asked = [row for row in rows if row]
        only_score = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        with self._lock:
            self._require_awake()
            prompts = [{"prompt_token_ids": row} for row in asked]
            outputs = while_alive(self.llm, lambda: self.llm.generate(prompts, only_score, use_tqdm=False))
        scored = iter([_reported(row, output.prompt_logprobs) for row, output in zip(asked, outputs, strict=True)])
        return [torch.tensor(next(scored) if row else [], dtype=torch.float32) for row in rows]

    def _require_awake(self) -> None:
        if while_alive(self.llm, self.llm.llm_engine.is_sleeping):
            raise RuntimeError("the vLLM engine is asleep and would never answer: call wake_up first")


def _reported(token_ids: Sequence[int], positions: Sequence[Any] | None) -> list[float]:
    """Read the logprob of each id at its position; NaN if vLLM gives none."""
    if positions is None or len(positions) != len(token_ids):
        raise ValueError(f"vLLM gave logprobs for {len(positions or ())} of {len(token_ids)} tokens")
    return [
        math.nan if at is None or token not in at else min(float(at[token].logprob), 0.0)
        for token, at in zip(token_ids, positions, strict=True)
    ]
