"""Logprobs of tokens: the right position, the right temperature, the right gradient."""

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from rlcanary.checks.asserts import assert_close, assert_true, assert_unchanged, gradient, soft
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds import inputs, rows
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.conventions import Conventions

# The last ones have more tokens, rows and ids than a chunk is likely to hold.
SHAPES = ((1, 1, 2), (1, 2, 3), (2, 2, 3), (3, 3, 5), (2, 5, 11), (1, 300, 3), (70, 1, 3), (1, 1, 2000))


def exact_logprobs(logits_BTV: Tensor, ids_BT: Tensor, temperature: float = 1.0) -> Tensor:
    """[B, T] log softmax(logits / temperature) at the ids, in float64."""
    scores_BTV = (logits_BTV.double() / temperature).log_softmax(dim=-1)
    return scores_BTV.gather(-1, ids_BT.unsqueeze(-1)).squeeze(-1)


def _scored(rng: Generator, *temperatures: float) -> Iterator[Case]:
    for value in temperatures:
        for shape in SHAPES:
            logits_BTV, ids_BT = inputs.logits(rng, *shape), inputs.token_ids(rng, *shape)
            weights_BT = inputs.uniform(rng, *shape[:2], low=0.5, high=1.5)
            label = [f"temperature {value}"] * (value != 1)
            yield Case(*label, shape, logits_BTV=logits_BTV, ids_BT=ids_BT, weights_BT=weights_BT, temperature=value)


def _drawn(rng: Generator, size: int, *temperatures: float) -> Case:
    (logits_BTV, ids_BT), temperature = rows.logits(rng, size), rows.one_of(rng, temperatures)
    weights_BT, scale = inputs.uniform(rng, *ids_BT.shape, low=0.5, high=1.5), float(logits_BTV.detach().abs().max())
    given = {"logits_BTV": logits_BTV, "ids_BT": ids_BT, "weights_BT": weights_BT, "temperature": temperature}
    return Case(**given, scale=max(1.0, scale / temperature))


@check(
    "logprob.is_log_softmax",
    needs=("token_logprobs",),
    cases=lambda rng: _scored(rng, 1.0),
    draws=lambda rng, size: _drawn(rng, size, 1.0),
)
def is_log_softmax(
    adapter: Adapter,
    logits_BTV: Tensor,
    ids_BT: Tensor,
    weights_BT: Tensor,
    temperature: float,
    scale: float = 1.0,
) -> None:
    """A token's logprob is log softmax(logits) at its own id and position, in value and in gradient.

    Silent because a logprob of the wrong token or position is still a negative number: the loss is finite, the ratio
    gets clipped, and the policy learns noise. Look at the gather: its dimension, the shift by one between logits and
    ids (logits at t score the token at t + 1), and at anything that detaches or rescales the logits.
    """
    exact_BT = exact_logprobs(logits_BTV, ids_BT, temperature)
    got_BT = adapter.token_logprobs(logits_BTV.clone(), ids_BT, temperature)
    with soft():
        assert_close(got_BT, exact_BT, "logprobs differ from log softmax at the token's id", scale=scale)
    wanted_BTV = gradient(exact_BT, logits_BTV, weights_BT)
    told = "the gradient of the logprobs with respect to the logits is not onehot - softmax"
    assert_close(gradient(got_BT, logits_BTV, weights_BT), wanted_BTV, told, scale=scale, quantity="gradient")


@check(
    "logprob.temperature",
    needs=("token_logprobs",),
    cases=lambda rng: _scored(rng, 0.6, 1.7),
    draws=lambda rng, size: _drawn(rng, size, 0.1, 0.6, 0.99, 1.7, 3.0),
)
def divides_by_the_temperature(
    adapter: Adapter,
    logits_BTV: Tensor,
    ids_BT: Tensor,
    weights_BT: Tensor,
    temperature: float,
    scale: float = 1.0,
) -> None:
    """At temperature T a token's logprob is log softmax(logits / T), in value and gradient, also on repeated calls.

    Silent because nothing shows at T = 1: with T below 1 in the sampler and 1 in the trainer, the importance ratio is
    taken against a distribution that was never sampled from, a constant bias. Look for a path (loss, old logprobs,
    reference) that divides twice or not at all, and for a division in place, which rescales the caller's logits for the
    next use.
    """
    exact_BT = exact_logprobs(logits_BTV, ids_BT, temperature)
    got_BT = adapter.token_logprobs(logits_BTV.clone(), ids_BT, temperature)
    with soft():
        told = f"at temperature {temperature} logprobs differ from log softmax(logits / T)"
        assert_close(got_BT, exact_BT, told, scale=scale)
    wanted_BTV = gradient(exact_BT, logits_BTV, weights_BT)
    told = f"at temperature {temperature} the gradient is not (onehot - softmax(logits / T)) / T"
    assert_close(gradient(got_BT, logits_BTV, weights_BT), wanted_BTV, told, scale=scale, quantity="gradient")


def _two_temperatures(rng: Generator) -> Iterator[Case]:
    logits_BTV, ids_BT = inputs.logits(rng, 2, 3, 5).detach(), inputs.token_ids(rng, 2, 3, 5)
    for temperature in (1.0, 0.5):
        yield Case(f"temperature {temperature}", logits_BTV=logits_BTV, ids_BT=ids_BT, temperature=temperature)


@check("logprob.inputs_untouched", severity="hardening", needs=("token_logprobs",), cases=_two_temperatures)
def inputs_untouched(adapter: Adapter, logits_BTV: Tensor, ids_BT: Tensor, temperature: float) -> None:
    """Scoring tokens does not modify the logits and the ids.

    Silent because the first call is right; the next use of the logits (entropy, a second score, the comparison with the
    reference model) sees rescaled numbers. Look for `div_`, `/=` and other operations in place.
    """
    before = logits_BTV.clone(), ids_BT.clone()
    adapter.token_logprobs(logits_BTV, ids_BT, temperature)
    assert_unchanged((logits_BTV, ids_BT), before, "token_logprobs changed its input in place")


def _rows(rng: Generator) -> Iterator[Case]:
    for temperature in (1.0, 0.6):
        for shift in (0.0, 100.0):
            row_V = inputs.uniform(rng, 5, low=-3, high=3) + shift
            yield Case(f"temperature {temperature}, shift {shift:g}", row_V=row_V, temperature=temperature)


@check("logprob.probabilities_add_to_one", needs=("token_logprobs",), cases=_rows)
def probabilities_add_to_one(adapter: Adapter, row_V: Tensor, temperature: float) -> None:
    """Probabilities add to 1 over the vocabulary, at any temperature and after a constant shift of the logits.

    Silent because unnormalised scores have the same ranking and their ratios look like ratios. Look for a missing
    logsumexp, one that is taken over the wrong axis or at another temperature than the logit.
    """
    size = len(row_V)
    logits_BTV = row_V.expand(1, size, size).contiguous()
    got_BT = torch.as_tensor(adapter.token_logprobs(logits_BTV, torch.arange(size).unsqueeze(0), temperature))
    total = float(got_BT.detach().double().exp().sum())
    told = f"the probabilities of all {size} tokens add to {total:.6g} at temperature {temperature}"
    assert_true(abs(total - 1) < 1e-3, told, quantity="value", magnitude=abs(total - 1))


def _filtered(rng: Generator) -> Iterator[Case]:
    logits_BTV = inputs.logits(rng, 2, 2, 5).detach()
    logits_BTV[..., 3:] = -torch.inf
    yield Case(logits_BTV=logits_BTV.requires_grad_(), ids_BT=inputs.token_ids(rng, 2, 2, 3))


@check("logprob.filtered_logits", needs=("token_logprobs",), cases=_filtered)
def filtered_logits(adapter: Adapter, logits_BTV: Tensor, ids_BT: Tensor) -> None:
    """Logits set to -inf by a top-k or top-p filter do not disturb logprobs and gradients of the kept tokens.

    Silent because a NaN in one row is often skipped or replaced by zero downstream. Look for `0 * -inf`, for a shift of
    the logits by a minimum, and for clamps.
    """
    exact_BT = exact_logprobs(logits_BTV, ids_BT)
    got_BT = adapter.token_logprobs(logits_BTV.clone(), ids_BT, 1.0)
    with soft():
        assert_close(got_BT, exact_BT, "logprobs are wrong where other entries of the row are -inf")
    told = "gradients are wrong where other entries of the row are -inf"
    assert_close(gradient(got_BT, logits_BTV), gradient(exact_BT, logits_BTV), told, quantity="gradient")


def _large(rng: Generator) -> Iterator[Case]:
    for magnitude in (30.0, 200.0):
        logits_BTV = (inputs.logits(rng, 2, 2, 4).detach() / 3 * magnitude).requires_grad_()
        ids_BT = inputs.token_ids(rng, 2, 2, 4)
        yield Case(f"logits around {magnitude:g}", logits_BTV=logits_BTV, ids_BT=ids_BT, magnitude=magnitude)


@check("logprob.large_logits", needs=("token_logprobs",), cases=_large)
def large_logits(adapter: Adapter, logits_BTV: Tensor, ids_BT: Tensor, magnitude: float) -> None:
    """Logits of the order of a hundred are scored without overflow and with float32's precision.

    Silent because exp overflows to inf only for confident tokens, whose loss is then dropped or clipped. Look for
    softmax followed by log, and for an exp without the row's maximum taken out.
    """
    exact_BT = exact_logprobs(logits_BTV, ids_BT)
    got_BT = adapter.token_logprobs(logits_BTV.clone(), ids_BT, 1.0)
    assert_close(got_BT, exact_BT, f"logprobs of logits around {magnitude:g} are wrong", scale=magnitude)


def _keeps_the_dtype(conventions: Conventions) -> str | None:
    return None if conventions.logprobs_upcast else "logprobs are declared to be of the logits' dtype"


def _bfloat16(rng: Generator) -> Iterator[Case]:
    logits_BTV = inputs.logits(rng, 2, 2, 5).detach().bfloat16() * 3
    ids_BT = inputs.token_ids(rng, 2, 2, 5)
    for temperature in (1.0, 0.6):
        yield Case({"temperature": temperature}, logits_BTV=logits_BTV, ids_BT=ids_BT, temperature=temperature)


@check("logprob.bfloat16_logits", needs=("token_logprobs",), applies=_keeps_the_dtype, cases=_bfloat16)
def bfloat16_logits(adapter: Adapter, logits_BTV: Tensor, ids_BT: Tensor, temperature: float) -> None:
    """Logprobs of bfloat16 logits are computed and returned in float32.

    Silent because a logprob with three correct digits looks fine: importance ratios of exactly equal policies then
    scatter by several percent, and clipping turns on at random. Look for a log-softmax, or a division by the temperature,
    in the dtype of the logits.
    """
    exact_BT = exact_logprobs(logits_BTV, ids_BT, temperature)
    got_BT = torch.as_tensor(adapter.token_logprobs(logits_BTV.clone(), ids_BT, temperature))
    error = float((got_BT.detach().double() - exact_BT).abs().max())
    assert_true(error < 1e-4, f"logprobs of bfloat16 logits are off by {error:.2g}", quantity="value", magnitude=error)
