"""Training: updates, checkpoints and evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from pathlib import Path

    from rlcanary.contract.batch import CollatedBatch, Group


class Training:
    """Updates, checkpoints and evaluations of a `TrainState`."""

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        """One optimizer update on a `TrainState` -> logged metrics.

        Advantages come from `batch.rewards`. Reference logprobs come from the batch or, where it has none, from
        `state.ref_model`. Metrics go under the names of `LossOutput` and `loss` (with all terms, of the whole batch), `lr`
        (that of this update), `grad_norm` (before clipping), `reward` (mean of the rewards) and `tokens` (attended tokens of
        the batch). A metric that is not logged is not compared.
        """
        raise NotProvided

    def rl_step(self, state: Any, groups: list[Group], pad_token_id: int) -> dict[str, float]:
        """All updates of a `TrainState` on one rollout batch -> logged metrics.

        In each of `epochs_per_rollout` passes every completion is trained once, in one of `mini_batches` updates; which of
        them go together is free. Advantages and old logprobs are computed once, from all groups and before the first
        update. Metrics are those of the updates as `train_step` names them, reduced as `logged_updates` declares. Code that
        cannot split these groups so declines with `NotProvided`.
        """
        raise NotProvided

    def save_checkpoint(self, state: Any, folder: Path) -> None:
        """Write a checkpoint of a `TrainState` into an existing folder, where earlier ones of the run may be."""
        raise NotProvided

    def load_checkpoint(self, state: Any, folder: Path) -> Any:
        """Load the latest checkpoint of a folder into a new state, made as at the start of the run -> the state to train."""
        raise NotProvided

    def evaluate(self, state: Any) -> dict[str, float]:
        """Evaluate a `TrainState` without changing it -> logged metrics, without times and speeds.

        If the state has `eval_items`, `reward` is the mean reward of the model's completions for them.
        """
        raise NotProvided
