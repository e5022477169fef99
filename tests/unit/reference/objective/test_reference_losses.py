"""The laws that the policy loss has to keep. Its values and gradients are in test_reference_derived_twice.py."""

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcanary.contract.batch import PolicyBatch
from rlcanary.contract.presets import CISPO, DAPO, GRPO, GSPO, PRESETS
from rlcanary.reference import (
    accumulated_loss,
    aggregate,
    count_sequences,
    importance_ratio,
    importance_weights,
    policy_loss,
    split,
)

AGGREGATIONS = [
    "token_mean",
    "sequence_mean",
    "sequence_mean_nonempty",
    "sequence_sum",
    "sequence_sum_nonempty",
    "constant",
    "group_token_mean",
]
EVERYTHING = {"kl_coef": 0.3, "entropy_coef": 0.1, "importance_level": "token"}
NAMES = ("logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs")
few = settings(max_examples=15, derandomize=True, deadline=None)


def ragged(seed=0, lengths=(5, 1, 0, 7, 3, 6), spread=0.6, dtype=torch.float64, groups=None):
    """A random batch, float64, whose ratios lie on both sides of every clipping bound."""
    rng = torch.Generator().manual_seed(seed)
    shape = len(lengths), max(lengths)
    mask = torch.arange(shape[1]) < torch.tensor(lengths).unsqueeze(1)

    def noise(scale):
        return scale * torch.randn(shape, generator=rng, dtype=torch.float64)

    logprobs = -0.1 - torch.rand(shape, generator=rng, dtype=torch.float64) * 3
    batch = PolicyBatch(
        logprobs=logprobs,
        old_logprobs=logprobs + noise(spread),
        advantages=torch.randn(shape[0], generator=rng, dtype=torch.float64),
        mask=mask,
        ref_logprobs=logprobs + noise(0.5),
        sampler_logprobs=logprobs + noise(0.3),
        entropy=torch.rand(shape, generator=rng, dtype=torch.float64),
        group_ids=torch.arange(shape[0]) // 2 if groups is None else torch.tensor(groups),
    )
    return as_dtype(batch, dtype)


def as_dtype(batch, dtype):
    tensors = {
        field.name: value.detach().to(dtype)
        for field in fields(batch)
        if isinstance(value := getattr(batch, field.name), torch.Tensor) and value.is_floating_point()
    }
    tensors["logprobs"].requires_grad_()
    return replace(batch, **tensors)


def loss_and_gradient(batch, conventions, loss=policy_loss):
    output = loss(batch, conventions)
    return output.loss.detach(), torch.autograd.grad(output.loss, batch.logprobs)[0]


VARIANTS = {
    **{f"preset {name}": conventions for name, conventions in PRESETS.items()},
    **{name: GRPO.replace(aggregation=name, aggregation_constant=7.0) for name in AGGREGATIONS},
    "dual clip": DAPO.replace(dual_clip=1.4),
    "unclipped": GRPO.replace(clip_low=None, clip_high=None),
    "clip above only": GRPO.replace(clip_low=None),
    "log-ratio clamp": GRPO.replace(log_ratio_clamp=0.15),
    "log-ratio clamp of sequences": GSPO.replace(log_ratio_clamp=0.15, clip_low=0.2, clip_high=0.2),
    "cispo with both bounds": CISPO.replace(clip_low=0.3, clip_high=0.3),
    "gspo with wide bounds": GSPO.replace(clip_low=0.1, clip_high=0.1),
    **{f"kl {name}": GRPO.replace(kl_coef=0.5, kl_estimator=name) for name in ("k1", "k2", "k3", "abs")},
    "kl of the other direction": GRPO.replace(kl_coef=0.5, kl_direction="reference_to_policy"),
    "kl clamps": GRPO.replace(kl_coef=0.5, kl_input_clamp=0.8, kl_output_clamp=0.1),
    "kl score term": GRPO.replace(kl_coef=0.5, kl_score_term=True),
    "kl ratio-weighted": DAPO.replace(kl_coef=0.5, kl_ratio_weighted=True),
    "kl in the reward": GRPO.replace(kl_coef=0.5, kl_placement="reward"),
    "entropy": GRPO.replace(entropy_coef=0.2),
    **{
        f"importance {level} {mode}": DAPO.replace(
            importance_level=level, importance_mode=mode, importance_low=0.8, importance_high=1.2
        )
        for level in ("token", "sequence")
        for mode in ("truncate", "mask")
    },
    "everything": DAPO.replace(**EVERYTHING),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_float32_is_within_rounding_of_float64(name):
    batch = ragged(seed=1)
    exact, exact_gradient = loss_and_gradient(batch, VARIANTS[name])
    got, gradient = loss_and_gradient(as_dtype(batch, torch.float32), VARIANTS[name])
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("garbage", [-50.0, math.nan, math.inf, -math.inf, 1e9])
@pytest.mark.parametrize("name", [*PRESETS, "everything"])
def test_masked_positions_are_immune(name, garbage):
    conventions = PRESETS.get(name, DAPO).replace(**EVERYTHING)
    batch = ragged(dtype=torch.float32)
    clean = policy_loss(batch, conventions)
    gradient = torch.autograd.grad(clean.loss, batch.logprobs)[0]
    for field in (*NAMES, "entropy"):
        value = getattr(batch, field).detach().masked_fill(~batch.mask, garbage).requires_grad_(field == "logprobs")
        dirty = replace(batch, **{field: value})
        output = policy_loss(dirty, conventions)
        assert output.loss.item() == clean.loss.item(), field
        assert torch.equal(torch.autograd.grad(output.loss, dirty.logprobs)[0], gradient), field
        assert output.metrics == clean.metrics, field


@pytest.mark.parametrize("name", NAMES)
def test_a_trained_token_that_nobody_scored_is_an_error(name):
    batch = ragged()
    values = getattr(batch, name).detach().clone()
    values[3, 2] = math.nan
    with pytest.raises(ValueError, match=rf"{name} is NaN .* row 3, position 2"):
        policy_loss(replace(batch, **{name: values}), DAPO.replace(**EVERYTHING))


def test_unscored_tokens_make_a_metric_nan_where_the_loss_does_not_need_them():
    batch = ragged()
    unscored = torch.full_like(batch.logprobs, math.nan).detach()
    output = policy_loss(replace(batch, ref_logprobs=unscored, sampler_logprobs=unscored, entropy=unscored), GRPO)
    assert output.loss.isfinite()
    assert all(math.isnan(output.metrics[name]) for name in ("kl", "mult_prob_error", "entropy"))


@pytest.mark.parametrize(
    ("field", "asked_by"),
    [
        ("ref_logprobs", {"kl_coef": 0.1}),
        ("sampler_logprobs", {"importance_level": "token"}),
        ("entropy", {"entropy_coef": 0.1}),
        ("group_ids", {"aggregation": "group_token_mean"}),
    ],
)
def test_what_the_conventions_ask_for_has_to_be_there(field, asked_by):
    with pytest.raises(ValueError, match=field):
        policy_loss(replace(ragged(), **{field: None}), GRPO.replace(**asked_by))


@pytest.mark.parametrize("shape", [(1,), (7,), (6, 1), (1, 7)])
def test_advantages_are_never_broadcast_by_accident(shape):
    with pytest.raises(ValueError, match="advantages"):
        policy_loss(replace(ragged(), advantages=torch.ones(shape)), GRPO)


def test_advantages_per_token_equal_those_per_row():
    batch = ragged(lengths=(3, 3, 3))
    per_token = replace(batch, advantages=batch.advantages.unsqueeze(1).expand(3, 3))
    assert loss_and_gradient(batch, GRPO)[0] == loss_and_gradient(per_token, GRPO)[0]
    assert torch.equal(loss_and_gradient(batch, GRPO)[1], loss_and_gradient(per_token, GRPO)[1])


@pytest.mark.parametrize("field", ["old_logprobs", "advantages", "ref_logprobs", "sampler_logprobs"])
def test_only_the_policy_carries_a_gradient(field):
    batch = ragged()
    leaf = getattr(batch, field).detach().requires_grad_()
    loss = policy_loss(replace(batch, **{field: leaf}), DAPO.replace(**EVERYTHING)).loss
    assert torch.autograd.grad(loss, leaf, allow_unused=True)[0] is None


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_without_a_trained_token_has_loss_and_gradient_zero_and_no_metrics(aggregation):
    batch = replace(ragged(), mask=torch.zeros(6, 7, dtype=torch.bool))
    output = policy_loss(batch, GRPO.replace(aggregation=aggregation, **EVERYTHING))
    assert output.loss.item() == 0
    assert not torch.autograd.grad(output.loss, batch.logprobs)[0].any()
    assert all(math.isnan(value) for value in output.metrics.values())


def one_token(log_ratio, advantage, conventions, dtype=torch.float32):
    logprobs = torch.tensor([[-1.0]], dtype=dtype, requires_grad=True)
    old = torch.tensor([[-1.0 - log_ratio]], dtype=dtype)
    batch = PolicyBatch(logprobs, old, torch.tensor([advantage], dtype=dtype), torch.ones(1, 1, dtype=torch.bool))
    output = policy_loss(batch, conventions)
    return output.loss.item(), torch.autograd.grad(output.loss, logprobs)[0].item(), output.metrics["clip_fraction"]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 1.0, -1.0, -1.0),
        (1.5, 1.0, -1.2, 0.0),
        (0.5, 1.0, -0.5, -0.5),
        (1.5, -1.0, 1.5, 1.5),
        (0.5, -1.0, 0.8, 0.0),
        (5.0, -1.0, 3.0, 0.0),
        (5.0, 0.0, 0.0, 0.0),
    ],
)
def test_clipping_holds_the_declared_side(ratio, advantage, loss, slope):
    got, gradient, clipped = one_token(math.log(ratio), advantage, GRPO.replace(dual_clip=3.0))
    assert (got, gradient) == (pytest.approx(loss, abs=1e-6), pytest.approx(slope, abs=1e-6))
    assert clipped == float(slope == 0 and advantage != 0)


@pytest.mark.parametrize("log_ratio", [100.0, math.inf])
def test_a_clipped_ratio_that_overflows_has_no_gradient_rather_than_nan(log_ratio):
    loss, gradient, clipped = one_token(log_ratio, 1.0, GRPO)
    assert (loss, gradient, clipped) == (pytest.approx(-1.2), 0.0, 1.0)
    assert one_token(log_ratio, 0.0, GRPO.replace(clip_high=None))[:2] == (0.0, 0.0)


def test_cispo_keeps_the_gradient_of_a_clipped_token():
    loss, gradient, clipped = one_token(math.log(10.0), 2.0, CISPO)
    assert (gradient, clipped) == (pytest.approx(-5.0 * 2.0, rel=1e-6), 1.0)
    assert loss == pytest.approx(5.0 * 2.0 * 1.0, rel=1e-6)


def test_a_sequence_ratio_is_the_geometric_mean_of_its_tokens():
    batch = ragged()
    ratio = importance_ratio(batch.logprobs, batch.old_logprobs, batch.mask, GSPO)
    row = (batch.logprobs[0, :5] - batch.old_logprobs[0, :5]).detach()
    assert ratio[0, :5].detach().numpy() == pytest.approx(row.exp().prod().item() ** (1 / 5))
    assert (ratio[~batch.mask] == 1).all()


@pytest.mark.parametrize("name", [*PRESETS, "group_token_mean", "dual clip"])
def test_the_clip_fraction_counts_the_tokens_whose_gradient_is_clipped(name):
    conventions = VARIANTS.get(name, PRESETS.get(name)).replace(
        kl_coef=0.0, entropy_coef=0.0, ratio_level="token", objective="clip", log_ratio_clamp=None
    )
    batch = ragged(seed=3)
    output = policy_loss(batch, conventions)
    gradient = torch.autograd.grad(output.loss, batch.logprobs)[0]
    assert output.metrics["clip_fraction"] == (gradient[batch.mask] == 0).double().mean().item()


def test_importance_weights_of_none_are_one_inside_the_mask():
    batch = ragged()
    weights = importance_weights(batch.old_logprobs, batch.sampler_logprobs, batch.mask, GRPO)
    assert torch.equal(weights, batch.mask.double())


def test_one_row_that_overflows_is_truncated():
    conventions = GRPO.replace(importance_level="sequence")
    ones = torch.ones(1, 4, dtype=torch.bool)
    weights = importance_weights(torch.zeros(1, 4), torch.full((1, 4), -100.0), ones, conventions)
    assert torch.equal(weights, torch.full((1, 4), 2.0))


shapes = st.lists(st.integers(0, 6), min_size=2, max_size=6).filter(lambda lengths: sum(lengths) > 0)
variants = st.sampled_from([VARIANTS[name].replace(**EVERYTHING) for name in VARIANTS])


@few
@given(lengths=shapes, conventions=variants, seed=st.integers(0, 99), data=st.data())
def test_row_order_does_not_matter(lengths, conventions, seed, data):
    batch = ragged(seed, lengths)
    order = torch.tensor(data.draw(st.permutations(range(len(lengths)))))
    loss, gradient = loss_and_gradient(batch, conventions)
    shuffled = as_dtype(batch.rows(order), torch.float64)
    got, got_gradient = loss_and_gradient(shuffled, conventions)
    torch.testing.assert_close(got, loss)
    torch.testing.assert_close(got_gradient, gradient[order])


@few
@given(lengths=shapes, conventions=variants, seed=st.integers(0, 99), left=st.integers(0, 3), right=st.integers(0, 3))
def test_padding_does_not_matter(lengths, conventions, seed, left, right):
    batch = ragged(seed, lengths)

    def pad(values, filler):
        return torch.nn.functional.pad(values.detach(), (left, right), value=filler)

    padded = {name: pad(getattr(batch, name), math.nan) for name in (*NAMES, "entropy")}
    wide = as_dtype(replace(batch, mask=pad(batch.mask, False), **padded), torch.float64)
    before, after = policy_loss(batch, conventions), policy_loss(wide, conventions)
    torch.testing.assert_close(after.loss, before.loss)
    assert after.metrics == pytest.approx(before.metrics)
    gradient = torch.autograd.grad(before.loss, batch.logprobs)[0]
    torch.testing.assert_close(torch.autograd.grad(after.loss, wide.logprobs)[0], pad(gradient, 0.0))


@few
@given(lengths=shapes, conventions=variants, seed=st.integers(0, 99), data=st.data())
def test_micro_batches_of_uneven_token_counts_add_up(lengths, conventions, seed, data):
    batch = as_dtype(ragged(seed, lengths), torch.float32)
    units = len(batch.group_ids.unique()) if conventions.aggregation == "group_token_mean" else len(lengths)
    n = data.draw(st.integers(1, units))
    loss, gradient = loss_and_gradient(batch, conventions)
    got, got_gradient = loss_and_gradient(batch, conventions, lambda *given: accumulated_loss(given[0], n, given[1]))
    torch.testing.assert_close(got, loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got_gradient, gradient, rtol=1e-5, atol=1e-6)
    assert accumulated_loss(batch, n, conventions).metrics == pytest.approx(
        policy_loss(batch, conventions).metrics, nan_ok=True
    )


@few
@given(conventions=variants, seed=st.integers(0, 99), scale=st.floats(0.1, 10))
def test_the_surrogate_grows_with_the_advantages(conventions, seed, scale):
    conventions = conventions.replace(kl_coef=0.0, entropy_coef=0.0)
    batch = ragged(seed)
    loss, gradient = loss_and_gradient(batch, conventions)
    scaled = replace(batch, advantages=batch.advantages * scale)
    got, got_gradient = loss_and_gradient(scaled, conventions)
    torch.testing.assert_close(got, loss * scale)
    torch.testing.assert_close(got_gradient, gradient * scale)


@few
@given(conventions=variants, seed=st.integers(0, 99), shift=st.floats(-0.1, 0.1))
def test_only_differences_of_logprobs_matter(conventions, seed, shift):
    """The loss stays when all four logprobs of a token move together; CISPO alone also weighs the logprob itself."""
    conventions = conventions.replace(objective="clip")
    batch = ragged(seed)
    moved = as_dtype(replace(batch, **{name: getattr(batch, name) + shift for name in NAMES}), torch.float64)
    for got, expected in zip(loss_and_gradient(moved, conventions), loss_and_gradient(batch, conventions), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_data_parallel_shards_add_up_to_the_whole_update(aggregation, ranks):
    """Each rank runs its shard in two micro-batches; gradients are averaged over ranks, as DDP and FSDP do."""
    conventions = GRPO.replace(aggregation=aggregation, **EVERYTHING)
    lengths = (5, 1, 0, 7, 3, 6, 2, 9, 4, 4, 1, 8)
    batch = as_dtype(ragged(4, lengths), torch.float32)
    _, expected = loss_and_gradient(batch, conventions)
    total = torch.zeros_like(expected)
    for shard in split(batch, ranks, conventions):
        for piece in split(shard, 2, conventions):
            loss = policy_loss(piece, conventions).loss * ranks
            total += torch.autograd.grad(loss, batch.logprobs, retain_graph=True)[0] / ranks
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_counts_of_shards_add_up(aggregation):
    conventions = GRPO.replace(aggregation=aggregation)
    batch = ragged()
    pieces = [replace(piece, global_tokens=None, global_sequences=None) for piece in split(batch, 3, conventions)]
    assert sum(count_sequences(piece, conventions) for piece in pieces) == count_sequences(batch, conventions)


def test_averaging_token_means_of_micro_batches_is_not_the_update():
    """What goes wrong without global counts: the mean of means, off by far more than rounding."""
    batch = ragged(lengths=(5, 1, 7, 2))
    pieces = [batch.rows(torch.tensor(rows)) for rows in ([0, 1], [2, 3])]
    mean = sum(policy_loss(piece, DAPO).loss for piece in pieces) / 2
    assert abs((mean / policy_loss(batch, DAPO).loss).item() - 1) > 0.02


def test_split_keeps_groups_whole_where_the_aggregation_needs_them():
    batch = ragged(groups=[7, 3, 7, 3, 7, 3])
    pieces = split(batch, 2, GRPO.replace(aggregation="group_token_mean"))
    assert [piece.group_ids.tolist() for piece in pieces] == [[3, 3, 3], [7, 7, 7]]


@pytest.mark.parametrize("pieces", [0, 7])
def test_split_into_none_or_more_pieces_than_rows_is_an_error(pieces):
    with pytest.raises(ValueError, match=f"6 rows or groups into {pieces} pieces"):
        split(ragged(), pieces, GRPO)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weight_of_every_token(aggregation):
    """One table for all aggregations: lengths 2, 0, 1 and 1, the first two rows one group, the others another."""
    mask = torch.tensor([[True, True], [False, False], [True, False], [True, False]])
    values = torch.zeros(4, 2, dtype=torch.float64, requires_grad=True)
    batch = PolicyBatch(values, values, torch.zeros(4), mask, group_ids=torch.tensor([0, 0, 1, 1]))
    total = aggregate(values, batch, GRPO.replace(aggregation=aggregation, aggregation_constant=10.0))
    weights = torch.autograd.grad(total, values)[0]
    first, second = {
        "token_mean": (1 / 4, 1 / 4),
        "sequence_mean": (1 / 8, 1 / 4),
        "sequence_mean_nonempty": (1 / 6, 1 / 3),
        "sequence_sum": (1 / 4, 1 / 4),
        "sequence_sum_nonempty": (1 / 3, 1 / 3),
        "constant": (1 / 40, 1 / 40),
        "group_token_mean": (1 / 4, 1 / 4),
    }[aggregation]
    expected = torch.tensor([[first, first], [0, 0], [second, 0], [second, 0]], dtype=torch.float64)
    torch.testing.assert_close(weights, expected)
