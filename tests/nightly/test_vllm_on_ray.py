"""vLLM in a Ray actor, where the plan's roles and resources put it."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_e2e_smoke import LIMIT, log_of, the_plan
from vllm_engines import IN_THE_ENGINE, is_engine_core
from waiting import HANG_S, wait_for

from rlcanary.grpo.train import ENDINGS, train
from rlcanary.system import processes

pytestmark = [pytest.mark.vllm, pytest.mark.ray]


def on_ray(**options: Any) -> dict[str, Any]:
    sampler = {"engine": "vllm", "cpus": 1.0, "options": {"max_model_len": 160, **options}}
    return {"runtime__kind": "ray", "runtime__start_timeout_s": HANG_S, "roles__sampler": sampler}


AHEAD = {"schedule__max_staleness": 1, "conventions__old_logprobs": "sampler"}


def test_an_engine_in_an_actor_takes_each_version_and_agrees_with_the_trainer(tmp_path: Path) -> None:
    before = processes.children()
    outcome = train(the_plan(tmp_path, 3, **on_ray(**IN_THE_ENGINE)))
    log = log_of(tmp_path)
    assert [line["policy_version"] for line in log] == [1, 2, 3]
    assert max(line["mult_prob_error"] for line in log) <= LIMIT
    assert outcome.account.fates["used"] == outcome.account.entered == 3 * 25
    wait_for(lambda: processes.children() - before == set())  # Ray ends its own without waiting for them


def engine_cores() -> list[psutil.Process]:
    """vLLM's own processes, which are children of the actor's."""
    descendants = psutil.Process().children(recursive=True)
    actors = {each.pid for each in descendants if "EngineActor" in processes.command_line(each.pid)}
    return [each for each in descendants if is_engine_core(each.pid) and each.ppid() in actors]


@pytest.mark.nightly
def test_an_engine_that_is_killed_in_its_actor_while_it_samples_ahead_ends_the_run(tmp_path: Path) -> None:
    killed: list[psutil.Process] = []

    def kill(step: int, metrics: Any) -> None:
        if step == 1:
            killed.extend(engine_cores())
            assert len(killed) == 1
            for core in killed:
                core.kill()

    with pytest.raises(ENDINGS, match=r"no engine is left|engine 0 did") as ended:
        train(the_plan(tmp_path, 6, **on_ray(), **AHEAD), on_step=kill)
    assert killed, f"the engine had gone before: {ended.value}"
    groups = [json.loads(line) for line in (tmp_path / "groups.ndjson").read_text().splitlines()]
    assert sorted(group["number"] for group in groups) == list(range(len(groups)))
    log = log_of(tmp_path)
    assert Counter(group["fate"] for group in groups)["used"] >= len(log) * 25
    assert max(line["staleness"] for line in log) == 1
    # The engine's own child notices by itself that it was killed.
    wait_for(lambda: not any(is_engine_core(each.pid) for each in psutil.Process().children(recursive=True)))
