"""The order of items, the plan of a run, rewards, and the batch of an update."""

from __future__ import annotations

import math
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.trl import releases
from rlcanary.adapters.trl.base import TrlBase
from rlcanary.adapters.trl.trainer.runs import GROUP, dataset_trainer, noted, ranked
from rlcanary.adapters.trl.trainer.state import Rollout
from rlcanary.adapters.trl.trainer.trainers import PROMPT
from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, Group
    from rlcanary.contract.records.building import PlanSettings, RunPlan
    from rlcanary.contract.records.reward_parts import RewardParts
    from rlcanary.contract.state import Item


class TrlData(TrlBase):
    """From the dataset's items to the batch of an update."""

    def data_order(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        key = n_items, rank, world_size
        epochs, visited = self._epochs.setdefault(key, (self._epochs_of(*key), []))
        while len(visited) <= epoch:
            visited.append(next(epochs))
        return list(visited[epoch])

    def resumed_order(self, n_items: int, consumed: int, count: int, rank: int, world_size: int) -> list[int]:
        settings = self._order_settings | {
            "num_train_epochs": math.ceil((consumed + count) / max(n_items // world_size, 1))
        }
        with tempfile.TemporaryDirectory() as folder:
            if consumed:
                # Rank 0 writes the checkpoint of all.
                with ranked(0, world_size):
                    trainer = dataset_trainer(settings, n_items, world_size, world_size)
                    noted(trainer, stop_at=consumed, folder=folder)
            with ranked(rank, world_size):
                trainer = dataset_trainer(settings, n_items, world_size, world_size)
                run = noted(trainer, stop_at=consumed + count, folder=folder, resumes=consumed > 0)
        return [item for batch in run.batches for item in batch]

    def run_plan(self, settings: PlanSettings) -> RunPlan:
        from rlcanary.contract.records.building import RunPlan

        if not settings.drop_last:
            raise NotProvided("the sampler always drops what is left of an epoch")
        limit = {}
        if settings.max_batches is not None:
            conventions = self.conventions
            limit["max_steps"] = settings.max_batches * conventions.epochs_per_rollout * conventions.mini_batches
        batches = []
        for rank in range(settings.ranks):
            with ranked(rank, settings.ranks):
                given = {"num_train_epochs": settings.epochs, **limit}
                try:
                    trainer = dataset_trainer(
                        self.settings, settings.n_items, settings.prompts_per_batch, settings.ranks, **given
                    )
                except ValueError as error:
                    raise NotProvided(str(error)) from error
                run = noted(trainer)
            batches.append(run.batches)
        schedule = run.trainer.lr_scheduler.lr_lambdas[0].keywords["num_training_steps"]
        return RunPlan(batches, run.trainer.state.global_step, schedule)

    def score(self, items: list[Item], completions: list[str]) -> Tensor:
        def reward(completions: list[str], item: list[Item], **_: Any) -> list[float | None]:
            return [each.reward(text) for each, text in zip(item, completions, strict=True)]

        trainer = self._trainer
        trainer.reward_funcs = [reward]
        rows = [{"prompt": PROMPT, "item": item} for item in items]
        with quiet():
            rewards = trainer._calculate_rewards(rows, [PROMPT] * len(rows), list(completions), [[]] * len(rows))
        return rewards[:, 0]  # type: ignore[no-any-return]

    def combine_rewards(self, parts: RewardParts) -> Tensor:
        """Return for each row the mean reward that the trainer logs of two completions with the row's parts."""
        import torch

        def given(part: int) -> Any:
            def reward(parts: list[list[float]], **_: Any) -> list[float | None]:
                return [None if math.isnan(row[part]) else row[part] for row in parts]

            return reward

        trainer, count = self._trainer, len(parts.weights)
        trainer.use_vllm = False
        trainer.reward_funcs = [given(part) for part in range(count)]
        trainer.reward_func_names = list(parts.names) or [f"part {part}" for part in range(count)]
        trainer.reward_processing_classes = [None] * count
        trainer.reward_weights = torch.tensor(parts.weights, dtype=torch.float32)
        trainer.model.train()
        rewards = []
        for row in parts.values.tolist():
            trainer._metrics["train"].clear()
            with quiet():
                trainer._generate_and_score_completions([{"prompt": PROMPT, "parts": row} for _ in range(GROUP)])
            rewards.append(trainer._metrics["train"]["reward"][-1])
        return torch.tensor(rewards)

    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        """Collate as the trainer does for its loss. It has no ids of groups or items: its rows keep their order."""
        import torch

        from rlcanary.contract.batch import CollatedBatch

        if any(group.ref_logprobs is not None for group in groups):
            raise NotProvided("the trainer scores with its reference model itself")
        trainer, rollout = self._trainer, Rollout.of_groups(groups, is_grouped=False)
        releases.use_padding(trainer, pad_token_id)
        trainer.num_generations = 1
        trainer.use_vllm = False
        trainer.model.train()
        # The log of rewards, without its limit of a generation batch.
        trainer._logs = {**trainer._logs, "rewards": defaultdict(list)}
        trainer.replayed = rollout.outputs(with_logprobs=True)
        with quiet():
            output = trainer._generate_and_score_completions(rollout.inputs())
        present_BT, sampled_BT = output["completion_mask"].bool(), output.get("tool_mask")
        mask_BT = present_BT if sampled_BT is None else present_BT & sampled_BT.bool()
        logprobs_BT = output.get("sampling_per_token_logps")
        input_ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        numbers = [number for number, group in enumerate(groups) for _ in group.completions]
        (rewards,) = trainer._logs["rewards"].values()
        return CollatedBatch(
            input_ids=input_ids,
            attention_mask=torch.cat([output["prompt_mask"].bool(), present_BT], dim=1),
            # The model is given none, and counts from the left edge.
            position_ids=torch.arange(input_ids.shape[1]).expand_as(input_ids),
            completion_starts=torch.full((len(numbers),), output["prompt_ids"].shape[1]),
            completion_ids=output["completion_ids"],
            completion_mask=mask_BT,
            rewards=torch.tensor(rewards),
            group_ids=torch.tensor(numbers),
            old_logprobs=None if logprobs_BT is None else logprobs_BT.masked_fill(~mask_BT, math.nan),
        )

    @property
    def _order_settings(self) -> dict[str, Any]:
        """Return settings with one update per prompt and rank."""
        return {**self.settings, "num_iterations": 1, "steps_per_generation": 1, "gradient_accumulation_steps": 1}

    def _epochs_of(self, n_items: int, rank: int, n_ranks: int) -> Iterator[list[int]]:
        """Go through the epochs of a run's data loader, as its loop does."""
        with ranked(rank, n_ranks):
            trainer = dataset_trainer(self._order_settings, n_items, n_ranks, n_ranks)
            loader = trainer.get_train_dataloader()
        epoch = 0
        while True:
            loader.set_epoch(epoch)
            yield [int(batch[0]) for batch in loader.batch_sampler]
            epoch += 1

    @cached_property
    def _epochs(self) -> dict[tuple[int, int, int], tuple[Iterator[list[int]], list[list[int]]]]:
        return {}
