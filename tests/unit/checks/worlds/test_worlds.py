"""Each world shows a mistake that no other one shows, and its program builds it."""

import copy
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.adapters.grpo import GrpoAdapter
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import all_checks, run_check
from rlcanary.checks.worlds import models
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import CollatedBatch, Completion
from rlcanary.errors import UserError

CHECKS = {check.id: check for check in all_checks()}


class PositionIdsIgnored(ReferenceAdapter):
    """Counts positions from the start of the row, padding included."""

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        positions_BS = torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids)
        return reference.completion_logprobs(model, replace(batch, position_ids=positions_BS), temperature)


class BiasesNeverSent(ReferenceAdapter):
    """Sends the tensors that a name map of bias-free models knows."""

    def sync_weights(self, state: Any, engine: Any) -> None:
        engine.load_weights((name, each) for name, each in state.model.named_parameters() if "bias" not in name)
        engine.reset_prefix_cache()
        engine.version += 1


class WindowForgotten(ReferenceAdapter):
    """Packs rows under a mask that keeps them apart and has no window."""

    def packed_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        narrow = copy.deepcopy(model)
        if narrow.config.model_type == "mistral":  # Gemma 2 cannot do without its window
            narrow.config.sliding_window = None
        return super().packed_logprobs(narrow, batch, temperature)


class SeamForgotten(ReferenceAdapter):
    """Packs rows of a model without a window, whatever its layers are."""

    def packed_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        if hasattr(model.config, "sliding_window"):
            return super().packed_logprobs(model, batch, temperature)
        return reference.packed_logprobs(OfUnknownLayers(model), batch, temperature)


class OfUnknownLayers(torch.nn.Module):
    """A model without a config that names its layers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)


class RouterNotTrained(ReferenceAdapter):
    """Leaves the router out of the update."""

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        for name, parameter in model.named_parameters():
            if name.endswith(".gate.weight"):
                parameter.register_hook(torch.zeros_like)
        return super().new_state(model, ref_model, learning_rate)


class AdaptersNeverSent(ReferenceAdapter):
    """Sends the weights that the engine has loaded from the checkpoint."""

    def sync_weights(self, state: Any, engine: Any) -> None:
        engine.load_weights((name, each) for name, each in state.model.named_parameters() if "lora_" not in name)
        engine.reset_prefix_cache()
        engine.version += 1


class FrozenPartTrained(ReferenceAdapter):
    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        return super().new_state(model.requires_grad_(True), ref_model, learning_rate)


class GenerationConfigLeaks(ReferenceAdapter):
    """Fills what a request leaves neutral from the model's own defaults, as `generate` of transformers does."""

    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        default = engine.model.generation_config.top_k or 0
        return super().generate(engine, prompts, {**sampling, "top_k": sampling["top_k"] or default})


class LoadedInTheDtypeOfTheConfig(ReferenceAdapter):
    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        return super().new_state(model.to(model.config.dtype or torch.float32).float(), ref_model, learning_rate)


class MastersNeverWrittenBack(GrpoAdapter):
    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        state = super().new_state(model, ref_model, learning_rate)
        state.masters.write_back = lambda: None
        return state


class LogitsScaledInTheirDtype(ReferenceAdapter):
    """Multiplies by a large number and divides by it again, which float16 does not hold."""

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        def scaled(**inputs: Any) -> Any:
            output = model(**inputs)
            output.logits = (output.logits * 2.0**15) / 2.0**15
            return output

        return reference.completion_logprobs(scaled, batch, temperature)


class OwnArchitecture(ReferenceAdapter):
    def new_model(self, seed: int) -> Any:
        return models.tied_and_biased()


class OwnBiasesNeverSent(BiasesNeverSent, OwnArchitecture):
    """Loses tensors that only the team's own architecture has."""


@pytest.mark.parametrize(
    ("world", "wrong", "check_id", "right"),
    [
        ("learned_positions", PositionIdsIgnored, "forward.padding", ReferenceAdapter),
        ("tied_and_biased", BiasesNeverSent, "sync.every_time", ReferenceAdapter),
        ("sliding_window", WindowForgotten, "forward.packing", ReferenceAdapter),
        ("router", RouterNotTrained, "step.off_policy_gradient", ReferenceAdapter),
        ("convolution", SeamForgotten, "forward.packing", ReferenceAdapter),
        ("lora", AdaptersNeverSent, "sync.every_time", ReferenceAdapter),
        ("part_frozen", FrozenPartTrained, "step.only_the_optimizer_moves", ReferenceAdapter),
        ("generation_config", GenerationConfigLeaks, "parity.logprobs", ReferenceAdapter),
        ("config_dtype", LoadedInTheDtypeOfTheConfig, "step.same_policy", ReferenceAdapter),
        ("bfloat16", MastersNeverWrittenBack, "step.only_the_optimizer_moves", GrpoAdapter),
        ("float16", LogitsScaledInTheirDtype, "forward.scores_each_token_at_its_place", ReferenceAdapter),
        ("own", OwnBiasesNeverSent, "sync.cached_prefixes", OwnArchitecture),
    ],
)
def test_world_shows_a_mistake_that_the_llama_hides(
    world: str, wrong: type[ReferenceAdapter], check_id: str, right: type[ReferenceAdapter]
) -> None:
    result = run_check(CHECKS[check_id], wrong(), f"{__name__}:{wrong.__name__}", worlds=(world,))
    assert result.status == "fail", result.message
    assert result.message.startswith(f"on the model {world}: ")
    assert all(f"model {world}" in found.fingerprint.case for found in result.findings), result.findings
    with pytest.raises(AssertionError):
        exec(result.snippet, {})
    # What packs rows on a convolution can only be declined.
    with suppress(NotProvided):
        exec(result.snippet.replace(f":{wrong.__name__}", f":{right.__name__}"), {})


class LlamaOnly(ReferenceAdapter):
    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        if model.config.model_type != "llama":
            raise NotProvided("only Llamas are implemented")
        return super().completion_logprobs(model, batch, temperature)


class CrashesOnOthers(ReferenceAdapter):
    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        return super().completion_logprobs(model, batch, temperature * len(model.model.layers) / 2)


def test_model_that_the_adapter_declines_is_left_out_and_no_failure() -> None:
    result = run_check(CHECKS["forward.padding"], LlamaOnly(), "unused")
    assert result.status == "pass"
    assert "learned_positions" in result.message


def test_crash_on_a_model_says_how_to_decline_it() -> None:
    result = run_check(CHECKS["forward.padding"], CrashesOnOthers(), "unused")
    assert result.status == "error"
    assert result.message.startswith("on the model learned_positions: ")
    assert "raises NotProvided" in result.message


def test_worlds_of_an_option_are_all_or_named_and_a_wrong_name_is_told() -> None:
    assert models.chosen("") == ()
    assert models.chosen("router, lora") == ("router", "lora")
    assert models.chosen("all") == tuple(models.WORLDS)
    with pytest.raises(UserError, match="no world 'moe': give all, or some of llama, learned_positions"):
        models.chosen("moe")


def test_widened_run_tries_more_models() -> None:
    check = CHECKS["forward.garbage_in_padding"]
    assert run_check(check, PositionIdsIgnored(), "unused").status == "pass"
    tried: list[str] = []

    class Noting(ReferenceAdapter):
        def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
            tried.append(model.config.model_type)
            return super().completion_logprobs(model, batch, temperature)

    run_check(check, Noting(), "unused", worlds=("learned_positions", "router"))
    assert list(dict.fromkeys(tried)) == ["llama", "gpt2", "mixtral"]


@pytest.mark.parametrize("name", models.WORLDS)
def test_models_of_a_world_are_equal_and_apart(name: str) -> None:
    first, second = models.WORLDS[name](), models.WORLDS[name]()
    pairs = list(zip(first.parameters(), second.parameters(), strict=True))
    assert all(one is not other and torch.equal(one, other) for one, other in pairs)


def test_model_that_the_installed_transformers_lacks_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_a_later_release() -> Any:
        from transformers import ModelOfALaterRelease

        return ModelOfALaterRelease()

    monkeypatch.setattr(models.tiny_models, "tiny_gemma4", of_a_later_release)
    with pytest.raises(NotProvided, match="the installed transformers has no such model"):
        models.composite()
