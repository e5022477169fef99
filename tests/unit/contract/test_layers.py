"""Copies of models are as those of `copy.deepcopy`."""

import copy
from typing import Any

import pytest
import torch

from rlcanary import tiny_models
from rlcanary.contract.layers import copied


def tensors(model: Any) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


class Remembers(torch.nn.Linear):
    """A layer with tensors outside of its parameters, and its own way of being copied."""

    copies = 0

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen = [torch.zeros(2)]
        self.twin = self.weight

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "copies": self.copies + 1}


@pytest.mark.parametrize("make", [tiny_models.tiny_llama, lambda: tiny_models.tiny_llama(tied=True), Remembers])
def test_copy_has_the_tensors_and_settings_of_the_model_and_shares_none(make: Any) -> None:
    model = make().train()
    model.register_buffer("counted", torch.ones(1))
    next(model.parameters()).requires_grad_(False)
    calls: list[str] = []
    model.register_forward_pre_hook(lambda *_: calls.append("hook"))
    ours, theirs = copied(model), copy.deepcopy(model)
    assert tensors(ours).keys() == tensors(theirs).keys() == tensors(model).keys()
    for name, tensor in tensors(ours).items():
        original = tensors(model)[name]
        assert torch.equal(tensor, original)
        assert tensor.requires_grad == original.requires_grad
        assert tensor.data_ptr() != original.data_ptr()
    assert [id(each) for each in ours.parameters()] != [id(each) for each in model.parameters()]
    assert len(list(ours.parameters())) == len(list(model.parameters()))
    assert [module.training for module in ours.modules()] == [module.training for module in model.modules()]
    with pytest.raises((TypeError, ValueError)):
        ours()
    assert calls == ["hook"]


def test_what_a_layer_holds_besides_is_copied_once_and_by_its_own_rule() -> None:
    layer = Remembers()
    (ours,) = copied((torch.nn.Sequential(layer, layer),))
    assert ours[0] is ours[1]
    assert ours[0].twin is ours[0].weight
    assert ours[0].copies == 1
    assert ours[0].seen[0].data_ptr() != layer.seen[0].data_ptr()


def test_tensors_that_two_models_share_are_shared_by_their_copies() -> None:
    model = tiny_models.tiny_llama()
    first, none, second = copied((model, None, model.model))
    assert none is None
    assert second is first.model
