"""An expected failure is a set of findings: anything else of the same check is a new failure."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import all_checks, run_check
from rlcanary.checks.findings.expected import NO_REASON, Comparison, compare, read_expected, update_expected
from rlcanary.checks.tally import Fingerprint
from rlcanary.contract.presets import PAPERS

CHECKS = {item.id: item for item in all_checks()}


class Rounds(ReferenceAdapter):
    """A float32 mean, whose rounding is divided by a tiny epsilon."""

    factor = 1.0

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        centred = rewards - rewards.float().mean()
        return self.factor * centred / (rewards.std() + 1e-6)


class RoundsFiveTimes(Rounds):
    factor = 5.0


class RoundsHalf(Rounds):
    factor = 0.5


class CrashesWhenAllAreMasked(ReferenceAdapter):
    """Raises where every importance weight is masked."""

    def importance_weights(self, trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
        weights = super().importance_weights(trainer_logprobs, sampler_logprobs, mask)
        if mask.sum() == 1:
            raise ZeroDivisionError("no weight is left")
        return weights


class CrashesAndInverts(CrashesWhenAllAreMasked):
    def importance_weights(self, trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
        return super().importance_weights(sampler_logprobs, trainer_logprobs, mask)


CORRECTED = PAPERS["grpo"].replace(importance_level="token", importance_high=1.2)


def compared(name: str, known: ReferenceAdapter, now: ReferenceAdapter, path: Path) -> Comparison:
    """What the file that one adapter's failures were written to says of another one's."""
    before, after = (run_check(CHECKS[name], adapter, "mine") for adapter in (known, now))
    assert before.status in ("fail", "error")
    update_expected(path, [before])
    path.write_text(path.read_text().replace(NO_REASON, "known"))
    return compare([after], read_expected(path))


def test_the_same_failure_is_expected(tmp_path: Path) -> None:
    name = "advantage.constant_reward_is_zero"
    assert compared(name, Rounds(), Rounds(), tmp_path / "known.txt").known


def test_smaller_failure_is_expected(tmp_path: Path) -> None:
    name = "advantage.constant_reward_is_zero"
    assert compared(name, Rounds(), RoundsHalf(), tmp_path / "known.txt").known


def test_rounding_that_is_five_times_as_large_is_red(tmp_path: Path) -> None:
    name = "advantage.constant_reward_is_zero"
    comparison = compared(name, Rounds(), RoundsFiveTimes(), tmp_path / "known.txt")
    assert comparison.is_red_from("hardening")
    assert "not among the" in comparison.unexpected[0].message


def test_inverted_weights_are_red_behind_an_expected_crash(tmp_path: Path) -> None:
    known, inverted = CrashesWhenAllAreMasked(CORRECTED), CrashesAndInverts(CORRECTED)
    comparison = compared("importance.declared_weights", known, inverted, tmp_path / "known.txt")
    assert comparison.is_red_from("hardening")
    # What is shown is the new finding, with a program that reproduces it.
    assert comparison.unexpected[0].status == "fail"
    assert "declared as token-level" in comparison.unexpected[0].message
    assert "assert_close(weights_BT" in comparison.unexpected[0].snippet


def test_gradient_is_red_behind_an_expected_value(tmp_path: Path) -> None:
    class OffsetKl(ReferenceAdapter):
        sign = 1.0

        def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
            kl = super().kl(logprobs, ref_logprobs)
            return self.sign * (kl - kl.detach()) + kl.detach() + 1

    class UpsideDown(OffsetKl):
        sign = -1.0

    comparison = compared("kl.declared_estimator", OffsetKl(), UpsideDown(), tmp_path / "known.txt")
    assert comparison.is_red_from("hardening")
    assert {found.fingerprint.quantity for found in comparison.unexpected[0].findings} == {"gradient"}


@pytest.mark.parametrize(
    "fingerprint",
    [
        Fingerprint("", "value", 0.056),
        Fingerprint("3 rewards of 0.9", "value", 0.3),
        Fingerprint("aggregation='token_mean'; [2, 3]", "gradient (2)", float("inf")),
        Fingerprint("[1, 1]", "raises ZeroDivisionError"),
        Fingerprint("", "value of shape [2, 3]"),
    ],
    ids=str,
)
def test_fingerprint_reads_as_it_is_written(fingerprint: Fingerprint) -> None:
    assert Fingerprint.parse(str(fingerprint)) == fingerprint


def test_deviation_of_half_as_much_again_is_the_same() -> None:
    known = Fingerprint("", "value", 0.06)
    assert known.covers(Fingerprint("", "value", 0.09))
    assert not known.covers(Fingerprint("", "value", 0.091))
    assert not known.covers(Fingerprint("", "value", float("inf")))
    assert not known.covers(Fingerprint("", "gradient", 0.06))
    assert not known.covers(Fingerprint("[2]", "value", 0.06))
    assert not known.covers(Fingerprint("", "value"))


def test_nan_is_an_infinite_deviation() -> None:
    class Nan(ReferenceAdapter):
        def entropy(self, logits: Tensor) -> Tensor:
            return super().entropy(logits) * torch.nan

    result = run_check(CHECKS["entropy.filtered_logits"], Nan(), "mine")
    assert [str(found.fingerprint) for found in result.findings] == ["value off by inf"]


def test_an_expected_nan_covers_no_number() -> None:
    nan, number = (Fingerprint("one", "value", magnitude) for magnitude in (math.inf, 1e3))
    assert nan.covers(nan)
    assert not nan.covers(number)


def test_code_that_samples_without_a_seed_gives_the_same_findings_again() -> None:
    class Noisy(ReferenceAdapter):
        def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
            return torch.rand(len(rewards))

    state = torch.get_rng_state()
    first, second = (run_check(CHECKS["advantage.shift"], Noisy(), "mine").findings for _ in range(2))
    assert first == second != ()
    assert torch.equal(torch.get_rng_state(), state)
