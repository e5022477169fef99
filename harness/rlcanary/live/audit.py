"""Watch the updates of a training run from outside, and judge every so many of them.

A hook on the logprobs that a loss is computed from receives, in the run's own backward pass, the gradient of each token. The
reference computes what it should have been under the declared conventions. Nothing of the run is changed: a hook that
returns nothing leaves the gradient as it is, and all that is computed is computed from copies, behind the backward pass.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rlcanary.contract.conventions import Conventions
from rlcanary.live import bundle
from rlcanary.live import ranks as processes
from rlcanary.live.findings import Finding, Findings, OnFinding, warn, warn_only, without_consequences
from rlcanary.live.invariants import JUDGES, logged
from rlcanary.live.ranks import Made, Ranks
from rlcanary.live.record import Record, custom_pieces
from rlcanary.live.sampling import Sampling
from rlcanary.live.syncs import Held, Syncs
from rlcanary.live.update import Update, exact, of_rows
from rlcanary.live.weights import Moves, Stillness

log = logging.getLogger("rlcanary.live")

# Judged from what all ranks of an update have; rollouts, samples and syncs are judged by each rank for itself.
OF_ALL_RANKS = ("update", "logged")


class Evidence(Protocol):
    """Evidence that adds up over a run, and that its checkpoints keep."""

    def state_dict(self) -> dict[str, Any]:
        """Return it in plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from it."""


class Audit:
    """The audit of one training run.

    Attributes:
        findings: what was found so far, each kind once.
        updates: the number of updates of the run, audited or not.
        audited: the number of audited updates.
        rollouts: the number of rollouts that `rollout` was given, audited or not.
        samplings: the number of batches that `sampled` was given, audited or not.
    """

    def __init__(
        self,
        conventions: Conventions | None = None,
        *,
        every: int = 20,
        on_finding: OnFinding = "warn",
        max_staleness: int | None = None,
        rows: int | None = None,
        max_tokens: int | None = None,
        bundles: str | Path | None = None,
        ranks: Ranks | None = None,
        group: Any = None,
    ) -> None:
        """Start an audit.

        Args:
            conventions: what the run is declared to do; None judges only what holds for every implementation.
            every: updates from one audited update to the next; the first one is audited.
            on_finding: "log" writes a line to the logger `rlcanary.live`, "warn" is also a warning, "stop" also raises
                `Stopped` behind the update; what `rollout`, `sampled` and `synced` find is a warning then.
            max_staleness: versions by which a row may be older than the trainer; None allows any.
            rows: the rows that each update has, over all its processes; None allows any number.
            max_tokens: the tokens that a completion may have; None allows any number.
            bundles: the folder that gets a bundle of each update with a new finding (`rlcanary replay`); None writes none.
            ranks: what the optimizer gets of the gradients of several processes that share an update: their "mean", as DDP
                and FSDP have it, or their "sum"; "separate" where each process takes updates of its own.
            group: the processes that share an update; None is all of them.

        Raises:
            TypeError: the conventions are none.
            ValueError: `every` is below 1, `on_finding` is none of these, or there are several processes and `ranks` does
                not say how they share an update.
        """
        if conventions is not None and not isinstance(conventions, Conventions):
            raise TypeError(f"{conventions!r} is no Conventions, as those of rlcanary.contract.presets are")
        if every < 1:
            raise ValueError(f"every={every} has to be at least 1")
        if on_finding not in ("log", "warn", "stop"):
            raise ValueError(f"on_finding={on_finding!r} has to be 'log', 'warn' or 'stop'")
        if processes.count() > 1 and ranks not in ("mean", "sum", "separate"):
            raise ValueError(
                f"the run has {processes.count()} processes: say with ranks='mean' (DDP and FSDP), 'sum' or 'separate' "
                "what an update gets of their gradients"
            )
        if conventions is not None and (pieces := custom_pieces(conventions)):
            log.warning("the loss is judged by the laws alone: %s is custom", " and ".join(pieces))
        self._ranks = ranks
        self.group = group
        self.conventions, self.every = conventions, every
        self.on_finding, self.max_staleness = on_finding, max_staleness
        self.bundles = None if bundles is None else Path(bundles)
        self.rows, self.max_tokens = rows, max_tokens
        self.findings = Findings()
        self.updates = self.audited = self.rollouts = self.samplings = 0
        self._has_failed = self._has_missed = False
        self._sampling = Sampling()
        self._stillness = Stillness()
        self._syncs = Syncs()
        self._evidence: dict[str, Evidence] = {
            "sampling": self._sampling,
            "stillness": self._stillness,
            "syncs": self._syncs,
        }

    @property
    def ranks(self) -> Ranks:
        """How the processes share an update, of which there may be more by now than when the audit was made."""
        return "separate" if processes.count() == 1 or self._ranks is None else self._ranks

    def update(
        self,
        *,
        mask: Tensor | None = None,
        loss_scale: float = 1.0,
        model: Any = None,
        optimizer: Any = None,
        **given: Any,
    ) -> Update:
        """Watch one update: use it as a context around all forward and backward passes of the update.

        Args:
            mask: [B, T] bool, true on the tokens that are trained; None where each micro-batch brings its own rows.
            loss_scale: the factor on the loss for float16, from `GradScaler.get_scale()`.
            model: the policy, if the optimizer steps inside the context: what it did to the weights is judged too.
            optimizer: of the policy: at a learning rate of 0 its weights may stand still.
            given: what else is known of the B rows: `rewards` [B], `group_ids` [B], `advantages` [B] or [B, T],
                `old_logprobs`, `sampler_logprobs`, `ref_logprobs` and `entropy` [B, T], `versions` [B] and
                `trainer_version`, the number of updates behind which each row was sampled, and behind which this one
                starts; `drawn_freely`, False where rows are chosen by their rewards or lengths, or
                drawn with top-k, top-p or penalties; `half_precision`, True where forward passes are in 16 bits, which the
                weights of `model` and an autocast around `watch` tell too.
        """
        is_audited = self.updates % self.every == 0
        self.updates += 1
        given |= {"loss_scale": loss_scale, "model": model, "optimizer": optimizer}
        return Update(self, self.updates - 1, is_audited, mask, given)

    def rollout(
        self,
        *,
        mask: Tensor,
        rewards: Tensor,
        group_ids: Tensor,
        advantages: Tensor,
        logs: Mapping[str, float] | None = None,
        measured: Mapping[str, float] | None = None,
    ) -> list[Finding]:
        """Judge the advantages of every so many rollouts where they are computed, apart from the loss.

        Args:
            mask: [B, T], true on the tokens that are trained; rows without one are not judged.
            rewards: [B].
            group_ids: [B].
            advantages: [B] or [B, T].
            logs: the numbers that the run logs of this rollout.
            measured: the same numbers, as the caller has measured them.
        """
        number, self.rollouts = self.rollouts, self.rollouts + 1
        if number % self.every or self.conventions is None:
            return []
        given = {"rewards": rewards, "group_ids": group_ids, "advantages": advantages}
        return self._judge_rows(
            "rollout",
            lambda: Record(
                number,
                self.conventions,
                torch.zeros(mask.shape, dtype=torch.float64),
                torch.zeros(mask.shape, dtype=torch.float64),
                exact(mask).bool(),
                logged=dict(logs or {}),
                measured=dict(measured or {}),
                is_rollout=True,
                **{name: exact(of_rows(name, value)) for name, value in given.items()},
            ),
        )

    def sampled(
        self,
        *,
        mask: Tensor,
        logprobs: Tensor,
        sampler_logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
        group_ids: Tensor | None = None,
        drawn_freely: bool = True,
    ) -> list[Finding]:
        """Judge samples of the present weights where the trainer scores them, apart from the loss, every so many times.

        Args:
            mask: [B, T], true on the tokens that are trained.
            logprobs: [B, T] of the trainer with the weights that the sampler had.
            sampler_logprobs: [B, T]; None where the sampler gives none.
            entropy: [B, T] of the trainer; with it samples are judged without the sampler's logprobs too.
            group_ids: [B].
            drawn_freely: see `update`.
        """
        number, self.samplings = self.samplings, self.samplings + 1
        if number % self.every:
            return []
        return self._judge_rows(
            "samples",
            lambda: Record(
                number,
                self.conventions,
                exact(logprobs),
                torch.zeros(mask.shape, dtype=torch.float64),
                exact(mask).bool(),
                sampler_logprobs=exact(sampler_logprobs),
                entropy=exact(entropy),
                group_ids=exact(of_rows("group_ids", group_ids)),
                versions=torch.zeros(len(mask), dtype=torch.long),
                trainer_version=0,
                drawn_freely=drawn_freely,
                is_rollout=True,
            ),
        )

    def _judge_rows(self, kind: str, make: Callable[[], Record]) -> list[Finding]:
        """Judge rows apart from an update, if their record can be made."""
        made: list[Record] = []
        self.guard(lambda: made.append(make()))
        return self.judge(made[0], kind=kind) if made else []

    def metrics(self) -> dict[str, float]:
        """Return numbers for the run's own logger: how many findings there are, and the size of each."""
        counts = {"canary/findings": float(len(self.findings)), "canary/audited_updates": float(self.audited)}
        sizes = {f"canary/{finding.invariant}": finding.size for finding in self.findings}
        return counts | {name: size for name, size in sizes.items() if math.isfinite(size)}

    def synced(self, trained: Held, held: Held, allowed: float | None = None) -> list[Finding]:
        """Judge a weight sync by what both sides hold behind it.

        Args:
            trained: the trainer's weights by name, or fingerprints of them; or the logprobs [N] that it gives probe tokens.
            held: the same of the engine.
            allowed: the mean difference of logprobs, in nats, that the engine's precision may make. None takes what half
                precision makes, or less for an engine that was as exact as the trainer behind the first sync.
        """
        found: list[Finding] = []
        self.guard(lambda: found.extend(self._syncs.judge(trained, held, allowed)))
        for finding in found:
            finding.since = self.updates
        self._tell([finding for finding in found if self.findings.add(finding)], kind="sync")
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the findings and the evidence of the run so far in plain values, for its checkpoint."""
        return {
            "updates": self.updates,
            "audited": self.audited,
            "rollouts": self.rollouts,
            "samplings": self.samplings,
            "findings": [asdict(finding) for finding in self.findings],
            **{name: part.state_dict() for name, part in self._evidence.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the audit of a run that is resumed, from `state_dict`."""
        self.guard(lambda: self._continue(state))

    def _continue(self, state: Mapping[str, Any]) -> None:
        findings = [Finding(**each) for each in state["findings"]]
        for name, part in self._evidence.items():
            part.load_state_dict(state[name])
        self.findings[:] = findings
        self.updates, self.audited, self.rollouts = (state[name] for name in ("updates", "audited", "rollouts"))
        self.samplings = state.get("samplings", 0)

    def conclude(self, make: Callable[[], Made]) -> tuple[Record | None, list[Finding]]:
        """Make the record of an update and what it did to the weights, on each rank, and judge it.

        Returns:
            The record, None where it could not be made, and what is wrong with it.
        """
        made: list[Made | None] = [None]

        def keep() -> None:
            made[0] = make()

        def gather() -> None:
            assert self.ranks is not None
            made[0] = processes.gathered(made[0], self.ranks, self.group)

        self.guard(keep)
        if self.ranks != "separate":
            self.guard(gather)
        if made[0] is None:
            return None, []
        self.audited += 1
        return made[0][0], self.judge(*made[0])

    def judge(self, record: Record, moves: Moves | None = None, kind: str = "update") -> list[Finding]:
        """Judge an update and what it did to the weights, and tell what is new; `kind` names its bundle."""
        found: list[Finding] = []
        for judge in (*JUDGES, self._sampling.judge):
            self.guard(lambda judge=judge: found.extend(judge(record)))  # type: ignore[misc]
        found = without_consequences(found, self.findings)
        if moves is not None:
            of_weights = self._stillness.judge(moves, record.gradient)
            self.guard(lambda: found.extend(of_weights))
        self._add(record, found, kind)
        return found

    def judge_logged(self, record: Record) -> None:
        """Judge numbers that a run has logged behind an update that was judged before."""
        self._add(record, without_consequences(list(logged.judge(record)), self.findings), "logged")

    def _add(self, record: Record, found: list[Finding], kind: str) -> None:
        for finding in found:
            finding.since = record.update
        new = [finding for finding in found if self.findings.add(finding)]
        self._tell(new, record, kind)

    def _tell(self, new: list[Finding], record: Record | None = None, kind: str = "update") -> None:
        speaks = processes.is_first(self.group)
        if not new or (kind in OF_ALL_RANKS and self.ranks != "separate" and not speaks):
            return
        rank = "" if speaks else f"rank {processes.rank(self.group)}: "
        told = [f"{rank}{finding}" for finding in new]
        kind = kind if speaks else f"rank-{processes.rank(self.group)}-{kind}"
        folder = self.bundles
        if folder is not None and record is not None:
            self.guard(
                lambda: told.append(f"replay it with: rlcanary replay {bundle.write(record, new, folder, kind)}")
            )
        for line in told:
            log.warning("%s", line)
            if self.on_finding != "log":
                warn(line)

    def was_not_judged(self, number: int, reason: str) -> None:
        """Warn, once, that an update that was to be judged is not."""
        if not self._has_missed:
            self._has_missed = True
            told = f"update {number} is not judged: {reason}"
            log.warning("rlcanary: %s", told)
            warn_only(told)

    def guard(self, function: Callable[[], None]) -> None:
        """Call a function of the audit. Its failure is a warning, once, and never one of the run."""
        try:
            with torch.device("cpu"):  # a run may have another default
                function()
        except Exception as error:
            log.debug("the audit of an update failed", exc_info=True)
            if not self._has_failed:
                self._has_failed = True
                warn_only(f"the audit of an update failed, the run is not affected: {type(error).__name__}: {error}")
