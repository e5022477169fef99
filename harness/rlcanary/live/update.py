"""One update of a training run, as it is watched."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from difflib import get_close_matches
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from rlcanary.contract.conventions import Conventions
from rlcanary.live.findings import Finding, OnFinding, Stopped
from rlcanary.live.ranks import Made, Ranks
from rlcanary.live.record import Record
from rlcanary.live.weights import Weights

Rows = Tensor | Sequence[int] | slice | None
# What each row has one of.
OF_ROWS = ("rewards", "group_ids", "advantages", "versions")
UNWATCHED = "no logprobs with a gradient were given to `watch` before it ended"


class Auditor(Protocol):
    """The audit that an update reports to, as this module sees `rlcanary.live.Audit`."""

    conventions: Conventions | None
    max_staleness: int | None
    rows: int | None
    max_tokens: int | None
    on_finding: OnFinding

    @property
    def ranks(self) -> Ranks:
        """How the processes share the update."""

    def guard(self, function: Callable[[], None]) -> None:
        """Call a function of the audit, whose failure is none of the run."""

    def was_not_judged(self, number: int, reason: str) -> None:
        """Say that an update that was to be judged is not."""

    def conclude(self, make: Callable[[], Made]) -> tuple[Record | None, list[Finding]]:
        """Make the record of the update, and judge it."""


class Update:
    """One update as it is watched: between `begin` and `end`, or in a `with` block.

    Attributes:
        audit: that this is an update of.
        is_audited: whether this update is judged; nothing is kept of one that is not.
        findings: what is wrong with this update, once it has ended; empty for updates that are not audited.
        record: what was judged, once it has ended and where `end` was to keep it.
    """

    def __init__(
        self, audit: Auditor, number: int, is_audited: bool, mask: Tensor | None, given: dict[str, Any]
    ) -> None:
        self.is_audited, self._is_dropped = is_audited, False
        self.findings: list[Finding] = []
        self.record: Record | None = None
        self.audit, self._number, self._mask = audit, number, mask
        self._loss_scale: float = given.pop("loss_scale")
        self._model, self._optimizer = given.pop("model"), given.pop("optimizer")
        self._given = given
        self._pieces: list[Piece] = []
        self._weights: Weights | None = None
        self._logged: dict[str, float] = {}
        self._are_means = False
        self._is_broken = self._is_over = False
        self._has_stepped = True
        self._stepping: Any = None

    def begin(self) -> None:
        """Note the weights before the update, and copy what is known of it: a run may overwrite its own."""
        if self.is_audited:
            self.audit.guard(self._copy)
        if self.is_audited and self._model is not None:
            self.audit.guard(self._weigh)

    def _copy(self) -> None:
        self._given = _copied(self._given)
        self._mask = None if self._mask is None else self._mask.detach().clone()

    def _weigh(self) -> None:
        self._weights = Weights(self._model, self._optimizer)
        if self._loss_scale != 1 and isinstance(self._optimizer, torch.optim.Optimizer):
            # A scaler leaves out the steps of gradients that are not finite. Wrappers of optimizers tell of none.
            with suppress(AttributeError):
                self._stepping = self._optimizer.register_step_post_hook(lambda *_: self._note_step())
                self._has_stepped = False

    def _note_step(self) -> None:
        self._has_stepped = True

    def __enter__(self) -> Self:
        self.begin()
        return self

    def watch(
        self,
        logprobs: Tensor,
        rows: Rows = None,
        entropy: Tensor | None = None,
        read: Callable[[Tensor], Tensor] | None = None,
        start: int = 0,
        **given: Any,
    ) -> Tensor:
        """Watch the logprobs of a micro-batch, and return them as they are.

        Args:
            logprobs: [b, t] that the loss is computed from; t may be smaller than T where the columns behind are padding.
            rows: the places of the b rows in the update; None is all of them, in order. Rows of an update that was not
                told its mask follow each other.
            entropy: [b, t] of the policy, where the loss has a bonus for it.
            read: makes [b, t] of the logprobs, and of their gradient, where the tensor has another shape.
            start: the column of the update at which these t begin, where a long row is computed in chunks.
            given: what is known of these rows where the update was told nothing of them: their `mask`, and what
                `Audit.update` takes.
        """
        if self.is_audited and logprobs.requires_grad:
            self._guard(lambda: self._add(logprobs, rows, entropy, read, start, given))
        return logprobs

    def _guard(self, function: Callable[[], None]) -> None:
        """Call a function of the audit; an update of which a part is not known is not judged."""
        was_broken = self._is_broken

        def attempt() -> None:
            self._is_broken = True
            function()
            self._is_broken = was_broken

        self.audit.guard(attempt)

    def _add(
        self,
        logprobs: Tensor,
        rows: Rows,
        entropy: Tensor | None,
        read: Callable[[Tensor], Tensor] | None,
        start: int,
        given: dict[str, Any],
    ) -> None:
        self._require_open()
        known = given if entropy is None else {**given, "entropy": entropy}
        if of_the_update := {name: value for name, value in known.items() if isinstance(value, bool | int)}:
            self.know(**of_the_update)
        values = (logprobs.detach() if read is None else read(logprobs.detach())).clone()  # a run may overwrite its own
        if self._mask is not None and start + values.shape[1] > self._mask.shape[1]:
            told = f"logprobs of columns {start} to {start + values.shape[1]}, and the mask of the update has"
            raise ValueError(f"{told} {self._mask.shape[1]}: both are to be of the same tokens")
        self._pieces.append(Piece(logprobs, values, self._places(rows, len(values)), start, known, read, self._guard))

    def _places(self, rows: Rows, count: int) -> Tensor:
        if self._mask is None:
            start = sum(len(piece.rows) for piece in self._pieces)
            return torch.arange(start, start + count)
        every_row = torch.arange(len(self._mask))
        places = every_row if rows is None else every_row[rows.cpu() if isinstance(rows, Tensor) else rows]
        if len(places) != count:
            raise ValueError(f"{count} rows of logprobs for {len(places)} places in the update: name them with rows=")
        return places

    def know(self, **given: Any) -> None:
        """Add what is known of the update by now, see `Audit.update`."""
        self._given |= _copied(given) if self.is_audited else given

    def log(self, metrics: Mapping[str, Any], are_means: bool = False) -> None:
        """Take the numbers that the run logs of this update, before it ends; unknown names are left out.

        Args:
            metrics: the numbers by their names, such as `loss` and `kl`.
            are_means: metrics are means of those of the micro-batches.
        """
        if self.is_audited:
            self._are_means = are_means
            self.audit.guard(lambda: self._take(metrics))

    def _take(self, metrics: Mapping[str, Any]) -> None:
        self._require_open()
        self._logged |= _numbers(metrics)

    def _require_open(self) -> None:
        if self._is_over:
            raise ValueError(f"update {self._number} is over: call `watch` and `log` before it ends")

    def end(self, was_stepped: bool = True, keep_record: bool = False) -> None:
        """Judge the update.

        Args:
            was_stepped: False where the optimizer left its step out, so that weights stand still.
            keep_record: keep what was judged in `record`.

        Raises:
            Stopped: something was found, and the audit stops a run for it.
        """
        pieces = self._released()
        if self.is_audited and (pieces or self.audit.ranks != "separate"):
            self._weights = self._weights if was_stepped and self._has_stepped else None
            record, self.findings = self.audit.conclude(lambda: self._made(pieces))
            self.record = record if keep_record else None
        elif self.is_audited:
            self.audit.was_not_judged(self._number, UNWATCHED)
        elif self._is_dropped:
            told = "the parameters had no gradient behind its first micro-batches, which may have been thrown away"
            self.audit.was_not_judged(self._number, told)
        self._given, self._model, self._optimizer, self._weights = {}, None, None, None
        if self.findings and self.audit.on_finding == "stop":
            raise Stopped("; ".join(map(str, self.findings)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.end()
        else:
            self.drop()

    def drop(self) -> None:
        """End the update without a judgement: its gradient was thrown away."""
        self._released()
        self._is_dropped, self.is_audited = True, False
        self._given, self._model, self._optimizer, self._weights = {}, None, None, None

    @property
    def has_gradient(self) -> bool:
        """Whether the logprobs of a watched micro-batch have got their gradient."""
        return any(piece.has_gradient for piece in self._pieces)

    def _released(self) -> list[Piece]:
        pieces, self._pieces, self._is_over = self._pieces, [], True
        for piece in pieces:
            piece.handle.remove()
        if self._stepping is not None:
            self._stepping.remove()
        return pieces

    def _made(self, pieces: list[Piece]) -> Made:
        if self._is_broken:
            raise ValueError("a micro-batch could not be watched")
        if not pieces and (self._mask is None or exact(self._mask).any()):
            raise ValueError(UNWATCHED)
        return self._record(pieces), None if self._weights is None else self._weights.moves()

    def _record(self, pieces: list[Piece]) -> Record:
        given = {name: exact(of_rows(name, value)) for name, value in self._given.items()}
        if self._mask is not None:
            given["mask"] = exact(self._mask)
            shape = tuple(given["mask"].shape)
        else:
            shape = (sum(len(piece.rows) for piece in pieces), max(piece.logprobs.shape[1] for piece in pieces))
        for name in {name for piece in pieces for name in piece.given}:
            if all(piece.given.get(name) is not None for piece in pieces):
                given[name] = _placed([(piece, exact(piece.given[name])) for piece in pieces], shape)
        _require_known(given)
        is_half = (
            given.pop("half_precision", False) or any(piece.is_autocast for piece in pieces) or _is_half(self._model)
        )
        gradient_BT = torch.zeros(shape, dtype=torch.float64)
        for piece in pieces:
            gradient_BT[piece.rows, piece.columns] += piece.gradient.cpu() / self._loss_scale
        # The chunks of a micro-batch have its rows.
        rows = list({tuple(piece.rows.tolist()): piece.rows for piece in pieces}.values())
        return Record(
            self._number,
            self.audit.conventions,
            _placed([(piece, exact(piece.logprobs)) for piece in pieces], shape),
            gradient_BT,
            given.pop("mask").bool(),
            pieces=rows,
            eps=max((torch.finfo(piece.logprobs.dtype).eps for piece in pieces), default=0.0),
            half_precision=is_half,
            max_staleness=self.audit.max_staleness,
            declared_rows=self.audit.rows,
            max_tokens=self.audit.max_tokens,
            logged=self._logged,
            parts=rows if self._are_means else [],
            **given,
        )


class Piece:
    """The logprobs [b, t] of a micro-batch, what is known of its rows, and the gradient that the logprobs get."""

    def __init__(
        self,
        watched: Tensor,
        logprobs: Tensor,
        rows: Tensor,
        start: int,
        given: Mapping[str, Any],
        read: Callable[[Tensor], Tensor] | None,
        guard: Callable[[Callable[[], None]], None],
    ) -> None:
        self.rows, self.logprobs, self._read = rows, logprobs, read
        self.columns = slice(start, start + logprobs.shape[1])
        self.is_autocast = torch.is_autocast_enabled(watched.device.type)
        known = {name: of_rows(name, value) for name, value in given.items()}
        self.given = {name: value.detach().clone() for name, value in known.items() if isinstance(value, Tensor)}
        self.gradient = torch.zeros(logprobs.shape, dtype=torch.float64, device=logprobs.device)
        self.has_gradient = False
        self.handle: Any = watched.register_hook(lambda gradient: guard(lambda: self._note(gradient)))

    def _note(self, gradient: Tensor | None) -> None:
        if gradient is None:
            return  # so is the hook called of an output that got none, where its node gave others
        self.has_gradient = True
        gradient = gradient.detach() if self._read is None else self._read(gradient.detach())
        self.gradient += gradient  # and is read later: a GPU would be waited for in the backward pass


def _require_known(given: Mapping[str, Any]) -> None:
    known = [each.name for each in fields(Record)]
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, 1)
            told = f": did you mean {close[0]}?" if close else ""
            raise ValueError(f"an update has nothing that is called {name}{told}")


def _is_half(model: Any) -> bool:
    return model is not None and any(each.dtype in (torch.bfloat16, torch.float16) for each in model.parameters())


def of_rows(name: str, value: Any) -> Any:
    """Return what each row has one of as [B], where it comes as a list or a column [B, 1]."""
    if name not in OF_ROWS or value is None:
        return value
    values = torch.as_tensor(value)
    return values.squeeze(1) if values.ndim == 2 and values.shape[1] == 1 else values


def _placed(parts: list[tuple[Piece, Tensor]], shape: tuple[int, ...]) -> Tensor:
    """Put the rows of micro-batches, [b] or [b, t], at their places in the update, padded on the right with zeros."""
    dtype, ndim = (parts[0][1].dtype, parts[0][1].ndim) if parts else (torch.float64, 2)
    whole = torch.zeros(shape[:ndim], dtype=dtype)
    for piece, values in parts:
        if ndim == 1:
            whole[piece.rows] = values
        else:
            whole[piece.rows, piece.columns] = values
    return whole


def _copied(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in given.items()}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Read the numbers among what a run logs, which may name its phase and hold histograms too."""
    numbers = {
        name: value
        for name, value in metrics.items()
        if hasattr(value, "__float__") and math.prod(getattr(value, "shape", ())) == 1
    }
    return {name: float(value.detach() if isinstance(value, Tensor) else value) for name, value in numbers.items()}


def exact(value: Any) -> Any:
    """Return a value as a record keeps it: copy a tensor to the CPU, those of floats in float64."""
    if not isinstance(value, Tensor):
        return value
    copied = value.detach().cpu()
    return copied.double() if copied.is_floating_point() else copied.clone()
