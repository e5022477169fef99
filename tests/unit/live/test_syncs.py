"""A sync is judged by the weights, or by probe tokens: one that leaves out a low-rank adapter is found."""

import copy
import json

import pytest
import torch

from rlcanary.grpo.lora import add_adapters, merged_weights
from rlcanary.grpo.plan.models import LoraSettings
from rlcanary.live import Audit, probe_logprobs
from rlcanary.tiny_models import tiny_llama


@pytest.mark.parametrize(("is_dropped", "found"), [(False, []), (True, ["sync.probes"])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sync_that_leaves_out_the_adapter_is_found_by_probe_tokens(
    dtype: torch.dtype, is_dropped: bool, found: list[str]
) -> None:
    audit, model = Audit(on_finding="log"), tiny_llama()
    engine, base = copy.deepcopy(model).to(dtype), copy.deepcopy(model.state_dict())
    add_adapters(model, LoraSettings(rank=2, alpha=4), seed=0)
    for _ in range(4):
        engine.load_state_dict(base if is_dropped else merged_weights(model), strict=False)
        audit.synced(probe_logprobs(model), probe_logprobs(engine))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    assert [finding.invariant for finding in audit.findings] == found
    assert model.training == tiny_llama().training


def test_weights_are_compared_by_name_in_the_precision_of_the_engine() -> None:
    trained = {"a": torch.tensor([0.1, 0.2]), "b": torch.ones(2)}
    held = {name: weight.bfloat16() for name, weight in trained.items()}
    assert Audit(on_finding="log").synced(trained, held) == []
    found = Audit(on_finding="log").synced(trained, {"a": held["a"], "b": 2 * held["b"]})
    assert [finding.invariant for finding in found] == ["sync.weights"]
    found = Audit(on_finding="log").synced({"a": "1", "b": "2"}, {"a": "1", "c": "2"})
    assert [finding.invariant for finding in found] == ["sync.missing", "sync.unknown"]


def test_the_first_sync_is_remembered_across_a_resume() -> None:
    first, resumed = Audit(on_finding="log"), Audit(on_finding="log")
    assert first.synced(torch.zeros(8), torch.full((8,), 0.0005)) == []
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    (finding,) = resumed.synced(torch.zeros(8), torch.full((8,), 0.05))
    assert finding.invariant == "sync.probes"


def test_an_engine_in_half_precision_may_be_further_away_on_unlikely_tokens() -> None:
    audit, source = Audit(on_finding="log"), torch.Generator().manual_seed(0)
    for _ in range(300):  # logits of a sharp policy, with a few roundings of bfloat16
        trained = -40 * torch.rand(8, generator=source)
        assert audit.synced(trained, trained * (1 + 2**-7 * torch.randn(8, generator=source))) == []
    (finding,) = audit.synced(trained, trained - 3.0)
    assert finding.invariant == "sync.probes"


def test_probes_leave_each_part_of_the_model_in_its_mode() -> None:
    model = tiny_llama().train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    probe_logprobs(model)
    assert [module.training for module in model.modules()] == before
