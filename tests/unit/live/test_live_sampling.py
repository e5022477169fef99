"""Rows of the present version are samples of the policy: found where they are not, and silent over long healthy runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcanary.live import Audit

B, T, V = 32, 16, 20
MASK = torch.ones(B, T, dtype=torch.bool)
IN_ORDER = torch.arange(B)
SHUFFLED = torch.cat([IN_ORDER[::2], IN_ORDER[1::2]])  # no neighbours are of one group
Sampler = Callable[[Tensor, int], Tensor]
"""The logits that the sampler draws from, made of the trainer's and the number of the update."""


class Run:
    """Updates of a table of logits that moves at random, with samples of it."""

    def __init__(self, seed: int, scale: float = 2.0) -> None:
        self.source = torch.Generator().manual_seed(seed)
        self.audit = Audit(every=1, on_finding="log")
        self.logits = scale * torch.randn(B, T, V, generator=self.source)

    def update(
        self,
        sampler: Sampler,
        reported: Sampler | None = None,
        same_seed: bool = False,
        order: Tensor = IN_ORDER,
        **given: Any,
    ) -> list[str]:
        """Sample in groups of two, update on the rows in this order -> what was found."""
        number = self.audit.updates
        drawn_from = sampler(self.logits, number)
        ids = torch.multinomial(drawn_from.softmax(-1).view(-1, V), 1, generator=self.source).view(B, T, 1)
        if same_seed:
            self.logits[1::2], ids[1::2] = self.logits[::2].clone(), ids[::2].clone()
        told = drawn_from if reported is None else reported(self.logits, number)
        log_probs, ids = self.logits.log_softmax(-1)[order], ids[order]
        known = {
            "sampler_logprobs": told[order].log_softmax(-1).gather(-1, ids)[..., 0],
            "versions": torch.full((B,), number),
            "group_ids": order // 2,
            "trainer_version": number,
        }
        with self.audit.update(mask=MASK, **{**known, **given}) as update:
            policy = log_probs.gather(-1, ids)[..., 0].requires_grad_()
            watched = update.watch(policy, entropy=-(log_probs.exp() * log_probs).sum(-1))
            (-watched.mean()).backward()
        self.logits = self.logits + 0.05 * torch.randn(B, T, V, generator=self.source)
        return [finding.invariant for finding in update.findings]


def same(logits: Tensor, _: int) -> Tensor:
    return logits


def in_half_precision(logits: Tensor, number: int) -> Tensor:
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(number))
    return (logits + 0.03 * noise).bfloat16().float()


def in_half_precision_of_large_logits(logits: Tensor, number: int) -> Tensor:
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(number))
    return (logits + 0.4 * noise).bfloat16().float()


def top_five(logits: Tensor, _: int) -> Tensor:
    return logits.masked_fill(logits < logits.topk(5).values[..., -1:], -torch.inf)


def colder(logits: Tensor, _: int) -> Tensor:
    return logits / 0.8


def warmer(logits: Tensor, _: int) -> Tensor:
    return logits * 0.8


def left_behind(logits: Tensor, number: int) -> Tensor:
    """Weights of which an ever larger part is missing."""
    return logits + 0.1 * number * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("sampler", [same, in_half_precision])
def test_healthy_runs_have_no_finding(sampler: Sampler) -> None:
    for seed in range(5):
        run = Run(seed)
        assert [kind for _ in range(60) for kind in run.update(sampler)] == []


def test_rows_of_a_sharp_policy_that_half_precision_moves_have_no_finding() -> None:
    """Most rows are the same on both sides to the last digits, and a few, with an open token, are not."""
    for seed in range(3):
        run = Run(seed)
        run.logits[torch.arange(B) % 8 > 0] *= 100
        run.logits[:, torch.arange(T) % 8 > 0] *= 20
        assert [kind for _ in range(60) for kind in run.update(in_half_precision_of_large_logits)] == []


@pytest.mark.parametrize(
    ("sampler", "reported", "found", "within"),
    [
        (same, colder, "sampling.ratio", 5),
        (same, lambda logits, _: logits.roll(1, dims=1), "sampling.ratio", 2),
        (colder, same, "sampling.surprise", 4),
        (warmer, same, "sampling.surprise", 4),
        (top_five, same, "sampling.surprise", 8),
        (left_behind, None, "sampling.drift", 8),
    ],
    ids=["raw logprobs", "rows of a neighbour", "colder", "warmer", "top-k", "weights left behind"],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_sampler_that_is_not_the_policy_is_found(
    sampler: Sampler, reported: Sampler | None, found: str, within: int, seed: int
) -> None:
    run = Run(seed)
    kinds = {kind for _ in range(within) for kind in run.update(sampler, reported)}
    assert found in kinds


def test_a_sampler_that_reads_something_else_from_the_start_is_found() -> None:
    run = Run(0)
    noise = torch.randn(B, T, V, generator=torch.Generator().manual_seed(9))
    kinds = {kind for _ in range(3) for kind in run.update(lambda logits, _: logits + noise)}
    assert "sampling.distance" in kinds


@pytest.mark.parametrize(("reported", "found"), [(colder, "sampling.ratio"), (same, "sampling.surprise")])
def test_an_update_with_a_logprob_that_is_no_number_hides_nothing_of_later_ones(reported: Sampler, found: str) -> None:
    run = Run(0)
    healthy = run.logits.clone()
    run.logits[0, 0] = torch.nan
    number = run.audit.updates
    logprobs = run.logits.log_softmax(-1)[..., 0].requires_grad_()
    known = {"sampler_logprobs": healthy.log_softmax(-1)[..., 0], "versions": torch.full((B,), number)}
    with run.audit.update(mask=MASK, trainer_version=number, **known) as update:
        update.watch(logprobs, entropy=logprobs.detach()).sum().backward()
    assert [finding.invariant for finding in update.findings] == ["logprobs.not_finite"]
    run.logits = healthy
    assert found in {kind for _ in range(5) for kind in run.update(colder if reported is same else same, reported)}


def test_a_row_that_the_sampler_reads_in_another_way_is_found() -> None:
    def one_row(logits: Tensor, _: int) -> Tensor:
        other = logits.clone()
        other[3] += torch.randn(T, V, generator=torch.Generator().manual_seed(9))
        return other

    run = Run(0)
    assert "sampling.uneven" in [kind for _ in range(3) for kind in run.update(one_row)]
    assert "in row 3" in str(run.audit.findings[0])


def test_beside_an_engine_of_the_same_precision_a_row_that_is_a_little_off_is_found() -> None:
    def one_row(logits: Tensor, _: int) -> Tensor:
        other = logits.clone()
        other[3] += 0.2 * torch.randn(T, V, generator=torch.Generator().manual_seed(9))
        return other

    run = Run(0)
    assert "sampling.uneven" in [kind for _ in range(6) for kind in run.update(one_row)]
    run = Run(0)
    assert [kind for _ in range(6) for kind in run.update(lambda *now: in_half_precision(one_row(*now), 0))] == []


def test_beside_a_trainer_in_half_precision_an_engine_that_rounds_the_same_at_first_is_not_taken_for_exact() -> None:
    # A GPU and a CPU add up in another order, and round most sums alike: few logits differ, by a step of bfloat16.
    def few_steps(logits: Tensor, number: int) -> Tensor:
        moved = torch.rand(logits.shape, generator=torch.Generator().manual_seed(number)) < 0.001 * min(number, 10)
        return logits.bfloat16().float() * torch.where(moved, 1 + 2**-7, 1.0)

    def found(**given: Any) -> set[str]:
        run = Run(0)
        run.logits = run.logits.bfloat16().float()
        kinds = set()
        for _ in range(40):
            kinds.update(run.update(few_steps, **given))
            run.logits = run.logits.bfloat16().float()
        return kinds

    assert found(half_precision=True) == set()
    assert found() & {"sampling.drift", "sampling.uneven"}


def test_half_precision_is_told_by_the_weights_and_by_autocast() -> None:
    def told(dtype: torch.dtype, is_autocast: bool) -> bool:
        model = torch.nn.Linear(1, 1, dtype=dtype)
        update = Audit(every=1, on_finding="log").update(mask=MASK, model=model)
        update.begin()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            logprobs = update.watch(torch.zeros(B, T, requires_grad=True))
        logprobs.mean().backward()
        update.end(keep_record=True)
        assert update.record is not None
        return update.record.half_precision

    assert [told(torch.float32, False), told(torch.bfloat16, False), told(torch.float32, True)] == [False, True, True]


@pytest.mark.parametrize("order", [IN_ORDER, SHUFFLED], ids=["in order", "shuffled"])
def test_samples_of_a_prompt_that_share_a_seed_are_found(order: Tensor) -> None:
    run = Run(0)
    assert run.update(same, same_seed=True, order=order) == ["sampling.repeats"]


def test_short_answers_that_repeat_by_chance_are_no_finding() -> None:
    for seed in range(5):
        run = Run(seed, scale=8.0)
        equal = run.logits[::2]
        for _ in range(60):
            run.logits[1::2] = equal
            run.logits[:, 2:] = 0
            run.logits[:, 2:, 0] = 50.0
            assert run.update(same) == []


def test_what_breaks_late_is_found_soon() -> None:
    run = Run(0)
    assert [kind for _ in range(100) for kind in run.update(same)] == []
    assert "sampling.surprise" in {kind for _ in range(8) for kind in run.update(colder, same)}


def test_rows_of_older_weights_are_left_out() -> None:
    run = Run(0)
    older = {"versions": torch.full((B,), -1)}
    assert [kind for _ in range(10) for kind in run.update(colder, same, **older)] == []


def test_rows_that_were_chosen_are_not_taken_for_samples_of_the_policy() -> None:
    run = Run(0)
    assert [kind for _ in range(10) for kind in run.update(top_five, same, drawn_freely=False)] == []


def test_samples_are_judged_apart_from_the_loss_with_the_logprobs_of_the_sampler_or_the_entropy_alone() -> None:
    def found(temperature: float, with_logprobs: bool, spoilt: float = 0.0) -> list[str]:
        source, audit = torch.Generator().manual_seed(0), Audit(every=2, on_finding="log")
        for _ in range(10):
            logits = 2 * torch.randn(B, T, V, generator=source)
            drawn_from = logits / temperature
            ids = torch.multinomial(drawn_from.softmax(-1).view(-1, V), 1, generator=source).view(B, T, 1)
            log_probs = (logits + spoilt).log_softmax(-1)
            audit.sampled(
                mask=MASK,
                logprobs=log_probs.gather(-1, ids)[..., 0],
                sampler_logprobs=drawn_from.log_softmax(-1).gather(-1, ids)[..., 0] if with_logprobs else None,
                entropy=-(log_probs.exp() * log_probs).sum(-1),
            )
        assert audit.samplings == 10
        return [finding.invariant for finding in audit.findings]

    assert found(1.0, with_logprobs=True) == found(1.0, with_logprobs=False) == []
    assert "sampling.surprise" in found(0.8, with_logprobs=True)
    assert found(0.8, with_logprobs=False) == ["sampling.surprise"]
    assert found(1.0, with_logprobs=True, spoilt=torch.nan) == ["logprobs.not_finite"]
