"""Code whose loss or rollout takes a model is checked as it is, through a model that stands in for the policy."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from rlcanary import Completion, EngineModel, Group, LogprobModel, LossOutput, NotProvided, PolicyBatch
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import all_checks, run_check
from rlcanary.checks.worlds.scripted_engine import ScriptedEngine
from rlcanary.reference import make_batch

CHECKS = {check.id: check for check in all_checks()}


class LossOfAModel(ReferenceAdapter):
    """A codebase whose loss runs the model, two rows at a time, and calls `backward` itself on request."""

    calls_backward = False
    forgets = 0

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        model = LogprobModel(batch)
        scores = []
        for first in range(0, len(batch.mask), 2):
            ids = model.input_ids[first : first + 2]
            logprobs = model(ids[:, :-1]).logits.log_softmax(dim=-1)
            scores.append(logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1))
        logprobs_BT = torch.cat(scores)[:, self.forgets :]
        logprobs_BT = torch.nn.functional.pad(logprobs_BT, (0, self.forgets))
        output = super().policy_loss(replace(batch, logprobs=logprobs_BT))
        if self.calls_backward:
            output.loss.backward()
            return LossOutput(model.loss(output.loss.item()), output.metrics)
        return LossOutput(model.loss(output.loss), output.metrics)


def verdicts(adapter: ReferenceAdapter, *names: str) -> dict[str, str]:
    chosen = [check for name, check in CHECKS.items() if name.startswith(names)]
    results = [run_check(check, adapter, "unused") for check in chosen]
    return {result.id: result.message for result in results if result.status not in ("pass", "not-provided")}


@pytest.mark.parametrize("calls_backward", [False, True])
def test_a_correct_loss_that_takes_a_model_passes_the_checks_of_losses(calls_backward: bool) -> None:
    adapter = LossOfAModel()
    adapter.calls_backward = calls_backward
    assert verdicts(adapter, "loss", "kl.pulls") == {}


def test_a_loss_that_takes_a_model_and_is_off_by_a_token_is_red() -> None:
    adapter = LossOfAModel()
    adapter.forgets = 1
    assert {"loss.declared_value", "loss.declared_gradient"} <= verdicts(adapter, "loss.declared").keys()


def test_completions_with_a_hole_are_declined() -> None:
    mask_BT = torch.tensor([[True, True, False], [True, False, True]])
    whole = PolicyBatch(-torch.ones(1, 3), -torch.ones(1, 3), torch.ones(1), mask_BT[:1])
    assert LogprobModel(whole).completions() == [[1, 1]]
    holed = PolicyBatch(-torch.ones(2, 3), -torch.ones(2, 3), torch.ones(2), mask_BT)
    with pytest.raises(NotProvided, match="trained whole"):
        LogprobModel(holed).completions()


class RolloutOfAModel(ReferenceAdapter):
    """A codebase that samples with the `generate` of transformers, prompt by prompt, and keeps the logprobs."""

    shift = 0

    def rollout(self, engine: Any, items: list[Any], sampling: Any) -> list[Group]:
        if "stop_sequences" in sampling:
            raise NotProvided("ends at ids")
        model = EngineModel(engine, do_sample=True, eos_token_id=sampling["eos_token_ids"])
        groups = []
        for item in items:
            prompt_1S = torch.tensor([list(item.prompt_ids)])
            completions = []
            for _ in range(sampling["n"]):
                options = {"max_new_tokens": sampling["max_new_tokens"], "return_dict_in_generate": True}
                output = model.generate(prompt_1S, output_logits=True, **options)
                ids = output.sequences[0, prompt_1S.shape[1] :]
                logprobs = torch.cat(output.logits).log_softmax(dim=-1)[range(len(ids)), ids.roll(self.shift)]
                end = "stop" if ids[-1] in sampling["eos_token_ids"] else "length"
                text = engine.tokenizer.decode(ids, skip_special_tokens=True)
                completions.append(Completion(ids.tolist(), logprobs.tolist(), end, text=text))
            rewards = [float(item.reward(each.text)) for each in completions]
            groups.append(Group(prompt_1S[0].tolist(), completions, rewards, item_id=item.id))
        return groups


def test_a_correct_rollout_that_calls_generate_passes_the_checks_of_rollouts() -> None:
    correct = ("rollout.groups", "rollout.completions", "rollout.prompts", "rollout.items", "rollout.samples_afresh")
    assert verdicts(RolloutOfAModel(), *correct, "rollout.logprobs") == {}


def test_a_rollout_that_keeps_the_logprobs_of_other_tokens_is_red() -> None:
    adapter = RolloutOfAModel()
    adapter.shift = 1
    assert verdicts(adapter, "rollout.logprobs").keys() == {"rollout.logprobs_and_finish_reasons"}


def test_prompts_padded_on_the_left_reach_the_engine_without_padding() -> None:
    engine = ScriptedEngine({(5,): [Completion([8, 9], [-1.0, -2.0])] * 2, (6, 7): [Completion([3], [-1.0])] * 2})
    prompts_BS, mask_BS = torch.tensor([[0, 5], [6, 7]]), torch.tensor([[0, 1], [1, 1]])
    sequences = EngineModel(engine, do_sample=True).generate(
        input_ids=prompts_BS, attention_mask=mask_BS, num_return_sequences=2, pad_token_id=4
    )
    assert [request.prompt for request in engine.requests] == [(5,), (6, 7)]
    assert sequences.tolist() == [[0, 5, 8, 9], [0, 5, 8, 9], [6, 7, 3, 4], [6, 7, 3, 4]]


def test_an_option_that_no_sampler_has_is_refused() -> None:
    engine = ScriptedEngine({(5,): [Completion([8], [-1.0])]})
    with pytest.raises(ValueError, match="unknown sampling parameter"):
        EngineModel(engine).generate(torch.tensor([[5]]), temprature=0.5)


def test_scores_of_single_rows_are_padded_to_the_batch() -> None:
    groups = [Group([5], [Completion([8, 9]), Completion([7])], [0.0, 1.0])]
    batch, _ = make_batch(groups, 0)
    padded_BT = batch.padded([torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])])
    assert padded_BT.tolist() == [[-1.0, -2.0], [-3.0, 0.0]]
