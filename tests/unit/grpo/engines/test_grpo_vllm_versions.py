"""What other versions of vLLM do differently, in stand-ins: they cannot be installed beside the one that runs here."""

import enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlcanary.grpo.engines.vllm_policy import VllmPolicy
from rlcanary.grpo.engines.vllm_worker import WeightReceiver, receive
from rlcanary.grpo.sync.transports import pack
from rlcanary.tiny_models import tiny_tokenizer


class LogprobsMode(enum.Enum):
    """vLLM 0.10's; later it is a plain string."""

    RAW_LOGPROBS = "raw_logprobs"


def policy(mode: Any, was_reset: bool | None = True) -> VllmPolicy:
    config = SimpleNamespace(
        logprobs_mode=mode,
        max_model_len=64,
        get_vocab_size=lambda: 64,
        try_get_generation_config=lambda: {"eos_token_id": 2},
    )
    engine = SimpleNamespace(
        engine_core=SimpleNamespace(),
        model_config=config,
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(worker_extension_cls="")),
    )
    return VllmPolicy(
        SimpleNamespace(llm_engine=engine, get_tokenizer=tiny_tokenizer, reset_prefix_cache=lambda: was_reset)
    )


@pytest.mark.parametrize("mode", [LogprobsMode.RAW_LOGPROBS, "raw_logprobs"])
def test_raw_engine_refuses_processed_logprobs_whatever_its_setting_is_made_of(mode: Any) -> None:
    with pytest.raises(ValueError, match="logprobs_mode='raw_logprobs'"):
        policy(mode).generate([[5]], {"temperature": 0.6})


@pytest.mark.parametrize("was_reset", [True, None])
def test_reset_that_says_nothing_is_no_failure(was_reset: bool | None) -> None:
    policy("raw_logprobs", was_reset).reset_prefix_cache()


def test_reset_that_did_not_happen_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="requests are under way"):
        policy("raw_logprobs", was_reset=False).reset_prefix_cache()


def test_worker_that_reloads_from_files_only_says_so_and_loads_nothing() -> None:
    worker = WeightReceiver()
    loaded = []
    worker.model_runner = SimpleNamespace(reload_weights=lambda: loaded.append(True))
    with pytest.raises(RuntimeError, match=r"needs 0\.16 or later"):
        worker.rlcanary_receive_weights([pack("weight", torch.zeros(1))])
    assert loaded == []


def test_engine_without_the_worker_extension_says_what_to_start_it_with() -> None:
    with pytest.raises(RuntimeError, match="without worker_extension_cls"):
        receive(policy("raw_logprobs").llm, [])
