"""The bundled reference as an adapter, which passes every check.

One check judges what is declared, not only whether it is done: `advantage.bounded` also fails the reference where a
deviation of the others, which may be 0, is declared as the divisor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from rlcanary.contract.adapter import Adapter, Item, NotProvided
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import GRPO

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, Completion, Group, LossOutput, PolicyBatch
    from rlcanary.contract.records.buffering import BufferSettings, Taken
    from rlcanary.contract.records.building import PlanSettings, RunPlan, RunSettings
    from rlcanary.contract.records.conversations import ConversationOptions, Environment, Episode, Task
    from rlcanary.contract.records.credit import Credit, CreditBatch, ValueBatch
    from rlcanary.contract.records.layouts import Layout, RowShard, VocabShards
    from rlcanary.contract.records.lengths import Lengths
    from rlcanary.contract.records.other_losses import DistillationBatch, OtherBatch, PreferenceBatch, SupervisedBatch
    from rlcanary.contract.records.preparation import Answer, DataRow, PreparationOptions, PreparedData, Setting
    from rlcanary.contract.records.reporting import EvaluatedItem, LoggedSample, Metric, RolloutBatch
    from rlcanary.contract.records.reward_parts import RewardParts
    from rlcanary.contract.records.routing import ReplayLayout, RoutedRow


class ReferenceAdapter(Adapter):
    name = "reference"

    def __init__(self, conventions: Conventions = GRPO) -> None:
        self.conventions = conventions

    def configured(self, **changes: Any) -> Self:
        return type(self)(self.conventions.replace(**changes))

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        from rlcanary import reference

        return reference.token_logprobs(logits, token_ids, temperature)

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        from rlcanary import reference

        return reference.completion_logprobs(model, batch, temperature)

    def entropy(self, logits: Tensor) -> Tensor:
        from rlcanary import reference

        return reference.entropy(logits)

    def completion_mask(self, completion_ids: Tensor, eos_token_ids: Sequence[int], pad_token_id: int) -> Tensor:
        from rlcanary import reference

        return reference.completion_mask(completion_ids, eos_token_ids)

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        from rlcanary import reference

        return reference.advantages(rewards, group_ids, self.conventions)

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        from rlcanary import reference

        return reference.policy_loss(batch, self.conventions)

    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        from rlcanary import reference

        return reference.accumulated_loss(batch, n_micro, self.conventions)

    def packed_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        from rlcanary import reference
        from rlcanary.reference.logprobs import Unpackable

        try:
            return reference.packed_logprobs(model, batch, temperature)
        except Unpackable as error:
            raise NotProvided(str(error)) from error

    def sharded_loss(self, batch: PolicyBatch, n_ranks: int) -> LossOutput:
        # The pieces carry the counts of the whole, so each rank's gradient is its share and the ranks' sum is the update.
        return self.accumulated_loss(batch, n_ranks)

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        from rlcanary import reference

        return reference.kl(logprobs, ref_logprobs, self.conventions)

    def importance_weights(self, trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
        from rlcanary import reference

        return reference.importance_weights(trainer_logprobs, sampler_logprobs, mask, self.conventions)

    def token_advantages(self, batch: CreditBatch) -> Credit:
        from rlcanary import reference

        return reference.token_advantages(batch, self.conventions)

    def values(self, model: Any, batch: CollatedBatch) -> Tensor:
        from rlcanary import reference

        return reference.values(model, batch)

    def value_loss(self, batch: ValueBatch) -> LossOutput:
        from rlcanary import reference

        return reference.value_loss(batch, self.conventions)

    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        from rlcanary import reference

        return reference.make_batch(groups, pad_token_id, mask_truncated=self.conventions.mask_truncated)[0]

    def shape_rewards(self, rewards: Tensor, lengths: Lengths) -> Tensor:
        from rlcanary import reference

        return reference.shape_rewards(rewards, lengths, self.conventions)

    def combine_rewards(self, parts: RewardParts) -> Tensor:
        from rlcanary import reference

        return reference.combine_rewards(parts)

    def keep_group(self, rewards: Tensor) -> bool:
        from rlcanary import reference

        return reference.has_signal(rewards)

    def accumulation_steps(self, batch_size: int, micro_batch_size: int, n_ranks: int, sequence_parallel: int) -> int:
        from rlcanary.reference.data import ordering

        return ordering.accumulation_steps(batch_size, micro_batch_size, n_ranks, sequence_parallel)

    def render(
        self, messages: list[Mapping[str, Any]], tokenizer: Any, tools: list[Mapping[str, Any]] | None = None
    ) -> tuple[list[int], list[bool]]:
        from rlcanary.reference.data import rendering

        return rendering.render(messages, tokenizer, tools)

    def score(self, items: list[Item], completions: list[str]) -> Tensor:
        from rlcanary.reference.data import scoring

        return scoring.score(items, completions)

    def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
        from rlcanary.reference import rollout

        return rollout.rollout(engine, items, sampling)

    def converse(
        self, engine: Any, tokenizer: Any, tasks: list[Task], environment: Environment, options: ConversationOptions
    ) -> list[list[Episode]]:
        from rlcanary.reference import conversations

        return conversations.converse(engine, tokenizer, tasks, environment, options)

    def data_order(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        from rlcanary.reference.data import ordering

        shuffle = self.conventions.data_order == "shuffled"
        return ordering.data_order(n_items, epoch, rank, world_size, shuffle=shuffle)

    def resumed_order(self, n_items: int, consumed: int, count: int, rank: int, world_size: int) -> list[int]:
        from rlcanary.reference.data import ordering

        return ordering.resumed_order(lambda epoch: self.data_order(n_items, epoch, rank, world_size), consumed, count)

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        from rlcanary import reference

        return reference.train_step(state, batch, self.conventions)

    def rl_step(self, state: Any, groups: list[Group], pad_token_id: int) -> dict[str, float]:
        from rlcanary import reference

        if sum(len(group.completions) for group in groups) < self.conventions.mini_batches:
            raise NotProvided(f"fewer completions than the {self.conventions.mini_batches} mini-batches")
        return reference.rl_step(state, self.make_batch(groups, pad_token_id), self.conventions)

    def save_checkpoint(self, state: Any, folder: Path) -> None:
        from rlcanary.reference import checkpoint

        checkpoint.save_checkpoint(state, folder)

    def load_checkpoint(self, state: Any, folder: Path) -> Any:
        from rlcanary.reference import checkpoint

        return checkpoint.load_checkpoint(state, folder)

    def evaluate(self, state: Any) -> dict[str, float]:
        sampling = {"temperature": self.conventions.evaluation_temperature, "max_new_tokens": 8}
        # The engine samples from a copy of the model and draws its own random numbers.
        completions = self.new_engine(state.model).generate([item.prompt_ids for item in state.eval_items], sampling)
        rewards = self.score(list(state.eval_items), [sampled.text for (sampled,) in completions])
        return {"reward": float(rewards.double().mean())}

    def sync_weights(self, state: Any, engine: Any) -> None:
        sends_all = self.conventions.sync_frozen
        weights = state.model.named_parameters()
        engine.load_weights((name, weight) for name, weight in weights if sends_all or weight.requires_grad)
        if self.conventions.sync_buffers:
            engine.load_weights(state.model.named_buffers())
        # Keys and values of the old weights are wrong for the new ones.
        engine.reset_prefix_cache()
        engine.version += 1

    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        completions: list[list[Completion]] = engine.generate(prompts, sampling)
        return completions

    def rollout_metrics(self, batch: RolloutBatch, n_ranks: int) -> dict[str, float]:
        from rlcanary.reference import reporting

        return reporting.rollout_metrics(batch, self.conventions)

    def merged_metrics(self, parts: list[dict[str, Metric]]) -> dict[str, float]:
        from rlcanary.reference import reporting

        return reporting.merged_metrics(parts)

    def evaluation_metrics(self, items: list[EvaluatedItem], k: int, batch_size: int) -> dict[str, float]:
        from rlcanary.reference import reporting

        return reporting.evaluation_metrics(items, k, self.conventions)

    def evaluation_items(self, n_items: int, batch_size: int, rank: int, n_ranks: int) -> list[int]:
        from rlcanary.reference import reporting

        return reporting.evaluation_items(n_items, rank, n_ranks)

    def evaluation_steps(self, n_steps: int, every: int, at_start: bool, at_end: bool) -> list[int]:
        from rlcanary.reference import reporting

        return reporting.evaluation_steps(n_steps, every, at_start=at_start, at_end=at_end)

    def logged_samples(self, batch: RolloutBatch, n_samples: int) -> list[LoggedSample]:
        from rlcanary.reference import reporting

        return reporting.logged_samples(batch, n_samples)

    def supervised_loss(self, batch: SupervisedBatch) -> LossOutput:
        from rlcanary import reference

        return reference.supervised_loss(batch, self.conventions)

    def distillation_loss(self, batch: DistillationBatch) -> LossOutput:
        from rlcanary import reference

        return reference.distillation_loss(batch, self.conventions)

    def distillation_advantages(self, student_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
        from rlcanary import reference

        return reference.distillation_advantages(student_logprobs, teacher_logprobs, mask)

    def preference_loss(self, batch: PreferenceBatch) -> LossOutput:
        from rlcanary import reference

        return reference.preference_loss(batch, self.conventions)

    def accumulated_other_loss(self, batch: OtherBatch, n_micro: int) -> LossOutput:
        from rlcanary import reference

        return reference.accumulated_other_loss(batch, n_micro, self.conventions)

    def sharded_other_loss(self, batch: OtherBatch, n_ranks: int) -> LossOutput:
        # As in `sharded_loss`, the pieces carry the counts of the whole.
        return self.accumulated_other_loss(batch, n_ranks)

    def new_buffer(self, settings: BufferSettings) -> Any:
        from rlcanary.reference.buffering import Buffer

        return Buffer(settings, self.conventions.buffer_order, self.conventions.buffer_full)

    def put_groups(self, buffer: Any, groups: list[Group]) -> int:
        taken: int = buffer.put(groups)
        return taken

    def take_groups(self, buffer: Any, trainer_version: int) -> Taken:
        taken: Taken = buffer.take(trainer_version)
        return taken

    def groups_to_start(self, buffer: Any, trainer_version: int, running: int) -> int:
        room: int = buffer.room(trainer_version, running)
        return room

    def save_buffer(self, buffer: Any, folder: Path) -> None:
        import torch

        torch.save((buffer.waiting, buffer.trained), folder / "buffer.pt")

    def load_buffer(self, settings: BufferSettings, folder: Path) -> Any:
        import torch

        buffer = self.new_buffer(settings)
        buffer.waiting, buffer.trained = torch.load(folder / "buffer.pt", weights_only=False)
        return buffer

    def rollout_seed(self, seed: int, rank: int, step: int, request: int) -> int:
        from rlcanary.reference import buffering

        return buffering.rollout_seed(seed, rank, step, request)

    def build(self, settings: RunSettings, model: Any) -> Any:
        from rlcanary.reference import building

        return building.build(settings, model, self.conventions)

    def run_plan(self, settings: PlanSettings) -> RunPlan:
        from rlcanary.reference.data import run_plan

        return run_plan.run_plan(settings, self.conventions)

    def verify(self, answer: Answer) -> bool:
        from rlcanary.reference.data import verifying

        return verifying.verify(answer, self.conventions)

    def prepare(self, rows: list[DataRow], tokenizer: Any, options: PreparationOptions) -> PreparedData:
        from rlcanary.reference.data import preparing

        return preparing.prepare(rows, tokenizer, options, self.conventions)

    def list_settings(self) -> list[Setting]:
        from rlcanary.reference.data import configuration

        return list(configuration.SETTINGS)

    def effective(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        from rlcanary.reference.data import configuration

        return configuration.effective(written)

    def shard_rows(self, batch: CollatedBatch, layout: Layout, rank: int) -> list[RowShard]:
        from rlcanary.reference import layouts

        return layouts.shard_rows(batch, layout.context_parallel, rank)

    def gathered_logprobs(self, shards: list[list[Tensor]], batch: CollatedBatch, layout: Layout) -> Tensor:
        from rlcanary.reference import layouts

        return layouts.gathered_logprobs(shards, batch, layout.context_parallel)

    def replayed_routes(self, rows: list[RoutedRow], layout: ReplayLayout) -> Tensor:
        from rlcanary.reference import routing

        return routing.replayed_routes(rows, layout)

    def sharded_update(self, state: Any, batch: CollatedBatch, layout: Layout) -> dict[str, float]:
        from rlcanary.reference import layouts

        units = len(batch.rewards)
        if self.conventions.aggregation == "group_token_mean":
            units = len(batch.group_ids.unique())
        if units < layout.data_parallel * layout.micro_batches:
            raise NotProvided(f"fewer rows or groups than pieces: {units}")
        return layouts.sharded_update(state, batch, layout, self.conventions)

    def vocab_parallel_logprobs(self, shards: VocabShards, token_ids: Tensor, temperature: float) -> Tensor:
        from rlcanary.reference import layouts

        return layouts.vocab_parallel_logprobs(shards, token_ids, temperature)
