"""Logprobs of tokens: the right position, the right temperature, the right gradient."""

import torch
from torch import Generator, Tensor

from rlcanary.checks.check import check
from rlcanary.checks.subject import Subject
from rlcanary.checks.worlds import inputs as cases
from rlcanary.contract.conventions import Conventions

SHAPES = ((1, 1, 2), (1, 2, 3), (2, 2, 3), (3, 3, 5), (2, 5, 11))


def _exact(logits_BTV: Tensor, ids_BT: Tensor, temperature: float) -> Tensor:
    scores_BTV = (logits_BTV.detach().double() / temperature).log_softmax(dim=-1)
    return scores_BTV.gather(-1, ids_BT.unsqueeze(-1)).squeeze(-1)


def _exact_gradient(logits_BTV: Tensor, ids_BT: Tensor, temperature: float, weights_BT: Tensor) -> Tensor:
    leaf_BTV = logits_BTV.detach().double().requires_grad_()
    scores_BTV = (leaf_BTV / temperature).log_softmax(dim=-1)
    (scores_BTV.gather(-1, ids_BT.unsqueeze(-1)).squeeze(-1) * weights_BT).sum().backward()
    assert leaf_BTV.grad is not None
    return leaf_BTV.grad


@check("logprob.is_log_softmax", needs=("token_logprobs",))
def is_log_softmax(subject: Subject, rng: Generator) -> None:
    """A token's logprob is log softmax(logits) at its own id and position, in value and in gradient.

    Silent because a logprob of the wrong token or position is still a negative number: the loss is finite, the ratio
    gets clipped, and the policy learns noise. Look at the gather: its dimension, the shift by one between logits and
    ids (logits at t score the token at t + 1), and at anything that detaches or rescales the logits.
    """
    for shape in SHAPES:
        with subject.case(shape):
            logits_BTV, ids_BT = cases.logits(rng, *shape), cases.token_ids(rng, *shape)
            weights_BT = cases.uniform(rng, *shape[:2], low=0.5, high=1.5)
            call = subject.call("token_logprobs", logits_BTV, ids_BT, 1.0)
            call.expect(_exact(logits_BTV, ids_BT, 1.0), "logprobs differ from log softmax at the token's id")
            call.expect_gradient(
                _exact_gradient(logits_BTV, ids_BT, 1.0, weights_BT),
                "the gradient of the logprobs with respect to the logits is not onehot - softmax",
                weights=weights_BT,
            )


@check("logprob.temperature", needs=("token_logprobs",))
def temperature(subject: Subject, rng: Generator) -> None:
    """At temperature T a token's logprob is log softmax(logits / T), in value and gradient, also on repeated calls.

    Silent because nothing shows at T = 1: with T below 1 in the sampler and 1 in the trainer, the importance ratio is
    taken against a distribution that was never sampled from, a constant bias. Look for a path (loss, old logprobs,
    reference) that divides twice or not at all, and for a division in place, which rescales the caller's logits for the
    next use.
    """
    for value in (0.6, 1.7):
        for shape in SHAPES:
            with subject.case(f"temperature {value}", shape):
                logits_BTV, ids_BT = cases.logits(rng, *shape), cases.token_ids(rng, *shape)
                weights_BT = cases.uniform(rng, *shape[:2], low=0.5, high=1.5)
                call = subject.call("token_logprobs", logits_BTV, ids_BT, value)
                call.expect(
                    _exact(logits_BTV, ids_BT, value),
                    f"at temperature {value} logprobs differ from log softmax(logits / T)",
                )
                call.expect_gradient(
                    _exact_gradient(logits_BTV, ids_BT, value, weights_BT),
                    f"at temperature {value} the gradient is not (onehot - softmax(logits / T)) / T",
                    weights=weights_BT,
                )


@check("logprob.inputs_untouched", needs=("token_logprobs",))
def inputs_untouched(subject: Subject, rng: Generator) -> None:
    """Scoring tokens does not modify the logits and the ids.

    Silent because the first call is right; the next use of the logits (entropy, a second score, the comparison with the
    reference model) sees rescaled numbers. Look for `div_`, `/=` and other operations in place.
    """
    logits_BTV, ids_BT = cases.logits(rng, 2, 3, 5).detach(), cases.token_ids(rng, 2, 3, 5)
    for value in (1.0, 0.5):
        with subject.case(f"temperature {value}"):
            call = subject.call("token_logprobs", logits_BTV, ids_BT, value)
            call.expect_inputs_untouched("token_logprobs changed its input in place")


@check("logprob.probabilities_add_to_one", needs=("token_logprobs",))
def probabilities_add_to_one(subject: Subject, rng: Generator) -> None:
    """Probabilities add to 1 over the vocabulary, at any temperature and after a constant shift of the logits.

    Silent because unnormalised scores have the same ranking and their ratios look like ratios. Look for a missing
    logsumexp, one that is taken over the wrong axis or at another temperature than the logit.
    """
    vocabulary = 5
    for temperature in (1.0, 0.6):
        for shift in (0.0, 100.0):
            row_V = cases.uniform(rng, vocabulary, low=-3, high=3) + shift
            logits_BTV = row_V.expand(1, vocabulary, vocabulary).contiguous()
            with subject.case(f"temperature {temperature}, shift {shift:g}"):
                call = subject.call("token_logprobs", logits_BTV, torch.arange(vocabulary).unsqueeze(0), temperature)
                total = call.value.double().exp().sum()
                call.expect_true(
                    abs(float(total) - 1) < 1e-3,
                    f"the probabilities of all {vocabulary} tokens add to {float(total):.6g} at temperature {temperature}",
                    "abs(float(got.double().exp().sum()) - 1) < 1e-3",
                    magnitude=abs(float(total) - 1),
                )


@check("logprob.filtered_logits", needs=("token_logprobs",))
def filtered_logits(subject: Subject, rng: Generator) -> None:
    """Logits set to -inf by a top-k or top-p filter do not disturb logprobs and gradients of the kept tokens.

    Silent because a NaN in one row is often skipped or replaced by zero downstream. Look for `0 * -inf`, for a shift of
    the logits by a minimum, and for clamps.
    """
    logits_BTV = cases.logits(rng, 2, 2, 5).detach()
    logits_BTV[..., 3:] = -torch.inf
    ids_BT = cases.token_ids(rng, 2, 2, 3)
    logits_BTV.requires_grad_()
    weights_BT = torch.ones(2, 2)
    call = subject.call("token_logprobs", logits_BTV, ids_BT, 1.0)
    call.expect(_exact(logits_BTV, ids_BT, 1.0), "logprobs are wrong where other entries of the row are -inf")
    call.expect_gradient(
        _exact_gradient(logits_BTV, ids_BT, 1.0, weights_BT),
        "gradients are wrong where other entries of the row are -inf",
        weights=weights_BT,
    )


@check("logprob.large_logits", needs=("token_logprobs",))
def large_logits(subject: Subject, rng: Generator) -> None:
    """Logits of the order of a hundred are scored without overflow and with float32's precision.

    Silent because exp overflows to inf only for confident tokens, whose loss is then dropped or clipped. Look for
    softmax followed by log, and for an exp without the row's maximum taken out.
    """
    for magnitude in (30.0, 200.0):
        with subject.case(f"logits around {magnitude:g}"):
            logits_BTV = (cases.logits(rng, 2, 2, 4).detach() / 3 * magnitude).requires_grad_()
            ids_BT = cases.token_ids(rng, 2, 2, 4)
            call = subject.call("token_logprobs", logits_BTV, ids_BT, 1.0)
            call.expect(
                _exact(logits_BTV, ids_BT, 1.0), f"logprobs of logits around {magnitude:g} are wrong", scale=magnitude
            )


def _keeps_the_dtype(conventions: Conventions) -> str | None:
    return None if conventions.logprobs_upcast else "logprobs are declared to be of the logits' dtype"


@check("logprob.bfloat16_logits", needs=("token_logprobs",), applies=_keeps_the_dtype)
def bfloat16_logits(subject: Subject, rng: Generator) -> None:
    """Logprobs of bfloat16 logits are computed and returned in float32.

    Silent because a logprob with three correct digits looks fine: importance ratios of exactly equal policies then
    scatter by several percent, and clipping turns on at random. Look for a log-softmax in the dtype of the logits.
    """
    logits_BTV = cases.logits(rng, 2, 2, 5).detach().bfloat16() * 3
    ids_BT = cases.token_ids(rng, 2, 2, 5)
    call = subject.call("token_logprobs", logits_BTV, ids_BT, 1.0)
    error = float((call.value.double() - _exact(logits_BTV, ids_BT, 1.0)).abs().max())
    exact = [[round(value, 7) for value in row] for row in _exact(logits_BTV, ids_BT, 1.0).tolist()]
    call.expect_true(
        error < 1e-4,
        f"logprobs of bfloat16 logits are off by {error:.2g}",
        f"float((got.double() - torch.tensor({exact})).abs().max()) < 1e-4",
        magnitude=error,
    )
