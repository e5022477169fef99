"""What TRL's own code is given and asked: nothing masked, cut or left behind that TRL does not."""

import pytest
import torch

from rlcanary.adapters import load_adapter
from rlcanary.contract.batch import PolicyBatch


@pytest.fixture(scope="module")
def trl():
    pytest.importorskip("trl")
    return load_adapter("trl")


@pytest.mark.parametrize(("level", "shape"), [("token", (2, 2)), ("sequence", (2, 1))])
def test_the_weights_of_the_sampler_reach_the_loss_as_the_trainer_computed_them(trl, monkeypatch, level, shape):
    from trl import GRPOTrainer

    given, compute = [], GRPOTrainer._compute_loss

    def noted(trainer, model, inputs):
        given.append(inputs["importance_sampling_ratio"])
        return compute(trainer, model, inputs)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", noted)
    logprobs = torch.tensor([[-1.0, -2.0], [-1.0, -3.0]])
    batch = PolicyBatch(
        logprobs=logprobs.clone().requires_grad_(),
        old_logprobs=logprobs,
        advantages=torch.tensor([1.0, -1.0]),
        mask=torch.tensor([[True, True], [True, False]]),
        sampler_logprobs=logprobs - 0.1,
    )
    trl.configured(importance_level=level, importance_mode="truncate").policy_loss(batch)
    assert given[0].shape == shape
    # The trainer's weight of a token that is not trained is 1.
    assert level == "sequence" or float(given[0][1, 1]) == 1
