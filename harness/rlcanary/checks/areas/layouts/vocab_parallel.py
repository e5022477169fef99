"""Logprobs from logits whose vocabulary lies on several ranks."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from rlcanary.checks.areas.scoring.logprob import exact_logprobs
from rlcanary.checks.asserts import assert_close, gradient, soft
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds import inputs, rows
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.records.layouts import VocabShards

NEEDS = ("vocab_parallel_logprobs",)
# [T, vocabulary] and the numbers of ranks. The first and last entries of each rank are among the ids.
SIZES = ((4, 4, (1, 2, 4)), (6, 6, (2, 3)), (8, 8, (4,)))


def _case(rng: Generator, logits_BTV: Tensor, n_ranks: int, temperature: float, *label: object) -> Case:
    n_rows, width, vocabulary = logits_BTV.shape
    # The rows have different ids at each position.
    ids_BT = (torch.arange(width) + torch.arange(n_rows).unsqueeze(1)) % vocabulary
    weights_BT = inputs.uniform(rng, *ids_BT.shape, low=0.5, high=1.5)
    given: dict[str, Any] = {"ids_BT": ids_BT, "weights_BT": weights_BT, "temperature": temperature}
    return Case(*label, f"{n_ranks} ranks", logits_BTV=logits_BTV, n_ranks=n_ranks, **given)


def _split(rng: Generator) -> Iterator[Case]:
    for temperature in (1.0, 0.6):
        for width, vocabulary, ranks in SIZES:
            logits_BTV = inputs.logits(rng, 2, width, vocabulary)
            for n_ranks in ranks:
                yield _case(rng, logits_BTV, n_ranks, temperature, f"temperature {temperature}", vocabulary)


def _drawn(rng: Generator, size: int) -> Case:
    n_ranks = rows.whole(rng, 1, 4)
    vocabulary = n_ranks * rows.whole(rng, 1, 2 + size)
    logits_BTV = inputs.logits(rng, rows.whole(rng, 1, 3), vocabulary, vocabulary)
    return _case(rng, logits_BTV, n_ranks, rows.one_of(rng, (0.6, 1.0, 1.7)))


@check("vocab_parallel.is_log_softmax", needs=NEEDS, cases=_split, draws=_drawn)
def is_log_softmax(
    adapter: Adapter, logits_BTV: Tensor, ids_BT: Tensor, weights_BT: Tensor, n_ranks: int, temperature: float
) -> None:
    """Logprobs over a split vocabulary are those of the whole one, in value and in the gradient of each rank's logits.

    Silent because a softmax over one rank's entries is a softmax, and the ids of most tokens lie inside of most ranks'
    ranges. A reduction that autograd does not see leaves the ranks without the token's id with no gradient, while the
    value is right. Look at the sum and the maximum over ranks, at the first and last id of each rank, and at backward.
    """
    shards = [each.clone() for each in logits_BTV.chunk(n_ranks, dim=-1)]
    got_BT = adapter.vocab_parallel_logprobs(VocabShards(shards, logits_BTV.shape[-1]), ids_BT, temperature)
    exact_BT = exact_logprobs(logits_BTV, ids_BT, temperature)
    with soft():
        assert_close(got_BT, exact_BT, f"over {n_ranks} ranks logprobs are not log softmax of all logits")
    message = f"over {n_ranks} ranks the gradient of the logits is not that of log softmax of all logits"
    wanted_BTV = gradient(exact_BT, logits_BTV, weights_BT)
    assert_close(gradient(got_BT, logits_BTV, weights_BT), wanted_BTV, message, quantity="gradient")


def _far_apart(rng: Generator) -> Iterator[Case]:
    for shift in (200.0, -200.0):
        logits_BTV = inputs.logits(rng, 1, 4, 4).detach()
        logits_BTV[..., :2] += shift
        yield _case(rng, logits_BTV.requires_grad_(), 2, 1.0, f"first rank {shift:+g}")


@check("vocab_parallel.ranks_far_apart", needs=NEEDS, cases=_far_apart)
def ranks_far_apart(
    adapter: Adapter, logits_BTV: Tensor, ids_BT: Tensor, weights_BT: Tensor, n_ranks: int, temperature: float
) -> None:
    """Logits that are by two hundred larger on one rank than on another are scored without overflow.

    Silent because exp overflows only for confident tokens, whose loss is then dropped or clipped. Look for a maximum that
    each rank takes of its own entries and that is not reduced before exp.
    """
    shards = [each.clone() for each in logits_BTV.chunk(n_ranks, dim=-1)]
    got_BT = adapter.vocab_parallel_logprobs(VocabShards(shards, logits_BTV.shape[-1]), ids_BT, temperature)
    exact_BT = exact_logprobs(logits_BTV, ids_BT, temperature)
    with soft():
        assert_close(got_BT, exact_BT, "logprobs of logits far apart on two ranks are wrong", scale=200.0)
    message = "the gradient of logits far apart on two ranks is wrong"
    wanted_BTV = gradient(exact_BT, logits_BTV, weights_BT)
    assert_close(gradient(got_BT, logits_BTV, weights_BT), wanted_BTV, message, quantity="gradient")


def _padded(rng: Generator) -> Iterator[Case]:
    for vocab_size, n_ranks in ((3, 2), (5, 2), (5, 4), (7, 4)):
        width = -(-vocab_size // n_ranks)
        logits_BTV = inputs.logits(rng, 1, vocab_size, width * n_ranks)
        case = _case(rng, logits_BTV, n_ranks, 1.0, f"{vocab_size} of {width * n_ranks} entries")
        yield Case(case.label, **case.inputs, vocab_size=vocab_size)


@check("vocab_parallel.padding_has_no_probability", needs=NEEDS, cases=_padded)
def padding_has_no_probability(
    adapter: Adapter,
    logits_BTV: Tensor,
    ids_BT: Tensor,
    weights_BT: Tensor,
    n_ranks: int,
    temperature: float,
    vocab_size: int,
) -> None:
    """Entries that only fill the vocabulary of the last ranks take no probability and have no gradient.

    Silent because they take little of it: every logprob is lower than the sampler's by the same small amount, and the ratio
    is off 1. Look for the padded size where the size of the vocabulary belongs.
    """
    shards = [each.clone() for each in logits_BTV.chunk(n_ranks, dim=-1)]
    got_BT = adapter.vocab_parallel_logprobs(VocabShards(shards, vocab_size), ids_BT, temperature)
    exact_BT = exact_logprobs(logits_BTV[..., :vocab_size], ids_BT, temperature)
    with soft():
        assert_close(got_BT, exact_BT, f"logprobs are not log softmax of the {vocab_size} entries that are tokens")
    message = "the gradient of the logits is not that of the entries that are tokens"
    wanted_BTV = gradient(exact_BT, logits_BTV, weights_BT)
    assert_close(gradient(got_BT, logits_BTV, weights_BT), wanted_BTV, message, quantity="gradient")
