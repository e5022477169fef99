"""Sampling parameters: one set of names, nothing dropped, nothing overruled in silence."""

import math
from typing import Any

import pytest

from rlcanary.checks.worlds.samples import sampling
from rlcanary.contract.engine import InProcessEngine
from rlcanary.contract.sampling import Sampling
from rlcanary.grpo.engines.vllm_policy import arguments
from rlcanary.tiny_models import tiny_llama

ALL = {
    "max_new_tokens": 7,
    "n": 3,
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 5,
    "repetition_penalty": 1.3,
    "stop_sequences": ("###",),
    "eos_token_ids": (2, 3),
    "seed": 4,
    "logprobs": "raw",
    "skip_special_tokens": False,
    "min_p": 0.05,
    "min_tokens": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
}


@pytest.mark.parametrize(
    ("name", "spelling", "value"),
    [
        ("max_new_tokens", "max_tokens", 5),
        ("n", "num_return_sequences", 4),
        ("stop_sequences", "stop", ["a"]),
        ("stop_sequences", "stop_strings", "a"),
        ("eos_token_ids", "eos_token_id", 2),
        ("eos_token_ids", "stop_token_ids", [2]),
        ("min_tokens", "min_new_tokens", 1),
    ],
)
def test_other_spellings_are_understood_and_two_at_once_refused(name: str, spelling: str, value: Any) -> None:
    known = Sampling.of({spelling: value})
    assert known == Sampling.of({name: value}) != Sampling()
    # torchrl: {max_tokens: 5, max_new_tokens: 9} samples 5.
    with pytest.raises(ValueError, match=rf"{spelling}=.* and {name}=.* are two spellings"):
        Sampling.of({spelling: value, name: ALL[name]})


@pytest.mark.parametrize("off", [0, -1])
def test_top_k_of_0_or_minus_1_is_off(off: int) -> None:
    parameters = Sampling.of({"top_k": off, "eos_token_ids": []})
    assert parameters.top_k == 0
    assert arguments(parameters)["top_k"] == -1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_token": 5}, "did you mean max_new_tokens"),
        ({"sense_of_humour": 1}, "known are temperature"),
        ({"num_beams": 4}, "beam search"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"top_p": 0}, "top_p=0 .*at most 1"),
        ({"top_p": 1.1}, r"top_p=1\.1"),
        ({"top_k": -2}, "top_k=-2 .*0 or -1 for off"),
        ({"top_k": 1.5}, r"top_k=1\.5"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"n": True}, "n=True"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"stop": [""]}, "stop_sequences"),
        ({"eos_token_ids": [-1]}, "eos_token_ids"),
        ({"seed": -1}, "seed=-1"),
        ({"min_p": 1.5}, r"min_p=1\.5"),
        ({"min_tokens": 17}, "min_tokens=17 .*max_new_tokens=16"),
        ({"presence_penalty": 3}, "presence_penalty=3"),
        ({"frequency_penalty": math.nan}, "frequency_penalty=nan"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is not taken: .*logprobs"),
        ({"ignore_eos": True, "stop_token_ids": [2]}, "two spellings"),
        ({"ignore_eos": 1}, "ignore_eos=1"),
        ({"logprobs": "all"}, "logprobs='all'"),
        ({"do_sample": False, "temperature": 0.7}, "contradict each other"),
        ({"do_sample": True, "temperature": 0}, "contradict each other"),
        ({"do_sample": "no"}, "do_sample='no'"),
        ({"temperature": 0, "n": 4}, "completion n=4 times"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling.of(options)


def test_do_sample_false_is_temperature_0() -> None:
    greedy = Sampling.of({"do_sample": False})
    assert greedy == Sampling.of({"temperature": 0}) == Sampling(temperature=0.0)
    assert not greedy.do_sample
    assert Sampling.of({"do_sample": True}) == Sampling()


def test_ignoring_the_end_is_having_none() -> None:
    assert Sampling.of({"ignore_eos": True}).eos_token_ids == ()
    assert Sampling.of({"ignore_eos": False}) == Sampling()


def test_logprobs_flag_is_those_of_the_distribution_drawn_from() -> None:
    assert Sampling.of({"logprobs": True}).logprobs == "processed"
    assert Sampling.of({"logprobs": False}).logprobs is None


def test_policy_fills_in_its_ends_only_where_none_are_named() -> None:
    assert Sampling().with_ends([2]).eos_token_ids == (2,)
    assert Sampling(eos_token_ids=()).with_ends([2]).eos_token_ids == ()
    with pytest.raises(ValueError, match="with_ends"):
        arguments(Sampling())


def test_vllm_takes_every_parameter_as_it_is_meant() -> None:
    vllm = pytest.importorskip("vllm")
    taken = vllm.SamplingParams(**arguments(Sampling.of(ALL)))
    assert (taken.n, taken.max_tokens, taken.seed, taken.logprobs) == (3, 7, 4, 0)
    assert (taken.temperature, taken.top_p, taken.top_k, taken.repetition_penalty) == (0.6, 0.9, 5, 1.3)
    assert (taken.min_p, taken.min_tokens, taken.presence_penalty, taken.frequency_penalty) == (0.05, 2, 0.5, 0.25)
    assert (taken.stop, taken.stop_token_ids, taken.ignore_eos) == (["###"], [2, 3], True)
    assert vllm.SamplingParams(**arguments(Sampling(eos_token_ids=()))).top_k in (0, -1)


def test_in_process_engine_takes_every_parameter() -> None:
    (group,) = InProcessEngine(tiny_llama()).generate([[5, 6]], ALL)
    assert len(group) == ALL["n"]
    assert InProcessEngine(tiny_llama()).generate([[5, 6]], Sampling.of(ALL)) == [group]


def test_requests_of_the_checks_are_spelled_as_the_record_is() -> None:
    assert Sampling.of(sampling()) == Sampling(max_new_tokens=4, eos_token_ids=())
