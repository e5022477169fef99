"""The metrics of an evaluation with several samples per item: mean, best of k, pass@k and votes, by dataset and over all."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

from torch import Generator

from rlcanary.checks.asserts import assert_metrics, assert_true, unless_raised
from rlcanary.checks.case import Case
from rlcanary.checks.check import check, other_values
from rlcanary.checks.worlds.rows import one_of, whole
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.conventions import BestAtK, Conventions, OverallScore, Unscored, VoteTie
from rlcanary.contract.records.reporting import EvaluatedItem
from rlcanary.reference import reporting

MARGIN = 0.08
"""How far an estimate from 1000 draws may be off, as a share of the range of scores: five standard errors."""


def _ends(conventions: Conventions) -> tuple[float, float]:
    """Return a wrong score and a right one: 0 and 1 for thresholds between them."""
    return min(0.0, conventions.pass_threshold - 1), max(1.0, conventions.pass_threshold)


def _item(item_id: int, scores: Sequence[float], answers: str = "", *, dataset: str = "math") -> EvaluatedItem:
    return EvaluatedItem(item_id, list(scores), dataset, list(answers) if answers else None)


def _evaluated(conventions: Conventions) -> list[EvaluatedItem]:
    """Make five items of two datasets, four samples each, whose votes have no ties."""
    wrong, right = _ends(conventions)
    return [
        _item(0, [wrong, right, wrong, wrong], "abac"),
        _item(1, [right, right, wrong, right], "ddad"),
        _item(2, [wrong, wrong, wrong, wrong], "aaaf"),
        _item(0, [right, wrong, right, right], "xyxx", dataset="code"),
        _item(1, [right, right, right, right], "zzzz", dataset="code"),
    ]


def _evaluations(conventions: Conventions) -> Iterator[Case]:
    wrong, right = _ends(conventions)
    for k in (1, 2):
        yield Case(f"one item, k={k}", items=[_item(0, [wrong, right, wrong], "aba")], k=k)
    for k in (1, 2, 3, 4):
        yield Case(f"two datasets, k={k}", items=_evaluated(conventions), k=k)
    graded = [conventions.pass_threshold + distance for distance in (-0.5, 0.25, -0.25, 0.5)]
    yield Case("around the threshold", items=[_item(0, graded), _item(1, graded[::-1], dataset="code")], k=2)
    uneven = [_item(0, [right, wrong]), _item(1, [wrong, right, wrong, wrong, wrong]), _item(2, [right, right, wrong])]
    yield Case("unequal numbers of samples", items=uneven, k=2)
    tied = [_item(0, [wrong, right, right, wrong], "abba"), _item(1, [right, wrong, wrong], "abc")]
    yield Case("tied votes", items=tied, k=1)
    long = EvaluatedItem(0, [wrong, wrong, right, wrong, right], "math", ["137", "15", "42", "1", "42"])
    yield Case("answers that begin alike", items=[long], k=1)
    many = [_item(number, [wrong, right if number % 3 else wrong]) for number in range(70)]
    yield Case("70 items", items=many, k=1)
    below = [_item(0, [wrong - 1, wrong - 2]), _item(1, [wrong - 3, wrong - 1, wrong - 1])]
    yield Case("scores below those of wrong answers", items=below, k=2)


def _other_definitions(conventions: Conventions) -> list[dict[str, Any]]:
    """List the declarations that differ in one field."""
    choices = {"best_at_k": get_args(BestAtK), "vote_tie": get_args(VoteTie), "overall_score": get_args(OverallScore)}
    return other_values(conventions, choices)


def _drawn(conventions: Conventions, rng: Generator, size: int) -> Case:
    ends, n_samples = _ends(conventions), whole(rng, 2, size + 1)
    items = [
        _item(index, [one_of(rng, ends) for _ in range(n_samples)], dataset=one_of(rng, ("math", "code")))
        for index in range(whole(rng, 1, 2 * size))
    ]
    return Case(items=items, k=whole(rng, 1, n_samples))


@check(
    "evaluation_metrics.recomputed",
    severity="dashboard",
    needs=("evaluation_metrics",),
    cases=_evaluations,
    alternatives=_other_definitions,
    draws=_drawn,
)
def recomputed(adapter: Adapter, items: list[EvaluatedItem], k: int) -> None:
    """Mean, best@k, pass@k and the majority's score are those of these samples, by dataset and over all.

    Silent because each of them is a number between 0 and 1 that rises during training. Look for a pass@k that is 1 as soon
    as one of all n samples is right, for the biased 1 - (1 - c/n)^k, for a best of k that is the best of all, for a
    comparison with 1.0, and for a mean over datasets where one over items is declared.
    """
    expected = reporting.evaluation_metrics(items, k, adapter.conventions)
    _assert_metrics(adapter, adapter.evaluation_metrics(items, k, len(items)), expected, "computed again", items)


def _assert_metrics(
    adapter: Adapter, got: dict[str, float], expected: dict[str, float], told: str, items: Sequence[EvaluatedItem]
) -> None:
    """Assert the metrics that are both logged and expected; a best@k by resampling within its sampling error."""
    estimated = {
        name: value
        for name, value in expected.items()
        if name.endswith("best@k") and adapter.conventions.best_at_k == "resampled"
    }
    assert_metrics(got, {name: value for name, value in expected.items() if name not in estimated}, told)
    every = [score for item in items for score in item.scores]
    for name in estimated.keys() & got.keys():
        error = abs(float(got[name]) - estimated[name])
        told_all = f"the metric {name} is {float(got[name]):.6g}, {told} it is {estimated[name]:.6g}"
        holds = error <= MARGIN * (max(every) - min(every)) + 1e-5
        assert_true(holds, told_all, quantity=f"metric {name}", magnitude=error)


def _first_and_last_k(conventions: Conventions) -> Iterator[Case]:
    for k in (1, 4):
        yield Case(f"k={k}", items=_evaluated(conventions), k=k)


@check("evaluation_metrics.limits", severity="dashboard", needs=("evaluation_metrics",), cases=_first_and_last_k)
def limits(adapter: Adapter, items: list[EvaluatedItem], k: int) -> None:
    """With k = 1, best@k is the mean and pass@k the share of right samples; with k = n, of all, one right sample is enough.

    Silent because between these limits no one knows the number by heart. Look for a k that is not passed on, for the
    number of items in the place of the number of samples, and for samples of other items among the k.
    """
    right = [[score >= adapter.conventions.pass_threshold for score in item.scores] for item in items]
    alone = [items.index(item) for item in items if item.dataset == "math"]
    if k == 1:
        best = [sum(item.scores) / len(item.scores) for item in items]
        passed = [sum(each) / len(each) for each in right]
    else:
        best = [max(item.scores) for item in items]
        passed = [float(any(each)) for each in right]
    expected = {"math/pass@k": sum(passed[index] for index in alone) / len(alone)}
    if k == 1 or adapter.conventions.best_at_k == "subsets":
        expected["math/best@k"] = sum(best[index] for index in alone) / len(alone)
    _assert_metrics(adapter, adapter.evaluation_metrics(items, k, len(items)), expected, f"with k={k}", items)


def _all_wrong(conventions: Conventions) -> Iterator[Case]:
    wrong, _ = _ends(conventions)
    for n_samples, k in ((1, 1), (3, 2), (3, 3), (1, 2), (3, 8)):
        items = [_item(index, [wrong] * n_samples) for index in range(2)]
        yield Case(f"{n_samples} samples, k={k}", items=items, k=k)


@check("evaluation_metrics.nothing_right", severity="dashboard", needs=("evaluation_metrics",), cases=_all_wrong)
def nothing_right(adapter: Adapter, items: list[EvaluatedItem], k: int) -> None:
    """Items without a right sample give no pass@k above 0, also where k is greater than the number of samples.

    Silent because the shortcut of the estimator, 1 where fewer than k samples are wrong, holds for fewer samples than k
    too: the benchmark is then solved. Look for `if n - c < k: return 1.0`. An error, NaN or no number at all are fine.
    """
    metrics = unless_raised(adapter.evaluation_metrics, items, k, len(items)) or {}
    for name in ("pass@k", "math/pass@k"):
        if name in metrics:
            told = f"no sample is right, and {name} is {float(metrics[name]):.4g} for k={k}"
            assert_true(not float(metrics[name]) > 1e-6, told, quantity=f"metric {name}")


def _batched(conventions: Conventions) -> Iterator[Case]:
    for batch_size in (1, 2, 3, 4):
        yield Case(f"batches of {batch_size}", items=_evaluated(conventions), batch_size=batch_size)


@check("evaluation_metrics.batches_and_order", severity="dashboard", needs=("evaluation_metrics",), cases=_batched)
def batches_and_order(adapter: Adapter, items: list[EvaluatedItem], batch_size: int) -> None:
    """Neither the batches of an evaluation nor the order of items and samples change a number.

    Silent because the score of a small last batch weighs as much as that of a full one: a dataset whose last item stands
    alone gets half of its score from it. Look for means of the batches' means, batches that are left out, the first sample
    in the place of all, and samples that are regrouped by position.
    """
    turned = [
        replace(item, scores=list(item.scores)[::-1], answers=list(item.answers or [])[::-1]) for item in items[::-1]
    ]
    together = adapter.evaluation_metrics(items, 2, len(items))
    if adapter.conventions.best_at_k == "resampled":
        # Two estimates differ by their sampling errors.
        together = {name: value for name, value in together.items() if not name.endswith("best@k")}
    for told, given in {"in one batch": items, "in one batch, in another order": turned}.items():
        assert_metrics(adapter.evaluation_metrics(given, 2, batch_size), together, told)


def _two_datasets(conventions: Conventions) -> Iterator[Case]:
    yield Case(items=_evaluated(conventions))


@check(
    "evaluation_metrics.items_are_separate", severity="dashboard", needs=("evaluation_metrics",), cases=_two_datasets
)
def items_are_separate(adapter: Adapter, items: list[EvaluatedItem]) -> None:
    """The numbers of a dataset depend on its own items alone: other datasets and their samples do not reach them.

    Silent because the score of a dataset with some of a neighbour's items is a plausible score. Look for items of
    different datasets that have the same id, as here, for a reshape by a fixed number of samples, and for a last dataset
    that takes the rest.
    """
    alone = adapter.evaluation_metrics([item for item in items if item.dataset == "math"], 2, len(items))
    expected = {name: value for name, value in alone.items() if name.startswith("math/")}
    mixed = adapter.evaluation_metrics(items[::2] + items[1::2], 2, len(items))
    _assert_metrics(adapter, mixed, expected, "without the other dataset", items)


def _nan_scores(conventions: Conventions) -> Iterator[Case]:
    wrong, right = _ends(conventions)
    for name in dict.fromkeys((conventions.unscored, *get_args(Unscored))):
        items = [
            _item(0, [right, math.nan, wrong]),
            _item(1, [right, right, wrong]),
            _item(0, [right] * 3, dataset="code"),
        ]
        yield Case("" if name == conventions.unscored else name, changes={"unscored": name}, items=items)


@check("evaluation_metrics.unscored", severity="dashboard", needs=("evaluation_metrics",), cases=_nan_scores)
def unscored(adapter: Adapter, items: list[EvaluatedItem]) -> None:
    """A sample without a score (NaN) makes the numbers an error, is left out of them, or counts as 0, as declared.

    Silent because a verifier that times out on one machine then looks like a worse policy. Look for `nan_to_num` and
    `nanmean`, and for a NaN that is compared with a threshold, which is false.
    """
    if adapter.conventions.unscored == "error":
        metrics = unless_raised(adapter.evaluation_metrics, items, 1, len(items)) or {}
        logged = [name for name in ("math/mean@n", "mean@n", "math/pass@k", "pass@k") if name in metrics][:1]
        told = f"a sample without a score is declared as an error, and {logged} has the value of the others"
        numbers = [float(metrics[name]) for name in logged]
        assert_true(all(map(math.isnan, numbers)), told, quantity="metric mean@n", compared=len(numbers))
        return
    expected = reporting.evaluation_metrics(items, 1, adapter.conventions)
    is_zero = adapter.conventions.unscored == "zero"
    told = "with 0 for the missing score" if is_zero else "over the samples with a score"
    got = adapter.evaluation_metrics(items, 1, len(items))
    _assert_metrics(adapter, got, expected, told, [_item(0, _ends(adapter.conventions))])
