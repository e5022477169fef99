"""The inputs that checks try, smallest first, so that the first failure is a small counterexample.

They are adversarial on purpose: uneven lengths, a fully masked row, B equal to T, groups of one, constant rewards,
ratios on both sides of the clipping bounds. Numbers are rounded so that a counterexample reads well; float32 holds them
exactly enough.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor

from rlcanary import reference
from rlcanary.checks.case import Case
from rlcanary.contract.batch import Batch, PolicyBatch
from rlcanary.contract.conventions import Conventions

Record = TypeVar("Record", bound=Batch)

# [B, T] of a batch, and the number of trained tokens of each row; None is a mask with holes, as tool turns leave.
Shape = tuple[int, int, tuple[int, ...] | None]

SHAPES: tuple[Shape, ...] = (
    (1, 1, (1,)),
    (2, 2, (2, 1)),
    (2, 3, (3, 1)),
    (4, 4, (4, 2, 1, 3)),
    (4, 6, None),
)
WITH_EMPTY_ROW: Shape = (4, 5, (5, 0, 2, 3))
# More rows, and more tokens, than a chunk, a bucket or a block is likely to hold.
LARGE: tuple[Shape, ...] = ((70, 3, None), (2, 300, (300, 140)))


def uniform(rng: Generator, *shape: int, low: float, high: float, decimals: int = 2) -> Tensor:
    """Draw float32 numbers uniformly from [low, high], rounded."""
    return (torch.rand(*shape, generator=rng) * (high - low) + low).round(decimals=decimals)


def logits(rng: Generator, rows: int, width: int, vocabulary: int) -> Tensor:
    """[rows, width, vocabulary] float32 logits that require a gradient."""
    return uniform(rng, rows, width, vocabulary, low=-3, high=3).requires_grad_()


def fresh(batch: Record) -> Record:
    """Copy a batch of tensors as a forward pass leaves them: no leaves, so that code may work on them in place."""
    tensors = {name: value.clone() for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return replace(batch, **tensors)


def token_ids(rng: Generator, rows: int, width: int, vocabulary: int) -> Tensor:
    """[rows, width] ids."""
    return torch.randint(vocabulary, (rows, width), generator=rng)


def mask(rng: Generator, rows: int, width: int, lengths: tuple[int, ...] | None) -> Tensor:
    """[rows, width] bool from lengths, or with holes and at least one true entry in each row."""
    if lengths is not None:
        return torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    holes = torch.rand(rows, width, generator=rng) < 0.6
    holes[:, 0] = True
    return holes


def policy_batch(
    rng: Generator, rows: int, width: int, lengths: tuple[int, ...] | None, *, on_policy: bool = False
) -> PolicyBatch:
    """A batch of two completions per prompt, with ratios between 0.5 and 2; on policy all of them are 1."""
    logprobs_BT = uniform(rng, rows, width, low=-3, high=-0.5)
    # No difference lies on a round number, where a clamp may have two correct gradients.
    drift_BT = torch.zeros(rows, width) if on_policy else uniform(rng, rows, width, low=-0.7, high=0.7) + 0.003
    mismatch_BT = torch.zeros(rows, width) if on_policy else uniform(rng, rows, width, low=-0.4, high=0.4)
    # A row advantage of both signs in every batch of two rows or more, none of them zero.
    signs_B = torch.tensor([1.0, -1.0]).repeat(rows)[:rows]
    batch = PolicyBatch(
        logprobs=logprobs_BT.clone().requires_grad_(),
        old_logprobs=(logprobs_BT - drift_BT).round(decimals=3),
        advantages=signs_B * uniform(rng, rows, low=0.3, high=1.5),
        mask=mask(rng, rows, width, lengths),
        ref_logprobs=(logprobs_BT + uniform(rng, rows, width, low=-0.8, high=0.8) + 0.003).round(decimals=3),
        sampler_logprobs=(logprobs_BT - drift_BT + mismatch_BT).round(decimals=3),
        entropy=uniform(rng, rows, width, low=0.1, high=2),
        group_ids=torch.arange(rows) // 2,
    )
    return _of_probabilities(batch)


def _of_probabilities(batch: PolicyBatch) -> PolicyBatch:
    """Lower all logprobs of a token alike, so that none is above zero: code may take them back to probabilities."""
    names = ("logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs")
    given = {name: getattr(batch, name).detach() for name in names}
    highest_BT = torch.stack(list(given.values())).amax(dim=0)
    excess_BT = torch.where(highest_BT > 0, highest_BT + 0.1, 0.0)
    lowered = {name: (values_BT - excess_BT).round(decimals=3) for name, values_BT in given.items()}
    return replace(batch, **{**lowered, "logprobs": lowered["logprobs"].requires_grad_()})


def on_policy_batch(logprobs_BT: Tensor, advantages: Tensor, mask_BT: Tensor) -> PolicyBatch:
    """A batch of one group, in the dtype of these logprobs, which are those of policy, sampler and reference alike."""
    return PolicyBatch(
        logprobs=logprobs_BT.clone().requires_grad_(),
        old_logprobs=logprobs_BT,
        advantages=advantages,
        mask=mask_BT,
        ref_logprobs=logprobs_BT,
        sampler_logprobs=logprobs_BT,
        entropy=torch.zeros_like(logprobs_BT),
        group_ids=torch.zeros(len(mask_BT), dtype=torch.long),
    )


def one_row(log_ratios: list[float], advantage: float) -> PolicyBatch:
    """Make a batch of one row, with equal logprobs of policy and reference."""
    logprobs_1T, log_ratio_1T = torch.full((1, len(log_ratios)), -1.0), torch.tensor([log_ratios])
    batch = on_policy_batch(logprobs_1T, torch.tensor([advantage]), torch.ones_like(logprobs_1T, dtype=torch.bool))
    old_1T = logprobs_1T - log_ratio_1T
    return replace(batch, old_logprobs=old_1T, sampler_logprobs=old_1T, entropy=torch.ones_like(logprobs_1T))


def ratios_around_bounds(conventions: Conventions) -> list[float]:
    """Return ratios of `one_row` on both sides of each clipping bound, and never on one, where two gradients are correct."""
    # The distance that a dynamic bound allows is one of probabilities, of which the present one is 1/e.
    unit = math.e if conventions.clip_bounds == "dynamic" else 1.0
    bounds = [1 - unit * conventions.clip_low] if conventions.clip_low is not None else []
    bounds += [1 + unit * conventions.clip_high] if conventions.clip_high is not None else []
    bounds += [conventions.dual_clip] if conventions.dual_clip is not None else []
    ratios = {1.0, 0.31, 2.9, *(bound * side for bound in bounds for side in (0.97, 1.03) if bound > 0)}
    return sorted(value for value in ratios if all(abs(value - bound) > 1e-4 for bound in bounds))


def kl_clamp_edges(conventions: Conventions) -> dict[str, list[float]]:
    """Return the log-ratios at which each declared clamp starts to act."""
    edges = {}
    if conventions.kl_input_clamp is not None:
        edges["kl_input_clamp"] = [-conventions.kl_input_clamp, conventions.kl_input_clamp]
    if conventions.kl_output_clamp is not None:
        edges["kl_output_clamp"] = [_reaching(conventions.kl_output_clamp, sign, conventions) for sign in (-1, 1)]
    return edges


def _reaching(estimate: float, sign: int, conventions: Conventions) -> float:
    """Find by bisection the log-ratio of this sign whose estimate is this large."""
    # |x|, x²/2 and exp(-x) - 1 + x, which is above x - 1, are all larger at the upper end.
    low, high = 0.0, estimate + math.sqrt(2 * estimate) + 2
    for _ in range(60):
        middle = (low + high) / 2
        if float(unclamped_kl(torch.tensor(sign * middle, dtype=torch.float64), conventions).abs()) < estimate:
            low = middle
        else:
            high = middle
    return sign * high


def unclamped_kl(log_ratio: Tensor, conventions: Conventions) -> Tensor:
    """The declared estimate of a log-ratio, without its clamps."""
    free = conventions.replace(kl_input_clamp=None, kl_output_clamp=None)
    return reference.kl(log_ratio, torch.zeros_like(log_ratio), free)


def beside(edges: Sequence[float]) -> tuple[Tensor, Tensor]:
    """[1, T] logprobs of policy and of reference, with log-ratios on both sides of each edge."""
    log_ratio_1T = torch.tensor([[factor * edge for edge in edges for factor in (0.9, 1.1)]])
    # Neither of the two probabilities is above 1.
    logprobs_1T = log_ratio_1T.clamp(max=0) - 0.5
    return logprobs_1T, logprobs_1T - log_ratio_1T


def around_kl_clamps(conventions: Conventions) -> Iterator[Case]:
    """Yield a row on policy for each declared clamp of a KL in the loss, with log-ratios on both sides of its edges."""
    if not conventions.kl_coef or conventions.kl_placement != "loss":
        return
    for name, edges in kl_clamp_edges(conventions).items():
        logprobs_1T, ref_1T = beside(edges)
        batch = on_policy_batch(logprobs_1T, torch.tensor([1.0]), torch.ones_like(logprobs_1T, dtype=torch.bool))
        batch = replace(batch, ref_logprobs=ref_1T, entropy=torch.ones_like(logprobs_1T))
        yield Case(f"both sides of {name}", batch=batch)


def batches(*shapes: Shape, on_policy: bool = False, **changes: Any) -> Callable[[Generator], Iterator[Case]]:
    """Make the cases of a check: a batch of each of these shapes, under conventions with these changes."""

    def cases(rng: Generator) -> Iterator[Case]:
        for shape in shapes:
            batch = policy_batch(rng, *shape, on_policy=on_policy)
            yield Case(batch if len(shapes) > 1 else "", changes=changes, batch=batch)

    return cases


def reward_groups(rng: Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """[B] rewards and [B] group ids. Equal group sizes first; then shuffled rows; then groups of unequal size."""
    yield torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    yield torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 0])
    yield torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5, 3.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    yield uniform(rng, 8, low=-2, high=5), torch.arange(8) // 4
    # Far apart, so that the wrong axis or the wrong scope of a statistic shows.
    yield torch.tensor([0.0, 1.0, 100.0, 103.0]), torch.tensor([0, 0, 1, 1])
    # So small that the epsilon matters.
    yield torch.tensor([0.0, 1e-4, 3e-4, 2e-4]), torch.tensor([0, 0, 0, 0])
    # Equal but for one, and not exact in float32, where E[x²] - E[x]² cancels.
    yield torch.tensor([0.0, *[0.95] * 7]), torch.zeros(8, dtype=torch.long)
    yield uniform(rng, 6, low=0, high=1), torch.tensor([0, 1, 0, 1, 1, 0])
    yield uniform(rng, 7, low=0, high=1), torch.tensor([4, 4, 4, 7, 7, 7, 7])
    # Large groups, and many of them.
    yield uniform(rng, 140, low=0, high=1), torch.arange(140) // 70
    yield uniform(rng, 160, low=0, high=1), torch.arange(160) // 2
