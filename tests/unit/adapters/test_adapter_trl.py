"""The adapter of TRL: a bug that is planted in TRL's own code is found through it, and it declares what the trainer does."""

from collections.abc import Callable
from typing import Any

import pytest

from rlcanary.adapters import load_adapter
from rlcanary.checks import all_checks, run_check

pytest.importorskip("trl")

Plant = Callable[[pytest.MonkeyPatch], None]


def _prefixes_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("trl.generation.vllm_client.VLLMClient.reset_prefix_cache", lambda _: None)


def _one_parameter_is_not_sent(patch: pytest.MonkeyPatch) -> None:
    from trl.generation.vllm_generation import VLLMGeneration

    sent = VLLMGeneration._iter_named_params
    patch.setattr(VLLMGeneration, "_iter_named_params", lambda self: list(sent(self))[:-1])


def _advantages_are_shuffled_apart(patch: pytest.MonkeyPatch) -> None:
    def shuffled(batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "advantages": batch["advantages"].roll(1)}

    patch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", shuffled)


def _moments_are_not_loaded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("trl.trainer.grpo_trainer.GRPOTrainer._load_optimizer_and_scheduler", lambda *_: None)


def _gradients_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("torch.nn.Module.zero_grad", lambda *_, **__: None)


def _replies_are_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("trl.trainer.grpo_trainer.GRPOTrainer._get_tool_suffix_ids", lambda *_: [])


def _ranks_have_the_same_items(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("accelerate.data_loader.BatchSamplerShard.__iter__", lambda self: iter(self.batch_sampler))


@pytest.mark.parametrize(
    ("check_id", "plant"),
    [
        ("sync.cached_prefixes", _prefixes_are_kept),
        ("sync.every_parameter", _one_parameter_is_not_sent),
        ("step.declared_gradient", _advantages_are_shuffled_apart),
        ("checkpoint.training_goes_on", _moments_are_not_loaded),
        ("step.gradients_start_anew", _gradients_are_kept),
        ("rendering.tool_turns", _replies_are_left_out),
        ("order.every_item_once", _ranks_have_the_same_items),
    ],
)
def test_a_bug_in_trls_own_code_is_found(check_id: str, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    (check,) = [each for each in all_checks() if each.id == check_id]
    assert run_check(check, load_adapter("trl"), "trl").status == "pass"
    plant(monkeypatch)
    assert run_check(check, load_adapter("trl"), "trl").status == "fail"


def test_conventions_are_those_of_trls_configuration() -> None:
    conventions = load_adapter("trl").conventions
    declared = (
        conventions.old_logprobs,
        conventions.training_dropout,
        conventions.max_grad_norm,
        conventions.temperature,
    )
    assert declared == ("trainer", True, 1.0, 1.0)


def test_a_copied_model_of_a_state_computes_with_its_own_weights() -> None:
    import torch

    from rlcanary.contract.layers import copied
    from rlcanary.tiny_models import tiny_llama

    state = load_adapter("trl").new_state(tiny_llama(), None, 1e-3)
    other = copied(state.model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert not other(input_ids=torch.tensor([[5, 6]])).logits.any()


def test_a_setting_for_the_calls_of_tools_leaves_the_limits_of_the_checks_alone() -> None:
    from rlcanary.adapters.trl import TrlAdapter

    chosen = ("conversation.max_turns", "conversation.history", "rendering.tool_turns")
    checks = [check for check in all_checks() if check.id in chosen]
    found = {check.id: run_check(check, TrlAdapter(max_tool_calling_iterations=0), "trl") for check in checks}
    wanted = {check.id: run_check(check, TrlAdapter(), "trl") for check in checks}
    assert {name: (each.status, each.message) for name, each in found.items()} == {
        name: (each.status, each.message) for name, each in wanted.items()
    }
    assert found["conversation.max_turns"].status == "pass"


def test_a_trl_without_a_limit_of_tool_calls_declines_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlcanary.adapters.trl import TrlAdapter, conversations

    monkeypatch.setattr(conversations.releases, "parameters", lambda _: ["self", "beta"])
    (check,) = (check for check in all_checks() if check.id == "conversation.history")
    result = run_check(check, TrlAdapter(), "trl")
    assert result.status == "not-provided", result.message
    assert "this release of TRL has no tool loop" in result.message


def test_another_padding_of_one_call_is_not_that_of_the_next() -> None:
    from rlcanary.adapters.trl import releases

    adapter = load_adapter("trl")
    releases.use_padding(adapter._trainer, 3)
    assert adapter._trainer._tokenizer.pad_token_id == 0
