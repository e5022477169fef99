"""What verl's own code is given: nothing masked, cast or divided that its trainer hands on as it is."""

import pytest
import torch

from rlcanary.adapters import load_adapter
from rlcanary.contract.records.lengths import Lengths


@pytest.fixture(scope="module")
def verl():
    pytest.importorskip("verl")
    return load_adapter("verl")


def test_lengths_are_punished_by_the_reward_manager_that_the_trainer_runs(verl, monkeypatch):
    from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager
    from verl.workers.reward_manager import dapo

    def older(*_, **__):
        raise AssertionError("the older manager, which no trainer runs")

    monkeypatch.setattr(dapo.DAPORewardManager, "__init__", older)
    ran, run_single = [], DAPORewardManager.run_single
    monkeypatch.setattr(DAPORewardManager, "run_single", lambda *args: ran.append(1) or run_single(*args))
    lengths = Lengths(torch.tensor([2, 7, 8]), torch.tensor([1, 2, 3]), max_new_tokens=8, max_prompt_tokens=3)
    punished = verl.configured(overlong_buffer=4, overlong_penalty=1.0)
    assert punished.shape_rewards(torch.tensor([1.0, 0.5, 0.0]), lengths).tolist() == [1.0, -0.25, -1.0]
    assert len(ran) == 3
