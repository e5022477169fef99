"""The bundled trainer, `rlcanary.grpo`, as an adapter: it runs the code of `rlcanary train`.

Parts shared with the reference are called through the trainer's own modules where it has any: updates in micro-batches
by length on master weights, sampling through the collector, sync with coverage and fingerprints.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Self

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.adapter import Adapter, Item, NotProvided
from rlcanary.contract.capabilities.layouts import Layouts
from rlcanary.contract.capabilities.other_losses import OtherLosses
from rlcanary.contract.capabilities.reporting import Reporting
from rlcanary.contract.sampling import Sampling

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, Completion, Group, LossOutput
    from rlcanary.contract.records.buffering import BufferSettings, Taken
    from rlcanary.contract.records.building import RunSettings
    from rlcanary.contract.records.conversations import ConversationOptions, Environment, Episode, Task
    from rlcanary.contract.records.credit import Credit, CreditBatch, ValueBatch
    from rlcanary.contract.records.preparation import Answer, Setting
    from rlcanary.grpo.plan.schedule import Schedule
    from rlcanary.grpo.rollout.buffer import GroupBuffer

# The verifiers, by the kind and format of an answer.
VERIFIERS = {
    ("number", "hash"): "gsm8k",
    ("number", "tag"): "gsm8k",
    ("math", "boxed"): "math",
    ("math", "tag"): "math",
    ("exact", "bare"): "exact",
}
# The least that a plan has to say.
PLAN = {
    "run": {"folder": "runs/one", "steps": 1},
    "model": {"scratch": {}},
    "data": {"datasets": [{"name": "arithmetic"}]},
    "schedule": {"prompts_per_step": 2, "group_size": 2},
}
# Rows per forward pass: small, so that the checks' few rows make several micro-batches.
MICRO_BATCH = 2
# Room of a buffer without a bound.
ROOM = 1000


class _Buffer:
    """The trainer's buffer with the settings that its callers have. No call waits: each has an event loop of its own."""

    def __init__(self, settings: BufferSettings, buffer: GroupBuffer) -> None:
        self.settings, self.buffer = settings, buffer

    @property
    def waiting(self) -> int:
        return asyncio.run(self.buffer.account()).waiting


class GrpoAdapter(ReferenceAdapter):
    """Adapter of the bundled GRPO trainer."""

    name = "grpo"

    def configured(self, **changes: Any) -> Self:
        if changes.get("buffer_order", "oldest_first") != "oldest_first" or changes.get("buffer_full") == "drop_oldest":
            raise NotProvided("the buffer is first in, first out, and waits while it is full")
        return super().configured(**changes)

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        from rlcanary.grpo.plan.optimizer import OptimizerSettings
        from rlcanary.grpo.training.trainer import new_state

        return new_state(model, OptimizerSettings(learning_rate), ref_model)

    def build(self, settings: RunSettings, model: Any) -> Any:
        from rlcanary.contract.records.building import RunSettings
        from rlcanary.grpo.lora import add_adapters
        from rlcanary.grpo.plan.models import LoraSettings
        from rlcanary.grpo.plan.optimizer import OptimizerSettings
        from rlcanary.grpo.training.trainer import new_state, refresh_reference

        taken = ("learning_rate", "warmup_updates", "weight_decay", "betas")
        given = {name: getattr(settings, name) for name in taken}
        if replace(settings, total_updates=RunSettings.total_updates, lora=None) != RunSettings(**given):
            raise NotProvided("a plan has a constant learning rate, freezes no parts, and the eps is that of torch")
        if self.conventions.decayed != "all":
            raise NotProvided("weight decay is of all parameters")
        if lora := settings.lora:
            add_adapters(model, LoraSettings(lora.rank, lora.alpha, tuple(lora.targets)), seed=0)
        state = new_state(model, OptimizerSettings(**given))
        if self.conventions.kl_coef:
            refresh_reference(state)
        return state

    def token_advantages(self, batch: CreditBatch) -> Credit:
        import torch

        from rlcanary.contract.records.credit import Credit
        from rlcanary.grpo.training.trainer import UpdateBatch, policy_data

        # The trainer's only rewards of tokens are a KL: here that of logprobs of 0 to a reference whose logprobs they are.
        conventions = self.conventions.replace(
            **{"kl_placement": "reward", "kl_coef": 1.0, "kl_estimator": "k1", "kl_direction": "policy_to_reference"},
            **{"kl_input_clamp": None, "kl_output_clamp": None, "kl_score_term": False, "kl_ratio_weighted": False},
            old_logprobs="trainer",
        )
        zeros_BT = torch.zeros(batch.mask.shape)
        rewarded_BT = zeros_BT if batch.token_rewards is None else batch.token_rewards
        rows = replace(_completions(batch), rewards=batch.rewards, ref_logprobs=rewarded_BT)
        values_BT = batch.values if conventions.token_credit == "gae" else None
        given = policy_data(None, rows, conventions, _schedule(rows), zeros_BT, values_BT)
        advantages = given.advantages
        if advantages.ndim == 1:
            advantages = advantages.unsqueeze(1).expand(batch.mask.shape)
        return Credit(advantages, given.returns if isinstance(given, UpdateBatch) else None)

    def values(self, model: Any, batch: CollatedBatch) -> Tensor:
        from rlcanary.grpo.training.critic import frozen_values

        return frozen_values(model, batch, _schedule(batch))

    def value_loss(self, batch: ValueBatch) -> LossOutput:
        from rlcanary.adapters.batches import table_of
        from rlcanary.contract.batch import LossOutput
        from rlcanary.grpo.plan.optimizer import OptimizerSettings
        from rlcanary.grpo.training.critic import accumulate_value_gradients
        from rlcanary.grpo.training.trainer import new_state

        # The trainer runs the backward pass itself. A critic whose parameters are the values gets their gradient.
        values_BT = batch.values.masked_fill(~batch.mask, 0)
        table, rows = table_of(values_BT), _completions(batch)
        critic, given = new_state(table, OptimizerSettings()), replace(batch, values=values_BT.detach())
        output = accumulate_value_gradients(critic, rows, given, self.conventions, _schedule(rows))
        linear = (values_BT * table.weight.grad.view(len(values_BT), -1)[:, :-1]).sum()
        return LossOutput(output.loss + linear - linear.detach(), output.metrics)

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        from rlcanary.grpo.training.trainer import accumulate_gradients, descend, policy_data

        schedule = _schedule(batch)
        given = policy_data(state, batch, self.conventions, schedule)
        output = accumulate_gradients(state, batch, given, self.conventions, schedule)
        return {
            **output.metrics,
            "loss": float(output.loss),
            **descend(state, self.conventions),
            "reward": float(batch.rewards.double().mean()),
            "tokens": float(batch.attention_mask.sum()),
        }

    def rl_step(self, state: Any, groups: list[Group], pad_token_id: int) -> dict[str, float]:
        from statistics import fmean

        from rlcanary.grpo.plan.schedule import Schedule
        from rlcanary.grpo.training.updates import take_updates

        if self.conventions.schedule_advances != "update":
            raise NotProvided("the learning rate changes with every update")
        if self.conventions.logged_updates == "last":
            raise NotProvided("a step logs the means over its updates")
        sizes = {len(group.completions) for group in groups}
        prompts, rest = divmod(len(groups), self.conventions.mini_batches)
        if len(sizes) > 1 or rest:
            raise NotProvided("an update takes whole groups of one size")
        (size,) = sizes
        schedule = Schedule(
            prompts_per_step=len(groups),
            group_size=size,
            rows_per_update=prompts * size,
            epochs_per_step=self.conventions.epochs_per_rollout,
            rows_per_micro_batch=size,
            max_staleness=self.conventions.epochs_per_rollout * self.conventions.mini_batches - 1,
        )
        updates = take_updates(state, self.make_batch(groups, pad_token_id), self.conventions, schedule)
        return {name: fmean(update[name] for update in updates) for name in updates[0]}

    def save_checkpoint(self, state: Any, folder: Path) -> None:
        from rlcanary.grpo.training.checkpoint import learner_content, save_checkpoint

        save_checkpoint(folder, state.updates, learner_content(state), keep=2)

    def load_checkpoint(self, state: Any, folder: Path) -> Any:
        from rlcanary.grpo.training.checkpoint import last_checkpoint, load_checkpoint, restore_learner

        path = last_checkpoint(folder)
        if path is None:
            raise FileNotFoundError(f"{folder} has no checkpoint")
        restore_learner(state, load_checkpoint(path))
        return state

    def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
        from rlcanary.grpo.data.items import ItemIterator
        from rlcanary.grpo.rollout.collector import Collector

        without_reward: list[str] = []

        def noting(reward: Callable[[str], float | None]) -> Callable[[str], float | None]:
            def noted(text: str) -> float | None:
                value = reward(text)
                if value is None:
                    without_reward.append(text)
                return value

            return noted

        # Items of a check may share an id, which an epoch rejects.
        numbered = [Item(index, item.prompt_ids, noting(item.reward)) for index, item in enumerate(items)]
        iterator = ItemIterator(numbered, retries=0)
        iterator.start_epoch()
        collector = Collector([engine], iterator, sampling, slots=len(items))
        groups = asyncio.run(collector.collect(len(items)))
        if without_reward:
            raise NotProvided(
                "a group with a completion that cannot be scored is sampled again, and in the end left out"
            )
        return [replace(group, item_id=items[int(str(group.item_id))].id) for group in groups]

    def converse(
        self, engine: Any, tokenizer: Any, tasks: list[Task], environment: Environment, options: ConversationOptions
    ) -> list[list[Episode]]:
        from rlcanary.adapters.grpo.conversations import converse

        return converse(engine, tokenizer, tasks, environment, options)

    def sync_weights(self, state: Any, engine: Any) -> None:
        from rlcanary.grpo.sync.sync import InProcessEndpoint, sync_weights
        from rlcanary.grpo.sync.transports import CopyTransport

        sync_weights(state.model, [InProcessEndpoint(engine)], CopyTransport())

    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        try:
            request = Sampling.of(sampling).with_ends(())
        except ValueError as error:
            raise NotProvided(str(error)) from error
        completions: list[list[Completion]] = engine.generate(prompts, asdict(request))
        return completions

    def new_buffer(self, settings: BufferSettings) -> _Buffer:
        from rlcanary.grpo.rollout.buffer import GroupBuffer

        return _Buffer(settings, GroupBuffer(settings.capacity or ROOM, settings.max_staleness))

    def put_groups(self, buffer: _Buffer, groups: list[Group]) -> int:
        import torch

        from rlcanary.reference.data.filters import has_signal

        for taken, group in enumerate(groups):
            # The rollout judges a group before it puts it.
            if buffer.settings.dynamic_sampling and not has_signal(torch.tensor(group.rewards)):
                continue
            if buffer.waiting == buffer.buffer.capacity:
                return taken
            asyncio.run(buffer.buffer.put(group))
        return len(groups)

    def take_groups(self, buffer: _Buffer, trainer_version: int) -> Taken:
        from rlcanary.contract.records.buffering import Taken

        stale: list[Group] = []
        # It tells of stale groups without giving others, and is asked again.
        while buffer.waiting >= (count := buffer.settings.groups_per_batch):
            taken = asyncio.run(buffer.buffer.take(count, trainer_version))
            stale += taken.stale
            if taken.groups:
                return Taken(taken.groups, stale)
        return Taken([], stale)

    def groups_to_start(self, buffer: _Buffer, trainer_version: int, running: int) -> int:
        from rlcanary.grpo.data.items import ItemIterator
        from rlcanary.grpo.plan.schedule import Schedule

        settings = buffer.settings
        schedule = Schedule(settings.groups_per_batch, group_size=2, max_staleness=settings.max_staleness)
        if not schedule.versions_ahead:
            raise NotProvided("without groups ahead sampling and training take turns")
        # Groups that run or wait are items in flight.
        items = [Item(number, [0], lambda _: 0.0) for number in range(schedule.prompts_ahead + 1)]
        iterator = ItemIterator(items, most_in_flight=schedule.prompts_ahead)
        iterator.start_epoch()
        return sum(1 for _ in iter(iterator.next_item, None)) - buffer.waiting - running

    def rollout_seed(self, seed: int, rank: int, step: int, request: int) -> int:
        from rlcanary.grpo.rollout.collector import seeded

        # A request is known by its epoch, item and attempt; the item stands for the rank and the number.
        drawn: int = seeded({"seed": seed}, step, (rank, request), 0)["seed"]
        return drawn

    def verify(self, answer: Answer) -> bool:
        from rlcanary.grpo.rewards.by_name import VerifiersByName
        from rlcanary.grpo.rewards.verifier import Reward

        name = VERIFIERS.get((answer.kind, answer.format))
        if name is None:
            raise NotProvided("the trainer has no such verifier")
        return Reward(VerifiersByName()[name], answer.reference)(answer.text) == 1

    def list_settings(self) -> list[Setting]:
        from rlcanary.contract.records.preparation import Setting

        return [
            Setting("run.seed", (7, 0)),
            Setting("run.tensorboard", (True, False)),
            Setting("run.checkpoint_every", (5, 0)),
            Setting("data.system_prompt", ("be brief", "")),
            Setting("data.chat_template", (True, False)),
            Setting("schedule.rows_per_micro_batch", (2, None)),
            Setting("schedule.max_staleness", (1, 0)),
            Setting("sampling.temperature", (0.7,)),
            Setting("sampling.max_new_tokens", (8,)),
            Setting("optimizer.learning_rate", (1e-6,)),
            Setting("optimizer.weight_decay", (0.1, 0.0)),
            Setting("optimizer.betas", ((0.9, 0.95),)),
            Setting("conventions.kl_coef", (0.1, 0.0)),
            Setting("conventions.clip_high", (0.28, None)),
            Setting("conventions.temperature", (), derived_from=("sampling.temperature",)),
        ]

    def effective(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        from operator import attrgetter

        from rlcanary.grpo.plan.reading import plan_of

        given: dict[str, Any] = copy.deepcopy(PLAN)
        for name, value in written.items():
            *sections, last = name.split(".")
            place = given
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = value
        plan = plan_of(given)
        return {each.name: attrgetter(each.name)(plan) for each in self.list_settings()}


def _schedule(batch: CollatedBatch) -> Schedule:
    """Return that of one update on all rows, in micro-batches."""
    from rlcanary.grpo.plan.schedule import Schedule

    rows = len(batch.rewards)
    micro = MICRO_BATCH if rows % MICRO_BATCH == 0 else 1
    return Schedule(prompts_per_step=1, group_size=rows, rows_per_micro_batch=micro)


def _completions(batch: CreditBatch | ValueBatch) -> CollatedBatch:
    """Make rows of these trained tokens, each behind a prompt of one token. Every token has an id of its own."""
    import torch

    from rlcanary.contract.batch import CollatedBatch

    rows, width = batch.mask.shape
    ids_BS = torch.arange(rows * (width + 1)).view(rows, width + 1)
    group_ids_B = torch.zeros(rows, dtype=torch.long) if batch.group_ids is None else batch.group_ids
    return CollatedBatch(
        input_ids=ids_BS,
        attention_mask=torch.ones_like(ids_BS, dtype=torch.bool),
        position_ids=torch.arange(width + 1).expand_as(ids_BS),
        completion_starts=torch.ones(rows, dtype=torch.long),
        completion_ids=ids_BS[:, 1:],
        completion_mask=batch.mask,
        rewards=torch.zeros(rows),
        group_ids=group_ids_B,
    )


# The oracle's would be judged in place of what the trainer has not: other losses, ranks, metrics by these definitions, a
# limit for prompts, epochs of whole batches (groups are trained as they come, for a number of steps), and a buffer that is
# saved (a run that resumes samples what waited again).
for _name in (
    *(name for group in (Layouts, OtherLosses, Reporting) for name in vars(group) if not name.startswith("_")),
    *("prepare", "run_plan", "save_buffer", "load_buffer"),
):
    setattr(GrpoAdapter, _name, getattr(Adapter, _name))
