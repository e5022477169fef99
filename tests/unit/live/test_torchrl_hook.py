"""The audit in torchrl's `GRPOTrainer`: planted bugs are found in the first update, and no weight is changed."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchrl.trainers.algorithms.grpo as algorithms
from torchrl.objectives.llm import GRPOLoss, MCAdvantage

from rlcanary import live
from rlcanary.adapters.torchrl.adapter import TorchrlAdapter
from rlcanary.contract.batch import Completion, Group
from rlcanary.tiny_models import tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def group(prompt: list[int], draw: random.Random, model: Any, off: float = 0.0) -> Group:
    """Four completions of different lengths, with the logprobs of the model, less what they are off."""
    completions = []
    for _ in range(4):
        ids = [draw.randrange(3, 60) for _ in range(draw.randint(1, 7))]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, 1:-1]
        chosen = logits.log_softmax(-1).gather(-1, torch.tensor(ids).unsqueeze(-1))
        completions.append(Completion(ids, (chosen.squeeze(-1) - off).tolist()))
    return Group(prompt, completions, [1.0, 0.0, 1.0, draw.random()])


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Take updates with torchrl's own trainer -> the weights, the findings, the numbers of the trainer's log."""
    own = algorithms.GRPOTrainer

    def run(
        updates: int = 1, is_audited: bool = True, off: float = 0.0, schedule: Callable[[Any], None] = lambda _: None
    ) -> tuple[dict[str, torch.Tensor], list[Any], list[Any]]:
        hooks, logged = [], []

        def trainer(**settings: Any) -> Any:
            made = own(**settings)
            if is_audited:
                hooks.append(live.torchrl(made, every=1, on_finding="log"))
            schedule(made.loss_module)
            made._log = lambda **numbers: logged.append(numbers)
            return made

        monkeypatch.setattr(algorithms, "GRPOTrainer", trainer)
        torch.manual_seed(0)
        draw = random.Random(0)
        adapter = TorchrlAdapter({"entropy_coeff": 0.01})
        state = adapter.new_state(tiny_llama(), tiny_llama(1), 1e-2)
        for _ in range(updates):
            adapter.rl_step(state, [group([1, 5 + number], draw, state.model, off) for number in range(2)], 0)
        audits = [hook.audit for hook in hooks]
        assert len(hooks) == (updates if is_audited else 0)
        assert all(audit.audited == audit.updates == 1 and audit.rollouts == 2 for audit in audits)
        return state.model.state_dict(), [each for audit in audits for each in audit.findings], logged

    return run


def test_a_correct_run_has_no_finding_and_the_weights_of_one_without_the_audit(trained: Any) -> None:
    weights, found, logged = trained(2)
    assert found == []
    assert [numbers["canary/findings"] for numbers in logged if "canary/findings" in numbers] == [0, 0]
    others, *_ = trained(2, is_audited=False)
    assert all(torch.equal(weights[name], others[name]) for name in others)


def test_bounds_that_a_schedule_moves_are_those_of_the_update(trained: Any) -> None:
    def tighten(loss: Any) -> None:
        loss.clip_epsilon_low, loss.clip_epsilon_high = 0.01, 0.02

    _, found, _ = trained(off=0.1, schedule=tighten)
    assert found == []


def test_a_mask_that_is_off_by_one_is_found(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weigh = GRPOLoss._aggregate_loss_value
    monkeypatch.setattr(
        GRPOLoss,
        "_aggregate_loss_value",
        lambda self, value, mask, tensordict=None: weigh(self, value, mask.roll(1, -1), tensordict),
    )
    _, (finding,), _ = trained()
    assert finding.invariant == "gradient.direction"


def test_a_loss_that_is_divided_twice_is_found(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = GRPOLoss.forward

    def halved(self: Any, tensordict: Any) -> Any:
        output = forward(self, tensordict)
        output.loss_objective = output.loss_objective / 2
        return output

    monkeypatch.setattr(GRPOLoss, "forward", halved)
    _, (finding,), _ = trained()
    assert (finding.invariant, finding.size) == ("gradient.scale", pytest.approx(0.5))


def test_advantages_that_are_not_divided_are_found(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = MCAdvantage._inv_call_single

    def undivided(self: Any, trajectory: Any) -> Any:
        group = compute(self, trajectory)
        if group is not None:
            group[self.advantage_key] = group[self.rewards_key] - group[self.rewards_key].mean()
        return group

    monkeypatch.setattr(MCAdvantage, "_inv_call_single", undivided)
    _, (finding,), _ = trained()
    assert finding.invariant == "advantages"
