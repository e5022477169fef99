"""Sampling parameters, under one set of names for every backend.

Backends spell the same thing differently, and silently accept parameters that they do not know or support. Here two
spellings of one parameter are an error, and so are unknown names: the request is sampled as it was written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Literal, Self

# Other spellings: vLLM's, transformers' and those of the in-process engine.
SPELLINGS = {
    "max_tokens": "max_new_tokens",
    "n": "num_return_sequences",
    "stop": "stop_sequences",
    "stop_strings": "stop_sequences",
    "eos_token_id": "eos_token_ids",
    "stop_token_ids": "eos_token_ids",
}
BEAMS = "beam search draws nothing from the policy, so that its completions cannot be trained on"
REFUSED = {"num_beams": BEAMS, "length_penalty": BEAMS, "early_stopping": BEAMS, "num_beam_groups": BEAMS}


@dataclass(frozen=True)
class GenerationParameters:
    """The parameters of one request, checked.

    Attributes:
        max_new_tokens: a completion of this length without an end is truncated, with finish reason "length".
        num_return_sequences: completions per prompt.
        temperature: 0 is greedy.
        top_p: only the likeliest tokens that hold this probability together can be drawn; 1 is off.
        top_k: only the k likeliest tokens can be drawn; 0 is off.
        repetition_penalty: divides the positive logits of tokens that were seen, and multiplies negative ones; 1 is off.
        stop_sequences: texts that end a completion; they stay part of it.
        eos_token_ids: ids that end a completion and are part of it; None means those of the policy, () none at all.
        seed: makes the request repeatable; None draws anew each time.
        logprobs: "processed" are those of the distribution that was drawn from, "raw" those of the model at temperature 1,
            None leaves them out. A greedy request has raw ones.
        skip_special_tokens: the completion's text leaves out special tokens.
    """

    max_new_tokens: int = 16
    num_return_sequences: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    stop_sequences: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    logprobs: Literal["raw", "processed"] | None = "processed"
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "num_return_sequences"):
            _require(name, getattr(self, name), _is_int(getattr(self, name)) and getattr(self, name) > 0, "above 0")
        _require("temperature", self.temperature, _is_finite(self.temperature) and self.temperature >= 0, "0 or more")
        _require("top_p", self.top_p, _is_finite(self.top_p) and 0 < self.top_p <= 1, "above 0 and at most 1")
        _require("top_k", self.top_k, _is_int(self.top_k) and self.top_k >= 0, "above 0, or 0 or -1 for off")
        penalty = self.repetition_penalty
        _require("repetition_penalty", penalty, _is_finite(penalty) and penalty > 0, "above 0")
        _require("seed", self.seed, self.seed is None or (_is_int(self.seed) and self.seed >= 0), "0 or more, or None")
        _require("logprobs", self.logprobs, self.logprobs in ("raw", "processed", None), "'raw', 'processed' or None")
        stops = self.stop_sequences
        are_texts = isinstance(stops, tuple) and all(isinstance(stop, str) and stop for stop in stops)
        _require("stop_sequences", stops, are_texts, "a list of texts that are not empty")
        ends = self.eos_token_ids
        are_ids = ends is None or (isinstance(ends, tuple) and all(_is_int(end) and end >= 0 for end in ends))
        _require("eos_token_ids", ends, are_ids, "a list of ids, or None for those of the policy")
        if self.temperature == 0 and self.num_return_sequences > 1:
            raise ValueError(
                f"temperature=0 draws the same completion num_return_sequences={self.num_return_sequences} times"
            )

    @classmethod
    def of(cls, options: Mapping[str, Any] | GenerationParameters) -> GenerationParameters:
        """Build the parameters from options.

        Args:
            options: the fields of this class or other spellings of them (`SPELLINGS`), and `do_sample`. Without a
                temperature `do_sample=False` is temperature 0. `top_k=-1` is 0, `logprobs=True` is "processed".

        Raises:
            ValueError: a name is unknown or not supported by all backends, a parameter is given in two spellings, options
                contradict each other, or a value is out of range.
        """
        if isinstance(options, GenerationParameters):
            return options
        given: dict[str, Any] = {}
        spelled: dict[str, str] = {}
        for spelling, value in options.items():
            name = SPELLINGS.get(spelling, spelling)
            if name in given:
                raise ValueError(
                    f"{spelled[name]}={given[name]!r} and {spelling}={value!r} are two spellings of one parameter: "
                    "give one of them"
                )
            given[name], spelled[name] = value, spelling
        do_sample = given.pop("do_sample", None)
        _refuse_unknown(given)
        if do_sample is not None:
            _require("do_sample", do_sample, isinstance(do_sample, bool), "True or False")
            temperature = given.setdefault("temperature", 1.0 if do_sample else 0.0)
            if do_sample != (temperature != 0):
                raise ValueError(
                    f"do_sample={do_sample} and temperature={temperature!r} contradict each other: temperature 0 is greedy"
                )
        if _is_int(given.get("top_k")) and given["top_k"] == -1:
            given["top_k"] = 0
        if isinstance(given.get("logprobs"), bool):
            given["logprobs"] = "processed" if given["logprobs"] else None
        if isinstance(given.get("stop_sequences"), str):
            given["stop_sequences"] = (given["stop_sequences"],)
        if _is_int(given.get("eos_token_ids")):
            given["eos_token_ids"] = (given["eos_token_ids"],)
        for name in ("stop_sequences", "eos_token_ids"):
            if isinstance(given.get(name), list):
                given[name] = tuple(given[name])
        if "stop_sequences" in given and given["stop_sequences"] is None:
            del given["stop_sequences"]
        return cls(**given)

    @property
    def do_sample(self) -> bool:
        """True if tokens are drawn; otherwise each is the likeliest."""
        return self.temperature > 0

    def with_ends(self, eos_token_ids: Sequence[int]) -> Self:
        """Fill in the policy's end-of-sequence ids if these parameters name none."""
        return self if self.eos_token_ids is not None else replace(self, eos_token_ids=tuple(eos_token_ids))

    def for_vllm(self) -> dict[str, Any]:
        """Build the arguments of `vllm.SamplingParams`, the same names in all versions. `eos_token_ids` have to be set.

        Raw or processed logprobs are a setting of vLLM's engine, which `VllmPolicy` holds a request to.
        """
        return {
            "n": self.num_return_sequences,
            "max_tokens": self.max_new_tokens,
            "temperature": float(self.temperature),
            "top_p": float(self.top_p),
            "top_k": self.top_k or -1,
            "repetition_penalty": float(self.repetition_penalty),
            "stop": list(self.stop_sequences),
            "include_stop_str_in_output": True,
            # The model's own end would otherwise be added to those of the request.
            "ignore_eos": True,
            "stop_token_ids": list(self._ends),
            "seed": self.seed,
            "logprobs": None if self.logprobs is None else 0,
            "skip_special_tokens": self.skip_special_tokens,
        }

    def for_in_process(self) -> dict[str, Any]:
        """Build the fields of `rlcanary.contract.engine.Sampling`. `eos_token_ids` have to be set.

        Raises:
            ValueError: the in-process engine does not support a parameter.
        """
        if self.repetition_penalty != 1 or self.stop_sequences:
            raise ValueError("the in-process engine has neither repetition_penalty nor stop_sequences")
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "max_new_tokens": self.max_new_tokens,
            "n": self.num_return_sequences,
            "seed": self.seed,
            "eos_token_ids": self._ends,
            "logprobs": self.logprobs or "processed",
        }

    @property
    def _ends(self) -> tuple[int, ...]:
        if self.eos_token_ids is None:
            raise ValueError("eos_token_ids is None: the policy that samples fills in its own (with_ends)")
        return self.eos_token_ids


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    names = [field.name for field in fields(GenerationParameters)]
    for name in given:
        if name in REFUSED:
            raise ValueError(f"{name} is not taken: {REFUSED[name]}")
        if name not in names:
            close = get_close_matches(name, [*names, *SPELLINGS, "do_sample"], n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(names)} and do_sample"
            raise ValueError(f"unknown generation parameter {name!r}: {hint}")


def _require(name: str, value: Any, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value!r} has to be {expected}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
