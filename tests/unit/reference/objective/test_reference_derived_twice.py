"""The policy loss of the reference, value and gradient, against `plain_loss` over the grid of conventions."""

from dataclasses import replace
from itertools import cycle, product
from typing import get_args

import plain_loss
import pytest
import torch

from rlcanary.contract.batch import PolicyBatch
from rlcanary.contract.conventions import Aggregation, Conventions
from rlcanary.contract.presets import PRESETS
from rlcanary.reference import (
    accumulated_loss,
    aggregate,
    count_sequences,
    importance_ratio,
    importance_weights,
    policy_loss,
    rewards_with_kl,
    split,
)

AGGREGATIONS = get_args(Aggregation)
LENGTHS = (3, 0, 1, 4, 2, 1)
OBJECTIVES = {
    "clip": {},
    "clip of 3e-4": {"clip_low": 3e-4, "clip_high": 4e-4},
    "clip above only": {"clip_low": None, "clip_high": 0.1},
    "clip below only": {"clip_low": 0.1, "clip_high": None},
    "unclipped": {"clip_low": None, "clip_high": None},
    "dual clip": {"dual_clip": 1.3},
    "dual clip of the unclipped": {"dual_clip": 1.3, "clip_low": None, "clip_high": None},
    "log-ratio clamp": {"log_ratio_clamp": 0.25, "clip_high": 0.4, "dual_clip": 1.5},
    "cispo": {"objective": "cispo", "clip_low": None, "clip_high": 0.3},
    "cispo with both bounds and a log-ratio clamp": {"objective": "cispo", "log_ratio_clamp": 0.2, "clip_low": 0.1},
    "dynamic bounds": {"clip_bounds": "dynamic", "clip_low": 0.1, "clip_high": 0.15},
    "dynamic bounds of rare tokens": {"clip_bounds": "dynamic", "clip_low": 0.02, "clip_high": 0.02, "dual_clip": 1.5},
    "dynamic bound above only": {"clip_bounds": "dynamic", "clip_low": None, "clip_high": 0.1},
    "gmpo with dynamic bounds": {"objective": "gmpo", "clip_bounds": "dynamic", "clip_low": 0.1, "clip_high": 0.05},
    "cispo with dynamic bounds": {"objective": "cispo", "clip_bounds": "dynamic", "clip_low": 0.1, "clip_high": 0.05},
    "tokens of high entropy": {"top_entropy": 0.3},
    "the token of the highest entropy": {"top_entropy": 0.01, "objective": "reinforce"},
    "reinforce": {"objective": "reinforce"},
    "gmpo": {"objective": "gmpo", "clip_low": 0.2, "clip_high": 0.3},
    "gmpo unclipped": {"objective": "gmpo", "clip_low": None, "clip_high": None},
    "sapo": {"objective": "sapo"},
    "sapo of other temperatures": {
        "objective": "sapo",
        "sapo_temperature_positive": 3.0,
        "sapo_temperature_negative": 0.4,
    },
    "off-policy mask": {"off_policy_mask": 0.05},
    "off-policy mask below zero": {"off_policy_mask": -0.1, "objective": "reinforce"},
}
CORRECTIONS = [
    {},
    *(
        {"importance_level": level, "importance_mode": mode, "importance_low": 0.8, "importance_high": 1.2}
        for level, mode in product(("token", "sequence"), ("truncate", "mask"))
    ),
]
GRADIENT_OF_THE_KL = {"plain": {}, "score term": {"kl_score_term": True}, "ratio-weighted": {"kl_ratio_weighted": True}}


def batch_of(seed, lengths=LENGTHS, holes=False, per_token=False):
    """Float64, ratios and weights on both sides of every bound; NaN wherever nothing is trained."""
    rng = torch.Generator().manual_seed(seed)
    shape = len(lengths), max(lengths) + 1

    def uniform(low, high, shape=shape):
        return low + (high - low) * torch.rand(shape, generator=rng, dtype=torch.float64)

    mask = torch.arange(shape[1]) < torch.tensor(lengths).unsqueeze(1)
    if holes:
        mask &= uniform(0, 1) < 0.7
    logprobs = uniform(-3, -0.1)
    old = logprobs + uniform(-0.6, 0.6)
    batch = PolicyBatch(
        logprobs=logprobs,
        old_logprobs=old,
        advantages=uniform(-2, 2, shape if per_token else shape[:1]),
        mask=mask,
        ref_logprobs=logprobs + uniform(-0.8, 0.8),
        sampler_logprobs=old + uniform(-0.5, 0.5),
        entropy=uniform(0, 2),
        group_ids=torch.tensor([7, 3, 7, 3, 5, 5, 7, 3])[: len(lengths)],
    )
    batch.advantages[-1] = 0
    for name in ("logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs", "entropy"):
        setattr(batch, name, getattr(batch, name).masked_fill(~mask, torch.nan))
    batch.logprobs.requires_grad_()
    return batch


def plain(batch, conventions):
    """Loss, gradient and metrics of `plain_loss`, the gradient as [B, T]."""
    rows, logprobs = plain_loss.rows_of(batch)
    slopes = torch.zeros_like(batch.logprobs)
    slopes[batch.mask] = torch.tensor(
        [slope for row in plain_loss.gradient(rows, logprobs, conventions) for slope in row], dtype=torch.float64
    )
    return (
        plain_loss.loss(rows, logprobs, logprobs, conventions),
        slopes,
        plain_loss.metrics(rows, logprobs, conventions),
    )


def assert_derived_twice(batch, conventions):
    loss, gradient, metrics = plain(batch, conventions)
    got = policy_loss(batch, conventions)
    slope = torch.autograd.grad(got.loss, batch.logprobs)[0]
    assert got.loss.item() == pytest.approx(loss, rel=1e-9, abs=1e-12), conventions
    assert torch.allclose(slope, gradient, rtol=1e-6, atol=1e-8), (conventions, slope - gradient)
    assert got.metrics == pytest.approx(metrics, rel=1e-9, abs=1e-12, nan_ok=True), conventions


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_ratio_aggregation_and_correction(objective):
    batches = cycle(batch_of(seed, holes=seed % 2 == 1, per_token=seed > 1) for seed in range(4))
    entropy, estimators = cycle((0.0, 0.1, 0.1)), cycle(("k1", "k2", "k3"))
    for level, aggregation, correction in product(("token", "sequence"), AGGREGATIONS, CORRECTIONS):
        conventions = Conventions(
            ratio_level=level,
            aggregation=aggregation,
            aggregation_constant=7.0,
            entropy_coef=next(entropy),
            approx_kl_estimator=next(estimators),
            **OBJECTIVES[objective],
            **correction,
        )
        assert_derived_twice(next(batches), conventions)


@pytest.mark.parametrize("gradient", GRADIENT_OF_THE_KL)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_every_kl_estimator_direction_clamp_and_gradient(estimator, gradient):
    batches = cycle(batch_of(seed, holes=seed % 2 == 1) for seed in range(3))
    aggregations = cycle(AGGREGATIONS)
    for direction, held, bound, level, ratio_clamp in product(
        ("policy_to_reference", "reference_to_policy"), (None, 0.3), (None, 0.1), ("token", "sequence"), (None, 0.2)
    ):
        conventions = Conventions(
            kl_estimator=estimator,
            kl_direction=direction,
            kl_coef=0.7,
            kl_input_clamp=held,
            kl_output_clamp=bound,
            ratio_level=level,
            log_ratio_clamp=ratio_clamp,
            aggregation=next(aggregations),
            **GRADIENT_OF_THE_KL[gradient],
        )
        assert_derived_twice(next(batches), conventions)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_with_all_its_terms(name):
    for seed, terms in enumerate(({}, {"kl_coef": 0.3, "entropy_coef": 0.1, "importance_level": "sequence"})):
        assert_derived_twice(batch_of(seed, holes=True), PRESETS[name].replace(**terms))


@pytest.mark.parametrize("kl", AGGREGATIONS)
@pytest.mark.parametrize("entropy", AGGREGATIONS)
def test_every_aggregation_per_term(kl, entropy):
    conventions = Conventions(
        kl_coef=0.7, entropy_coef=0.1, kl_aggregation=kl, entropy_aggregation=entropy, aggregation_constant=7.0
    )
    assert_derived_twice(batch_of(7, holes=True), conventions.replace(aggregation="token_mean"))
    assert_derived_twice(batch_of(8), conventions.replace(aggregation="sequence_mean", top_entropy=0.5))


def test_the_kl_in_the_reward_is_logged_and_not_in_the_loss():
    conventions = Conventions(kl_coef=0.7, kl_placement="reward", kl_estimator="k1")
    assert_derived_twice(batch_of(0), conventions)


def counts(rows, conventions):
    """How many trained tokens rows have, and how many sequences the aggregation divides by."""
    lengths = [len(row.tokens) for row in rows]
    if conventions.aggregation == "group_token_mean":
        return sum(lengths), len({row.group for row in rows})
    nonempty = conventions.aggregation.endswith("nonempty")
    return sum(lengths), sum(length > 0 for length in lengths) if nonempty else len(lengths)


# Rows in two and in three parts: uneven, out of order, one of them with nothing trained. Then with groups kept whole.
PARTS = [[[0, 3, 4], [5, 2, 1]], [[1], [5, 0], [4, 3, 2]]]
PARTS_OF_GROUPS = [[[4, 5], [3, 0, 2, 1]], [[0, 2], [5, 4], [1, 3]]]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_parts_with_the_counts_of_the_whole_add_up_to_it(aggregation):
    conventions = Conventions(
        aggregation=aggregation, aggregation_constant=7.0, kl_coef=0.3, entropy_coef=0.1, importance_level="token"
    )
    batch = batch_of(5)
    rows, _ = plain_loss.rows_of(batch)
    tokens, sequences = counts(rows, conventions)
    assert count_sequences(batch, conventions) == sequences
    loss, gradient, _ = plain(batch, conventions)
    whole = replace(batch, global_tokens=tokens, global_sequences=sequences)
    for parts in PARTS_OF_GROUPS if aggregation == "group_token_mean" else PARTS:
        losses = [policy_loss(whole.rows(torch.tensor(part)), conventions).loss for part in parts]
        assert sum(losses).item() == pytest.approx(loss)
        assert torch.allclose(torch.autograd.grad(sum(losses), batch.logprobs)[0], gradient, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_micro_batches_are_the_whole_update(aggregation, pieces):
    conventions = Conventions(aggregation=aggregation, kl_coef=0.3, entropy_coef=0.1, ratio_level="sequence")
    batch = batch_of(6, holes=True)
    loss, gradient, metrics = plain(batch, conventions)
    got = accumulated_loss(batch, pieces, conventions)
    assert got.loss.item() == pytest.approx(loss)
    assert torch.allclose(torch.autograd.grad(got.loss, batch.logprobs)[0], gradient, rtol=1e-6, atol=1e-8)
    assert got.metrics == pytest.approx(metrics)
    assert len(split(batch, pieces, conventions)) == pieces


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_token_values_as_one_number(aggregation):
    conventions = Conventions(aggregation=aggregation, aggregation_constant=3.0)
    batch = batch_of(7, holes=True)
    rows, _ = plain_loss.rows_of(batch)
    values = torch.where(batch.mask, torch.arange(batch.mask.numel()).view(batch.mask.shape), torch.nan).double()
    terms = [row[keep].tolist() for row, keep in zip(values, batch.mask, strict=True)]
    assert aggregate(values, batch, conventions).item() == pytest.approx(plain_loss.aggregate(rows, terms, conventions))


@pytest.mark.parametrize("correction", CORRECTIONS[1:], ids=str)
def test_importance_weights_of_every_token(correction):
    conventions = Conventions(**correction)
    batch = batch_of(8, holes=True)
    rows, _ = plain_loss.rows_of(batch)
    expected = [plain_loss.correction(token, row, conventions) for row in rows for token in row.tokens]
    got = importance_weights(batch.old_logprobs, batch.sampler_logprobs, batch.mask, conventions)
    assert got[batch.mask].tolist() == pytest.approx(expected)
    assert not got[~batch.mask].any()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bound", [None, 0.2])
def test_importance_ratios_of_every_token_and_their_gradient(level, bound):
    conventions = Conventions(ratio_level=level, log_ratio_clamp=bound)
    batch = batch_of(9, holes=True)
    rows, logprobs = plain_loss.rows_of(batch)
    got = importance_ratio(batch.logprobs, batch.old_logprobs, batch.mask, conventions)
    expected = [plain_loss.ratios(row, values, conventions) for row, values in zip(rows, logprobs, strict=True)]
    assert got[batch.mask].tolist() == pytest.approx([ratio for row in expected for ratio in row])
    # On policy the surrogate without clipping is -Σ ratio, whose gradient is derived above.
    conventions = conventions.replace(clip_low=None, clip_high=None, aggregation="sequence_sum")
    ones = replace(batch, advantages=torch.ones(len(rows), dtype=torch.float64))
    gradient = torch.autograd.grad(got[batch.mask].sum(), batch.logprobs)[0]
    assert torch.allclose(-gradient / len(rows), plain(ones, conventions)[1], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("bound", [None, 0.2])
def test_rewards_minus_the_kl_of_the_row_or_of_each_token(estimator, bound):
    conventions = Conventions(
        kl_estimator=estimator, kl_coef=0.4, kl_placement="reward", kl_input_clamp=bound, kl_score_term=True
    )
    batch = batch_of(10, holes=True)
    rows, logprobs = plain_loss.rows_of(batch)
    estimates = [
        [plain_loss.kl(logprob, logprob, token, conventions) for token, logprob in zip(row.tokens, values, strict=True)]
        for row, values in zip(rows, logprobs, strict=True)
    ]
    per_row = (
        rewards_with_kl(batch.advantages, batch.logprobs, batch.ref_logprobs, batch.mask, conventions)
        - batch.advantages
    )
    assert per_row.tolist() == pytest.approx([-0.4 * sum(row) for row in estimates])
    per_token = rewards_with_kl(
        torch.zeros_like(batch.logprobs), batch.logprobs, batch.ref_logprobs, batch.mask, conventions
    )
    assert per_token[batch.mask].tolist() == pytest.approx([-0.4 * estimate for row in estimates for estimate in row])
    assert not per_token[~batch.mask].any()


@pytest.mark.parametrize(
    "clamps",
    [{"kl_output_clamp": 2.0}, {"kl_input_clamp": 2.0}, {"kl_input_clamp": 20.0, "kl_output_clamp": 2.0}],
    ids=str,
)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("gradient", GRADIENT_OF_THE_KL.values(), ids=GRADIENT_OF_THE_KL)
def test_a_token_held_by_a_clamp_has_no_gradient(estimator, clamps, gradient):
    """Also where the estimate overflows, which 0 × ∞ would turn into NaN."""
    conventions = Conventions(kl_estimator=estimator, kl_coef=1.0, clip_low=None, clip_high=None, **clamps, **gradient)
    for logprob, ref in ((-1.0, -4.0), (-4.0, -1.0), (-200.0, -1.0), (-1.0, -200.0)):
        logprobs = torch.tensor([[logprob]], requires_grad=True)
        batch = PolicyBatch(
            logprobs, logprobs.detach(), torch.zeros(1), torch.ones(1, 1, dtype=torch.bool), torch.tensor([[ref]])
        )
        slope = torch.autograd.grad(policy_loss(batch, conventions).loss, logprobs)[0]
        assert slope.item() == 0.0, (logprob, ref)


def test_a_ratio_that_overflows_has_no_gradient_where_the_clamp_holds_its_kl():
    conventions = Conventions(kl_coef=1.0, kl_ratio_weighted=True, kl_output_clamp=2.0)
    logprobs = torch.tensor([[-1.0]], requires_grad=True)
    old, ref, mask = torch.tensor([[-200.0]]), torch.tensor([[-2.0]]), torch.ones(1, 1, dtype=torch.bool)
    loss = policy_loss(PolicyBatch(logprobs, old, torch.zeros(1), mask, ref), conventions).loss
    assert (loss.item(), torch.autograd.grad(loss, logprobs)[0].item()) == (2.0, 0.0)


@pytest.mark.parametrize("bound", [None, 0.2])
def test_the_kl_is_weighted_by_the_ratios_of_its_tokens_at_every_level(bound):
    """A ratio of the row would carry the KL of one token into the gradients of the others."""
    batch = batch_of(11)
    batch.advantages.zero_()
    by_level = {}
    for level in ("token", "sequence"):
        conventions = Conventions(kl_coef=1.0, kl_ratio_weighted=True, ratio_level=level, log_ratio_clamp=bound)
        loss = policy_loss(batch, conventions).loss
        by_level[level] = loss, torch.autograd.grad(loss, batch.logprobs)[0]
    torch.testing.assert_close(by_level["sequence"], by_level["token"])


def test_the_score_function_part_of_the_kl_is_not_counted_twice():
    with pytest.raises(ValueError, match="kl_ratio_weighted together"):
        Conventions(kl_score_term=True, kl_ratio_weighted=True)


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_tokens_of_high_entropy_are_those_of_the_whole_in_any_number_of_pieces(pieces):
    batch, conventions = batch_of(8), Conventions(top_entropy=0.4, entropy_coef=0.1, aggregation="token_mean")
    loss, gradient, _ = plain(batch, conventions)
    got = accumulated_loss(batch, pieces, conventions)
    assert got.loss.item() == pytest.approx(loss, rel=1e-9)
    assert torch.allclose(torch.autograd.grad(got.loss, batch.logprobs)[0], gradient, rtol=1e-6, atol=1e-8)
