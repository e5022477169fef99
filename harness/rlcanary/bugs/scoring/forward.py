"""Bugs on the way from token ids to logprobs."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import CollatedBatch


class NoAttentionMask(Bug):
    id = "trl.no-attention-mask"
    source = "TRL bbdd6db17, #2708, survey T02"
    effect = "padding is attended to: a completion scores differently beside longer prompts"

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        attending = replace(batch, attention_mask=torch.ones_like(batch.attention_mask))
        return reference.completion_logprobs(model, attending, temperature)


class LogitsOneLate(Bug):
    id = "trl.logits-one-late"
    source = "TRL a5b98fcf9, #2058, survey T38"
    effect = "each token is scored by the logits at its own position, which predict the next one"

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        def late(**inputs: Any) -> Any:
            output = model(**inputs)
            output.logits = output.logits.roll(-1, dims=1)
            return output

        return reference.completion_logprobs(late, batch, temperature)


class LastPositions(Bug):
    id = "rlvr.last-positions-scored"
    source = "rlvr-experiments 7b60ce4, survey H08"
    effect = "the last T logits are taken, so that shorter rows are scored inside their padding"

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        mask = batch.attention_mask.long()
        logits = model(input_ids=batch.input_ids, attention_mask=mask, position_ids=batch.position_ids).logits
        width = batch.completion_ids.shape[1]
        return reference.token_logprobs(logits[:, -width - 1 : -1], batch.completion_ids, temperature)


class TextPositions(Bug):
    id = "verl.position-ids-ignored"
    source = "verl 830fab2ae, #527, survey V10"
    effect = "the row's position ids are ignored; left-padded rows are scored at other positions"

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        counted = torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids) * 2
        return reference.completion_logprobs(model, replace(batch, position_ids=counted), temperature)


class OneBackendWithoutTemperature(Bug):
    id = "verl.one-backend-without-temperature"
    source = "verl 5deb8cc9a, #3133, survey V33"
    effect = "this path scores at temperature 1, the other one at the sampling temperature"

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        return reference.completion_logprobs(model, batch, 1.0)


class AttentionMaskOfTokenIds(Bug):
    id = "verl.token-ids-as-attention-mask"
    source = "verl a43ead6f8, #1411, survey V17"
    effect = "token ids serve as the attention mask: padding with an id other than 0 is attended to"

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        def masked_by_id(**inputs: Any) -> Any:
            inputs["attention_mask"] = inputs["input_ids"].bool().long()
            return model(**inputs)

        return reference.completion_logprobs(masked_by_id, batch, temperature)


class BoundariesOfAbsolutePositions(Bug):
    id = "prime-rl.packed-documents-attend"
    source = "prime-rl 7d7bd9233, #2392, survey P15; AReaL 71eb201b4, #214, survey A34"
    effect = "documents of a packed sequence attend to each other"

    def packed_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        def seamless(_: Any, args: Any, inputs: dict[str, Any]) -> Any:
            count = inputs["input_ids"].shape[1]
            visible = torch.ones(count, count, dtype=torch.bool).tril()
            return args, {**inputs, "attention_mask": torch.zeros(1, 1, count, count).masked_fill(~visible, -1e9)}

        hook = model.register_forward_pre_hook(seamless, with_kwargs=True)
        try:
            return reference.packed_logprobs(model, batch, temperature)
        finally:
            hook.remove()


class CutFromTheWrongSide(Bug):
    id = "skyrl.cut-from-the-wrong-side"
    source = "SkyRL 50ebff5a0, #1367"
    effect = "logprobs of right-aligned rows are cut from the left: a short row gets those of its prompt"

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        logprobs_BT = reference.completion_logprobs(model, batch, temperature)
        padding_B = logprobs_BT.shape[1] - batch.completion_mask.sum(dim=1)
        rolled = [row.roll(int(count)) for row, count in zip(logprobs_BT, padding_B, strict=True)]
        return torch.stack(rolled)


class TemperatureInAnotherArgument(Bug):
    id = "slime.temperature-in-another-argument"
    source = "slime 4a1adb684, #557"
    effect = "the temperature is passed in the place of the row boundaries: packed rows are scored at 1"

    def packed_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        return reference.packed_logprobs(model, batch, 1.0)


class ExpertsInputsWeighted(Bug):
    id = "areal.experts-inputs-weighted"
    source = "AReaL 1fd9f9499, #940, survey A38"
    effect = "the router's weights multiply what goes into the experts, not what comes out: it is another model"

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        def weighted(experts: Any, inputs: tuple[Tensor, Tensor, Tensor], _: Tensor) -> Any:
            x_ND, chosen_NK, weights_NK = inputs
            places = zip(chosen_NK.split(1, dim=1), weights_NK.split(1, dim=1), strict=True)
            return sum(experts.forward(x_ND * gate_N1, expert_N1, gate_N1**0) for expert_N1, gate_N1 in places)

        layers = [module for module in model.modules() if type(module).__name__.endswith("Experts")]
        hooks = [layer.register_forward_hook(weighted) for layer in layers]
        try:
            return super().completion_logprobs(model, batch, temperature)
        finally:
            for hook in hooks:
                hook.remove()


class StateOverTheSeam(Bug):
    id = "skyrl.state-over-the-seam"
    source = "SkyRL b0f74aca4, #2056, survey S38"
    effect = "layers with a state are not told where packed rows begin: it runs on from one row into the next"

    def packed_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        is_first_N = batch.position_ids[batch.attention_mask] == 0
        is_first_N[0] = False

        def run_on(_layer: Any, _inputs: Any, embedded_1NH: Tensor) -> Tensor:
            return embedded_1NH + embedded_1NH.roll(1, dims=1) * is_first_N.unsqueeze(-1)

        hook = model.get_input_embeddings().register_forward_hook(run_on)
        try:
            return super().packed_logprobs(model, batch, temperature)
        finally:
            hook.remove()


class ScaleLeftOut(Bug):
    id = "unsloth.scale-of-logits-left-out"
    source = "unsloth-zoo, #930; unsloth, #11277"
    effect = "a fused head leaves out the factor by which a model scales its logits: it is another temperature"

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        scale = getattr(model.config, "logits_scaling", 1.0)
        return super().completion_logprobs(model, batch, temperature / scale)


class VocabularyFilledUp(Bug):
    id = "unsloth.capped-lanes-behind-the-vocabulary"
    source = "unsloth, #10616"
    effect = (
        "lanes behind the vocabulary are -inf, of which the cap of the logits makes a number that takes probability"
    )

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        cap = getattr(model.config, "final_logit_softcapping", None)
        if cap is None:
            return super().completion_logprobs(model, batch, temperature)

        def filled(_model: Any, _inputs: Any, output: Any) -> Any:
            lanes = -output.logits.shape[-1] % 64
            output.logits = torch.nn.functional.pad(output.logits, (0, lanes), value=-cap)
            return output

        hook = model.register_forward_hook(filled)
        try:
            return super().completion_logprobs(model, batch, temperature)
        finally:
            hook.remove()


class CapOfTheOuterConfig(Bug):
    id = "prime-rl.cap-of-the-outer-config"
    source = "prime-rl, #2844"
    effect = "the cap of the logits is looked up in the outer configuration, where a vision-language model has none"

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        text_config = model.config.get_text_config()
        if text_config is model.config or not (cap := getattr(text_config, "final_logit_softcapping", None)):
            return super().completion_logprobs(model, batch, temperature)
        text_config.final_logit_softcapping = None
        try:
            return super().completion_logprobs(model, batch, temperature)
        finally:
            text_config.final_logit_softcapping = cap
