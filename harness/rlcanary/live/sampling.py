"""Completions are samples of the weights that are trained: judged over the updates of a run, on rows of the present version.

Two identities hold for every policy, with the expectation over tokens that it draws itself. The mean of the ratio r of the
trainer's probability to the sampler's is 1, and the mean of -log p is the entropy. The mean of r - 1 - log r over the
sampler's tokens is how far the trainer is away from it, in nats (the KL divergence). No engine computes exactly what the
trainer does, so each statement allows for a mean difference, and for nothing else: tokens may depend on each other, and
single ones be far off, as they are in half precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from rlcanary.live.bets import Bets, evidence_of_rows
from rlcanary.live.findings import Finding
from rlcanary.live.record import Record

# What an engine in lower precision may move the mean ratio, or the mean of -log p in nats.
ALLOWED = 0.03
# Ratios above this one count as this one where a mean below 1 is looked for.
LARGEST = 4.0
# The entropy and the logprob of a token add up to no less than this.
LEAST = -20.0
# The nats per token that the sampler may be away from the trainer: ten times its distance at the start and a bit, within
# what half precision makes of a sharp policy.
FURTHEST, FURTHER, TIMES = 0.05, 0.02, 10
# The audited updates that are the start.
FIRST = 3
# An engine that computes what the trainer does in 32 bits is told by the tokens that are not sure: in each of the first
# updates at least LEAST_OPEN of them, nine in ten nearer than NEAR nats. Half precision moves most of them further. On two
# devices it may move few, since both round nearly equal sums: where the trainer is known to compute in 16 bits, no engine
# is taken for exact. An exact one has a bound of its own, a hundred times the square of NEAR.
NEAR, MOST_TOKENS, SURE, LEAST_OPEN, FURTHEST_EXACT = 1e-4, 0.9, -0.01, 8, 1e-6
# A pair of equal completions counts as no less likely than exp(-20).
RAREST = 20.0

# The mean that each statement bounds, of what is bet on.
BOUNDS = {
    "above": 1 + ALLOWED,
    "below": ALLOWED - 1,
    "likely": ALLOWED,
    "unlikely": ALLOWED,
    "repeated": 1 + ALLOWED,
    "away": 1.0,
    "row away": 1.0,
}


class Sampling:
    """The evidence on the sampler of a run so far."""

    def __init__(self) -> None:
        self._bets = {name: Bets(bound, len(BOUNDS)) for name, bound in BOUNDS.items()}
        self._at_start: list[float] = []
        self._open_at_start: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """Return what is known so far, in plain values."""
        bets = {name: each.state_dict() for name, each in self._bets.items()}
        return {"bets": bets, "at_start": self._at_start[:], "open_at_start": self._open_at_start[:]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what was known before."""
        for name, each in state["bets"].items():
            self._bets[name].load_state_dict(each)
        self._at_start = list(state["at_start"])
        self._open_at_start = list(state.get("open_at_start", [LARGEST]))

    def judge(self, record: Record) -> Iterator[Finding]:
        """Judge the rows of an update that the present weights have drawn."""
        if record.versions is None or record.trainer_version is None:
            return
        present_BT = record.mask & (record.versions == record.trainer_version).unsqueeze(1)
        has_dropout = record.conventions is not None and record.conventions.training_dropout
        if record.sampler_logprobs is not None:
            # A NaN would stay in the bets to the end of the run.
            known_BT = present_BT & ~(record.logprobs - record.sampler_logprobs).isnan()
            yield from self._ratios(record, known_BT)
            if record.drawn_freely:
                yield from self._repeats(record, present_BT)
            if known_BT.any() and not has_dropout:
                yield from self._distances(record, known_BT)
        if record.entropy is not None and record.drawn_freely and not has_dropout:
            yield from self._surprises(record, present_BT & ~(record.entropy + record.logprobs).isnan())

    def _ratios(self, record: Record, known_BT: Tensor) -> Iterator[Finding]:
        if record.sampler_logprobs is None or not known_BT.any():
            return
        gap_N = (record.logprobs - record.sampler_logprobs)[known_BT]
        ratio_N = gap_N.exp()
        off = float(ratio_N.mean()) - 1
        is_above = self._bets["above"].refuted_by(ratio_N, 0.0)
        is_below = self._bets["below"].refuted_by(-ratio_N, -LARGEST) and record.drawn_freely
        if is_above or is_below:
            yield Finding(
                "sampling.ratio",
                "on samples of the present weights the mean ratio of trainer to sampler has to be 1 and is "
                f"{'above' if is_above else 'below'} it ({1 + off:.4g} in this update; the mean difference of their "
                f"logprobs is {float(gap_N.mean()):.3g}, the largest {float(gap_N.abs().max()):.3g}): the two score other "
                "tokens, at another temperature, or with other weights",
                abs(off),
            )

    def _distances(self, record: Record, known_BT: Tensor) -> Iterator[Finding]:
        """Bet on the distance of all tokens, and of the tokens of a row, in parts of what it may be."""
        assert record.sampler_logprobs is not None
        has_known_B = known_BT.any(dim=1)
        gap_BT, known_BT = (record.logprobs - record.sampler_logprobs)[has_known_B], known_BT[has_known_B]
        away_BT = (gap_BT.exp() - 1 - gap_BT).masked_fill(~known_BT, 0)
        is_started = len(self._at_start) == FIRST
        start = min(self._at_start) if is_started else FURTHEST
        is_exact = is_started and max(self._open_at_start) < NEAR and not record.half_precision
        most = FURTHEST_EXACT if is_exact else min(TIMES * start + FURTHER, FURTHEST)
        now = float(away_BT[known_BT].mean())
        if not is_started:
            open_N = gap_BT[known_BT & (record.logprobs[has_known_B] < SURE)].abs()
            self._at_start.append(now)
            place = max(1, math.ceil(MOST_TOKENS * len(open_N)))  # torch's quantile takes 16 million numbers at most
            self._open_at_start.append(float(open_N.kthvalue(place)[0]) if len(open_N) >= LEAST_OPEN else LARGEST)
        is_away = self._bets["away"].refuted_by(away_BT[known_BT] / most, 0.0)
        is_row_away = self._bets["row away"].refuted_by(evidence_of_rows(away_BT / most, known_BT), 0.0)
        away_B = away_BT.sum(dim=1) / known_BT.sum(dim=1)
        median = float(away_B.median())
        if is_row_away and median <= most:
            row, furthest = int(has_known_B.nonzero()[away_B.argmax()]), float(away_B.max())
            yield Finding(
                "sampling.uneven",
                f"on samples of the present weights the sampler is {furthest:.3g} nats per token away from the trainer in "
                f"row {row}, and {median:.2g} in the median row: padding, position ids, the mask or the prompt differ there",
                furthest,
            )
        elif (is_away or is_row_away) and start >= FURTHEST:
            yield Finding(
                "sampling.distance",
                f"on samples of the present weights the sampler is {now:.3g} nats per token away from the trainer, from the "
                "start: it reads other tokens, or computes another model",
                now,
            )
        elif is_away or is_row_away:
            yield Finding(
                "sampling.drift",
                f"on samples of the present weights the sampler is {now:.3g} nats per token away from the trainer, and was "
                f"{start:.2g} at the start: a weight sync leaves something out",
                now,
            )

    def _repeats(self, record: Record, present_BT: Tensor) -> Iterator[Finding]:
        """Bet on pairs of neighbours of a group to be equal at 1 / p of the first, of which the mean is 1.

        Logprobs tell completions apart, but not those of a policy to which all tokens are equally likely.
        """
        if record.group_ids is None or record.sampler_logprobs is None:
            return
        by_group_B = record.group_ids.argsort(stable=True)  # a run may have shuffled its rows
        group_ids_B, present_BT = record.group_ids[by_group_B], present_BT[by_group_B]
        logprobs_BT = record.sampler_logprobs[by_group_B].masked_fill(~present_BT, 0).nan_to_num()
        is_pair_P = (group_ids_B[1:] == group_ids_B[:-1]) & present_BT[1:].any(1) & present_BT[:-1].any(1)
        is_equal_P = (logprobs_BT[1:] == logprobs_BT[:-1]).all(1) & (present_BT[1:] == present_BT[:-1]).all(1)
        highest_B = logprobs_BT.masked_fill(~present_BT, -math.inf).amax(1)
        lowest_B = logprobs_BT.masked_fill(~present_BT, math.inf).amin(1)
        is_equal_P &= (highest_B > lowest_B)[1:]
        odds_P = (-logprobs_BT[:-1].sum(dim=1)).clamp(max=RAREST).exp() * is_equal_P
        if is_pair_P.any() and self._bets["repeated"].refuted_by(odds_P[is_pair_P], 0.0):
            equal, pairs = int(is_equal_P[is_pair_P].sum()), int(is_pair_P.sum())
            yield Finding(
                "sampling.repeats",
                f"{equal} of {pairs} neighbours in a group are the same completion, more than chance makes: samples of a "
                "prompt share a random seed, or one is counted several times",
                equal / pairs,
            )

    def _surprises(self, record: Record, present_BT: Tensor) -> Iterator[Finding]:
        assert record.entropy is not None
        if not present_BT.any():
            return
        entropy_N = record.entropy[present_BT]
        excess_N = entropy_N + record.logprobs[present_BT]
        is_likely = self._bets["likely"].refuted_by(excess_N, LEAST)
        if self._bets["unlikely"].refuted_by(-excess_N, -entropy_N) or is_likely:
            mean = float(excess_N.mean())
            cause = (
                "it samples at a lower temperature, with top-k or top-p, or tokens that are likely are trained alone"
                if is_likely
                else "it samples at a higher temperature, from older weights, or tokens are trained that it did not draw"
            )
            yield Finding(
                "sampling.surprise",
                f"samples of the present weights are {'more' if is_likely else 'less'} likely than the policy's own: -log p "
                f"is {abs(mean):.3g} nats per token {'below' if is_likely else 'above'} the entropy in this update; {cause}",
                abs(mean),
            )
