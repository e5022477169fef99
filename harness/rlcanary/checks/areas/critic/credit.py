"""Credit of tokens: rewards reach the tokens that earned them, over turns, tool tokens and padding."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Generator, Tensor

from rlcanary import reference
from rlcanary.checks.asserts import assert_close, assert_true, soft, unless_raised
from rlcanary.checks.case import Case
from rlcanary.checks.check import Cases, check, other_values
from rlcanary.checks.worlds import inputs, rows
from rlcanary.checks.worlds.credit import DECAYS, SHAPES, credit_batch, drawn_credit, known_returns, without_untrained
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.conventions import Conventions, TokenCredit, Whitening, WhiteningSingleton
from rlcanary.contract.records.credit import Credit, CreditBatch

RETURNS: dict[str, Any] = {"token_credit": "returns", **DECAYS}
GAE: dict[str, Any] = {"token_credit": "gae", **DECAYS}
PLAIN: dict[str, Any] = {"token_credit": "outcome", "baseline_weighting": "rows", "whitening": "none"}


def _kinds(conventions: Conventions) -> dict[str, dict[str, Any]]:
    """Return the declared credit with other decays or, if none is declared, every kind that the adapter can be set to."""
    if conventions.token_credit != "outcome":
        return {"": {}, "decays": DECAYS if conventions.token_credit == "gae" else {"discount": 0.9}}
    return {
        "": {},
        "whitened": {"whitening": "mean_std"},
        "weighted baseline": {"baseline_weighting": "tokens", "advantage_baseline": "mean"},
        "returns": RETURNS,
        "turn returns": {"token_credit": "turn_returns", **DECAYS},
        "gae": GAE,
        "returns, whitened": {
            **RETURNS,
            "advantage_baseline": "none",
            "advantage_scale": "none",
            "whitening": "mean_std",
        },
        "gae, whitened": {**GAE, "whitening": "mean_std"},
        "gae, whitened, another lambda of the critic": {**GAE, "whitening": "mean_std", "critic_lambda": 0.5},
    }


def _batches(*shapes: inputs.Shape) -> Cases:
    def cases(conventions: Conventions, rng: Generator) -> Iterator[Case]:
        for kind, changes in _kinds(conventions).items():
            for shape in shapes:
                label = shape[:2] if len(shapes) > 1 else ()
                yield Case(*label, within=kind, changes=changes, batch=credit_batch(rng, *shape))

    return cases


def _drawn(conventions: Conventions, rng: Generator, size: int) -> Case:
    changes = rows.one_of(rng, list(_kinds(conventions).values()))
    return Case(changes=changes, batch=drawn_credit(rng, size, conventions.replace(**changes)))


def _other_formulas(conventions: Conventions) -> list[dict[str, Any]]:
    """List the declarations that differ in one field."""
    choices = {"whitening": get_args(Whitening), "whitening_ddof": (0, 1), "token_credit": get_args(TokenCredit)}
    return other_values(conventions, choices)


def _given(conventions: Conventions, rng: Generator) -> Iterator[Case]:
    yield from _batches(*SHAPES)(conventions=conventions, rng=rng)
    for kind, changes in _kinds(conventions).items():
        batch = credit_batch(rng, 5, 4, (4, 1, 3, 2, 2))
        yield Case("shuffled groups of 3 and 2", within=kind, changes=changes, batch=_of_groups(batch, [7, 4, 7, 4, 7]))
        bare = replace(credit_batch(rng, 4, 3, (3, 1, 2, 3)), token_rewards=None)
        yield Case("rewards of rows alone", within=kind, changes=changes, batch=bare)
    yield from _batches(*inputs.LARGE)(conventions=conventions, rng=rng)


def _of_groups(batch: CreditBatch, group_ids: list[int]) -> CreditBatch:
    return replace(batch, group_ids=torch.tensor(group_ids))


@check(
    "credit.declared_advantages",
    needs=("token_advantages",),
    cases=_given,
    alternatives=_other_formulas,
    draws=_drawn,
)
def declared_advantages(adapter: Adapter, batch: CreditBatch) -> None:
    """Each trained token has the declared advantage: outcome of its row, discounted returns, returns of its turn, or GAE.

    Silent because advantages of any size and order train something, and the reward curve moves. Look at the direction of
    the recursion, at the token that the row's reward falls on, at what discount and lambda multiply, and at whitening.
    """
    expected = reference.token_advantages(_double(batch), adapter.conventions)
    advantages_BT = adapter.token_advantages(batch).advantages
    told = f"advantages are not those declared as {_formula(adapter.conventions)}"
    scale = float(batch.rewards.abs().max())
    assert_close(advantages_BT, expected.advantages, told, where=batch.mask, scale=scale)


def _formula(conventions: Conventions) -> str:
    credit = f"{conventions.token_credit!r}"
    credit += f", discount {conventions.discount:g}" if conventions.token_credit != "outcome" else ""
    credit += f", lambda {conventions.gae_lambda:g}" if conventions.token_credit == "gae" else ""
    credit += ", baseline weighted by tokens" if conventions.baseline_weighting == "tokens" else ""
    return credit + (f", whitening {conventions.whitening!r}" if conventions.whitening != "none" else "")


def _double(batch: CreditBatch) -> CreditBatch:
    """Convert the rewards to float64, in which the reference then answers."""
    return replace(batch, rewards=batch.rewards.double())


def _critics(rng: Generator) -> Iterator[Case]:
    for kind, changes in {
        "": {"token_credit": "gae"},
        "decays": GAE,
        "whitened": {**GAE, "whitening": "mean_std"},
        "another lambda of the critic": {**GAE, "critic_lambda": 0.5},
        "a critic of whole returns": {**GAE, "critic_lambda": 1.0},
    }.items():
        for shape in SHAPES:
            yield Case(*shape[:2], within=kind, changes=changes, batch=credit_batch(rng, *shape))


def _drawn_critic(conventions: Conventions, rng: Generator, size: int) -> Case:
    changes = {**GAE, "critic_lambda": rows.one_of(rng, (None, 0.5, 1.0))}
    return Case(changes=changes, batch=drawn_credit(rng, size, conventions.replace(**changes)))


@check("credit.declared_returns", needs=("token_advantages",), cases=_critics, draws=_drawn_critic)
def declared_returns(adapter: Adapter, batch: CreditBatch) -> None:
    """The returns that the critic is trained towards are its values plus the advantages before whitening, at its own lambda.

    Silent because the critic's loss falls towards any target. Look for returns that are computed behind the whitening,
    for the lambda of the critic's own advantages, and for values that were changed in between.
    """
    expected = reference.token_advantages(_double(batch), adapter.conventions)
    found_BT = adapter.token_advantages(batch).returns
    assert_true(found_BT is not None, "with a critic there are no returns", quantity="returns")
    told = "the critic's returns are not its values plus the advantages before whitening"
    assert_close(found_BT, torch.as_tensor(expected.returns), told, where=batch.mask, quantity="returns")


def _assert_same(after: Credit, before: Credit, told: str, where_after: Tensor, where_before: Tensor) -> None:
    """Assert that advantages, and returns where there are any, are the same at the marked tokens."""
    with soft():
        assert_close(after.advantages[where_after], before.advantages[where_before], f"{told} changed advantages")
    if after.returns is not None and before.returns is not None:
        told = f"{told} changed the critic's returns"
        assert_close(after.returns[where_after], before.returns[where_before], told, quantity="returns")


# Holes, a row that trains its last token and rows that do not.
_law = partial(check, needs=("token_advantages",), cases=_batches((4, 5, (5, 2, 1, 3)), (4, 6, None)), draws=_drawn)


@_law("credit.untrained_tokens")
def untrained_tokens(adapter: Adapter, batch: CreditBatch) -> None:
    """Rewards and values of tokens that are not trained, of tools or of padding, change nothing.

    Silent because they are small numbers as all others: a KL penalty of the tool's tokens, or what the critic thinks of
    padding. Look for a sum before the mask, and for a value behind the last token that the recursion starts from.
    """
    before = adapter.token_advantages(copy.deepcopy(batch))
    others = {"values": 9.0, "token_rewards": -5.0}
    given = {name: getattr(batch, name) for name in others}
    changed = {name: value.masked_fill(~batch.mask, others[name]) for name, value in given.items() if value is not None}
    after = adapter.token_advantages(replace(batch, **changed))
    _assert_same(after, before, "other rewards and values of untrained tokens", batch.mask, batch.mask)


@_law("credit.holes_are_nothing")
def holes_are_nothing(adapter: Adapter, batch: CreditBatch) -> None:
    """Advantages are the same when tokens that are not trained, between the others or behind them, are taken out.

    Silent because a discount over a long tool output only makes the credit of earlier turns small, and a reward on the last
    column only of short rows gets lost. Look for a recursion over columns that takes the hole for a step or for the end of
    an episode, and for a reward that is placed by the width of the batch.
    """
    before = adapter.token_advantages(copy.deepcopy(batch))
    moved = without_untrained(batch)
    after = adapter.token_advantages(copy.deepcopy(moved))
    _assert_same(after, before, "taking out untrained tokens", moved.mask, batch.mask)


@_law("credit.row_order")
def row_order(adapter: Adapter, batch: CreditBatch) -> None:
    """Shuffling the rows shuffles advantages and returns with them.

    Silent because rewards, values and masks of different rows have the same shapes. Look for a tensor that is sorted or
    filtered while the others are not, and for groups by position.
    """
    order = torch.arange(len(batch.mask)).roll(1)
    shuffled = {name: value[order] for name, value in vars(batch).items() if isinstance(value, Tensor)}
    before = adapter.token_advantages(copy.deepcopy(batch))
    after = adapter.token_advantages(CreditBatch(**shuffled))
    given = Credit(before.advantages[order], None if before.returns is None else before.returns[order])
    _assert_same(after, given, "shuffling the rows", batch.mask[order], batch.mask[order])


def _perfect(rng: Generator) -> Iterator[Case]:
    for decays in ({}, DECAYS, {"discount": 1.0, "gae_lambda": 0.0}):
        changes = {"token_credit": "gae", "whitening": "none", **decays}
        for shape in SHAPES:
            yield Case(*shape[:2], within=Case(decays).label, changes=changes, batch=credit_batch(rng, *shape))


@check("credit.perfect_critic", needs=("token_advantages",), cases=_perfect)
def perfect_critic(adapter: Adapter, batch: CreditBatch) -> None:
    """A critic that knows every return leaves no advantage, at every lambda.

    Silent because a bias that grows towards one end of the row looks like a lesson about length. Look for values that are
    shifted against rewards, for a value behind the end, for a reward beside the last token, and for holes in the recursion.
    """
    known_BT = known_returns(batch, adapter.conventions)
    advantages_BT = adapter.token_advantages(replace(batch, values=known_BT)).advantages
    told = "with a critic that knows every return there are advantages"
    assert_close(advantages_BT, torch.zeros_like(known_BT), told, where=batch.mask, scale=2)


def _whitened(conventions: Conventions, rng: Generator) -> Iterator[Case]:
    for kind in dict.fromkeys((conventions.whitening, "mean_std", "mean", "std")):
        if kind != "none":
            for shape in SHAPES[1:]:
                yield Case(*shape[:2], within=kind, changes={"whitening": kind}, batch=credit_batch(rng, *shape))


@check("credit.whitened", needs=("token_advantages",), cases=_whitened)
def whitened(adapter: Adapter, batch: CreditBatch) -> None:
    """Whitened advantages have mean 0 and standard deviation 1 over the trained tokens of the whole batch, as declared.

    Silent because statistics that count padding only shrink the advantages, by a factor that depends on the longest row,
    and the optimizer hides the factor. Look for `mean()` without the mask, for ddof, for each rank or slice that
    whitens its own, and for row statistics in place of token statistics.
    """
    trained_N = adapter.token_advantages(batch).advantages[batch.mask]
    kind, ddof = adapter.conventions.whitening, adapter.conventions.whitening_ddof
    if kind in ("mean_std", "mean"):
        told = "advantages that are declared as centred have another mean over trained tokens than 0"
        with soft():
            assert_close(trained_N.mean(), torch.zeros(()), told, quantity="mean")
    if kind in ("mean_std", "std"):
        told = f"advantages that are declared as divided by their deviation (ddof {ddof}) have another one than 1"
        assert_close(trained_N.std(correction=ddof), torch.ones(()), told, quantity="deviation")


def _without_spread(conventions: Conventions) -> Iterator[Case]:
    one_BT, all_BT = torch.tensor([[True, False], [False, False]]), torch.ones(2, 2, dtype=torch.bool)
    nothing_BT, turn_ids_BT = torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.long)
    for kind in dict.fromkeys((conventions.whitening, "mean_std", "mean", "std")):
        for ddof in (0, 1) if kind != "none" else ():
            changes = {"whitening": kind, "whitening_ddof": ddof}
            for name, rewards, mask_BT in (
                ("one trained token", [1.0, 0.25], one_BT),
                ("equal rewards", [0.1, 0.1], all_BT),
            ):
                batch = CreditBatch(torch.tensor(rewards), mask_BT, torch.tensor([0, 0]), nothing_BT)
                batch.turn_ids = turn_ids_BT
                yield Case(name, within=changes, changes=changes, batch=batch)


def _other_singletons(conventions: Conventions) -> list[dict[str, Any]]:
    return other_values(conventions, {"whitening_singleton": get_args(WhiteningSingleton)})


@check("credit.without_spread", needs=("token_advantages",), cases=_without_spread, alternatives=_other_singletons)
def without_spread(adapter: Adapter, batch: CreditBatch) -> None:
    """Whitening is finite where all advantages are equal, and as declared where one token leaves no deviation.

    Silent because it takes a filter or a rank that leaves one token: with n - 1 its deviation is NaN, and so are its
    advantage and, one step later, all weights; or something replaces the NaN by a zero. Look for a condition that asks for
    no token where it has to ask for fewer than two, and for a division without an epsilon. An error is no silence.
    """
    credit = unless_raised(adapter.token_advantages, copy.deepcopy(batch))
    if credit is None:
        return
    trained_N = credit.advantages[batch.mask]
    if len(trained_N) > adapter.conventions.whitening_ddof:
        told = f"advantages of trained tokens are {trained_N.tolist()}"
        assert_true(bool(trained_N.isfinite().all()), told, quantity="advantages", compared=len(trained_N))
    else:
        expected = reference.token_advantages(_double(batch), adapter.conventions)
        told = f"the advantage of one trained token is not as declared ({adapter.conventions.whitening_singleton!r})"
        assert_close(credit.advantages, expected.advantages, told, where=batch.mask, quantity="advantages")


def _outcomes(rng: Generator) -> Iterator[Case]:
    for shape in SHAPES:
        yield Case(*shape[:2], changes=PLAIN, batch=replace(credit_batch(rng, *shape), token_rewards=None))


@check("credit.every_token_of_the_row", needs=("token_advantages", "advantages"), cases=_outcomes)
def every_token_of_the_row(adapter: Adapter, batch: CreditBatch) -> None:
    """With credit by outcome, every trained token of a row carries the advantage that the row has among its group.

    Silent because tokens with advantage zero raise no error, they only do not learn. Look for a mask that comes from
    another row or another step of the trajectory, and for a broadcast along the wrong axis.
    """
    rows_B = torch.as_tensor(adapter.advantages(batch.rewards.clone(), batch.group_ids.clone())).detach()
    expected_BT = rows_B.unsqueeze(1).expand(batch.mask.shape)
    told = "trained tokens do not carry the advantage of their row"
    assert_close(adapter.token_advantages(batch).advantages, expected_BT, told, where=batch.mask)
