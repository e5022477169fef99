"""verl's numbers of rollouts, validations and micro-batches, and its table of samples."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.verl.updates import Updates
from rlcanary.adapters.verl.workers.run_config import run_config
from rlcanary.adapters.verl.workers.trainer import Rollout, new_trainer, put_rollouts
from rlcanary.adapters.verl.workers.transfer_queue import Rows, Store, stored
from rlcanary.contract.adapter import NotProvided

if TYPE_CHECKING:
    from rlcanary.contract.records.reporting import EvaluatedItem, LoggedSample, Metric, RolloutBatch

METRICS = {
    "critic/rewards/mean": "reward",
    "critic/rewards/min": "reward_min",
    "critic/rewards/max": "reward_max",
    "response_length/mean": "length",
    "response_length/min": "length_min",
    "response_length/max": "length_max",
    "training/off_policy/trajectory_staleness/mean": "staleness",
    "training/off_policy/trajectory_staleness/max": "staleness_max",
}


class Reports(Updates):
    """Numbers and samples that a run logs."""

    def rollout_metrics(self, batch: RolloutBatch, n_ranks: int) -> dict[str, float]:
        """Compute the trainer's metrics of a step, whose number is one above that of its last weight sync."""
        import torch

        metrics: dict[str, Any] = {}
        with stored() as store, quiet():
            rows = put_groups(store, batch)
            for key in rows.keys:
                store.rows[key] |= {
                    name: torch.zeros(len(store.rows[key]["responses"])) for name in ("advantages", "returns")
                }
            trainer = new_trainer(run_config(algorithm=self.algorithm), _get_n_gpus_for_throughput=lambda: n_ranks)
            trainer._compute_metrics(rows, metrics, {"step": 1.0}, batch.trainer_version + 1, 0)
        return {ours: float(metrics[theirs]) for theirs, ours in METRICS.items()}

    def merged_metrics(self, parts: list[dict[str, Metric]]) -> dict[str, float]:
        """Join the metrics of micro-batches as a worker does."""
        from verl.utils import metric
        from verl.utils.py_functional import append_to_dict

        if any(each.reduction == "last" for part in parts for each in part.values()):
            raise NotProvided('a Metric has no aggregation "last"')
        joined: dict[str, Any] = {}
        for part in parts:
            append_to_dict(joined, {name: metric.Metric(each.reduction, each.value) for name, each in part.items()})
        return {name: float(value) for name, value in metric.reduce_metrics(joined).items()}

    def evaluation_metrics(self, items: list[EvaluatedItem], k: int, batch_size: int) -> dict[str, float]:
        sizes = {len(item.scores) for item in items}
        if len(sizes) > 1:
            raise NotProvided("every prompt of a validation has val_kwargs.n samples")
        (n,) = sizes
        samples = [(item, score) for item in items for score in item.scores]
        with quiet():
            logged = new_trainer(run_config(algorithm=self.algorithm))._val_metrics_update(
                [item.dataset for item, _ in samples],
                [str((item.dataset, item.item_id)) for item, _ in samples],
                {"reward": [score for _, score in samples]},
                [],
            )
        named = {f"mean@{n}": "mean@n", f"best@{k}/mean": "best@k"}
        return {
            f"{dataset}/{ours}": float(value)
            for dataset in {item.dataset for item in items}
            for theirs, ours in named.items()
            for section in ("val-core", "val-aux")
            if (value := logged.get(f"{section}/{dataset}/reward/{theirs}")) is not None
        }

    def logged_samples(self, batch: RolloutBatch, n_samples: int) -> list[LoggedSample]:
        """Log a table of validation samples, whose texts stand for their ids."""
        from rlcanary.contract.records.reporting import LoggedSample

        shown: list[tuple[Any, ...]] = []
        logger = SimpleNamespace(log=lambda _, samples, step: shown.extend((*each, step) for each in samples))
        with quiet():
            trainer = new_trainer(
                run_config(trainer={"log_val_generations": n_samples}), validation_generations_logger=logger
            )
        trainer.global_steps = batch.step
        rows = [
            (json.dumps(list(group.prompt_ids)), completion.text or "", reward)
            for group in batch.groups
            for completion, reward in zip(group.completions, group.rewards, strict=True)
        ]
        trainer._maybe_log_val_generations(*map(list, zip(*rows, strict=True)))
        return [LoggedSample(json.loads(prompt), text, reward, step) for prompt, text, reward, step in shown]


def put_groups(store: Store, batch: RolloutBatch) -> Rows:
    """Write groups into the store, whose policy versions are the global steps of their weights."""
    rollouts = [
        Rollout(str(number), session, group.prompt_ids, completion, reward, group.policy_version)
        for number, group in enumerate(batch.groups)
        for session, (completion, reward) in enumerate(zip(group.completions, group.rewards, strict=True))
    ]
    return put_rollouts(store, rollouts)
