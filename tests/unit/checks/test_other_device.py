"""Code that trains on a GPU, as its team would connect it: tensors and models arrive on the CPU, results stay on the GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).parents[2] / "support"
PLACES = [str(SUPPORT), os.environ.get("PYTHONPATH", "")]


def python(*arguments, cwd):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PLACES), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def verdicts(folder, adapter, *checks):
    """Run checks on an adapter of other_device, in a process that has this device -> the result of each by its id."""
    only = [f"--only={check}" for check in checks]
    options = ["--timeout=0", "--json=out.json"]
    done = python("-m", "rlcanary", "check", f"other_device:{adapter}", *only, *options, cwd=folder)
    assert done.returncode in (0, 1), done.stderr
    return {each["id"]: each for each in json.loads((folder / "out.json").read_text())["checks"]}


def test_the_device_refuses_tensors_that_are_elsewhere(tmp_path):
    program = "import torch, other_device; there = torch.ones(2).to(other_device.DEVICE) + 1; there + torch.ones(2)"
    assert "add got some on cpu, some on other:0" in python("-c", program, cwd=tmp_path).stderr


def test_right_code_passes(tmp_path):
    judged = verdicts(
        tmp_path,
        "OnTheDevice",
        "logprob.",
        "advantage.",
        "loss.",
        "forward.scores_each_token_at_its_place",
        "step.direction",
        "metrics.recomputed",
        "sync.every_parameter",
    )
    assert {name: each["message"] for name, each in judged.items() if each["status"] != "pass"} == {}
    assert len(judged) >= 36


def test_the_bundled_trainer_makes_no_tensor_elsewhere(tmp_path):
    judged = verdicts(tmp_path, "GrpoOnTheDevice", "step.direction", "metrics.recomputed")
    assert [each["status"] for each in judged.values()] == ["pass", "pass"]


def test_wrong_code_is_caught_and_its_program_shows_it_there(tmp_path):
    judged = verdicts(tmp_path, "Ascending", "step.direction", "loss.on_policy_sign")
    assert [each["status"] for each in judged.values()] == ["fail", "fail"]
    # An update returns no tensor that would have to be moved.
    assert ["OnCpu(load_adapter(" in each["snippet"] for each in judged.values()] == [True, False]
    program = judged["loss.on_policy_sign"]["snippet"]
    assert python("-c", program, cwd=tmp_path).returncode == 1
    right = python("-c", program.replace("Ascending", "OnTheDevice"), cwd=tmp_path)
    assert right.returncode == 0, right.stderr


def test_a_batch_that_was_not_moved_is_named(tmp_path):
    (result,) = verdicts(tmp_path, "NotMoved", "step.direction").values()
    assert result["status"] == "error"
    assert "batch.to(device)" in result["message"]
