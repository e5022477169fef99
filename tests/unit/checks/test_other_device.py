"""Code that trains on a GPU, as its team would connect it: tensors and models arrive on the CPU, results stay on the GPU."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import other_device
import pytest
import torch
from other_device import DEVICE, Elsewhere

from rlcanary.adapters.grpo import GrpoAdapter
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import all_checks, run_check
from rlcanary.contract.adapter import NotProvided


class OnTheDevice(ReferenceAdapter):
    name = "on the device"

    def token_logprobs(self, logits, token_ids, temperature):
        return super().token_logprobs(logits.to(DEVICE), token_ids.to(DEVICE), temperature)

    def completion_logprobs(self, model, batch, temperature):
        return super().completion_logprobs(moved(model), batch.to(DEVICE), temperature)

    def advantages(self, rewards, group_ids):
        return super().advantages(rewards.to(DEVICE), group_ids.to(DEVICE))

    def policy_loss(self, batch):
        return super().policy_loss(batch.to(DEVICE))

    def new_state(self, model, ref_model, learning_rate):
        if next(model.parameters()).dtype == torch.bfloat16:
            raise NotProvided("there are no float32 masters")
        return super().new_state(moved(model), ref_model and moved(ref_model), learning_rate)

    def train_step(self, state, batch):
        return super().train_step(state, batch.to(DEVICE))


class Ascending(OnTheDevice):
    def policy_loss(self, batch):
        return super().policy_loss(replace(batch, advantages=-batch.advantages))

    def train_step(self, state, batch):
        batch = batch.to(DEVICE)
        batch.rewards = -batch.rewards
        return ReferenceAdapter.train_step(self, state, batch)


class GrpoOnTheDevice(GrpoAdapter):
    name = "grpo on the device"

    def new_state(self, model, ref_model, learning_rate):
        return super().new_state(moved(model), ref_model and moved(ref_model), learning_rate)

    def train_step(self, state, batch):
        return super().train_step(state, batch.to(DEVICE))


class NotMoved(OnTheDevice):
    def train_step(self, state, batch):
        return ReferenceAdapter.train_step(self, state, batch)


def moved(model):
    # A cache would make tensors from lists, which a device in Python cannot.
    model.config.use_cache = False
    return model.to(DEVICE)


CHECKS = {check.id: check for check in all_checks()}
JUDGED = [name for name in CHECKS if name.startswith(("logprob.", "advantage.", "loss."))] + [
    "forward.scores_each_token_at_its_place",
    "step.off_policy_gradient",
    "step.direction",
    "metrics.recomputed",
    "sync.every_parameter",
]


def judged(name, adapter):
    return run_check(CHECKS[name], adapter, f"{__file__}:{type(adapter).__name__}")


def test_the_device_refuses_tensors_that_are_elsewhere():
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2).to(DEVICE) + torch.ones(2)
    assert isinstance(torch.ones(2).to(DEVICE) + 1, Elsewhere)


@pytest.mark.parametrize("name", JUDGED)
def test_right_code_is_judged_as_on_the_cpu(name):
    there, here = judged(name, OnTheDevice()), judged(name, ReferenceAdapter())
    assert (there.status, there.judged) == ("pass", here.judged), there.message


@pytest.mark.parametrize("name", ["step.off_policy_gradient", "metrics.recomputed"])
def test_the_bundled_trainer_makes_no_tensor_elsewhere(name):
    result = judged(name, GrpoOnTheDevice())
    assert result.status == "pass", result.message


@pytest.mark.parametrize(("name", "returns_tensors"), [("step.direction", False), ("loss.on_policy_sign", True)])
def test_wrong_code_is_caught_and_its_program_shows_it_there(name, returns_tensors):
    program = judged(name, Ascending()).snippet
    assert ("OnCpu(load_adapter(" in program) == returns_tensors
    places = [str(Path(other_device.__file__).parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    for text, code in ((program, 1), (program.replace("Ascending", "OnTheDevice"), 0)):
        finished = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, check=False)
        assert finished.returncode == code, finished.stderr


def test_a_batch_that_was_not_moved_is_named():
    result = judged("step.direction", NotMoved())
    assert result.status == "error"
    assert "batch.to(device)" in result.message
