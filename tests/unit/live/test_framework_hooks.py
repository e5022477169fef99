"""The audit in the trainers and workers of verl and SkyRL, which start it by their own extension points."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

RUNS = Path(__file__).parents[2] / "support/live_runs"
STARTED_BY = {"verl": {"VERL_USE_EXTERNAL_MODULES": "rlcanary.live.hooks.verl"}, "skyrl": {}}
FOUND = {
    ("verl", "mask off by one"): "gradient.direction",
    ("verl", "scaled by accumulation"): "1 / 2, the number of micro-batches",
    ("verl", "not divided"): "advantages",
    ("skyrl", "mask off by one"): "gradient.direction",
    ("skyrl", "scaled by accumulation"): "gradient.",
    ("skyrl", "averaged over padding"): "it averages over padding",
    ("skyrl", "not divided"): "advantages",
}


@cache
def run(framework: str) -> dict[str, Any]:
    """Train with the framework's own code, without a bug and with each."""
    environment = os.environ | STARTED_BY[framework] | {"RLCANARY_LIVE_EVERY": "1", "OMP_NUM_THREADS": "1"}
    script = RUNS / f"live_{framework}.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout)
    return results


@pytest.mark.parametrize("framework", STARTED_BY)
def test_a_correct_run_has_no_finding_and_the_weights_of_one_without_the_audit(framework: str) -> None:
    results = run(framework)
    assert results["none"]["found"] == []
    assert results["none"]["audited"] > 2  # updates, and advantages where they are computed
    assert results["equal"]
    assert any(name.endswith("canary/findings") for name in results["none"]["logged"])


@pytest.mark.parametrize(("framework", "bug"), FOUND)
def test_a_planted_bug_is_found_in_the_first_update(framework: str, bug: str) -> None:
    (found,) = run(framework)[bug]["found"]
    assert FOUND[framework, bug] in found


@pytest.mark.parametrize("framework", STARTED_BY)
def test_the_logprobs_of_the_engine_are_compared_with_the_trainers(framework: str) -> None:
    samples = run(framework)["samples"]
    assert samples["of the policy"] == []
    assert any("sampling.ratio" in told for told in samples["of other weights"])


def test_masks_of_skyrl_that_the_conventions_cannot_express_are_no_wrong_gradient() -> None:
    found = [{told.partition(":")[0].partition(".")[0] for told in each} for each in run("skyrl")["masks"]]
    assert [each - {"sampling"} for each in found] == [set()] * 3  # the engine is away from the trainer


def test_samples_of_an_asynchronous_trainer_are_left_out() -> None:
    assert run("verl")["samples"]["of an asynchronous trainer"] == []


def test_an_update_of_verl_on_two_ranks_is_judged_as_one(tmp_path: Path) -> None:
    environment = os.environ | STARTED_BY["verl"] | {"RLCANARY_LIVE_EVERY": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = RUNS / "live_verl_ranks.py"
    done = subprocess.run([*command, script, tmp_path], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["none"] == [[]]
    ((told,),) = first["scaled by accumulation"]
    assert "the update is 0.5 times the declared one" in told
