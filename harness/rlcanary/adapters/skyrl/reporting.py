"""The numbers that SkyRL logs of rollouts, evaluations and micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcanary.adapters.skyrl.base import SkyrlBase
from rlcanary.contract.adapter import NotProvided

if TYPE_CHECKING:
    from rlcanary.contract.records.reporting import EvaluatedItem, Metric, RolloutBatch

ROLLOUT = {
    "generate/avg_num_tokens": "length",
    "generate/min_num_tokens": "length_min",
    "generate/max_num_tokens": "length_max",
}
# SkyRL tells the reduction of a metric from the end of its name.
ENDINGS = {"mean": "", "sum": "_loss", "min": "_min", "max": "_max"}


class Reporting(SkyrlBase):
    """Logged numbers."""

    def rollout_metrics(self, batch: RolloutBatch, n_ranks: int) -> dict[str, float]:
        from skyrl.train.generators.utils import get_metrics_from_generator_output, get_rollout_metrics

        rows = [(group, index) for group in batch.groups for index in range(len(group.completions))]
        responses = [list(group.completions[index].token_ids) for group, index in rows]
        rewards = [float(group.rewards[index]) for group, index in rows]
        uids = [str(number) for number, group in enumerate(batch.groups) for _ in group.completions]
        logged = get_rollout_metrics(responses, rewards)
        found = {ours: float(logged[theirs]) for theirs, ours in ROLLOUT.items()}
        return {**found, "reward": get_metrics_from_generator_output({"rewards": rewards}, uids)["avg_score"]}

    def merged_metrics(self, parts: list[dict[str, Metric]]) -> dict[str, float]:
        from skyrl.backends.skyrl_train.workers.worker_utils import reduce_metrics

        values: dict[str, list[float]] = {}
        names: dict[str, str] = {}
        for part in parts:
            for name, metric in part.items():
                if metric.reduction not in ENDINGS:
                    raise NotProvided("SkyRL's metrics are means, sums, minima and maxima")
                written = f"{name}{ENDINGS[metric.reduction]}"
                names[written] = name
                values.setdefault(written, []).append(metric.value)
        return {names[written]: value for written, value in reduce_metrics(values, sum_loss_metrics=True).items()}

    def evaluation_metrics(self, items: list[EvaluatedItem], k: int, batch_size: int) -> dict[str, float]:
        from skyrl.train.generators.utils import get_metrics_from_generator_output
        from skyrl.train.utils.trainer_utils import calculate_per_dataset_metrics

        counts = {len(item.scores) for item in items}
        if len(counts) > 1:
            raise NotProvided("n_samples_per_prompt is one number for all prompts")
        rewards = [float(score) for item in items for score in item.scores]
        uids = [f"{item.dataset} {item.item_id}" for item in items for _ in item.scores]
        sources = [item.dataset for item in items for _ in item.scores]
        count = counts.pop()
        whole = get_metrics_from_generator_output({"rewards": rewards}, uids)
        logged: dict[str, Any] = calculate_per_dataset_metrics({"rewards": rewards}, uids, sources, count)
        metrics = {"mean@n": whole["avg_score"]}
        # In SkyRL every score above 0 is right.
        has_pass = k == count and all(score in (0, 1) for score in rewards)
        if has_pass:
            metrics["pass@k"] = whole["pass_at_n"]
        for dataset in dict.fromkeys(sources):
            metrics[f"{dataset}/mean@n"] = logged[f"eval/{dataset}/avg_score"]
            if has_pass:
                metrics[f"{dataset}/pass@k"] = logged[f"eval/{dataset}/pass_at_{count}"]
        return metrics
