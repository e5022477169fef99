"""Bugs in the reduction of metrics over micro-batches, ranks and steps."""

import math
from dataclasses import replace

from rlcanary.bugs.museum import Bug
from rlcanary.contract.records.reporting import Metric


class ExtremesAveraged(Bug):
    id = "miles.extremes-averaged"
    source = "miles, #1968"
    effect = "the minimum and maximum over ranks are the means of the ranks' own: both are too near the middle"

    def merged_metrics(self, parts: list[dict[str, Metric]]) -> dict[str, float]:
        def averaged(metric: Metric) -> Metric:
            return replace(metric, reduction="mean") if metric.reduction in ("min", "max") else metric

        return super().merged_metrics([{name: averaged(each) for name, each in part.items()} for part in parts])


class ExtremesDivided(Bug):
    id = "nemo-rl.extremes-divided"
    source = "NeMo RL 0eb5fffec, #1818, survey N26"
    effect = "minimum and maximum are divided by the number of batches, and fall below the mean"

    def merged_metrics(self, parts: list[dict[str, Metric]]) -> dict[str, float]:
        divided = {name for part in parts for name, metric in part.items() if metric.reduction in ("min", "max")}
        merged = super().merged_metrics(parts)
        return {name: value / len(parts) if name in divided else value for name, value in merged.items()}


class ReducedByName(Bug):
    id = "verl.reduced-by-name"
    source = "verl, #7361"
    effect = "a metric with max or min anywhere in its name is reduced to that: minmax_diff, terminated"

    def merged_metrics(self, parts: list[dict[str, Metric]]) -> dict[str, float]:
        def by_name(name: str, metric: Metric) -> Metric:
            if "max" in name:
                return replace(metric, reduction="max")
            return replace(metric, reduction="min") if "min" in name else metric

        return super().merged_metrics([{name: by_name(name, each) for name, each in part.items()} for part in parts])


class MetricsOfTheFirstWorker(Bug):
    id = "verl.metrics-of-the-first-worker"
    source = "verl eb06fda2a, #3699, survey V39"
    effect = "joining the workers' data keeps the metrics of the first and drops all others"

    def merged_metrics(self, parts: list[dict[str, Metric]]) -> dict[str, float]:
        return super().merged_metrics(parts[:1])


class BatchesWeighAlike(Bug):
    id = "openrlhf.batches-weigh-alike"
    source = "OpenRLHF, #1336"
    effect = "a last batch of one pair weighs as much as a full one: an accuracy of 2/3 is logged as 1/2"

    def merged_metrics(self, parts: list[dict[str, Metric]]) -> dict[str, float]:
        def alike(metric: Metric) -> Metric:
            return replace(metric, count=min(metric.count, 1))

        return super().merged_metrics([{name: alike(each) for name, each in part.items()} for part in parts])


class EmptyMicroBatchCounts(Bug):
    id = "nemo-rl.empty-micro-batch-counts"
    source = "NeMo RL, #230"
    effect = "a micro-batch without a valid sample gives 0, which is averaged with the metrics of the others"

    def merged_metrics(self, parts: list[dict[str, Metric]]) -> dict[str, float]:
        def zero(metric: Metric) -> Metric:
            is_empty = metric.count == 0 and metric.reduction == "mean"
            return replace(metric, value=0.0, count=1) if is_empty or math.isnan(metric.value) else metric

        return super().merged_metrics([{name: zero(each) for name, each in part.items()} for part in parts])


class MergedByPosition(Bug):
    id = "open-instruct.merged-by-position"
    source = "open-instruct, #614"
    effect = "ranks that have seen other datasets add the reward of one dataset to the metric of another"

    def merged_metrics(self, parts: list[dict[str, Metric]]) -> dict[str, float]:
        names = max((list(part) for part in parts), key=len)
        return super().merged_metrics([dict(zip(names, part.values(), strict=False)) for part in parts])
