"""Watch the updates of a training run from outside, and judge every so many of them.

A hook on the logprobs that a loss is computed from receives, in the run's own backward pass, the gradient of each token. The
reference computes what it should have been under the declared conventions. Nothing of the run is changed: a hook that
returns nothing leaves the gradient as it is, and all that is computed is computed from copies, behind the backward pass.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor

from rlcanary.contract.conventions import Conventions
from rlcanary.live import bundle
from rlcanary.live import ranks as processes
from rlcanary.live.findings import Finding, Findings, without_consequences
from rlcanary.live.invariants import JUDGES
from rlcanary.live.ranks import Made, Ranks
from rlcanary.live.record import Record
from rlcanary.live.sampling import Sampling
from rlcanary.live.weights import Moves, Stillness, Weights

log = logging.getLogger("rlcanary.live")

OnFinding = Literal["log", "warn", "stop"]
Rows = Tensor | Sequence[int] | slice | None


class Stopped(Exception):
    """The audit found something, and was asked to stop the run for it. The update was taken."""


class Audit:
    """The audit of one training run.

    Attributes:
        findings: what was found so far, each kind once.
        updates: the number of updates of the run, audited or not.
        audited: the number of audited updates.
    """

    def __init__(
        self,
        conventions: Conventions | None = None,
        *,
        every: int = 20,
        on_finding: OnFinding = "warn",
        max_staleness: int | None = None,
        bundles: Path | None = None,
        ranks: Ranks | None = None,
        group: Any = None,
    ) -> None:
        """Start an audit.

        Args:
            conventions: what the run is declared to do; None judges only what holds for every implementation.
            every: updates from one audited update to the next; the first one is audited.
            on_finding: "log" writes a line to the logger `rlcanary.live`, "warn" is also a warning, "stop" also raises
                `Stopped` behind the update.
            max_staleness: versions by which a row may be older than the trainer; None allows any.
            bundles: the folder that gets a bundle of each update with a new finding (`rlcanary replay`); None writes none.
            ranks: what the optimizer gets of the gradients of several processes that share an update: their "mean", as DDP
                and FSDP have it, or their "sum"; "separate" where each process takes updates of its own.
            group: the processes that share an update; None is all of them.

        Raises:
            ValueError: `every` is below 1, `on_finding` is none of these, or there are several processes and `ranks` does
                not say how they share an update.
        """
        if every < 1:
            raise ValueError(f"every={every} has to be at least 1")
        if on_finding not in ("log", "warn", "stop"):
            raise ValueError(f"on_finding={on_finding!r} has to be 'log', 'warn' or 'stop'")
        if processes.count() > 1 and ranks not in ("mean", "sum", "separate"):
            raise ValueError(
                f"the run has {processes.count()} processes: say with ranks='mean' (DDP and FSDP), 'sum' or 'separate' "
                "what an update gets of their gradients"
            )
        self.ranks = ranks if processes.count() > 1 else "separate"
        self.group = group
        self.conventions, self.every = conventions, every
        self.on_finding, self.max_staleness, self.bundles = on_finding, max_staleness, bundles
        self.findings = Findings()
        self.updates = self.audited = 0
        self._has_failed = False
        self._sampling = Sampling()
        self._stillness = Stillness()

    def update(self, *, mask: Tensor, loss_scale: float = 1.0, model: Any = None, **given: Any) -> Update:
        """Watch one update: use it as a context around all forward and backward passes of the update.

        Args:
            mask: [B, T] bool, true on the tokens that are trained.
            loss_scale: the factor on the loss for float16, from `GradScaler.get_scale()`.
            model: the policy, if the optimizer steps inside the context: what it did to the weights is judged too.
            given: what else is known of the B rows: `rewards` [B], `group_ids` [B], `advantages` [B] or [B, T],
                `old_logprobs`, `sampler_logprobs`, `ref_logprobs` and `entropy` [B, T], `versions` [B] and
                `trainer_version`, a number; `drawn_freely`, False where rows are chosen by their rewards or lengths, or
                drawn with top-k, top-p or penalties.
        """
        is_audited = self.updates % self.every == 0
        self.updates += 1
        return Update(self, self.updates - 1, is_audited, mask, loss_scale, model, given)

    def metrics(self) -> dict[str, float]:
        """Return numbers for the run's own logger."""
        return {"canary/findings": float(len(self.findings)), "canary/audited_updates": float(self.audited)}

    def conclude(self, make: Callable[[], Made]) -> list[Finding]:
        """Make the record of an update and what it did to the weights, on each rank, and judge it."""
        made: list[Made | None] = [None]

        def keep() -> None:
            made[0] = make()

        def gather() -> None:
            assert self.ranks is not None
            made[0] = processes.gathered(made[0], self.ranks, self.group)

        self.guard(keep)
        if self.ranks != "separate":
            self.guard(gather)
        return [] if made[0] is None else self.judge(*made[0])

    def judge(self, record: Record, moves: Moves | None = None) -> list[Finding]:
        """Judge an update and what it did to the weights, and tell what is new."""
        self.audited += 1
        found: list[Finding] = []
        for judge in (*JUDGES, self._sampling.judge):
            self.guard(lambda judge=judge: found.extend(judge(record)))  # type: ignore[misc]
        found = without_consequences(found)
        if moves is not None:
            of_weights = self._stillness.judge(moves, record.gradient)
            self.guard(lambda: found.extend(of_weights))
        for finding in found:
            finding.since = record.update
        new = [finding for finding in found if self.findings.add(finding)]
        if new and (self.ranks == "separate" or processes.is_first()):
            self._tell(record, new)
        return found

    def _tell(self, record: Record, new: list[Finding]) -> None:
        told = [str(finding) for finding in new]
        if self.bundles is not None:
            folder = self.bundles
            self.guard(lambda: told.append(f"replay it with: rlcanary replay {bundle.write(record, new, folder)}"))
        for line in told:
            log.warning("%s", line)
            if self.on_finding != "log":
                warnings.warn(f"rlcanary: {line}", stacklevel=5)

    def guard(self, function: Callable[[], None]) -> None:
        """Call a function of the audit. Its failure is a warning, once, and never one of the run."""
        try:
            function()
        except Exception as error:
            log.debug("the audit of an update failed", exc_info=True)
            if not self._has_failed:
                self._has_failed = True
                told = (
                    f"rlcanary: the audit of an update failed, the run is not affected: {type(error).__name__}: {error}"
                )
                warnings.warn(told, stacklevel=4)


class Update:
    """One update as it is watched.

    Attributes:
        findings: what is wrong with this update, once the context has been left; empty for updates that are not audited.
    """

    def __init__(
        self,
        audit: Audit,
        number: int,
        is_audited: bool,
        mask: Tensor,
        loss_scale: float,
        model: Any,
        given: dict[str, Any],
    ) -> None:
        self.findings: list[Finding] = []
        self._audit, self._number, self._is_audited = audit, number, is_audited
        self._mask, self._loss_scale, self._given = mask, loss_scale, given
        self._pieces: list[Piece] = []
        self._model = model
        self._weights: Weights | None = None
        self._logged: dict[str, float] = {}

    def __enter__(self) -> Self:
        if self._is_audited and self._model is not None:
            self._audit.guard(self._weigh)
        return self

    def _weigh(self) -> None:
        self._weights = Weights(self._model)

    def watch(self, logprobs: Tensor, rows: Rows = None, entropy: Tensor | None = None) -> Tensor:
        """Watch the logprobs of a micro-batch, and return them as they are.

        Args:
            logprobs: [b, t] that the loss is computed from; t may be smaller than T where the columns behind are padding.
            rows: the places of the b rows in the update; None is all of them, in order.
            entropy: [b, t] of the policy, where the loss has a bonus for it.
        """
        if self._is_audited and logprobs.requires_grad:
            self._audit.guard(lambda: self._pieces.append(Piece(logprobs, self._places(rows, len(logprobs)), entropy)))
        return logprobs

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Take the numbers that the run logs of this update, such as `loss` and `kl`; unknown names are left out."""
        if self._is_audited:
            self._audit.guard(lambda: self._logged.update({name: _number(value) for name, value in metrics.items()}))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            piece.handle.remove()
        if kind is None and self._is_audited and (pieces or self._audit.ranks != "separate"):
            self.findings = self._audit.conclude(lambda: self._made(pieces))
        self._given, self._model, self._weights = {}, None, None
        if kind is None and self.findings and self._audit.on_finding == "stop":
            raise Stopped("; ".join(map(str, self.findings)))

    def _made(self, pieces: list[Piece]) -> Made:
        return self._record(pieces), None if self._weights is None else self._weights.moves()

    def _places(self, rows: Rows, count: int) -> Tensor:
        every_row = torch.arange(len(self._mask))
        places = every_row if rows is None else every_row[rows.cpu() if isinstance(rows, Tensor) else rows]
        if len(places) != count:
            raise ValueError(f"{count} rows of logprobs for {len(places)} places in the update: name them with rows=")
        return places

    def _record(self, pieces: list[Piece]) -> Record:
        mask_BT = self._mask.detach().bool().cpu()
        logprobs_BT = torch.zeros(mask_BT.shape, dtype=torch.float64)
        gradient_BT = torch.zeros_like(logprobs_BT)
        for piece in pieces:
            width = piece.logprobs.shape[1]
            logprobs_BT[piece.rows, :width] = piece.logprobs.double().cpu()
            gradient_BT[piece.rows, :width] += piece.gradient / self._loss_scale
        given = {name: _exact(value) for name, value in self._given.items()}
        if all(piece.entropy is not None for piece in pieces):
            given["entropy"] = torch.zeros_like(logprobs_BT)
            for piece in pieces:
                assert piece.entropy is not None
                given["entropy"][piece.rows, : piece.entropy.shape[1]] = _exact(piece.entropy)
        return Record(
            self._number,
            self._audit.conventions,
            logprobs_BT,
            gradient_BT,
            mask_BT,
            pieces=[piece.rows for piece in pieces],
            eps=max((torch.finfo(piece.logprobs.dtype).eps for piece in pieces), default=0.0),
            max_staleness=self._audit.max_staleness,
            logged=self._logged,
            **given,
        )


class Piece:
    """The logprobs of a micro-batch, and the gradient that they get."""

    def __init__(self, logprobs: Tensor, rows: Tensor, entropy: Tensor | None = None) -> None:
        self.rows = rows
        self.logprobs = logprobs.detach()
        self.entropy = None if entropy is None else entropy.detach()
        self.gradient = torch.zeros(logprobs.shape, dtype=torch.float64)
        self.handle: Any = logprobs.register_hook(self._note)

    def _note(self, gradient: Tensor) -> None:
        self.gradient += gradient.detach().double().cpu()


def _number(value: Any) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def _exact(value: Any) -> Any:
    """Copy a tensor to the CPU, those of floats in float64."""
    if not isinstance(value, Tensor):
        return value
    copied = value.detach().cpu()
    return copied.double() if copied.is_floating_point() else copied.clone()
