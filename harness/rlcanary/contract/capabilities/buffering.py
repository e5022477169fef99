"""Between sampler and trainer: the buffer of groups that wait to be trained, and the seeds of the sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from pathlib import Path

    from rlcanary.contract.batch import Group
    from rlcanary.contract.records.buffering import BufferSettings, Taken


class Buffering:
    """Rollouts on their way to the trainer."""

    def new_buffer(self, settings: BufferSettings) -> Any:
        """Create an empty buffer. Code that lacks a setting declines other values than its own with `NotProvided`."""
        raise NotProvided

    def put_groups(self, buffer: Any, groups: list[Group]) -> int:
        """Put sampled groups into the buffer -> how many it took, from the first on; the others stay the caller's.

        A group that is thrown out later, or left out by dynamic sampling, counts as taken. The call never waits for room.
        Code that keeps one policy version per group declines groups whose tokens have several with `NotProvided`.
        """
        raise NotProvided

    def take_groups(self, buffer: Any, trainer_version: int) -> Taken:
        """Take the groups of one update by a trainer that has this version. The call never waits for groups.

        A group is too old if its oldest token was sampled more than `max_staleness` versions before; it is never trained.
        Each group is taken at most once. Fewer than a whole batch stay in the buffer.
        """
        raise NotProvided

    def groups_to_start(self, buffer: Any, trainer_version: int, running: int) -> int:
        """Tell how many more groups the sampler may start now, with the trainer's weights -> 0 or more.

        Updates come one after the other, each with a sync behind it: a trainer that has taken a batch trains it, and takes
        the next one with the next version.

        Args:
            buffer: the buffer that they will be put into.
            trainer_version: the version of trainer and sampler.
            running: groups that were started and are not put yet.
        """
        raise NotProvided

    def save_buffer(self, buffer: Any, folder: Path) -> None:
        """Write the buffer and the groups in it into an empty folder."""
        raise NotProvided

    def load_buffer(self, settings: BufferSettings, folder: Path) -> Any:
        """Read a buffer from a folder, in a new process -> one that goes on as the saved one would have."""
        raise NotProvided

    def rollout_seed(self, seed: int, rank: int, step: int, request: int) -> int:
        """Return the seed of a request for one or several completions of a prompt.

        Args:
            seed: the seed of the run.
            rank: the rank of the engine or worker; several may have the same prompt.
            step: the step of training, counted over the whole run.
            request: the number of the request among those of this rank and step.
        """
        raise NotProvided
