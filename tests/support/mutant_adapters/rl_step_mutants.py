"""Mistakes in the loop over the epochs and mini-batches of a rollout."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.batch import CollatedBatch, Completion, Group, PolicyBatch


class Loop(ReferenceAdapter):
    """The loop of an RL step, written so that each of its parts can be wrong."""

    def frozen(self, state: Any, batch: CollatedBatch) -> PolicyBatch:
        return reference.frozen_batch(state.model, state.ref_model, batch, self.conventions)

    def order(self, rows: int, epoch: int) -> Tensor:
        return torch.arange(rows)

    def inputs(self, state: Any, batch: CollatedBatch, frozen: PolicyBatch, rows_b: Tensor) -> PolicyBatch:
        return reference.mini_batch(state.model, batch, frozen, rows_b, self.conventions)

    def after_update(self, state: Any) -> None:
        """Do nothing."""

    def rl_step(self, state: Any, groups: list[Group], pad_token_id: int) -> dict[str, float]:
        batch, metrics = self.make_batch(groups, pad_token_id), {}
        frozen = self.frozen(state, batch)
        for epoch in range(self.conventions.epochs_per_rollout):
            for rows_b in self.order(len(batch.rewards), epoch).tensor_split(self.conventions.mini_batches):
                loss = reference.policy_loss(self.inputs(state, batch, frozen, rows_b), self.conventions).loss
                metrics = reference.descend(state, loss, self.conventions)
                self.after_update(state)
        return metrics


class OldLogprobsOfEachUpdate(Loop):
    def inputs(self, state: Any, batch: CollatedBatch, frozen: PolicyBatch, rows_b: Tensor) -> PolicyBatch:
        given = super().inputs(state, batch, frozen, rows_b)
        return replace(given, old_logprobs=given.logprobs.detach())


class AdvantagesOfTheMiniBatch(Loop):
    def inputs(self, state: Any, batch: CollatedBatch, frozen: PolicyBatch, rows_b: Tensor) -> PolicyBatch:
        given = super().inputs(state, batch, frozen, rows_b)
        return replace(given, advantages=self.advantages(batch.rewards[rows_b], batch.group_ids[rows_b]))


class DividedByTheWholeRollout(Loop):
    def inputs(self, state: Any, batch: CollatedBatch, frozen: PolicyBatch, rows_b: Tensor) -> PolicyBatch:
        given = super().inputs(state, batch, frozen, rows_b)
        return replace(given, global_sequences=float(len(batch.rewards)))


class DividedByAFullMiniBatch(Loop):
    """The last update is divided as if it had as many rows as the others."""

    def inputs(self, state: Any, batch: CollatedBatch, frozen: PolicyBatch, rows_b: Tensor) -> PolicyBatch:
        given = super().inputs(state, batch, frozen, rows_b)
        return replace(given, global_sequences=float(math.ceil(len(batch.rewards) / self.conventions.mini_batches)))


class LossWithoutTheCap(Loop):
    """The loss takes the logits before the model caps them; scoring takes them behind it."""

    def inputs(self, state: Any, batch: CollatedBatch, frozen: PolicyBatch, rows_b: Tensor) -> PolicyBatch:
        cap = getattr(state.model.config, "final_logit_softcapping", None)
        if cap is None:
            return super().inputs(state, batch, frozen, rows_b)

        def uncapped(_model: Any, _inputs: Any, output: Any) -> Any:
            output.logits = (cap * torch.atanh((output.logits.double() / cap).clamp(-1 + 1e-12, 1 - 1e-12))).float()
            return output

        hook = state.model.register_forward_hook(uncapped)
        try:
            return super().inputs(state, batch, frozen, rows_b)
        finally:
            hook.remove()


class ReferenceOfEachUpdate(Loop):
    """The reference model is the policy of the update before: the KL starts anew each time."""

    def inputs(self, state: Any, batch: CollatedBatch, frozen: PolicyBatch, rows_b: Tensor) -> PolicyBatch:
        given = super().inputs(state, batch, frozen, rows_b)
        return replace(given, ref_logprobs=None if given.ref_logprobs is None else given.logprobs.detach())


class OneEpoch(Loop):
    def rl_step(self, state: Any, groups: list[Group], pad_token_id: int) -> dict[str, float]:
        return ReferenceAdapter(self.conventions.replace(epochs_per_rollout=1)).rl_step(state, groups, pad_token_id)


class DrawnWithReplacement(Loop):
    def order(self, rows: int, epoch: int) -> Tensor:
        return torch.randint(rows, (rows,))


class SecondEpochOfTheFirstHalf(Loop):
    def order(self, rows: int, epoch: int) -> Tensor:
        return torch.arange(rows) // (1 + epoch)


class OldLogprobsByItem(Loop):
    """Old logprobs are kept by the item's id, also those of the item's last rollout."""

    def __init__(self, *conventions: Any) -> None:
        super().__init__(*conventions)
        self._kept: dict[Any, Tensor] = {}

    def frozen(self, state: Any, batch: CollatedBatch) -> PolicyBatch:
        frozen = super().frozen(state, batch)
        kept = self._kept.setdefault(tuple(batch.item_ids), frozen.old_logprobs)
        return replace(frozen, old_logprobs=kept)


class ScheduleByEpoch(Loop):
    def rl_step(self, state: Any, groups: list[Group], pad_token_id: int) -> dict[str, float]:
        before = state.scheduler.state_dict()["last_epoch"]
        metrics = super().rl_step(state, groups, pad_token_id)
        state.scheduler.last_epoch = before
        for _ in range(self.conventions.epochs_per_rollout):
            state.scheduler.step()
        return metrics


class WeightsRestored(Loop):
    """Every update starts from the weights before the first one, as if each were tried."""

    def rl_step(self, state: Any, groups: list[Group], pad_token_id: int) -> dict[str, float]:
        self._start = {name: value.clone() for name, value in state.model.state_dict().items()}
        self._left = self.conventions.epochs_per_rollout * self.conventions.mini_batches
        return super().rl_step(state, groups, pad_token_id)

    def after_update(self, state: Any) -> None:
        self._left -= 1
        if self._left:
            state.model.load_state_dict(self._start)


class RewardsSorted(Loop):
    """Groups are sorted by their prompts for the forward pass, and the rewards stay where they were."""

    def rl_step(self, state: Any, groups: list[Group], pad_token_id: int) -> dict[str, float]:
        by_prompt = sorted(groups, key=lambda group: list(group.prompt_ids))
        mixed = [replace(group, rewards=other.rewards) for group, other in zip(by_prompt, groups, strict=True)]
        return super().rl_step(state, mixed, pad_token_id)


class WrongAnswersLeftOut(Loop):
    """Completions without a reward do not enter the loss, in this path only."""

    def inputs(self, state: Any, batch: CollatedBatch, frozen: PolicyBatch, rows_b: Tensor) -> PolicyBatch:
        given = super().inputs(state, batch, frozen, rows_b)
        return replace(given, mask=given.mask & (batch.rewards[rows_b] > 0)[:, None])


class ToolTokensTrained(Loop):
    """The list that tells the policy's tokens from a tool's is left behind, in this path only; those of a tool score 0."""

    def rl_step(self, state: Any, groups: list[Group], pad_token_id: int) -> dict[str, float]:
        of_the_policy = [
            replace(group, completions=[_as_of_the_policy(each) for each in group.completions]) for group in groups
        ]
        return super().rl_step(state, of_the_policy, pad_token_id)


def _as_of_the_policy(completion: Completion) -> Completion:
    logprobs = [0.0 if math.isnan(each) else each for each in completion.logprobs or ()]
    return replace(completion, sampled=None, logprobs=logprobs or None)


class RewardsInPlace(Loop):
    def rl_step(self, state: Any, groups: list[Group], pad_token_id: int) -> dict[str, float]:
        metrics = super().rl_step(state, groups, pad_token_id)
        for group in groups:
            group.rewards[0] -= 1.0  # type: ignore[index]
        return metrics


class MetricsOfTheLastUpdate(ReferenceAdapter):
    def rl_step(self, state: Any, groups: list[Group], pad_token_id: int) -> dict[str, float]:
        last = ReferenceAdapter(self.conventions.replace(logged_updates="last"))
        return last.rl_step(state, groups, pad_token_id)


CAUGHT_BY = {
    MetricsOfTheLastUpdate: "rl_step.metrics",
    OldLogprobsOfEachUpdate: "rl_step.declared_gradients",
    AdvantagesOfTheMiniBatch: "rl_step.declared_gradients",
    DividedByTheWholeRollout: "rl_step.declared_gradients",
    DividedByAFullMiniBatch: "rl_step.declared_gradients",
    LossWithoutTheCap: "rl_step.declared_gradients",
    ReferenceOfEachUpdate: "rl_step.declared_gradients",
    OneEpoch: "rl_step.each_row_once_per_epoch",
    DrawnWithReplacement: "rl_step.each_row_once_per_epoch",
    SecondEpochOfTheFirstHalf: "rl_step.each_row_once_per_epoch",
    OldLogprobsByItem: "rl_step.rollouts_are_separate",
    ScheduleByEpoch: "rl_step.learning_rates",
    WeightsRestored: "rl_step.weights_move",
    RewardsSorted: "rl_step.order_of_groups",
    WrongAnswersLeftOut: "rl_step.one_update_is_train_step",
    ToolTokensTrained: "rl_step.declared_gradients",
    RewardsInPlace: "rl_step.groups_untouched",
}
RL_STEP_MUTANTS = list(CAUGHT_BY)
