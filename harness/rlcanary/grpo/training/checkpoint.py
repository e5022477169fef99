"""Checkpoints: one file each, written whole or not at all; a run resumes from one with identical numbers."""

from __future__ import annotations

import io
import re
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from rlcanary.errors import UserError
from rlcanary.system.files import write_whole

if TYPE_CHECKING:
    from rlcanary.grpo.training.trainer import LearnerState

NAME = re.compile(r"step-(\d{6,})\.pt")


class CheckpointError(Exception):
    """A checkpoint was not written; earlier ones are unchanged."""


def learner_content(state: LearnerState) -> dict[str, Any]:
    """Return all of a learner's state that later updates depend on, for `save_checkpoint`."""
    assert state.masters is not None
    return {
        "model": state.model.state_dict(),
        "masters": state.masters.parameters,
        "optimizer": state.optimizer.state_dict(),
        "scheduler": state.scheduler.state_dict(),
        "updates": state.updates,
        "reference": None if state.ref_model is None else state.ref_model.state_dict(),
        "critic": None if state.critic is None else learner_content(state.critic),
    }


def restore_learner(state: LearnerState, content: dict[str, Any]) -> None:
    """Put the learner's part of a checkpoint into a state that was made from the same plan."""
    import torch

    assert state.masters is not None
    state.model.load_state_dict(content["model"])
    with torch.no_grad():
        for master, saved in zip(state.masters.parameters, content["masters"], strict=True):
            master.copy_(saved)
    state.optimizer.load_state_dict(content["optimizer"])
    state.scheduler.load_state_dict(content["scheduler"])
    state.updates = content["updates"]
    if content["reference"] is not None and state.ref_model is not None:
        state.ref_model.load_state_dict(content["reference"])
    if state.critic is not None:
        restore_learner(state.critic, content["critic"])


def random_state() -> dict[str, Any]:
    """Return the state of torch's generators, which a model in training mode draws its dropout from."""
    import torch

    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def restore_random_state(state: dict[str, Any]) -> None:
    """Continue the random numbers of `random_state`; those of a GPU where it was saved with as many."""
    import torch

    torch.set_rng_state(state["cpu"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def save_checkpoint(folder: Path, step: int, content: dict[str, Any], keep: int) -> Path:
    """Write a checkpoint and remove the oldest ones.

    Args:
        folder: folder of the checkpoints, made if it is missing.
        step: the next step of the run.
        content: tensors and plain values.
        keep: checkpoints that stay, this one included.

    Raises:
        CheckpointError: the disk is full or the folder is not writable.
    """
    import torch

    buffer = io.BytesIO()
    torch.save(content, buffer)
    path = folder / f"step-{step:06d}.pt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, buffer.getvalue())
    except OSError as error:
        last = last_checkpoint(folder)
        kept = "there is no earlier one" if last is None else f"the one before it, {last.name}, is intact"
        raise CheckpointError(f"cannot write the checkpoint {path}: {error.strerror or error}; {kept}") from error
    for old in checkpoints(folder)[:-keep]:
        old.unlink()
    return path


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, oldest first."""
    found = [path for path in folder.glob("step-*.pt") if NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: int(path.stem.removeprefix("step-")))


def last_checkpoint(folder: Path) -> Path | None:
    """Find the checkpoint of the furthest step, None if there is none."""
    return next(reversed(checkpoints(folder)), None)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Load the content given to `save_checkpoint`.

    Raises:
        UserError: the file is not a checkpoint.
    """
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
        raise UserError(f"{path} is not a checkpoint that can be read: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a checkpoint of this trainer")
    return content
