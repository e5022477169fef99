"""Sampling parameters of a request, under one set of names for every engine.

Engines spell the same thing differently, and silently accept parameters that they do not know or support. `Sampling.of`
rejects unknown names and two spellings of one parameter: the request is sampled as it was written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, Literal, Self

# Other spellings: vLLM's and transformers'.
SPELLINGS = {
    "max_tokens": "max_new_tokens",
    "num_return_sequences": "n",
    "stop": "stop_sequences",
    "stop_strings": "stop_sequences",
    "eos_token_id": "eos_token_ids",
    "stop_token_ids": "eos_token_ids",
    "ignore_eos": "eos_token_ids",
    "min_new_tokens": "min_tokens",
}
BEAMS = "beam search draws nothing from the policy, so that its completions cannot be trained on"
SCORED = "score the prompt itself with the policy's `logprobs`, under the strategy attention"
REFUSED = {
    "prompt_logprobs": SCORED,
    "num_beams": BEAMS,
    "length_penalty": BEAMS,
    "early_stopping": BEAMS,
    "num_beam_groups": BEAMS,
}


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a request.

    Attributes:
        temperature: 0 is greedy.
        top_k: only the k likeliest tokens can be drawn; 0 is off.
        top_p: only the likeliest tokens that hold this probability together can be drawn; 1 is off.
        min_p: only tokens of at least this share of the likeliest one's probability can be drawn; 0 is off.
        max_new_tokens: a completion of this length without an end is truncated, with finish reason "length".
        min_tokens: no completion ends before it has so many tokens.
        n: completions per prompt.
        seed: makes the request repeatable; None draws anew each time.
        eos_token_ids: each of them ends a completion and is part of it; None means those of the engine, () none at all.
        logprobs: "raw" are those of the model at temperature 1, "processed" those of the distribution that was drawn from,
            None leaves them out. A greedy request has raw ones.
        repetition_penalty: divides the positive logits of tokens that were seen, and multiplies negative ones; 1 is off.
        presence_penalty: is taken from the logits of tokens that the completion has; 0 is off.
        frequency_penalty: is taken from them once for each time that the completion has them; 0 is off.
        stop_sequences: texts that end a completion; they stay part of it.
        skip_special_tokens: the completion's text leaves out special tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 16
    n: int = 1
    seed: int | None = None
    eos_token_ids: Sequence[int] | None = None
    logprobs: Literal["raw", "processed"] | None = "processed"
    repetition_penalty: float = 1.0
    stop_sequences: Sequence[str] = ()
    skip_special_tokens: bool = True
    min_p: float = 0.0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def draws_freely(self) -> bool:
        """True if each token is drawn from the policy at the temperature, with nothing cut off, forced or penalised."""
        bounds = (
            "top_k",
            "top_p",
            "min_p",
            "min_tokens",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
        return all(getattr(self, name) == getattr(Sampling, name) for name in bounds)

    def __post_init__(self) -> None:
        _require(self, "temperature", _is_finite(self.temperature) and self.temperature >= 0, "0 or more")
        _require(self, "top_k", _is_int(self.top_k) and self.top_k >= 0, "above 0, or 0 or -1 for off")
        _require(self, "top_p", _is_finite(self.top_p) and 0 < self.top_p <= 1, "above 0 and at most 1")
        _require(self, "min_p", _is_finite(self.min_p) and 0 <= self.min_p <= 1, "between 0 and 1")
        _require(self, "max_new_tokens", _is_int(self.max_new_tokens) and self.max_new_tokens > 0, "above 0")
        is_least = _is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_new_tokens
        _require(self, "min_tokens", is_least, f"0 or more, and at most max_new_tokens={self.max_new_tokens}")
        _require(self, "n", _is_int(self.n) and self.n > 0, "above 0")
        _require(self, "seed", self.seed is None or (_is_int(self.seed) and self.seed >= 0), "0 or more, or None")
        are_ids = self.eos_token_ids is None or all(_is_int(end) and end >= 0 for end in self.eos_token_ids)
        _require(self, "eos_token_ids", are_ids, "a list of ids, or None for those of the engine")
        _require(self, "logprobs", self.logprobs in ("raw", "processed", None), "'raw', 'processed' or None")
        penalty = self.repetition_penalty
        _require(self, "repetition_penalty", _is_finite(penalty) and penalty > 0, "above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            _require(self, name, _is_finite(penalty) and -2 <= penalty <= 2, "between -2 and 2")
        stops = self.stop_sequences
        are_texts = isinstance(stops, list | tuple) and all(isinstance(stop, str) and stop for stop in stops)
        _require(self, "stop_sequences", are_texts, "a list of texts that are not empty")

    @classmethod
    def of(cls, options: Mapping[str, Any] | Sampling) -> Sampling:
        """Build the parameters from options.

        Args:
            options: the fields of this class or other spellings of them (`SPELLINGS`), and `do_sample`. Without a
                temperature `do_sample=False` is temperature 0. `top_k=-1` is 0, `logprobs=True` is "processed", and
                `ignore_eos=True` is no end at all, `eos_token_ids=()`.

        Raises:
            ValueError: a name is unknown or not supported by all engines, a parameter is given in two spellings, options
                contradict each other, or a value is out of range.
        """
        if isinstance(options, Sampling):
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
        if spelled.get("eos_token_ids") == "ignore_eos":
            if not isinstance(given["eos_token_ids"], bool):
                raise ValueError(f"ignore_eos={given['eos_token_ids']!r} has to be True or False")
            given["eos_token_ids"] = () if given["eos_token_ids"] else None
        do_sample = given.pop("do_sample", None)
        _refuse_unknown(given)
        if do_sample is not None:
            if not isinstance(do_sample, bool):
                raise ValueError(f"do_sample={do_sample!r} has to be True or False")
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
        sampling = cls(**given)
        if not sampling.do_sample and sampling.n > 1:
            raise ValueError(f"temperature=0 draws the same completion n={sampling.n} times")
        return sampling

    @property
    def do_sample(self) -> bool:
        """True if tokens are drawn; otherwise each is the likeliest."""
        return self.temperature > 0

    def with_ends(self, eos_token_ids: Sequence[int]) -> Self:
        """Fill in the engine's end-of-sequence ids if these parameters name none."""
        return self if self.eos_token_ids is not None else replace(self, eos_token_ids=tuple(eos_token_ids))

    @property
    def ends(self) -> Sequence[int]:
        """Return the end-of-sequence ids.

        Raises:
            ValueError: they are None, so that `with_ends` has to come first.
        """
        if self.eos_token_ids is None:
            raise ValueError("eos_token_ids is None: the engine that samples fills in its own (with_ends)")
        return self.eos_token_ids


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    names = [field.name for field in fields(Sampling)]
    for name in given:
        if name in REFUSED:
            raise ValueError(f"{name} is not taken: {REFUSED[name]}")
        if name not in names:
            close = get_close_matches(name, [*names, *SPELLINGS, "do_sample"], n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(names)} and do_sample"
            raise ValueError(f"unknown sampling parameter {name!r}: {hint}")


def _require(sampling: Sampling, name: str, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name}={getattr(sampling, name)!r} has to be {expected}")


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


Options = Mapping[str, Any] | Sampling
