"""What an optimizer did to the weights is judged behind the update."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlcanary.contract.presets import GRPO
from rlcanary.live import Audit
from rlcanary.live.weights import PATIENCE, Weights

MASK = torch.ones(2, 3, dtype=torch.bool)


class Policy(nn.Module):
    """A table of logits, and a bias that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)))
        self.unread = nn.Parameter(torch.ones(3))
        self.base = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self) -> Tensor:
        return self.table.log_softmax(-1)[..., 0]


def updated(audit: Audit, policy: Policy, optimizer: Any, spoil: Any = lambda: None, rewards: Any = (1.0, 0.0)) -> Any:
    """Take an update -> what was found in it."""
    optimizer.zero_grad()
    given = {"rewards": torch.tensor(rewards), "group_ids": torch.zeros(2, dtype=torch.long)}
    with audit.update(mask=MASK, model=policy, **given) as update:
        logprobs = update.watch(policy())
        advantages = torch.tensor(rewards) - torch.tensor(rewards).mean()
        (-(logprobs * advantages.unsqueeze(1)).mean()).backward()
        optimizer.step()
        spoil()
    return [finding.invariant for finding in update.findings if finding.invariant.startswith("weights")]


def trained(policy: Policy) -> Any:
    return torch.optim.SGD([policy.table], lr=0.1)


def test_an_update_that_moves_what_it_is_to_move_has_no_finding() -> None:
    policy, audit = Policy(), Audit(GRPO, every=1, on_finding="log")
    assert [updated(audit, policy, trained(policy)) for _ in range(PATIENCE - 1)] == [[]] * (PATIENCE - 1)


def test_a_parameter_that_never_moves_beside_others_is_told_after_some_updates() -> None:
    policy, audit = Policy(), Audit(GRPO, every=1, on_finding="log")
    found = [updated(audit, policy, trained(policy)) for _ in range(PATIENCE)]
    assert found == [[]] * (PATIENCE - 1) + [["weights.stuck"]]
    assert "unread" in audit.findings[-1].message


def test_a_parameter_that_moves_at_times_is_not_stuck() -> None:
    policy, audit = Policy(), Audit(GRPO, every=1, on_finding="log")

    def at_times() -> None:
        with torch.no_grad():
            policy.unread += 1

    for number in range(3 * PATIENCE):
        assert updated(audit, policy, trained(policy), at_times if number % 5 == 0 else lambda: None) == []


def test_what_has_moved_before_may_rest() -> None:
    policy, audit = Policy(), Audit(GRPO, every=1, on_finding="log")

    def once() -> None:
        with torch.no_grad():
            policy.unread += 1

    assert updated(audit, policy, trained(policy), once) == []
    assert [updated(audit, policy, trained(policy)) for _ in range(2 * PATIENCE)] == [[]] * 2 * PATIENCE
    assert updated(audit, policy, trained(Policy())) == []


def test_an_optimizer_that_holds_other_weights_is_told_at_once() -> None:
    policy, audit = Policy(), Audit(GRPO, every=1, on_finding="log")
    assert updated(audit, policy, trained(Policy())) == ["weights.still"]


def test_an_update_without_a_gradient_may_stand_still() -> None:
    policy, audit = Policy(), Audit(GRPO, every=1, on_finding="log")
    assert updated(audit, policy, trained(policy), rewards=(1.0, 1.0)) == []


@pytest.mark.parametrize(
    ("name", "value", "found"), [("base", 2.0, "weights.frozen_moved"), ("table", torch.nan, "weights.not_finite")]
)
def test_frozen_weights_that_move_and_weights_that_are_no_numbers_are_told(name: str, value: float, found: str) -> None:
    policy, audit = Policy(), Audit(GRPO, every=1, on_finding="log")

    def spoil() -> None:
        with torch.no_grad():
            getattr(policy, name).view(-1)[0] = value

    assert updated(audit, policy, trained(policy), spoil) == [found]


class Coarse(Policy):
    """In bfloat16, with a parameter so large that a step on it is rounded away."""

    def __init__(self) -> None:
        super().__init__()
        self.unread.data.fill_(100.0)
        self.bfloat16()

    def forward(self) -> Tensor:
        moved = (self.unread - self.unread.detach()).sum()
        return super().forward() + moved * torch.tensor([[1.0], [0.0]], dtype=torch.bfloat16)


def test_steps_that_half_precision_rounds_away_are_named_as_the_cause() -> None:
    policy, audit = Coarse(), Audit(GRPO, every=1, on_finding="log")
    for _ in range(PATIENCE):
        updated(audit, policy, torch.optim.SGD([policy.table, policy.unread], lr=0.1))
        assert policy.unread.grad is not None
        assert policy.unread.grad.any()
    assert "unread is to be trained, and did not move" in audit.findings[-1].message
    assert "in bfloat16 a small step is rounded away" in audit.findings[-1].message


def test_a_failure_of_this_judgement_is_a_warning_and_none_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        yield 1 / 0

    monkeypatch.setattr("rlcanary.live.weights.Stillness.judge", broken)
    policy, audit = Policy(), Audit(GRPO, every=1, on_finding="log")
    with pytest.warns(UserWarning, match="the run is not affected: ZeroDivisionError"):
        assert updated(audit, policy, trained(policy)) == []


def test_moves_that_cancel_each_other_are_moves() -> None:
    policy, audit = Policy(), Audit(GRPO, every=1, on_finding="log")
    with torch.no_grad():
        policy.unread.copy_(torch.tensor([1.0, 1.0, 0.0]))

    def exchange() -> None:
        with torch.no_grad():
            policy.unread.copy_(torch.tensor([1.5, 0.5, 0.0]))

    assert updated(audit, policy, torch.optim.SGD([policy.unread], lr=0.1), exchange) == []


def test_parameters_that_have_no_value_here_are_left_out() -> None:
    """Those of other ranks between passes, or of another stage."""
    policy, audit = Policy(), Audit(GRPO, every=1, on_finding="log")
    policy.register_parameter("elsewhere", nn.Parameter(torch.empty(0)))
    policy.register_parameter("meta", nn.Parameter(torch.empty(3, device="meta")))
    found = [updated(audit, policy, trained(policy)) for _ in range(PATIENCE - 1)]
    assert found == [[]] * (PATIENCE - 1)
    assert audit.audited == PATIENCE - 1


def test_a_step_that_a_scaler_leaves_out_moves_nothing() -> None:
    """As docs/live.md writes it: the gradient of the parameters overflows, that of the logprobs does not."""
    policy, audit = Policy(), Audit(GRPO, every=1, on_finding="log")
    optimizer, scaler = trained(policy), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    rewards = torch.tensor([1.0, 0.0])
    steps = []
    for overflows in (True, False):
        optimizer.zero_grad()
        given = {"rewards": rewards, "group_ids": torch.zeros(2, dtype=torch.long), "loss_scale": scaler.get_scale()}
        before = policy.table.detach().clone()
        with audit.update(mask=MASK, model=policy, optimizer=optimizer, **given) as update:
            logprobs = update.watch(policy())
            scaler.scale(-(logprobs * (rewards - 0.5).unsqueeze(1)).mean()).backward()
            if overflows:
                assert policy.table.grad is not None
                policy.table.grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
        steps.append(not torch.equal(before, policy.table))
    assert (steps, [each.invariant for each in audit.findings if each.invariant.startswith("weights")]) == (
        [False, True],
        [],
    )


def test_an_optimizer_that_never_steps_is_told_under_a_scaler_of_one() -> None:
    policy, audit = Policy(), Audit(GRPO, every=1, on_finding="log")
    nothing = torch.optim.SGD([policy.unread], lr=0.1)
    assert updated(audit, policy, nothing) == ["weights.still"]


@pytest.mark.parametrize("wrap", [torch.compile, lambda model: nn.ModuleDict({"module": model})])
def test_a_run_may_be_resumed_in_another_wrapper(wrap: Any) -> None:
    policy, audit = Policy(), Audit(GRPO, every=1, on_finding="log")
    before = Weights(policy).moves().trained
    assert Weights(wrap(policy)).moves().trained == before
    assert updated(audit, policy, trained(policy)) == []
