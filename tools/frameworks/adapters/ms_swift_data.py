"""Rewards, batches, the order of items and the numbers that ms-swift's `GRPOTrainer` logs of its rollouts."""

from __future__ import annotations

import itertools
import math
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from ms_swift_objective import MODULE, generated
from ms_swift_trainers import as_rank, grpo_trainer, row
from ms_swift_training import SwiftTraining

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.trl.reporting import METRICS
from rlcanary.adapters.trl.trainer.ranks import Ranks
from rlcanary.adapters.trl.trainer.runs import GROUP
from rlcanary.adapters.trl.trainer.state import Rollout, group_size
from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, Group
    from rlcanary.contract.records.building import PlanSettings, RunPlan
    from rlcanary.contract.records.credit import CreditBatch
    from rlcanary.contract.records.lengths import Lengths
    from rlcanary.contract.records.preparation import Answer
    from rlcanary.contract.records.reporting import RolloutBatch
    from rlcanary.contract.records.reward_parts import RewardParts
    from rlcanary.contract.state import Item


class SwiftData(SwiftTraining):
    """From the dataset's items to the batch of an update."""

    # Rewards

    def score(self, items: list[Item], completions: list[str]) -> Tensor:
        trainer = self._trainer
        trainer.reward_funcs = [reward_of(items)]
        samples = trainer.to_samples([row(item=number) for number in range(len(items))])
        for sample, text in zip(samples, completions, strict=True):
            sample.messages.append({"role": "assistant", "content": text})
        with quiet():
            found: Tensor = trainer._compute_rewards_per_func(samples)[:, 0]
        return found

    def combine_rewards(self, parts: RewardParts) -> Tensor:
        """Return for each row the mean reward that the trainer logs of two completions with the row's parts."""
        import torch

        def given(part: int) -> Any:
            def reward(_: Any, parts: list[list[float]], **__: Any) -> list[float | None]:
                return [None if math.isnan(row[part]) else row[part] for row in parts]

            return reward

        rewards = []
        for values in parts.values.tolist():
            trainer, count = self._trainer, len(parts.weights)
            trainer.reward_funcs = [given(part) for part in range(count)]
            trainer.reward_model_plugins = [None] * count
            trainer.reward_func_names = list(parts.names) or [f"part {part}" for part in range(count)]
            trainer.reward_weights = torch.tensor(parts.weights, dtype=torch.float32)
            trainer.num_generations = GROUP
            generated(trainer, [row(parts=values) for _ in range(GROUP)])
            rewards.append(trainer._metrics["train"]["reward"][-1])
        return torch.tensor(rewards)

    def shape_rewards(self, rewards: Tensor, lengths: Lengths) -> Tensor:
        import torch
        from swift.rewards import orms

        cache = self.settings.get("soft_cache_length")
        if cache is None:
            raise NotProvided("soft_overlong is not among the reward functions")
        punish = orms["soft_overlong"](SimpleNamespace(soft_max_length=lengths.max_new_tokens, soft_cache_length=cache))
        ids = [[5] * int(length) for length in lengths.completions]
        return rewards + torch.tensor(punish([""] * len(ids), response_token_ids=ids))

    def keep_group(self, rewards: Tensor) -> bool:
        """Tell whether dynamic sampling, which is given this group first and then one with a spread, keeps it."""
        if len(rewards) < 2:
            raise NotProvided("num_generations has to be greater than 1")
        trainer = self._trainer
        trainer.num_generations = trainer.args.generation_batch_size = len(rewards)
        trainer.dynamic_resample_iterator = itertools.repeat([row(given_reward=float(n)) for n in range(len(rewards))])
        with quiet():
            first = trainer._rollout_samples([row(given_reward=float(reward), is_first=True) for reward in rewards])
            scored = trainer._compute_rewards_per_func(first)
            kept, _ = trainer._dynamic_sampling(first, scored)
        return any(sample.extra.get("is_first") for sample in kept)

    def verify(self, answer: Answer) -> bool:
        from swift.rewards import orms

        if (answer.kind, answer.format) not in (("number", "boxed"), ("math", "boxed"), ("number", "tag")):
            raise NotProvided("the reward function accuracy reads LaTeX, and plain numbers in an answer tag")
        reference = f"${answer.reference}$"
        (reward,) = orms["accuracy"]()([answer.text], solution=[reference])
        return float(reward) == 1.0

    # Batches

    def token_advantages(self, batch: CreditBatch) -> Any:
        from rlcanary.contract.records.credit import Credit

        if batch.token_rewards is not None or batch.values is not None:
            raise NotProvided("the trainer has neither rewards of tokens nor a critic")
        size = group_size(batch.group_ids.tolist())
        if size < 2:
            raise NotProvided("num_generations has to be greater than 1")
        trainer = self._trainer
        trainer.num_generations = size
        ids = [[6] * batch.mask.shape[1]] * len(batch.rewards)
        marks = batch.mask.long().tolist()
        trainer.engine.rollout = Rollout([[5]] * len(ids), ids, batch.rewards.tolist(), size, sampled=marks)
        (found,) = generated(trainer, [row(given_reward=reward) for reward in batch.rewards.tolist()])
        own = found["grpo_batch"]
        # The frame of the batch begins with the first trained token of any row.
        behind = batch.mask.shape[1] - own.advantages.shape[1]
        advantages: Tensor = own.advantages
        return Credit(_padded_left(advantages, behind))

    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        """Collate as the trainer does for its loss. It has no ids of groups: its rows keep their order."""
        import torch

        from rlcanary.contract.batch import CollatedBatch

        if any(group.ref_logprobs is not None for group in groups):
            raise NotProvided("the trainer scores with its reference model itself")
        if self.conventions.mask_truncated:
            raise NotProvided("overlong_filter takes truncated completions out of the loss, not out of the batch")
        rollout = Rollout.of_groups(groups, is_grouped=False)
        if any(not ids for ids in rollout.completion_ids):
            raise NotProvided("an engine of swift returns a token at least")
        trainer = self._trainer
        trainer.template.tokenizer.pad_token_id = pad_token_id
        (found,) = _rolled_out(trainer, rollout)
        inputs, own = found["model_inputs"], found["grpo_batch"]
        attention_BS = inputs["attention_mask"].bool()
        lengths_B = torch.tensor([len(ids) for ids in rollout.completion_ids])
        starts_B = torch.tensor([len(ids) for ids in rollout.prompt_ids])
        width = int(lengths_B.max())
        index_BT = starts_B.unsqueeze(1) + torch.arange(width)
        padded_BS = torch.nn.functional.pad(inputs["input_ids"], (0, width), value=pad_token_id)
        offset = inputs["input_ids"].shape[1] - own.completion_mask.shape[1]

        def of_completions(values_BT: Tensor, none: Any) -> Tensor:
            values_BS = torch.nn.functional.pad(values_BT, (offset, width), value=none)
            return values_BS.gather(1, index_BT)

        mask_BT = of_completions(own.completion_mask, False)
        logprobs_BT = own.rollout_per_token_logps
        rewards = trainer._logs["rewards"][trainer.reward_func_names[0]]
        return CollatedBatch(
            input_ids=inputs["input_ids"],
            attention_mask=attention_BS,
            position_ids=torch.arange(attention_BS.shape[1]).expand_as(attention_BS),
            completion_starts=starts_B,
            completion_ids=padded_BS.gather(1, index_BT),
            completion_mask=mask_BT,
            rewards=torch.tensor(list(rewards)),
            group_ids=torch.tensor([number for number, group in enumerate(groups) for _ in group.completions]),
            old_logprobs=None
            if logprobs_BT is None
            else of_completions(logprobs_BT, 0.0).masked_fill(~mask_BT, math.nan),
        )

    def rollout_metrics(self, batch: RolloutBatch, n_ranks: int) -> dict[str, float]:
        if any(each.finish_reason == "abort" for group in batch.groups for each in group.completions):
            raise NotProvided("swift's records know no interrupted completions")
        if len(batch.groups) % n_ranks:
            raise NotProvided("ranks have equally many prompts")
        share = len(batch.groups) // n_ranks
        parts = [batch.groups[first : first + share] for first in range(0, len(batch.groups), share)]
        rollouts = [Rollout.of_groups(part) for part in parts]
        if len({each.group_size for each in rollouts}) > 1:
            raise NotProvided("groups have to be of equal size and in order")
        if any(not ids for each in rollouts for ids in each.completion_ids):
            raise NotProvided("an engine of swift returns a token at least")

        def work(rank: int, trainer: Any) -> dict[str, float]:
            trainer.engine = type(trainer.engine)(trainer)
            reasons = [each.finish_reason for group in parts[rank] for each in group.completions]
            trainer.num_generations = rollouts[rank].group_size
            _rolled_out(trainer, rollouts[rank], reasons)
            logged = trainer._metrics["train"]
            return {ours: logged[theirs][-1] for theirs, ours in METRICS.items()}

        if n_ranks == 1:
            return work(0, self._trainer)
        with patch("swift.rlhf_trainers.rollout_mixin.gather_object", lambda values: values):
            logged: dict[str, float] = Ranks(n_ranks, MODULE).run(work, self._trainer)[0]
        return logged

    # The order of items

    def data_order(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        key = n_items, rank, world_size
        epochs, visited = self._epochs.setdefault(key, (self._epochs_of(*key), []))
        while len(visited) <= epoch:
            visited.append(next(epochs))
        return list(visited[epoch])

    def _epochs_of(self, n_items: int, rank: int, n_ranks: int) -> Iterator[list[int]]:
        """Go through the epochs of a run's data loader, as its loop does."""
        with as_rank(rank, n_ranks):
            loader = self._dataset_trainer(n_items, n_ranks, n_ranks).get_train_dataloader()
        epoch = 0
        while True:
            if hasattr(loader, "set_epoch"):
                loader.set_epoch(epoch)
            yield [batch[0]["item"] for batch in loader]
            epoch += 1

    @cached_property
    def _epochs(self) -> dict[tuple[int, int, int], tuple[Iterator[list[int]], list[list[int]]]]:
        return {}

    def _dataset_trainer(self, n_items: int, prompts_per_batch: int, n_ranks: int, **options: Any) -> Any:
        """Construct the trainer of a rank, on a dataset of numbered items."""
        steps = options.get("steps_per_generation", 1)
        rows, rest = divmod(prompts_per_batch * GROUP, n_ranks * steps)
        if rest:
            raise NotProvided(f"{prompts_per_batch} prompts cannot be divided among {n_ranks} ranks and {steps} steps")
        own = {name: value for name, value in self.settings.items() if name != "soft_cache_length"}
        sizes = {"num_generations": GROUP, "per_device_train_batch_size": rows}
        return grpo_trainer({**own, **sizes, **options}, rows=[row(item=number) for number in range(n_items)])

    def run_plan(self, settings: PlanSettings) -> RunPlan:
        from rlcanary.adapters.trl.trainer.runs import noted
        from rlcanary.contract.records.building import RunPlan

        if not settings.drop_last:
            raise NotProvided("GRPOConfig sets dataloader_drop_last")
        given: dict[str, Any] = {"num_train_epochs": settings.epochs, "save_strategy": "no"}
        conventions = self.conventions
        given["steps_per_generation"] = conventions.mini_batches * self.settings.get("gradient_accumulation_steps", 1)
        if settings.max_batches is not None:
            given["max_steps"] = settings.max_batches * conventions.epochs_per_rollout * conventions.mini_batches
        batches = []
        for rank in range(settings.ranks):
            with as_rank(rank, settings.ranks):
                trainer = self._dataset_trainer(settings.n_items, settings.prompts_per_batch, settings.ranks, **given)
                run = noted(trainer)
            batches.append(run.batches)
        schedule = run.trainer.lr_scheduler.lr_lambdas[0].keywords["num_training_steps"]
        return RunPlan(batches, run.trainer.state.global_step, schedule)


def reward_of(items: list[Item]) -> Any:
    """Make a reward function that asks the items, of which the column `item` has the number."""

    def reward(completions: list[str], item: list[int], **_: Any) -> list[float | None]:
        return [items[number].reward(text) for number, text in zip(item, completions, strict=True)]

    return reward


def _rolled_out(trainer: Any, rollout: Rollout, finish_reasons: list[str] | None = None) -> list[dict[str, Any]]:
    """Have a trainer roll out these prompts, with this rollout as the answer of its engine, and collate it."""
    trainer.engine.rollout, trainer.engine.finish_reasons = rollout, finish_reasons
    trainer.engine.with_logprobs = True
    trainer.num_generations = rollout.group_size
    trainer.args.steps_per_generation = 1
    trainer._logs["rewards"].clear()
    for name in trainer.reward_func_names:  # without its limit of a generation batch
        trainer._logs["rewards"][name] = []
    texts = [trainer.template.tokenizer.decode(ids) for ids in rollout.prompt_ids]
    rows = [row(text, given_reward=reward) for text, reward in zip(texts, rollout.rewards, strict=True)]
    return generated(trainer, rows)


def _padded_left(values_BT: Tensor, width: int) -> Tensor:
    """Put columns in front that no trained token is in."""
    import torch

    return torch.nn.functional.pad(values_BT, (width, 0))
