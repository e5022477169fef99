"""The losses other than the policy's, derived a second time: by hand, by sums over the vocabulary, by limits."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from rlcanary.contract.conventions import Conventions, Divergence, TokenAggregation
from rlcanary.contract.records.credit import ValueBatch
from rlcanary.contract.records.other_losses import DistillationBatch, OtherBatch, PreferenceBatch, SupervisedBatch
from rlcanary.reference import (
    accumulated_other_loss,
    distillation_advantages,
    distillation_loss,
    other_loss,
    other_pieces,
    preference_loss,
    supervised_loss,
)
from rlcanary.reference.objective.aggregation import aggregate_tokens
from rlcanary.reference.objective.distillation import divergence

SMOOTHED = Conventions(supervised_label_smoothing=0.25)
MASK = torch.tensor([[True, False, True, True], [True, True, False, False], [False, False, False, False]])


def logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def supervised() -> SupervisedBatch:
    ids = torch.tensor([[0, 3, 1, 2], [4, 0, -100, 99], [0, 0, 0, 0]])
    return SupervisedBatch(logits(3, 4, 5).requires_grad_(), ids, MASK)


def test_two_equal_logits_cost_log_two_per_label() -> None:
    batch = SupervisedBatch(torch.zeros(1, 3, 2), torch.tensor([[1, 0, 1]]), torch.ones(1, 3, dtype=torch.bool))
    output = supervised_loss(batch, Conventions())
    assert output.loss.item() == pytest.approx(math.log(2))
    assert output.metrics["perplexity"] == pytest.approx(2)
    assert output.metrics["tokens"] == 2


def test_supervised_loss_is_a_sum_over_its_labels_in_plain_python() -> None:
    batch, total, count = supervised(), 0.0, 0
    for row, ids in enumerate(batch.labels.tolist()):
        for place, label in list(enumerate(ids))[1:]:
            if label != -100:
                p = [math.exp(each) for each in batch.logits[row, place - 1].tolist()]
                share = [each / sum(p) for each in p]
                target = [0.25 / 5 + 0.75 * (index == label) for index in range(5)]
                total -= sum(t * math.log(each) for t, each in zip(target, share, strict=True))
                count += 1
    assert count == 3
    assert supervised_loss(batch, SMOOTHED).loss.item() == pytest.approx(total / count)


def test_gradient_of_a_label_is_the_distribution_minus_its_target() -> None:
    batch = supervised()
    (found,) = torch.autograd.grad(supervised_loss(batch, SMOOTHED).loss, batch.logits)
    expected = torch.zeros_like(batch.logits)
    for row, place, label in ((0, 1, 1), (0, 2, 2), (1, 0, 0)):
        expected[row, place] = batch.logits[row, place].detach().softmax(0) - 0.05
        expected[row, place, label] -= 0.75
    assert torch.allclose(found, expected / 3)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", 14 / 4),
        ("sequence_mean", (4 / 3 + 10) / 3),
        ("sequence_mean_nonempty", (4 / 3 + 10) / 2),
        ("token_sum", 14.0),
    ],
)
def test_aggregation_of_known_numbers(aggregation: TokenAggregation, expected: float) -> None:
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    values = torch.tensor([[1.0, 1.0, 2.0], [10.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert float(aggregate_tokens(values, mask, aggregation)) == pytest.approx(expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_untrained_positions_never_enter(value: float) -> None:
    batch = supervised()
    spoilt = batch.logits.detach().clone()
    spoilt[0, [0, 3]] = value
    spoilt[2] = value
    other = replace(batch, logits=spoilt.requires_grad_())
    losses = [supervised_loss(each, SMOOTHED).loss for each in (batch, other)]
    assert losses[0] == losses[1]
    (found,) = torch.autograd.grad(losses[1], other.logits)
    assert found.isfinite().all()


def test_nothing_trained_has_loss_zero() -> None:
    batch = replace(supervised(), mask=torch.zeros_like(MASK))
    output = supervised_loss(batch, SMOOTHED)
    (found,) = torch.autograd.grad(output.loss, batch.logits)
    assert (output.loss.item(), float(found.abs().sum())) == (0, 0)
    assert math.isnan(output.metrics["nll"])


STUDENT, TEACHER = (logits(4, 6, seed=seed).log_softmax(-1) for seed in (1, 2))


def under(name: Divergence, beta: float = 0.5) -> torch.Tensor:
    return divergence(STUDENT, TEACHER, Conventions(distillation_divergence=name, distillation_beta=beta))


def test_kl_of_known_coins() -> None:
    student, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    forward = 0.9 * math.log(1.8) + 0.1 * math.log(0.2)
    reverse = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    found = [divergence(student, teacher, Conventions(distillation_divergence=each)) for each in get_args(Divergence)]
    middle = [0.7 * math.log(0.7) + 0.3 * math.log(0.3), math.log(0.5), 0.9 * math.log(0.9) + 0.1 * math.log(0.1)]
    jsd = -middle[0] + (middle[1] + middle[2]) / 2
    expected = [forward, reverse, jsd, (forward + reverse) / 2]
    assert torch.cat(found).tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.8])
def test_jsd_is_the_entropy_of_the_mixture_minus_the_mean_entropy(beta: float) -> None:
    def entropy(p: torch.Tensor) -> torch.Tensor:
        return -(p * p.log()).sum(-1)

    p, q = TEACHER.exp(), STUDENT.exp()
    expected = entropy(beta * p + (1 - beta) * q) - beta * entropy(p) - (1 - beta) * entropy(q)
    assert torch.allclose(under("jsd", beta), expected)


def test_limits_of_jsd_are_forward_and_reverse_kl() -> None:
    beta = 1e-7
    assert torch.allclose(under("jsd", beta) / beta, under("forward_kl"), rtol=1e-4)
    assert torch.allclose(under("jsd", 1 - beta) / beta, under("reverse_kl"), rtol=1e-4)


def test_token_that_the_teacher_excludes_does_not_disturb_forward_kl() -> None:
    teacher = TEACHER.clone()
    teacher[:, 0] = -math.inf
    student = STUDENT.clone().requires_grad_()
    found = divergence(student, teacher, Conventions(distillation_divergence="forward_kl"))
    (slope,) = torch.autograd.grad(found.sum(), student)
    assert found.isfinite().all()
    assert torch.allclose(slope, -teacher.exp())


def distillation(temperature: float = 1.0) -> DistillationBatch:
    ids = torch.tensor([[0, 3, 1, 2], [4, 0, 1, 3], [0, 0, 0, 0]])
    return DistillationBatch(logits(3, 4, 5).requires_grad_(), logits(3, 4, 5, seed=3), ids, MASK, temperature)


def test_gradient_at_a_high_temperature_is_kept_by_its_square() -> None:
    """At a high temperature the loss is half the mean squared distance of centred logits (Hinton et al., section 2.1)."""
    batch = distillation(1e4)
    conventions = Conventions(distillation_divergence="forward_kl", distillation_temperature_squared=True)
    student, teacher = (each - each.mean(-1, keepdim=True) for each in (batch.logits, batch.teacher_logits))
    expected = (student - teacher).square().mean(-1)[MASK].mean() / 2
    assert distillation_loss(batch, conventions).loss.item() == pytest.approx(expected.item(), rel=1e-3)


def test_hard_labels_have_their_weight_at_temperature_one() -> None:
    batch = distillation(3.0)
    soft = distillation_loss(batch, Conventions()).loss
    hard = torch.nn.functional.cross_entropy(batch.logits[MASK], batch.token_ids[MASK])
    found = distillation_loss(batch, Conventions(distillation_label_weight=0.3)).loss
    assert found.item() == pytest.approx((0.7 * soft + 0.3 * hard).item())


def test_advantages_of_all_tokens_give_the_gradient_of_the_reverse_kl() -> None:
    given = logits(1, 1, 7).requires_grad_()
    batch = DistillationBatch(given, logits(1, 1, 7, seed=4), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool))
    (exact,) = torch.autograd.grad(distillation_loss(batch, Conventions()).loss, given)
    student, teacher = given.log_softmax(-1).reshape(7, 1), batch.teacher_logits.log_softmax(-1).reshape(7, 1)
    advantages = distillation_advantages(student, teacher, torch.ones(7, 1, dtype=torch.bool))
    assert not advantages.requires_grad
    (sampled,) = torch.autograd.grad(-(student.detach().exp() * advantages * student).sum(), given)
    assert torch.allclose(sampled, exact)


def pairs() -> PreferenceBatch:
    """Two pairs: sums of log-ratios 1.5 and -0.5, then -1 and 1; padding is NaN."""
    chosen = torch.tensor([[-1.0, -2.0], [-3.0, math.nan]]).requires_grad_()
    rejected = torch.tensor([[-1.0, math.nan, math.nan], [-1.0, -1.0, -1.0]]).requires_grad_()
    masks = ~chosen.isnan(), ~rejected.isnan()
    ref_chosen = torch.tensor([[-1.5, -3.0], [-2.0, math.nan]])
    ref_rejected = torch.tensor([[-0.5, math.nan, math.nan], [-2.0, -1.0, -1.0]])
    return PreferenceBatch(chosen, rejected, *masks, ref_chosen, ref_rejected)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


DIFFERENCES = (2.0, -2.0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [softplus(-0.5 * x) for x in DIFFERENCES]),
        ({"preference_label_smoothing": 0.1}, [0.9 * softplus(-x / 2) + 0.1 * softplus(x / 2) for x in DIFFERENCES]),
        ({"preference_margin": 0.3}, [softplus(0.3 - 0.5 * x) for x in DIFFERENCES]),
        ({"preference_kind": "hinge"}, [0.0, 2.0]),
        ({"preference_kind": "ipo"}, [1.0, 9.0]),
        ({"preference_reference": False}, [softplus(1.0), softplus(0.0)]),
        ({"preference_length_normalised": True}, [softplus(-0.625), softplus(0.5 * (1 + 1 / 3))]),
        ({"preference_supervised_coef": 0.5}, [softplus(-0.5 * x) + 0.5 * 6 / 3 for x in DIFFERENCES]),
    ],
)
def test_preference_loss_of_known_pairs(changes: dict[str, object], expected: list[float]) -> None:
    output = preference_loss(pairs(), Conventions(preference_beta=0.5).replace(**changes))
    assert output.loss.item() == pytest.approx(sum(expected) / 2)


def test_rewards_of_known_pairs() -> None:
    metrics = preference_loss(pairs(), Conventions(preference_beta=0.5)).metrics
    named = ("chosen_reward", "rejected_reward", "reward_margin", "reward_accuracy")
    assert [metrics[name] for name in named] == pytest.approx([0.125, 0.125, 0.0, 0.5])


def test_gradient_of_dpo_is_beta_times_the_probability_that_the_order_is_wrong() -> None:
    batch = pairs()
    loss = preference_loss(batch, Conventions(preference_beta=0.5)).loss
    chosen, rejected = torch.autograd.grad(loss, (batch.chosen_logprobs, batch.rejected_logprobs))
    weights = [0.5 / (1 + math.exp(0.5 * x)) / 2 for x in DIFFERENCES]
    assert chosen.flatten().tolist() == pytest.approx([-weights[0], -weights[0], -weights[1], 0])
    assert rejected.flatten().tolist() == pytest.approx([weights[0], 0, 0, *[weights[1]] * 3])


def test_declared_reference_that_the_batch_lacks_is_an_error() -> None:
    with pytest.raises(ValueError, match="reference logprobs"):
        preference_loss(replace(pairs(), ref_chosen_logprobs=None), Conventions())


@pytest.mark.parametrize(
    "changes",
    [
        {"supervised_label_smoothing": 1.0},
        {"distillation_beta": 0.0},
        {"distillation_label_weight": -0.1},
        {"preference_beta": 0.0},
        {"preference_label_smoothing": 0.5},
        {"preference_kind": "dpo"},
    ],
)
def test_value_that_a_convention_cannot_take_is_an_error(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        Conventions().replace(**changes)


LENGTHS = torch.tensor([3, 1, 4, 2, 0, 2])
TRAINED = torch.arange(4) < LENGTHS.unsqueeze(1)


def update(kind: str) -> OtherBatch:
    """An update of six rows of uneven lengths, one of them empty where its loss knows empty rows."""
    if kind == "supervised":
        ids = torch.arange(30).reshape(6, 5) % 5
        return SupervisedBatch(logits(6, 5, 5).requires_grad_(), ids, torch.nn.functional.pad(TRAINED, (1, 0)))
    if kind == "distillation":
        ids = torch.arange(24).reshape(6, 4) % 5
        return DistillationBatch(logits(6, 4, 5).requires_grad_(), logits(6, 4, 5, seed=1), ids, TRAINED)
    if kind == "preference":
        chosen, rejected = TRAINED.clone(), TRAINED.flip(0).clone()
        chosen[:, 0] = rejected[:, 0] = True
        policy = [-logits(6, 4, seed=seed).abs().requires_grad_() for seed in (2, 3)]
        ref = [-logits(6, 4, seed=seed).abs() for seed in (4, 5)]
        return PreferenceBatch(*(each.detach().requires_grad_() for each in policy), chosen, rejected, *ref)
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    return ValueBatch(logits(6, 4).requires_grad_(), logits(6, 4, seed=1), TRAINED, logits(6, 4, seed=2), groups)


def trained_tensor(batch: OtherBatch) -> torch.Tensor:
    return next(value for value in vars(batch).values() if getattr(value, "requires_grad", False))


# The weight of row b in the whole: the loss of the row alone, times this, adds up to the loss of the update.
BY_TOKENS = {
    "supervised_aggregation": "token_mean",
    "distillation_aggregation": "token_mean",
    "value_aggregation": "token_mean",
}
BY_ROWS = dict.fromkeys(BY_TOKENS, "sequence_mean")


@pytest.mark.parametrize("kind", ["supervised", "distillation", "critic"])
@pytest.mark.parametrize("changes", [BY_TOKENS, BY_ROWS], ids=["tokens", "rows"])
@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_pieces_weigh_a_row_by_its_tokens_or_as_one_of_the_rows(kind: str, changes: dict[str, str], n: int) -> None:
    conventions, batch = Conventions().replace(**changes), update(kind)
    alone = [other_loss(batch.rows(torch.tensor([row])), conventions).loss for row in range(6)]
    weights = LENGTHS / LENGTHS.sum() if changes is BY_TOKENS else torch.ones(6) / 6
    expected = sum(weight * loss for weight, loss in zip(weights.tolist(), alone, strict=True))
    output = accumulated_other_loss(batch, n, conventions)
    assert output.loss.item() == pytest.approx(expected.item())
    leaf = trained_tensor(batch)
    found, wanted = (torch.autograd.grad(each, leaf, retain_graph=True)[0] for each in (output.loss, expected))
    assert torch.allclose(found, wanted)
    assert output.metrics == pytest.approx(other_loss(batch, conventions).metrics, nan_ok=True)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_pieces_of_pairs_weigh_pairs_alike_and_the_supervised_term_as_declared(aggregation: str, n: int) -> None:
    conventions = Conventions().replace(preference_supervised_coef=0.5, supervised_aggregation=aggregation)
    batch = update("preference")
    assert isinstance(batch, PreferenceBatch)
    pairs_alone = conventions.replace(preference_supervised_coef=0.0)
    expected = sum(preference_loss(batch.rows(torch.tensor([row])), pairs_alone).loss for row in range(6)) / 6
    nll = -batch.chosen_logprobs * batch.chosen_mask
    lengths = batch.chosen_mask.sum(1)
    weight = 1 / lengths.sum() if aggregation == "token_mean" else 1 / (6 * lengths.unsqueeze(1))
    expected = expected + 0.5 * (nll * weight).sum()
    output = accumulated_other_loss(batch, n, conventions)
    assert output.loss.item() == pytest.approx(expected.item())
    leaf = batch.chosen_logprobs
    found, wanted = (torch.autograd.grad(each, leaf, retain_graph=True)[0] for each in (output.loss, expected))
    assert torch.allclose(found, wanted)


def test_pieces_of_a_critic_keep_groups_whole_where_they_are_aggregated() -> None:
    conventions, batch = Conventions().replace(value_aggregation="group_token_mean"), update("critic")
    groups = [other_loss(batch.rows(torch.tensor([row, row + 1])), conventions).loss for row in (0, 2, 4)]
    assert accumulated_other_loss(batch, 3, conventions).loss.item() == pytest.approx(sum(groups).item() / 3)
    with pytest.raises(ValueError, match="cannot cut 3 rows or groups into 4"):
        other_pieces(batch, 4, conventions)


def test_counts_that_a_batch_tells_are_those_of_its_pieces_too() -> None:
    told = replace(update("supervised"), global_tokens=40.0, global_sequences=20.0)
    assert {(piece.global_tokens, piece.global_sequences) for piece in other_pieces(told, 3, Conventions())} == {
        (40.0, 20.0)
    }


def test_more_pieces_than_rows_are_an_error() -> None:
    with pytest.raises(ValueError, match="cannot cut 6 rows into 7 pieces"):
        other_pieces(update("supervised"), 7, Conventions())
