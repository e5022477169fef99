"""What TRL's own code is given and asked: nothing masked, cut or left behind that TRL does not."""

import pytest
import torch

from rlcanary.adapters import load_adapter
from rlcanary.contract.batch import Completion, PolicyBatch
from rlcanary.contract.declining import NotProvided


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


class Asked:
    """An engine that notes what it is asked, whose model ends at 2."""

    eos_token_ids = (2,)
    version = 0

    def __init__(self):
        self.requests = []

    def generate(self, prompts, sampling):
        self.requests.append(sampling)
        return [[Completion([7, 2], [-1.0, -1.0])] * sampling["n"] for _ in prompts]


@pytest.mark.parametrize(
    ("kwargs", "asked", "ends"),
    [
        ({"stop_token_ids": [9]}, None, (9, 2)),  # beside the model's own, as vLLM has it
        ({"stop_token_ids": [9], "ignore_eos": True}, None, (9,)),
        ({"ignore_eos": True}, None, ()),
        ({}, (9,), (9,)),
        ({}, (), ()),
        ({}, None, None),
    ],
)
def test_stop_ids_stand_beside_the_models_own_ends_as_in_vllm(kwargs, asked, ends):
    from rlcanary.adapters.trl import TrlAdapter

    engine = Asked()
    adapter = TrlAdapter(use_vllm=True, **({"generation_kwargs": kwargs} if kwargs else {}))
    adapter.generate(engine, [[5, 6]], {"n": 2, "max_new_tokens": 4, "temperature": 1.0, "eos_token_ids": asked})
    assert engine.requests[0].get("eos_token_ids") == ends


def test_settings_of_a_run_reach_the_server_where_a_request_names_no_others():
    from rlcanary.adapters.trl import TrlAdapter

    engine = Asked()
    request = {"n": 2, "max_new_tokens": 4, "temperature": 0.5}
    TrlAdapter(use_vllm=True, top_k=20, temperature=0.9).generate(engine, [[5, 6]], request)
    assert {name: engine.requests[0][name] for name in ("top_k", "temperature", "max_new_tokens")} == {
        "top_k": 20,
        "temperature": 0.5,
        "max_new_tokens": 4,
    }
    with pytest.raises(NotProvided, match="no min_tokens"):
        TrlAdapter(use_vllm=True, generation_kwargs={"min_tokens": 3}).generate(engine, [[5, 6]], request)


def _of_one_row():
    return PolicyBatch(
        logprobs=torch.tensor([[-1.0, -2.0]], requires_grad=True),
        old_logprobs=torch.tensor([[-1.0, -2.0]]),
        advantages=torch.tensor([1.0]),
        mask=torch.ones(1, 2, dtype=torch.bool),
    )


def _refused_settings():
    from rlcanary.adapters.trl import TrlAdapter

    with pytest.raises(ValueError, match="divisible by num_generations"):
        _ = TrlAdapter(num_generations=3).conventions


def _refused_file(trl):
    with pytest.raises(ValueError, match="divisible by num_generations"):
        trl.effective({"num_generations": 3})


def _another_config(_):
    from rlcanary.adapters.trl.losses import distillation_beta

    distillation_beta({})


@pytest.mark.parametrize(
    "between",
    [
        lambda trl: trl.data_order(8, 0, 1, 2),
        _another_config,
        lambda _: _refused_settings(),
        _refused_file,
    ],
    ids=["ranks", "a config", "refused settings", "a refused file"],
)
def test_a_trainer_knows_its_place_whatever_is_constructed_behind_it(trl, between):
    """accelerate has one record per process, which each `TrainingArguments` clears."""
    before = float(trl.policy_loss(_of_one_row()).loss.detach())
    between(trl)
    assert float(trl.policy_loss(_of_one_row()).loss.detach()) == before
