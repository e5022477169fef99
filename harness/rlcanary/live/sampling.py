"""Completions are samples of the weights that are trained: judged over the updates of a run, on rows of the present version.

Two identities hold for every policy, with the expectation over tokens that it draws itself. The mean of the ratio of the
trainer's probability to the sampler's is 1, and the mean of -log p is the entropy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from rlcanary.live.bets import Bets
from rlcanary.live.findings import Finding
from rlcanary.live.record import Record

# What an engine in lower precision may move the mean ratio, or the mean of -log p in nats.
ALLOWED = 0.03
# Ratios above this one count as this one where a mean below 1 is looked for.
LARGEST = 4.0
# The entropy and the logprob of a token add up to no less than this.
LEAST = -20.0
# The nats per token that the sampler may be away from the trainer, and beyond ten times its distance at the start.
FURTHEST, FURTHER, TIMES = 0.05, 0.02, 10
FIRST = 3
# A row that is this many nats per token away, and this many times as far as the median row, is read in another way.
ALONE, TIMES_THE_MEDIAN = 0.01, 1000
# A pair of equal completions counts as no less likely than exp(-20).
RAREST = 20.0


class Sampling:
    """What is known of the sampler of a run."""

    def __init__(self) -> None:
        self._above = Bets(1 + ALLOWED)
        self._below = Bets(ALLOWED - 1)
        self._likely = Bets(ALLOWED)
        self._unlikely = Bets(ALLOWED)
        self._repeated = Bets(1 + ALLOWED)
        self._bets = {
            "above": self._above,
            "below": self._below,
            "likely": self._likely,
            "unlikely": self._unlikely,
            "repeated": self._repeated,
        }
        self._at_start: list[float] = []
        self._lately: deque[float] = deque(maxlen=FIRST)

    def state_dict(self) -> dict[str, Any]:
        """Return what is known so far, in plain values."""
        bets = {name: each.state_dict() for name, each in self._bets.items()}
        return {"bets": bets, "at_start": list(self._at_start), "lately": list(self._lately)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what was known before."""
        for name, each in self._bets.items():
            each.load_state_dict(state["bets"][name])
        self._at_start, self._lately = list(state["at_start"]), deque(state["lately"], maxlen=FIRST)

    def judge(self, record: Record) -> Iterator[Finding]:
        """Judge the rows of an update that the present weights have drawn."""
        if record.versions is None or record.trainer_version is None:
            return
        present_BT = record.mask & (record.versions == record.trainer_version).unsqueeze(1)
        if record.sampler_logprobs is not None:
            yield from self._ratios(record, present_BT & ~record.sampler_logprobs.isnan())
            yield from self._repeats(record, present_BT)
        has_dropout = record.conventions is not None and record.conventions.training_dropout
        if record.entropy is not None and record.drawn_freely and not has_dropout:
            yield from self._surprises(record, present_BT)

    def _ratios(self, record: Record, known_BT: Tensor) -> Iterator[Finding]:
        if record.sampler_logprobs is None or not known_BT.any():
            return
        gap_N = (record.logprobs - record.sampler_logprobs)[known_BT]
        ratio_N = gap_N.exp()
        off = float(ratio_N.mean()) - 1
        is_above = self._above.refuted_by(ratio_N, 0.0)
        is_below = self._below.refuted_by(-ratio_N, -LARGEST) and record.drawn_freely
        if is_above or is_below:
            yield Finding(
                "sampling.ratio",
                "on samples of the present weights the mean ratio of trainer to sampler has to be 1 and is "
                f"{'above' if is_above else 'below'} it ({1 + off:.4g} in this update; the mean difference of their "
                f"logprobs is {float(gap_N.mean()):.3g}, the largest {float(gap_N.abs().max()):.3g}): the two score other "
                "tokens, at another temperature, or with other weights",
                abs(off),
            )
        yield from _uneven_rows(record, known_BT)
        away = float((gap_N.exp() - 1 - gap_N).mean())
        self._lately.append(away)
        now = sum(self._lately) / len(self._lately)
        if len(self._at_start) < FIRST:
            self._at_start.append(away)
            if len(self._at_start) < FIRST:
                return
        start = min(self._at_start)
        if start > FURTHEST:
            yield Finding(
                "sampling.distance",
                f"on samples of the present weights the sampler is {now:.3g} nats per token away from the trainer, from the "
                "start: it reads other tokens, or computes another model",
                now,
            )
        elif now > TIMES * start + FURTHER:
            yield Finding(
                "sampling.drift",
                f"on samples of the present weights the sampler is {now:.3g} nats per token away from the trainer, and was "
                f"{start:.2g} at the start: a weight sync leaves something out",
                now,
            )

    def _repeats(self, record: Record, present_BT: Tensor) -> Iterator[Finding]:
        """Bet on pairs of neighbours of a group to be equal at 1 / p of the first, of which the mean is 1."""
        if record.group_ids is None or record.sampler_logprobs is None:
            return
        logprobs_BT = record.sampler_logprobs.masked_fill(~present_BT, 0).nan_to_num()
        is_pair_P = (record.group_ids[1:] == record.group_ids[:-1]) & present_BT[1:].any(1) & present_BT[:-1].any(1)
        is_equal_P = (logprobs_BT[1:] == logprobs_BT[:-1]).all(1) & (present_BT[1:] == present_BT[:-1]).all(1)
        odds_P = (-logprobs_BT[:-1].sum(dim=1)).clamp(max=RAREST).exp() * is_equal_P
        if is_pair_P.any() and self._repeated.refuted_by(odds_P[is_pair_P], 0.0):
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
        is_likely = self._likely.refuted_by(excess_N, LEAST)
        if self._unlikely.refuted_by(-excess_N, -entropy_N) or is_likely:
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


def _uneven_rows(record: Record, known_BT: Tensor) -> Iterator[Finding]:
    """Find rows on which the sampler is far away from the trainer beside rows on which it is not."""
    assert record.sampler_logprobs is not None
    gap_BT = (record.logprobs - record.sampler_logprobs).masked_fill(~known_BT, 0)
    away_B = (gap_BT.exp() - 1 - gap_BT).sum(dim=1) / known_BT.sum(dim=1)
    known_B = away_B[~away_B.isnan()]
    row, most, median = int(away_B.nan_to_num().argmax()), float(known_B.max()), float(known_B.median())
    if most > max(ALONE, TIMES_THE_MEDIAN * median):
        yield Finding(
            "sampling.uneven",
            f"on samples of the present weights the sampler is {most:.3g} nats per token away from the trainer in row "
            f"{row}, and {median:.2g} in the median row: padding, position ids, the mask or the prompt of that row differ",
            most,
        )
