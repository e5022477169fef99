"""The schedule of rows sampled, trained and accumulated, and of weight syncs: validated before anything starts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """The rows of a training step. A row is one completion; a step is one rollout and all updates that train on it.

    Attributes:
        prompts_per_step: prompts that are sampled in a step.
        group_size: completions of each prompt.
        rows_per_update: rows of one optimizer update; None takes all of the step at once.
        epochs_per_step: times that each row is trained in its step.
        rows_per_micro_batch: rows of one forward and backward pass; None takes all of the update at once.
        sync_every: steps between two weight syncs.
        max_staleness: optimizer updates by which the weights may have moved between the sampling of a row and its training.
            The slack beyond updates per step and `sync_every` is used to sample while the trainer trains.
        dynamic_sampling: train only on groups whose rewards differ; further prompts are sampled in place of the others.
        refresh_reference_every: steps after which the policy becomes the reference model; 0 keeps the first one.
        seq_len_buckets: the widths that sequences are padded to, in tokens; none pads to the longest.
        completion_len_buckets: likewise for completions.
    """

    prompts_per_step: int
    group_size: int
    rows_per_update: int | None = None
    epochs_per_step: int = 1
    rows_per_micro_batch: int | None = None
    sync_every: int = 1
    max_staleness: int = 0
    dynamic_sampling: bool = False
    refresh_reference_every: int = 0
    seq_len_buckets: tuple[int, ...] = ()
    completion_len_buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse numbers that do not divide.

        Raises:
            ValueError: a number is out of range or does not divide another, named as in the plan.
        """
        counts = (
            "prompts_per_step",
            "group_size",
            "rows_per_update",
            "epochs_per_step",
            "rows_per_micro_batch",
            "sync_every",
        )
        for name in (*counts, "max_staleness", "refresh_reference_every"):
            value, least = getattr(self, name), int(name in counts)
            _require(value is None or value >= least, f"{name} is {value}, it has to be at least {least}")
        for name in ("seq_len_buckets", "completion_len_buckets"):
            buckets = getattr(self, name)
            rising = all(low < high for low, high in zip((0, *buckets), buckets, strict=False))
            _require(rising, f"{name} is {list(buckets)}, the widths have to be positive and rising")
        _require(
            self.rows_per_step % self.update_rows == 0,
            f"rows_per_update is {self.update_rows}, which does not divide the {self.rows_per_step} rows of a step "
            f"({self.prompts_per_step} prompts_per_step times {self.group_size} group_size)",
        )
        _require(
            self.update_rows % self.group_size == 0,
            f"rows_per_update is {self.update_rows}, which is no multiple of group_size {self.group_size}: "
            "an update takes whole groups",
        )
        _require(
            self.update_rows % self.micro_batch_rows == 0,
            f"rows_per_micro_batch is {self.micro_batch_rows}, which does not divide rows_per_update {self.update_rows}",
        )
        _require(
            self.max_staleness >= self.required_staleness,
            f"max_staleness is {self.max_staleness}, but with {self.updates_per_step} updates per step and sync_every "
            f"{self.sync_every} the last rows are trained {self.required_staleness} updates after they were sampled",
        )

    @property
    def rows_per_step(self) -> int:
        """Number of rows sampled in a step."""
        return self.prompts_per_step * self.group_size

    @property
    def update_rows(self) -> int:
        """Number of rows of one optimizer update."""
        return self.rows_per_step if self.rows_per_update is None else self.rows_per_update

    @property
    def micro_batch_rows(self) -> int:
        """Number of rows of one forward and backward pass."""
        return self.update_rows if self.rows_per_micro_batch is None else self.rows_per_micro_batch

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer updates on the rows of a step."""
        return self.epochs_per_step * self.rows_per_step // self.update_rows

    @property
    def micro_batches_per_update(self) -> int:
        """Number of forward and backward passes of one update."""
        return self.update_rows // self.micro_batch_rows

    @property
    def required_staleness(self) -> int:
        """Number of updates between the sampling and the training of the last row before a sync."""
        return self.sync_every * self.updates_per_step - 1

    @property
    def versions_ahead(self) -> int:
        """Number of policy versions by which a group may lag behind the trainer when its step begins.

        With 0, sampling and training take turns.
        """
        return (self.max_staleness - self.required_staleness) // (self.sync_every * self.updates_per_step)

    @property
    def prompts_ahead(self) -> int:
        """Number of prompts that may be sampled ahead of training, so that none of them grows stale while it waits."""
        return self.versions_ahead * self.sync_every * self.prompts_per_step

    def syncs_after(self, step: int) -> bool:
        """True if the weights are synced after this step; steps count from 0."""
        return (step + 1) % self.sync_every == 0

    def synced_before(self, step: int) -> bool:
        """True if the samplers have the trainer's weights when this step begins."""
        return step == 0 or self.syncs_after(step - 1)

    def refreshes_reference_after(self, step: int) -> bool:
        """True if the reference model is refreshed after this step."""
        return self.refresh_reference_every > 0 and (step + 1) % self.refresh_reference_every == 0


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
