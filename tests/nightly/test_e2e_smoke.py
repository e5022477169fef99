"""The bundled trainer on a real vLLM engine, end to end: it starts, trains, syncs, learns, and fails with a clear error."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from vllm_engines import IN_THE_ENGINE, is_engine_core
from waiting import wait_for

from rlcanary.contract.batch import Group
from rlcanary.grpo.engines.samplers import Samplers, start_samplers
from rlcanary.grpo.plan.models import load_model
from rlcanary.grpo.plan.plan import Plan
from rlcanary.grpo.plan.reading import plan_of
from rlcanary.grpo.sync.sync import SyncError, sync_weights
from rlcanary.grpo.sync.transports import BytesTransport
from rlcanary.grpo.train import ENDINGS, train
from rlcanary.reference import completion_logprobs, make_batch

pytestmark = pytest.mark.vllm

SHORT = [[5, 6, 7], [9, 11]]
# Longer than several blocks of the prefix cache, and sharing their beginning.
LONG = [[(7 * position) % 12 + 2 for position in range(100)] + tail for tail in ([3], [4, 5])]
LIMIT = 1.0001


def the_plan(folder: Path, steps: int = 2, **changes: Any) -> Plan:
    given: dict[str, Any] = {
        "run": {"folder": str(folder), "steps": steps},
        "model": {"scratch": {"characters": "0123456789+="}},
        "data": {"datasets": [{"name": "arithmetic", "count": 25, "largest": 4}]},
        "sampling": {"max_new_tokens": 2},
        "schedule": {"prompts_per_step": 25, "group_size": 16},
        "optimizer": {"learning_rate": 3e-3, "warmup_updates": 5},
        "conventions": {
            "aggregation": "token_mean",
            "max_grad_norm": 1.0,
            "entropy_coef": 0.01,
            "old_logprobs": "trainer",
        },
        "roles": {"sampler": {"engine": "vllm", "options": {"max_model_len": 160, **IN_THE_ENGINE}}},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        given.setdefault(section, {})[name] = value
    return plan_of(given)


def log_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def model_and_tokenizer() -> tuple[Any, Any]:
    return load_model(the_plan(Path("unused")).model, 0)


@pytest.fixture(scope="module")
def samplers(tmp_path_factory: pytest.TempPathFactory, model_and_tokenizer: tuple[Any, Any]) -> Iterator[Samplers]:
    folder = tmp_path_factory.mktemp("engine")
    plan = the_plan(folder)
    sampling = replace(plan.sampling, seed=0)
    with start_samplers(plan.roles.sampler, plan.runtime, sampling, folder, *model_and_tokenizer) as samplers:
        yield samplers


def mult_prob_error(model: Any, samplers: Samplers, prompts: list[list[int]], temperature: float) -> float:
    """Mean of exp|trainer's logprob - engine's logprob| over sampled tokens; the prompts are asked for twice."""
    (engine,) = samplers.engines
    sampling = {"temperature": temperature, "max_new_tokens": 24, "n": 4, "seed": 7, "eos_token_ids": ()}
    engine.generate(prompts, sampling)
    groups = [
        Group(prompt, completions, [0.0] * 4)
        for prompt, completions in zip(prompts, engine.generate(prompts, sampling), strict=True)
    ]
    batch, _ = make_batch(groups, 0)
    assert batch.old_logprobs is not None
    with torch.no_grad():
        logprobs = completion_logprobs(model, batch, temperature)
    gaps = (logprobs - batch.old_logprobs)[batch.completion_mask]
    assert len(gaps) == len(prompts) * 4 * 24
    return float(gaps.abs().exp().mean())


def moved(model: Any, seed: int) -> Any:
    """Weights that are clearly other ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def test_trainer_and_engine_agree_before_and_after_each_sync(
    samplers: Samplers, model_and_tokenizer: tuple[Any, Any]
) -> None:
    model, _ = model_and_tokenizer
    for syncs in range(3):
        if syncs:
            moved(model, syncs)
            # Its prefixes are cached, and the weights are other ones: agreement is not for the asking.
            assert mult_prob_error(model, samplers, LONG, 1.0) > LIMIT
            assert sync_weights(model, samplers.endpoints, samplers.transport) == syncs
        for temperature in (1.0, 0.6):
            for prompts in (SHORT, LONG):
                assert mult_prob_error(model, samplers, prompts, temperature) <= LIMIT, (syncs, temperature)


class DropsOne(BytesTransport):
    def deliver(self, parcel: Any) -> Any:
        return list(super().deliver(parcel))[1:]


def test_a_sync_that_loses_a_tensor_fails_and_a_whole_one_repairs_the_engine(
    samplers: Samplers, model_and_tokenizer: tuple[Any, Any]
) -> None:
    model, _ = model_and_tokenizer
    moved(model, 5)
    version = samplers.version
    with pytest.raises(SyncError, match="1 parameters are not"):
        sync_weights(model, samplers.endpoints, DropsOne())
    assert samplers.version == version
    sync_weights(model, samplers.endpoints, samplers.transport)
    assert mult_prob_error(model, samplers, LONG, 1.0) <= LIMIT


@pytest.mark.nightly
def test_an_engine_that_is_killed_ends_the_run_with_a_clear_error_and_resuming_gives_the_same_numbers(
    tmp_path: Path,
) -> None:
    """Also the learning of a dummy task in 60 steps, whose log the resumed run has to reproduce.

    The bound: a reward is 0 or 1, so that the mean of the 400 rewards of a step has a standard deviation of at most 0.025.
    At the start it is near 1/200; where nothing is learned, the mean of the last five steps, 2,000 rewards with a standard
    deviation of at most 0.0112, would exceed 0.1 less than once in 10^15 times.
    """
    from rlcanary.system import processes

    folder, steps = tmp_path / "run", 60
    plan = the_plan(folder, steps, run__checkpoint_every=20)
    resource_tracker.ensure_running()  # Python's own, which vLLM would start, and which stays
    before = processes.children()

    def kill_the_engine(step: int, metrics: Any) -> None:
        if step == 44:
            for child in processes.children() - before:
                if is_engine_core(child.pid):
                    os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(ENDINGS, match=r"engine|replica|Engine"):
        train(plan, on_step=kill_the_engine)
    stopped = log_of(folder)
    assert [line["step"] for line in stopped] == list(range(45))
    wait_for(lambda: processes.children() - before == set())  # a worker of the killed engine notices by itself

    train(plan, resume=True)
    log = log_of(folder)
    assert [line["step"] for line in log] == list(range(steps))
    for first, again in zip(stopped[40:], log[40:45], strict=True):
        for name in ("reward", "completion_tokens", "entropy", "kl", "grad_norm"):
            if name in first:
                assert again[name] == pytest.approx(first[name], rel=1e-3), (first["step"], name)
    assert fmean(line["reward"] for line in log[:5]) < 0.05
    assert fmean(line["reward"] for line in log[-5:]) > 0.3
    assert fmean(line["entropy"] for line in log[-5:]) < fmean(line["entropy"] for line in log[:5])
    assert max(line["mult_prob_error"] for line in log) <= LIMIT
    assert [line["policy_version"] for line in log] == list(range(1, steps + 1))
