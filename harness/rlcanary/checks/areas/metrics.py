"""Metrics of a training step: identities that hold on policy, and values that can be recomputed."""

import torch
from torch import Generator

from rlcanary.checks.check import check
from rlcanary.checks.subject import Call, Finding, NothingToCompare, Subject
from rlcanary.checks.worlds.descent import own_precision
from rlcanary.checks.worlds.states import precision, scheduled_rates
from rlcanary.checks.worlds.tiny_trainer import GROUPS, PAIR, build, new_state, reference_model, sampled, script
from rlcanary.checks.worlds.updates import declared
from rlcanary.contract.batch import Group

# Metrics that need no model to compute.
FROM_THE_BATCH = ("lr", "reward", "tokens")


def _expect(call: Call, expected: dict[str, float], told: str, source: list[str]) -> None:
    """Compare the metrics that both sides have; `source` is Python that makes `expected` in a snippet."""
    logged = {name: float(value) for name, value in call.output.items() if name in expected}
    if not logged:
        raise NothingToCompare(f"logs none of {', '.join(expected)}")
    call.subject.compared(len(logged))
    # A model's outputs are as exact as its weights; the absolute part covers logprobs of the order of ten in a mean that
    # cancels.
    rounding = torch.finfo(precision(call.given[0].model)).eps
    computed = {name: 0.0 if name in FROM_THE_BATCH else rounding for name in logged}
    allowed = {
        name: max(1e-3, 10 * rounding) * abs(expected[name]) + max(1e-4, 5 * rounding)
        for name, rounding in computed.items()
    }
    wrong = [name for name, got in logged.items() if not abs(got - expected[name]) <= allowed[name]]
    if wrong:
        name = wrong[0]
        lines = script(
            *source,
            f"got = adapter.train_step(*arguments)[{name!r}]",
            f"assert abs(got - expected[{name!r}]) <= {allowed[name]:.2g}, got",
        )
        values = "; ".join(f"{name} is {logged[name]:.6g}, not {expected[name]:.6g}" for name in wrong)
        magnitude = max(abs(logged[name] - expected[name]) / (abs(expected[name]) or 1.0) for name in wrong)
        raise Finding(f"{told}: {values}", call.snippet(lines), f"metrics {', '.join(wrong)}", magnitude)


@check("metrics.on_policy_identities", needs=("train_step",))
def on_policy_identities(subject: Subject, rng: Generator) -> None:
    """On the first update of a policy that equals its reference, ratios are 1, nothing is clipped and the KL is 0.

    Silent because a ratio of 1.02 or a clip fraction of 0.3 % looks like rounding. The cause is old logprobs from
    another pass, temperature or precision, or a trainer that did not start from the given weights. Look at every logged
    ratio, clip fraction and KL of step 0 before anything else.
    """
    expected = dict.fromkeys(("ratio_mean", "ratio_min", "ratio_max", "mult_prob_error"), 1.0)
    expected |= {"clip_fraction": 0.0, "kl": 0.0}
    for choice in ({}, {"temperature": 0.6}):
        with subject.case(choice):
            option = subject.configured(**choice)
            state = new_state(option, ref_model="tiny_llama()")
            batch = sampled(state.value.model, option.conventions, PAIR)
            call = option.call("train_step", state, batch)
            _expect(
                call,
                {**expected, "kl": 0.0},
                "on policy, with a reference that equals the policy",
                [f"expected = {expected | {'kl': 0.0}}"],
            )


@check("metrics.recomputed", needs=("train_step",))
def recomputed(subject: Subject, rng: Generator) -> None:
    """The logged learning rate, gradient norm, reward, KL, entropy, ratios and tokens are those of this update.

    Silent because a dashboard affects only people's decisions. Look for a learning rate that is read after the schedule
    has moved on, rewards before their weights, means over padding, the metrics of one worker, and a variable that was
    reused before it was logged.
    """
    for groups in (PAIR, GROUPS):
        with subject.case(f"{len(groups)} prompts"):
            _expect_recomputed(subject, groups)


def _expect_recomputed(subject: Subject, groups: list[Group]) -> None:
    given = reference_model(subject)
    state = new_state(subject, ref_model=given, learning_rate=1e-3, dressed="decaying({})")
    batch = sampled(state.value.model, subject.conventions, groups)
    ref_model = own_precision(state.value, given)
    metrics = declared(state.value.model, build(ref_model), batch, subject.conventions).metrics
    expected = metrics | {"lr": scheduled_rates(state.value, 1)[0][0]}
    source = [
        f"metrics = declared(arguments[0].model, {ref_model}, arguments[1], adapter.conventions).metrics",
        "expected = {**metrics, 'lr': scheduled_rates(arguments[0], 1)[0][0]}",
    ]
    _expect(
        subject.call("train_step", state, batch),
        expected,
        "computed again from the batch, logged metrics differ",
        source,
    )
